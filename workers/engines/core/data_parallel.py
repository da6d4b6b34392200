"""Several engines as the attention data-parallel ranks of one: each has its own cache, and all step together."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import (
    AdapterEngine,
    EngineStats,
    Failure,
    Grammars,
    KvTransfer,
    Output,
    RequestError,
    Scored,
    SequenceMeasurements,
    SequenceRequest,
    Started,
    StepResult,
    VisionEngine,
    WeightsEngine,
)


class DataParallelEngine:
    """Implements ``engine_protocol.Engine`` for text, without KV transfer; owns ``engines``, configured
    alike.

    Args:
        pause: called after each step of all ranks, for the time in which they wait for the slowest.
    """

    def __init__(self, engines: Seq[ScheduledEngine], pause: Callable[[], None] = lambda: None) -> None:
        self.kv_transfer: KvTransfer | None = None
        self.vision: VisionEngine | None = None
        self.grammars: Grammars | None = engines[0].grammars  # shared by all
        self.adapters: AdapterEngine | None = None
        self.weights: WeightsEngine | None = None
        self._engines = engines
        self._pause = pause
        self._rank_of: dict[object, int] = {}
        one, count = engines[0].info, len(engines)
        self.info = msgspec.structs.replace(
            one, total_blocks=one.total_blocks * count, slots=one.slots * count, dp_size=count
        )

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence on its rank.

        Raises:
            RequestError: it can never run here.
        """
        if not 0 <= request.rank < len(self._engines):
            raise RequestError(
                Code.invalid_request, f"rank {request.rank} does not exist: this worker has {len(self._engines)}"
            )
        self._engines[request.rank].submit(request)
        self._rank_of[request.key] = request.rank

    def cancel(self, key: object) -> bool:
        rank = self._rank_of.pop(key, None)
        return rank is not None and self._engines[rank].cancel(key)

    def has_work(self) -> bool:
        return any(engine.has_work() for engine in self._engines)

    def step(self) -> StepResult:
        """One batch on every rank that has work.

        Raises:
            EngineError: a rank is broken, and with it this engine.
        """
        outputs: list[Output] = []
        started: list[Started] = []
        failures: list[Failure] = []
        scored: list[Scored] = []
        measured: list[SequenceMeasurements] = []
        events: dict[int, list[KvEvent]] = {}
        computed = 0
        for rank, engine in enumerate(self._engines):
            if not engine.has_work():
                continue
            result = engine.step()
            outputs += result.outputs
            started += result.started
            failures += result.failures
            scored += result.scored
            measured += result.measured
            computed += result.computed_tokens
            if result.events:
                events[rank] = result.events
        self._pause()
        for output in outputs:
            if output.finish:
                self._rank_of.pop(output.key, None)
        for failure in failures:
            self._rank_of.pop(failure.key, None)
        return StepResult(outputs, events.pop(0, []), started, failures, computed, (), scored, events, measured)

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        each = [engine.stats() for engine in self._engines]
        return EngineStats(*(sum(getattr(stats, name) for stats in each) for name in EngineStats.__struct_fields__))

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._engines[rank].dump()

    def memory(self) -> dict[str, Memory]:
        return {}

    def release_pinned(self, key: object) -> bool:
        return False

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
