"""The asynchronous half of the adapter: submits to TensorRT-LLM and queues its outputs, KV events and statistics.

Everything here runs in the loop thread unless noted. Outputs are copied into the queue at once: TensorRT-LLM returns
the same object again and again.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from schemas.errors import Code
from workers.engines.external.outputs import SequenceFailure
from workers.engines.external.runtime import EngineFailed, EngineRuntime
from workers.engines.external.sequences import ActiveSequence, SequenceUpdate
from workers.engines.trtllm import disagg, errors, perf_metrics
from workers.engines.trtllm.api import Api
from workers.engines.trtllm.backoff import Backoff
from workers.engines.trtllm.metrics import NativeMetrics
from workers.engines.trtllm.prepare import Options, Prepared

log = structlog.get_logger("engine")

NO_REASON = "the engine ended the output without a reason"

POLL_S = 0.05  # timeout of one read of the engine's event and statistics queues
ABORT_S = 10.0  # how long an aborted request may take to end
HEALTH_S = 1.0


@dataclass(slots=True)
class Call:
    """The call of ``generate_async`` for one sequence. Belongs to the loop thread.

    Attributes:
        adopted: the prompt's KV comes from another engine.
        prepared: its arguments; None once it was made, since they may be large.
        result: what it returned.
    """

    adopted: bool
    prepared: Prepared | None
    result: Any = None
    aborted: bool = False


class KvEvents(NamedTuple):
    events: Seq[Mapping[str, Any]]


class Stat(NamedTuple):
    stat: Mapping[str, Any]


class Follower:
    """Follows one ``LLM`` and queues its events, in the loop thread."""

    def __init__(self, runtime: EngineRuntime[Api], options: Options, metrics: NativeMetrics) -> None:
        self._llm = runtime.llm
        self._api = runtime.api
        self._loop = runtime.loop
        self._options = options
        self._metrics = metrics
        self._emit = runtime.inbox.put
        self._broken = False
        self._repeats: bool | None = None  # whether an adopted output begins with the prefill engine's tokens

    # --- requests ---

    def launch(self, sequence: ActiveSequence[Call]) -> None:
        """Submit a sequence."""
        prepared, sequence.call.prepared = sequence.call.prepared, None
        if sequence.cancelled or self._broken or prepared is None:
            return
        try:
            params = self._api.sampling_params(prepared.sampling)
            sequence.call.result = self._llm.generate_async(sampling_params=params, **prepared.arguments)
        except Exception as error:
            self._failed(sequence, error, at_call=True)
            return
        sequence.task = self._loop.task(self._follow(sequence, prepared), f"sequence {sequence.call.result.request_id}")

    async def _follow(self, sequence: ActiveSequence[Call], prepared: Prepared) -> None:
        try:
            async for response in sequence.call.result:
                self._on_output(sequence, prepared, response)
        except Exception as error:
            self._failed(sequence, error, at_call=False)
            return
        if not sequence.cancelled and not prepared.cursor.finished:
            self._emit(
                SequenceUpdate(
                    sequence,
                    failure=SequenceFailure(Code.engine_error, NO_REASON),
                )
            )
        self._metrics.finished(getattr(sequence.call.result, "metrics_dict", None))

    def _on_output(self, sequence: ActiveSequence[Call], prepared: Prepared, response: Any) -> None:
        first, sequence.responded = not sequence.responded, True
        if sequence.cancelled:
            self.abort(sequence)
            return
        output, cursor = response.outputs[0], prepared.cursor
        params = output.disaggregated_params if sequence.hold else None
        tokens: Seq[int] = output.token_ids or (params.first_gen_tokens if params is not None else None) or ()
        if sequence.call.adopted:
            cursor.repeats = self._repeats if cursor.repeats is None else cursor.repeats
        new, failure = cursor.advance(tokens, output.logprobs, output.finish_reason, output.stop_reason)
        if sequence.call.adopted and self._repeats is None and cursor.repeats is not None:
            self._repeats = cursor.repeats
            log.info("adopted_outputs", repeat_prefill_tokens=cursor.repeats)
        cached = None
        if first:
            cached = min(max(0, int(getattr(response, "cached_tokens", 0) or 0)), sequence.prompt_len)
        opaque = None
        if params is not None and params.opaque_state:
            opaque = disagg.pack(params, self._options.layout, prepared.tokens)
        scored = sequence.scored(output.prompt_logprobs) if sequence.score else None
        if new or failure is not None or opaque is not None or first or scored is not None:
            traced = sequence.trace is not None and output.finish_reason
            measured = perf_metrics.measured(output.request_perf_metrics) if traced else None
            self._emit(SequenceUpdate(sequence, cached, new, failure, opaque, scored, measured))
        if cursor.finished and not response.finished:  # else it would keep generating
            self.abort(sequence)

    def _failed(self, sequence: ActiveSequence[Call], error: Exception, *, at_call: bool) -> None:
        if not errors.is_request_error(error, self._api.request_error, at_call=at_call):
            self.broken(error)
        elif not sequence.cancelled:
            code = errors.code_of(error, at_call=at_call, adopted=sequence.call.adopted)
            self._emit(SequenceUpdate(sequence, failure=SequenceFailure(code, str(error) or type(error).__name__)))

    def abort(self, sequence: ActiveSequence[Call]) -> None:
        """Abort a sequence, after a bounded wait if its prompt's KV is being fetched: aborting then is unsafe."""
        if sequence.call.result is None or sequence.call.aborted or sequence.call.result.finished:
            return
        if sequence.call.adopted and not sequence.responded:
            self._loop.later(self._options.abort_hold_s, self._abort_now, sequence)
            return
        self._abort_now(sequence)

    def _abort_now(self, sequence: ActiveSequence[Call]) -> None:
        if sequence.call.aborted or sequence.call.result.finished:
            return
        sequence.call.aborted = True
        try:
            sequence.call.result.abort()
        except Exception as error:
            self.broken(error)
            return
        self._loop.later(ABORT_S, self._cancel_following, sequence)

    def _cancel_following(self, sequence: ActiveSequence[Call]) -> None:
        if sequence.task is not None and not sequence.task.done():
            log.warning("abort_unanswered", seconds=ABORT_S)
            sequence.task.cancel()

    # --- events and statistics ---

    def start(self, *, events: bool, stats: bool) -> None:
        """Follow KV events, statistics and health. Call it after the first request."""
        if events:
            self._loop.task(
                self._drain("get_kv_cache_events_async", lambda item: self._emit(KvEvents([item]))), "kv events"
            )
        if stats:
            self._loop.task(self._drain("get_stats_async", lambda item: self._emit(Stat(item))), "statistics")
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
        """Poll the engine's own health check, if it has one."""
        check = getattr(self._llm, "_check_health", None)
        if not callable(check):
            log.info("engine_health", source="outputs only")
            return
        while True:
            await asyncio.sleep(HEALTH_S)
            try:
                healthy = check()
            except Exception as error:
                self.broken(error)
                return
            if healthy is False:
                self.broken(RuntimeError("TensorRT-LLM reports that it is unhealthy"))
                return

    def broken(self, error: BaseException) -> None:
        self._broken = True
        self._emit(EngineFailed(error))


async def drained(items: AsyncIterable[Any]) -> Any:
    """Yield items until the queue is empty; some releases signal that with QueueEmpty."""
    try:
        async for item in items:
            yield item
    except asyncio.QueueEmpty:
        return
