"""The asynchronous half of the adapter: submits to SGLang and queues its outputs. Runs in the loop thread."""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from penstock.schemas.errors import Code
from penstock.workers.engines.base import Scored
from penstock.workers.engines.external.outputs import SequenceFailure
from penstock.workers.engines.external.runtime import EngineFailed, EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence, SequenceUpdate
from penstock.workers.engines.sglang.api import Api
from penstock.workers.engines.sglang.load import RankLoads
from penstock.workers.engines.sglang.output_cursor import OutputCursor, prompt_scores
from penstock.workers.engines.sglang.prepare import Options, Prepared
from penstock.workers.engines.sglang.processes import Processes

log = structlog.get_logger("engine")

HEALTH_S = 0.5
RELEASED_S = 1.0  # from the release of a prompt to its abort, if it has not ended
LOAD_S = 0.1  # between two readings while there are outputs
NO_REASON = "the engine ended the output without a reason"


class Call(NamedTuple):
    """The calls of ``async_generate`` for one sequence.

    Attributes:
        prepare: the next call, from what the calls before it have generated.
        logprobs: how many alternatives each token reports; None: no log-probabilities.
        handoff: names the handoff that it is part of, on a prefill worker.
        offered: the state for the decode worker's engine, on a prefill worker.
        missing: why it cannot run on this engine of a pair.
    """

    prepare: Callable[[Seq[int]], Prepared]
    logprobs: int | None
    handoff: str = ""
    offered: bytes = b""
    missing: str = ""


class Follower:
    """Follows one ``sglang.Engine`` and queues its events, in the loop thread.

    Args:
        loads: where the ranks' load is noted.
        slots: prompts that a prefill engine has at once. Those beyond are not handed over yet: routers see them wait.
    """

    def __init__(
        self, runtime: EngineRuntime[Api], loads: RankLoads, processes: Processes, slots: int, options: Options
    ) -> None:
        self._llm = runtime.llm
        self._loop = runtime.loop
        self._emit = runtime.inbox.put
        self._loads = loads
        self._processes = processes
        self._broken = False
        self._numbers = itertools.count()
        self._loads_read = float("-inf")
        self._options = options
        self._slots = asyncio.Semaphore(slots)
        self._together: dict[str, list[asyncio.Task[None]]] = {}  # prompts in computation, by their handoff

    def launch(self, sequence: ActiveSequence[Call]) -> None:
        """Submit a sequence."""
        if sequence.cancelled or self._broken:
            return
        call = sequence.call
        if call.missing:  # routers place it again
            self._emit(SequenceUpdate(sequence, failure=SequenceFailure(Code.transfer_failed, call.missing)))
            return
        work = self._prefill(sequence) if self._options.role == "prefill" else self._follow(sequence)
        sequence.task = self._loop.task(work, f"sequence {sequence.key!r:.60}")
        if self._options.role == "prefill":
            self._together.setdefault(call.handoff, []).append(sequence.task)
            sequence.task.add_done_callback(lambda task: self._forget(call.handoff, task))

    def _forget(self, handoff: str, task: "asyncio.Task[None]") -> None:
        tasks = self._together.get(handoff, [])
        if task in tasks:
            tasks.remove(task)
        if not tasks:
            self._together.pop(handoff, None)

    def abort(self, sequence: ActiveSequence[Call]) -> None:
        """Abort a sequence: SGLang aborts requests whose stream is no longer iterated, in any phase.

        On a prefill worker all choices of a request are handed over and released as one. A prompt that was fetched ends
        by itself a moment after its release.
        """
        if self._options.role == "prefill" and not sequence.cancelled:
            self._loop.later(RELEASED_S, self._cancel, sequence.call.handoff)
        elif sequence.task is not None:
            sequence.task.cancel()

    def _cancel(self, handoff: str) -> None:
        for task in list(self._together.get(handoff, [])):
            task.cancel()

    async def _prefill(self, sequence: ActiveSequence[Call]) -> None:
        """Hand a sequence over, and compute its prompt while the decode engine waits for it."""
        async with self._slots:
            offered = sequence.call.offered if sequence.hold else None
            self._emit(SequenceUpdate(sequence, opaque=offered, handed=True))
            prepared = sequence.call.prepare(())
            try:
                stream = await self._llm.async_generate(**prepared.arguments, rid=self._name(), stream=True)
                try:
                    async for chunk in stream:
                        self._read_loads()
                        reason = chunk["meta_info"].get("finish_reason")
                        if reason is not None and reason["type"] == "abort":
                            log.warning("prompt_not_fetched", reason=reason.get("message"))
                finally:
                    await stream.aclose()
            except Exception as error:  # the decode engine gives the request back
                log.warning("prompt_not_computed", error=repr(error))

    async def _follow(self, sequence: ActiveSequence[Call]) -> None:
        said: list[int] = []
        try:
            prepared = sequence.call.prepare(said)
            while not await self._generate(sequence, prepared, said):
                prepared = sequence.call.prepare(said)
        except Exception as error:
            self._failed(sequence, error)

    def _name(self) -> str:
        """A request id. SGLang aborts every request whose id begins with the given one, so none is another's prefix."""
        return f"penstock-{next(self._numbers):016x}"

    async def _generate(self, sequence: ActiveSequence[Call], prepared: Prepared, said: list[int]) -> bool:
        """One call, whose tokens are added to ``said``; False: the sequence continues with another one."""
        cursor = OutputCursor(
            top=sequence.call.logprobs,
            stops=prepared.stops,
            least=prepared.least,
            goes_on=prepared.goes_on,
            adopted=bool(self._options.layout),
        )
        before = len(said)
        stream = await self._llm.async_generate(**prepared.arguments, rid=self._name(), stream=True)
        try:
            async with asyncio.timeout(self._options.wait_s or None) as first:  # for the prompt's KV
                async for chunk in stream:
                    first.reschedule(None)
                    said += self._on_chunk(sequence, cursor, chunk)
                    if cursor.finished:
                        return True
        finally:
            await stream.aclose()  # aborts now, not at garbage collection
        if prepared.goes_on and len(said) > before:
            return False
        self._emit(SequenceUpdate(sequence, failure=SequenceFailure(Code.engine_error, NO_REASON)))
        return True

    def _on_chunk(self, sequence: ActiveSequence[Call], cursor: OutputCursor, chunk: Any) -> list[int]:
        info = chunk["meta_info"]
        new, failure = cursor.take(chunk)
        if cursor.finished:
            self._loads.preemptions += int(info.get("num_retractions") or 0)
        if sequence.cancelled:
            return []
        self._read_loads()
        cached = None
        if new and not sequence.responded:
            sequence.responded = True
            cached = min(max(0, int(info.get("cached_tokens") or 0)), sequence.prompt_len)
        scored = self._scored(sequence, info) if new else None
        if new or failure is not None:
            self._emit(SequenceUpdate(sequence, cached, new, failure, None, scored))
        return [each.token for each in new]

    def _scored(self, sequence: ActiveSequence[Call], info: Any) -> Scored | None:
        """The prompt's log-probabilities, once: with the first token."""
        if not sequence.score:
            return None
        first, sequence.score = sequence.score, 0
        values = prompt_scores(info, sequence.prompt_len, first, sequence.scored_top)
        if not values:
            log.warning("prompt_logprobs_incomplete", tokens=sequence.prompt_len)
            return None
        return Scored(sequence.key, first, values)

    def _read_loads(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._loads_read >= LOAD_S:
            self._loads_read = now
            self._loop.task(self._take_loads(), "loads")

    async def _take_loads(self) -> None:
        self._loads.take(await self._llm.tokenizer_manager.get_loads())

    def _failed(self, sequence: ActiveSequence[Call], error: Exception) -> None:
        if sequence.cancelled:
            return
        code, message = Code.engine_error, str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            code, message = Code.transfer_failed, f"no KV came from the prefill engine in {self._options.wait_s:g} s"
        elif isinstance(error, ValueError | TypeError) and not sequence.responded:  # it refuses the request
            code = Code.invalid_request
        self._emit(SequenceUpdate(sequence, failure=SequenceFailure(code, message)))

    async def watch(self) -> None:
        """Look after the engine's processes: one can end while there are no requests."""
        while not self._broken:
            await asyncio.sleep(HEALTH_S)
            try:
                self._processes.check()
                await self._take_loads()
            except Exception as error:
                self.broken(error)

    def broken(self, error: BaseException) -> None:
        self._broken = True
        self._emit(EngineFailed(error))
