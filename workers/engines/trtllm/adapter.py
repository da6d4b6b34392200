"""The TensorRT-LLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

``TrtllmFollower`` submits sequences to TensorRT-LLM and queues its outputs, in the loop thread unless noted. Outputs
are copied into the queue at once: TensorRT-LLM returns the same object again and again.
"""

import itertools
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.workers.engines.core.embeddings import TEXT_ONLY, EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.events.translator import EventTranslator
from penstock.workers.engines.external.engine import LORA_S, BlockCounts, EngineAdapter, EngineLoras, unreadable
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import (
    NO_REASON,
    ActiveSequence,
    Follower,
    SequenceFailure,
    SequenceUpdate,
)
from penstock.workers.engines.trtllm import disagg
from penstock.workers.engines.trtllm import trtllm_metrics as stats
from penstock.workers.engines.trtllm.api import TrtllmApi
from penstock.workers.engines.trtllm.args import LORA_MODULES
from penstock.workers.engines.trtllm.engine_health import KvEvents, Liveness, QueueReader, Stats
from penstock.workers.engines.trtllm.engine_inputs import TrtllmInputs, TrtllmOptions, check, prepare
from penstock.workers.engines.trtllm.kv_events import Roots, TrtllmFormat, by_rank
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics, measured_times

_TOO_LONG = re.compile(
    r"max_num_tokens|max_seq_len|max_input_len|too long|exceed\w*.{0,40}(?:length|limit|tokens)", re.I
)
_TRANSFER = re.compile(r"transceiver|kv[ _-]?cache transfer|context (?:phase|request)|disagg", re.I)


def is_request_error(error: BaseException, request_error: type[BaseException] | None, *, at_call: bool) -> bool:
    """Whether only this request failed.

    The call itself validates values and types. While its outputs are iterated, only a RequestError is the request's
    own.

    Args:
        request_error: TensorRT-LLM's RequestError; a RuntimeError, so it is checked first.
        at_call: raised by the call, not while iterating.
    """
    if request_error is not None and isinstance(error, request_error):
        return True
    return at_call and isinstance(error, ValueError | TypeError | NotImplementedError)


def code_of(error: BaseException, *, at_call: bool, adopted: bool) -> Code:
    """The code of an error of one request.

    Args:
        adopted: its KV was computed by another engine; if its transfer fails, the prompt can be computed again.
    """
    text = str(error)
    if adopted and _TRANSFER.search(text):
        return Code.transfer_failed
    if _TOO_LONG.search(text):
        return Code.context_length_exceeded
    if isinstance(error, NotImplementedError):
        return Code.unsupported
    return Code.invalid_request if at_call else Code.engine_error


log = structlog.get_logger("engine")


ABORT_S = 10.0  # how long an aborted request may take to end
FETCH_MORE_S = 30.0  # how long a fetch of KV may take beyond the engine's own limit


@dataclass(slots=True)
class TrtllmCall:
    """The call of ``generate_async`` for one sequence. Belongs to the loop thread.

    Attributes:
        adopted: the prompt's KV comes from another engine.
        prepared: its arguments; None once it was made, since they may be large.
        result: what it returned.
    """

    adopted: bool
    prepared: TrtllmInputs | None
    result: Any = None
    aborted: bool = False


class TrtllmFollower(Follower[TrtllmApi, TrtllmCall]):
    """Follows one ``LLM``.

    Attributes:
        queues: reads the engine's other queues, from the first request on.
        liveness: what is seen of the engine.
    """

    def __init__(
        self,
        runtime: EngineRuntime[TrtllmApi],
        options: TrtllmOptions,
        metrics: NativeMetrics,
        *,
        kv_events: bool = False,
    ) -> None:
        super().__init__(runtime)
        self.options = options
        self._metrics = metrics
        self.liveness = Liveness(time.monotonic(), quiet_s=options.quiet_s, answer_s=options.answer_s)
        self._repeats: bool | None = None  # whether an adopted output begins with the prefill engine's tokens
        self.queues = QueueReader(
            runtime.llm,
            self.liveness,
            self._emit,
            self.broken,
            ask=self.ask,
            beat=self.beat,
            events=kv_events,
            stats=options.publish,
        )
        self.queues.start()
        runtime.resources.callback(self.queues.close)  # before the engine

    # --- requests ---

    async def _follow(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        prepared, sequence.call.prepared = sequence.call.prepared, None
        if sequence.cancelled or prepared is None:
            return
        self.queues.read()
        try:
            params = self._api.sampling_params(prepared.sampling)
            result = sequence.call.result = self._llm.generate_async(sampling_params=params, **prepared.arguments)
        except Exception as error:
            self._failed(sequence, error, self._code(sequence, error, at_call=True))
            return
        if sequence.call.adopted:
            self._loop.later(self.options.abort_hold_s + FETCH_MORE_S, self._not_fetched, sequence)
        try:
            async for response in result:
                self._on_output(sequence, prepared, response)
        except Exception as error:
            self._failed(sequence, error, self._code(sequence, error, at_call=False))
            return
        if not sequence.cancelled and not prepared.cursor.finished:
            self._fail(sequence, Code.engine_error, NO_REASON)
        self._metrics.finished(getattr(result, "metrics_dict", None))

    def _not_fetched(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        """Give a sequence up whose KV never came: TensorRT-LLM can lose a block before it was sent, and waits on."""
        if sequence.responded or sequence.cancelled or self._broken:
            return
        sequence.cancelled = True  # aborting it is unsafe while its KV may still be on its way
        log.warning("kv_never_came", seconds=self.options.abort_hold_s + FETCH_MORE_S)
        self._fail(sequence, Code.transfer_failed, "the prompt's KV did not come from the prefill worker's engine")

    def _on_output(self, sequence: ActiveSequence[TrtllmCall], prepared: TrtllmInputs, response: Any) -> None:
        cached = sequence.first_output(getattr(response, "cached_tokens", 0))
        self.liveness.generated(time.monotonic())
        if sequence.cancelled:
            self.abort(sequence)
            return
        output, cursor = response.outputs[0], prepared.cursor
        params = output.disaggregated_params if sequence.pin else None
        tokens: Seq[int] = output.token_ids or (params.first_gen_tokens if params is not None else None) or ()
        if sequence.call.adopted:
            cursor.repeats = self._repeats if cursor.repeats is None else cursor.repeats
        new, failure = cursor.take(tokens, output.logprobs, output.finish_reason, output.stop_reason)
        if sequence.call.adopted and self._repeats is None and cursor.repeats is not None:
            self._repeats = cursor.repeats
            log.info("adopted_outputs", repeat_prefill_tokens=cursor.repeats)
        opaque = None
        if params is not None and (params.opaque_state or getattr(params, "ctx_info_endpoint", None)):
            try:
                opaque = disagg.pack(params, self.options.layout, prepared.tokens)
            except (TypeError, ValueError) as error:  # only this request fails
                failure = SequenceFailure(Code.transfer_failed, f"its handoff state cannot be sent: {error}")
                log.error("handoff_state_unpackable", error=repr(error))
        scored = sequence.scored(output.prompt_logprobs) if sequence.score else None
        if new or failure is not None or opaque is not None or cached is not None or scored is not None:
            traced = sequence.trace is not None and output.finish_reason
            measured = measured_times(output.request_perf_metrics) if traced else None
            self._emit(SequenceUpdate(sequence, cached, new, failure, opaque, scored, measured))
        if cursor.finished and not response.finished:  # else it would keep generating
            self.abort(sequence)

    def _code(self, sequence: ActiveSequence[TrtllmCall], error: Exception, *, at_call: bool) -> Code | None:
        if not is_request_error(error, self._api.request_error, at_call=at_call):
            return None
        return code_of(error, at_call=at_call, adopted=sequence.call.adopted)

    def abort(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        """Abort a sequence, after a bounded wait if its prompt's KV is being fetched: aborting then is unsafe."""
        if sequence.call.result is None or sequence.call.aborted or sequence.call.result.finished:
            return
        if sequence.call.adopted and not sequence.responded:
            self._loop.later(self.options.abort_hold_s, self._abort_now, sequence)
            return
        self._abort_now(sequence)

    def _abort_now(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        if sequence.call.aborted or sequence.call.result.finished:
            return
        sequence.call.aborted = True
        try:
            sequence.call.result.abort()
        except Exception as error:
            self.broken(error)
            return
        self._loop.later(ABORT_S, self._cancel_following, sequence)

    def _cancel_following(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        if sequence.task is not None and not sequence.task.done():
            log.warning("abort_unanswered", seconds=ABORT_S)
            sequence.task.cancel()

    # --- liveness ---

    def ask(self) -> threading.Event:
        """Have the engine generate one token; returns what is set when it has come. From any thread."""
        came = threading.Event()
        self._loop.post(lambda: self._loop.task(self._generate_one(came), "one token"))
        return came

    def beat(self) -> None:
        """Have the loop show that it runs; from any thread."""
        self._loop.post(lambda: self.liveness.looped(time.monotonic()))

    async def _generate_one(self, came: threading.Event) -> None:
        try:
            await self._llm.generate_async(**self.options.one_token()).aresult()
        except Exception as error:
            if not is_request_error(error, self._api.request_error, at_call=True):
                self.broken(error)
                return
            log.warning("one_token_refused", error=str(error))
        self.liveness.answered(time.monotonic())
        came.set()


def loras(
    runtime: EngineRuntime[TrtllmApi], settings: WorkerSettings, one_token: Callable[[], dict[str, Any]]
) -> EngineLoras:
    """LoRA adapters, which TensorRT-LLM reads with the first request for them and never gives up again.

    1.2 ends with an adapter that it cannot read, so what it could stumble over is looked for before.

    Args:
        one_token: arguments of ``generate_async`` for a request of one token.
    """
    made: dict[str, Any] = {}  # by id, for good
    numbers = itertools.count(1)  # TensorRT-LLM tells adapters apart by them

    def read(identity: str, folder: AdapterFolder) -> Any:
        if identity in made:
            return made[identity]
        if len(made) >= settings.max_cpu_loras:
            raise AdapterError(
                f"TensorRT-LLM has read {len(made)} adapters, which --max-cpu-loras limits, and keeps also those that "
                "were unloaded; restart the worker, or raise the limit"
            )
        others = {each.rpartition(".")[2] for each in folder.modules} - set(LORA_MODULES.values())
        if others:
            raise unreadable("TensorRT-LLM", folder, f"it changes {', '.join(sorted(others))}")
        kind = runtime.api.lora
        assert kind is not None  # checked at the start
        asked = kind(identity, next(numbers), str(folder.path))

        async def first() -> None:
            await runtime.llm.generate_async(**one_token(), lora_request=asked).aresult()

        try:
            runtime.loop.run(first(), LORA_S)
        except Exception as error:  # of TensorRT-LLM's, of any kind
            raise unreadable("TensorRT-LLM", folder, error) from error
        made[identity] = asked
        return asked

    return EngineLoras(settings.max_loras, settings.max_lora_rank, runtime, read, lambda identity, asked: None)


class TrtllmBlocks:
    """Implements ``external.engine.KnownBlocks``: names of all ranks' blocks, and the pool in the latest statistic."""

    def __init__(self, info: EngineInfo, roots: Roots, metrics: NativeMetrics) -> None:
        self._translators = [EventTranslator(TrtllmFormat(info.block_size, roots)) for _ in range(info.dp_size)]
        self._pool = stats.PoolCounts(info.total_blocks, 0, info.total_blocks)
        self._metrics = metrics

    def take(self, event: KvEvents | Stats) -> dict[int, list[KvEvent]]:
        if isinstance(event, Stats):
            for stat in event.stats:
                self._pool = stats.pool_counts(stat) or self._pool
                self._metrics.observe(stat)
            return {}
        found = {rank: translator.forget() for rank, translator in enumerate(self._translators)} if event.lost else {}
        for rank, received in by_rank(event.events).items():
            if rank < len(self._translators):
                found.setdefault(rank, []).extend(self._translators[rank].feed(received))
        self._metrics.lost(sum(translator.counts.lost for translator in self._translators))
        return found

    def counts(self, *, active: bool, pinned: int) -> BlockCounts:
        total, used, free = self._pool
        if not active and not pinned:  # its last statistic may be from before the end of the last request
            used, free = 0, total
        cached = min(free, sum(translator.names for translator in self._translators))
        return BlockCounts(used, cached, max(0, total - used - cached), pinned)

    def dump(self, rank: int) -> list[KvEvent]:
        return self._translators[rank].dump()


def adapter_of(
    info: EngineInfo,
    runtime: EngineRuntime[TrtllmApi],
    options: TrtllmOptions,
    metrics: NativeMetrics,
    images: ImageStore | None = None,
) -> EngineAdapter[TrtllmCall]:
    """KV moves through TensorRT-LLM's own cache transceiver: handoffs are ``opaque``, and only embeddings have memory.

    Args:
        images: of prompts; None: the model takes none.
    """
    vision = None if images is None else EmbeddingPool(images, images.mark_embedded, images.alike)
    roots, consumed = Roots(info.block_size, options.root), ConsumedStates()

    def accept(request: SequenceRequest, lora: Any) -> ActiveSequence[TrtllmCall]:
        check(request, info, options.prompt_limit)
        if request.media:
            if vision is None:
                raise RequestError(Code.invalid_request, TEXT_ONLY)
            vision.check(request.media, len(request.prompt), adopted=bool(request.opaque))
        prepared = prepare(request, info, options, consumed)
        if lora is not None:
            prepared.arguments["lora_request"] = lora
        roots.learn(request.prompt, request.root or options.root, (m.digest for m in request.media))
        return ActiveSequence(request, TrtllmCall(prepared.adopted, prepared))

    follower = TrtllmFollower(runtime, options, metrics, kv_events=info.kv_events)
    return EngineAdapter("TensorRT-LLM", accept, follower, TrtllmBlocks(info, roots, metrics), vision, [metrics])
