"""The asynchronous half of the engine: asks TensorRT-LLM, follows its answers, events and statistics, tells facts.

Everything here runs in the loop's thread, except what says otherwise. What it hears goes into one queue at once, since
TensorRT-LLM hands out the same object again and again.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

from schemas.errors import Code
from workers.engines.base import SequenceRequest
from workers.engines.external import engine
from workers.engines.external.answer import Ending
from workers.engines.external.engine import Broken, Heard
from workers.engines.loop import LoopThread
from workers.engines.trtllm import disagg, errors, perf
from workers.engines.trtllm.api import Api
from workers.engines.trtllm.backoff import Backoff
from workers.engines.trtllm.metrics import NativeMetrics
from workers.engines.trtllm.prepare import Options, Prepared

log = structlog.get_logger("engine")

POLL_S = 0.05  # how long the engine's queues of events and statistics are waited at
ABORT_S = 10.0  # how long an aborted request may take to say so
HEALTH_S = 1.0


class Live(engine.Live):
    """One sequence."""

    __slots__ = ("aborted", "adopted", "prepared", "result")

    def __init__(self, request: SequenceRequest, prepared: Prepared) -> None:
        super().__init__(request)
        self.adopted = prepared.adopted
        self.prepared: Prepared | None = prepared
        self.aborted = False
        self.result: Any = None


class Events(NamedTuple):
    events: Seq[Mapping[str, Any]]


class Stat(NamedTuple):
    stat: Mapping[str, Any]


Fact = Heard | Events | Stat | Broken


class Follower:
    """Of one ``LLM``. Facts go to ``tell``, from the loop's thread."""

    def __init__(
        self,
        llm: Any,
        api: Api,
        loop: LoopThread,
        options: Options,
        metrics: NativeMetrics,
        tell: Callable[[Fact], None],
    ) -> None:
        self._llm = llm
        self._api = api
        self._loop = loop
        self._options = options
        self._metrics = metrics
        self._tell = tell
        self._broken = False
        self._repeats: bool | None = None  # whether an adopted answer begins with the prefill engine's tokens

    # --- requests ---

    def launch(self, live: Live) -> None:
        """Ask for a sequence."""
        prepared, live.prepared = live.prepared, None
        if live.cancelled or self._broken or prepared is None:
            return
        try:
            params = self._api.sampling(**prepared.sampling)
            live.result = self._llm.generate_async(sampling_params=params, **prepared.arguments)
        except Exception as error:
            self._failed(live, error, at_call=True)
            return
        live.task = self._loop.task(self._follow(live, prepared), f"sequence {live.result.request_id}")

    async def _follow(self, live: Live, prepared: Prepared) -> None:
        try:
            async for response in live.result:
                self._hear(live, prepared, response)
        except Exception as error:
            self._failed(live, error, at_call=False)
            return
        if not live.cancelled and not prepared.cursor.finished:
            self._tell(Heard(live, ending=Ending(Code.engine_error, "the engine ended the answer and did not say how")))
        self._metrics.finished(getattr(live.result, "metrics_dict", None))

    def _hear(self, live: Live, prepared: Prepared, response: Any) -> None:
        first, live.heard = not live.heard, True
        if live.cancelled:
            self.abort(live)
            return
        output, cursor = response.outputs[0], prepared.cursor
        params = output.disaggregated_params if live.hold else None
        tokens: Seq[int] = output.token_ids or (params.first_gen_tokens if params is not None else None) or ()
        if live.adopted:
            cursor.repeats = self._repeats if cursor.repeats is None else cursor.repeats
        new, ending = cursor.advance(tokens, output.logprobs, output.finish_reason, output.stop_reason)
        if live.adopted and self._repeats is None and cursor.repeats is not None:
            self._repeats = cursor.repeats
            log.info("adopted_answers", begin_with_the_prefill_tokens=cursor.repeats)
        cached = None
        if first:
            cached = min(max(0, int(getattr(response, "cached_tokens", 0) or 0)), live.prompt_len)
        opaque = None
        if params is not None and params.opaque_state:
            opaque = disagg.pack(params, self._options.layout, prepared.tokens)
        scored = live.scored(output.prompt_logprobs) if live.score else None
        if new or ending is not None or opaque is not None or first or scored is not None:
            measured = (
                perf.measured(output.request_perf_metrics) if live.trace is not None and output.finish_reason else None
            )
            self._tell(Heard(live, cached, new, ending, opaque, scored, measured))
        if cursor.finished and not response.finished:  # it would go on for nobody
            self.abort(live)

    def _failed(self, live: Live, error: Exception, *, at_call: bool) -> None:
        if not errors.own_fault(error, self._api.request_error, at_call=at_call):
            self.broken(error)
        elif not live.cancelled:
            code = errors.code_of(error, at_call=at_call, adopted=live.adopted)
            self._tell(Heard(live, ending=Ending(code, str(error) or type(error).__name__)))

    def abort(self, live: Live) -> None:
        """Have a sequence end. While its prompt's KV is being fetched that is not safe: it waits for that, bounded."""
        if live.result is None or live.aborted or live.result.finished:
            return
        if live.adopted and not live.heard:
            self._loop.later(self._options.abort_hold_s, self._abort_now, live)
            return
        self._abort_now(live)

    def _abort_now(self, live: Live) -> None:
        if live.aborted or live.result.finished:
            return
        live.aborted = True
        try:
            live.result.abort()
        except Exception as error:
            self.broken(error)
            return
        self._loop.later(ABORT_S, self._abandon, live)

    def _abandon(self, live: Live) -> None:
        if live.task is not None and not live.task.done():
            log.warning("abort_unanswered", seconds=ABORT_S)
            live.task.cancel()

    # --- events and statistics ---

    def start(self, *, events: bool, stats: bool) -> None:
        """Follow what is not of one request. Not before the first request: the engine has nothing before."""
        if events:
            self._loop.task(
                self._drain("get_kv_cache_events_async", lambda item: self._tell(Events([item]))), "kv events"
            )
        if stats:
            self._loop.task(self._drain("get_stats_async", lambda item: self._tell(Stat(item))), "statistics")
        self._loop.task(self._watch(), "health")

    async def _drain(self, method: str, take: Callable[[Mapping[str, Any]], None]) -> None:
        backoff = Backoff()
        try:
            while True:
                async for item in drained(getattr(self._llm, method)(timeout=POLL_S)):
                    take(item)
                    backoff.reset()
                await asyncio.sleep(backoff.next())
        except Exception as error:
            log.error("engine_queue_failed", queue=method, error=repr(error))
            self.broken(error)

    async def _watch(self) -> None:
        """The engine's own word on its health, where it has one."""
        check = getattr(self._llm, "_check_health", None)
        if not callable(check):
            log.info("engine_health", source="answers only")
            return
        while True:
            await asyncio.sleep(HEALTH_S)
            try:
                well = check()
            except Exception as error:
                self.broken(error)
                return
            if well is False:
                self.broken(RuntimeError("TensorRT-LLM says that it is not healthy"))
                return

    def broken(self, error: BaseException) -> None:
        self._broken = True
        self._tell(Broken(error))


async def drained(items: AsyncIterable[Any]) -> Any:
    """The items until there are no more for now; some releases say that with QueueEmpty, if they do not wait."""
    try:
        async for item in items:
            yield item
    except asyncio.QueueEmpty:
        return


__all__ = ["Broken", "Events", "Fact", "Follower", "Heard", "Live", "Stat", "drained"]
