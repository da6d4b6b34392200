"""An ``Engine`` made of a scheduler and something that computes its plans."""

from collections.abc import Sequence as Seq

import msgspec

from schemas.errors import Code
from schemas.kv import KvEvent
from schemas.transfer import Memory
from workers.engines.base import EngineInfo, EngineStats, RequestError, Reservation, SequenceRequest, StepResult
from workers.engines.core.scheduler import Scheduler
from workers.engines.core.sequence import Executor, Sampled


class ScheduledEngine:
    """Implements ``workers.engines.base.Engine``; owns ``executor`` and closes it."""

    def __init__(self, info: EngineInfo, scheduler: Scheduler, executor: Executor) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here (too long, unknown token ids, nothing to generate).
        """
        highest = max(max(request.prompt, default=0), max(request.generated, default=0))
        if highest >= self.info.vocab_size:
            raise RequestError(
                Code.invalid_request, f"token id {highest} is outside the vocabulary of {self.info.vocab_size}"
            )
        self._scheduler.submit(request)

    def cancel(self, key: object) -> bool:
        return self._scheduler.cancel(key)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepResult:
        """One batch.

        Raises:
            EngineError: the executor is broken; so is this engine.
        """
        plan = self._scheduler.schedule()
        sampled: list[Sampled] = self._executor.execute(plan) if plan else []
        return self._scheduler.commit(plan, sampled)

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def dump(self) -> list[KvEvent]:
        return self._scheduler.blocks.dump()

    @property
    def blocked(self) -> bool:
        return self._scheduler.blocked

    def memory(self) -> dict[str, Memory]:
        """The executor's pools; that of the KV with the block manager's generations."""
        pools = self._executor.memory()
        generations, _ = self._scheduler.blocks.generations.buffer_info()
        return {
            name: msgspec.structs.replace(pool, generations=generations) if name == "kv" else pool
            for name, pool in pools.items()
        }

    def drop(self, key: object) -> bool:
        return self._scheduler.drop(key)

    def reserve(self, digests: Seq[bytes], tails: int, users: int) -> Reservation | None:
        return self._scheduler.reserve(digests, tails, users)

    def adopt(self, reservation: Reservation) -> None:
        self._scheduler.adopt(reservation)

    def let_go(self, reservation: Reservation) -> None:
        self._scheduler.let_go(reservation)

    def close(self) -> None:
        self._executor.close()
