"""The vLLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

``VllmFollower`` runs in the loop thread: it submits sequences to vLLM and queues its outputs. These are deltas
(``RequestOutputKind.DELTA``), which a cursor converts to tokens, each reported once. Every delta has the new tokens,
including the ending one. An engine that took over another's KV draws that engine's last token again: it must be the
same, and is not reported twice.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.schemas.errors import Code
from penstock.workers.engines.core.embeddings import EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, SequenceRequest
from penstock.workers.engines.external import sequences
from penstock.workers.engines.external.engine import LORA_S, EngineAdapter, EngineLoras, WeightCommands, unreadable
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.external.event_streams import EMPTIED, KV_EVENTS_S, EventStreams
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.vllm import engine_inputs
from penstock.workers.engines.vllm.api import VllmApi
from penstock.workers.engines.vllm.engine_inputs import VllmInputs, VllmOptions, check, prepare


class Diverged(Exception):
    """The engine drew another token than the one already reported, after which it must continue."""


class VllmOutputCursor:
    """Position in the output of one sequence.

    Args:
        known: tokens already reported that the engine draws again.
        top: alternatives per token; None: no log-probabilities.
        adopted: its prompt's KV was fetched from another engine.
    """

    def __init__(self, *, known: Seq[int] = (), top: int | None = None, adopted: bool = False) -> None:
        self.finished = False
        self._known = list(known)
        self._top = top
        self._adopted = adopted

    def take(
        self,
        token_ids: Seq[int],
        logprobs: Seq[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[list[sequences.Token], sequences.SequenceFailure | None]:
        """Take one delta; returns its new tokens and the failure, if any.

        Raises:
            Diverged: nothing of this output can be used.
        """
        if self.finished:
            return [], None
        new: list[sequences.Token] = []
        for at, token in enumerate(token_ids):
            if self._known:
                if token != self._known.pop(0):
                    raise Diverged
                continue
            new.append(sequences.Token(token, "", sequences.logprob_at(logprobs, at, token, self._top)))
        if finish is None:
            return new, None
        if finish in ("stop", "repetition", "length") and self._known:
            raise Diverged
        self.finished = True
        if finish in ("abort", "error"):
            return new, self._failed(finish)
        stop_token = stop_reason if isinstance(stop_reason, int) else None
        return sequences.last_token(new, "length" if finish == "length" else "stop", stop_token)

    def _failed(self, finish: str) -> sequences.SequenceFailure:
        if finish == "abort":
            return sequences.SequenceFailure(Code.cancelled, "the engine ended the request: abort")
        code = Code.transfer_failed if self._adopted else Code.engine_error
        return sequences.SequenceFailure(code, "the engine failed on this request; see its log")


log = structlog.get_logger("engine")

OTHER_TOKENS = (
    "vLLM's image processor made other tokens of an image than the gateway counted; serve this model's images with the "
    "native engine"
)


class VllmCall(NamedTuple):
    """The call of ``generate`` for one sequence.

    Attributes:
        prepare_without_handoff: prepares the same call without another engine's KV.
        logprobs: how many alternatives each token reports; None: no log-probabilities.
        lora: vLLM's LoRARequest; None: it has no LoRA adapter.
    """

    prepared: VllmInputs
    prepare_without_handoff: Callable[[], VllmInputs]
    logprobs: int | None
    lora: Any = None


class VllmFollower(sequences.Follower[VllmApi, VllmCall]):
    """Follows one ``AsyncLLM``."""

    def __init__(self, runtime: EngineRuntime[VllmApi], options: VllmOptions) -> None:
        super().__init__(runtime)
        self._layout = options.layout
        self._images = options.images
        self._numbers = itertools.count()

    async def _follow(self, sequence: sequences.ActiveSequence[VllmCall]) -> None:
        try:
            try:
                await self._generate(sequence, sequence.call.prepared)
            except Diverged:
                log.info("handoff_token_differs", action="continuing after the reported token, from the fetched KV")
                await self._generate(sequence, sequence.call.prepare_without_handoff())
        except Exception as error:
            self._failed(sequence, error, self._code(sequence, error))

    async def _generate(self, sequence: sequences.ActiveSequence[VllmCall], prepared: VllmInputs) -> None:
        params = self._api.sampling_params(prepared.sampling)
        cursor = VllmOutputCursor(known=prepared.known, top=sequence.call.logprobs, adopted=prepared.adopted)
        name = f"penstock-{next(self._numbers)}"
        prompt = prepared.prompt
        if prepared.images and (store := self._images) is not None:
            pictures = await asyncio.to_thread(lambda: [store.decode(raw) for raw in prepared.images])
            prompt = prompt | {"multi_modal_data": {"image": pictures}}
        stream = self._llm.generate(
            prompt,
            params,
            name,
            lora_request=sequence.call.lora,
            trace_headers=sequence.trace,
            data_parallel_rank=prepared.rank,
        )
        try:
            async for output in stream:
                self._on_output(sequence, prepared, cursor, output)
        finally:
            await stream.aclose()  # aborts now, not at garbage collection
        if not cursor.finished:
            self._fail(sequence, Code.engine_error, sequences.NO_REASON)

    def _on_output(
        self, sequence: sequences.ActiveSequence[VllmCall], prepared: VllmInputs, cursor: VllmOutputCursor, output: Any
    ) -> None:
        if sequence.cancelled:
            return
        if prepared.whole and not sequence.responded and tuple(output.prompt_token_ids or ()) != prepared.whole:
            self._fail(sequence, Code.engine_error, OTHER_TOKENS)
            sequence.cancelled = True
            self.abort(sequence)
            return
        piece = output.outputs[0]
        new, failure = cursor.take(piece.token_ids, piece.logprobs, piece.finish_reason, piece.stop_reason)
        opaque = None
        if sequence.pin and output.kv_transfer_params and new:
            opaque = engine_inputs.pack(output.kv_transfer_params, self._layout, prepared.computed, new[-1].token)
        cached = sequence.first_output(output.num_cached_tokens) if new else None
        scored = sequence.scored(output.prompt_logprobs[1:]) if sequence.score and output.prompt_logprobs else None
        if new or failure is not None or scored is not None:
            self._emit(sequences.SequenceUpdate(sequence, cached, new, failure, opaque, scored))

    def _code(self, sequence: sequences.ActiveSequence[VllmCall], error: Exception) -> Code | None:
        if isinstance(error, self._api.dead) or self._llm.errored:
            return None
        if isinstance(error, self._api.transient):
            return Code.transfer_failed if sequence.call.prepared.adopted else Code.engine_error
        if isinstance(error, NotImplementedError):
            return Code.unsupported
        return Code.invalid_request if isinstance(error, self._api.refusals) else Code.engine_error


PREFIX = "vllm:"  # of vLLM's own metrics
HEALTH_S = 1.0
NO_SLEEP = (
    "vLLM frees memory only if it was started for that (--sleep-after-s, --share-device, or enable_sleep_mode in its "
    "arguments)"
)


class SchedulerStats:
    """The latest statistics of each rank's scheduler. Written in the loop thread, read in the engine thread."""

    def __init__(self) -> None:
        self.usage: dict[int, float] = {}  # share of the pool that running requests hold, by rank
        self.preemptions = 0

    def factory(self, config: object, rank: int = 0) -> "StatLogger":
        """For ``stat_loggers`` of AsyncLLM."""
        return StatLogger(self, rank)

    @property
    def used(self) -> float:
        """Used share of all pools."""
        return sum(self.usage.values()) / len(self.usage) if self.usage else 0.0


class StatLogger:
    """Receives one rank's statistics, with the methods of vLLM's ``StatLoggerBase``, which may gain arguments."""

    def __init__(self, scheduler: SchedulerStats, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **others: Any) -> None:
        usage = getattr(scheduler_stats, "kv_cache_usage", None)
        if usage is not None:
            self._scheduler.usage[self._rank] = float(usage)
        self._scheduler.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0) or 0)

    def log_engine_initialized(self) -> None:
        """Not used."""

    def log(self) -> None:
        """Not used."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Not used: the worker registers it."""


def loras(runtime: EngineRuntime[VllmApi], settings: WorkerSettings) -> EngineLoras:
    """LoRA adapters, which vLLM keeps in host memory from the time it has read them."""
    numbers = itertools.count(1)  # vLLM tells adapters apart by them
    loop, llm = runtime.loop, runtime.llm

    def read(identity: str, folder: AdapterFolder) -> Any:
        made = runtime.api.lora(identity, next(numbers), str(folder.path))
        try:
            taken = loop.run(llm.add_lora(made), LORA_S)
        except Exception as error:  # of vLLM's, of any kind
            raise unreadable("vLLM", folder, error) from error
        if not taken:
            raise AdapterError(f"vLLM did not take the adapter in {folder.path}; its log has the reason")
        return made

    def drop(identity: str, made: Any) -> None:
        async def remove() -> None:
            await llm.remove_lora(made.lora_int_id)

        loop.task(remove(), "adapter")

    return EngineLoras(settings.max_loras, settings.max_lora_rank, runtime, read, drop)


def weight_commands(
    runtime: EngineRuntime[VllmApi], path: Path, tree: Tree, *, lora: bool, images: bool, tied: bool
) -> WeightCommands:
    """
    Args:
        path: of the model's folder.
        tree: the engine's arguments.
        lora: it applies LoRA adapters.
        images: its model takes images.
        tied: its head has the weights of its embeddings.
    """
    llm = runtime.llm
    fixed = ""
    if tree.get("speculative_config"):
        fixed = "vLLM loads the model's weights only, not those of a draft model; restart workers"
    elif lora:  # 0.33 unloads them all, and reads them again from folders that may have changed
        fixed = "vLLM forgets its LoRA adapters when weights change; restart workers"
    elif images:
        fixed = "weights of models that take images are not replaced; restart workers"
    elif tied and runtime.api.cpu:  # 0.32 packs a copy of them for the head at its start only
        fixed = "vLLM's CPU build keeps the old weights of a head that is tied to the embeddings; restart workers"

    async def idle() -> bool:
        return bool(await llm.reset_prefix_cache())

    async def load(folder: Path) -> None:
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    async def sleep() -> None:
        await llm.sleep(level=1)

    async def wake() -> None:
        await llm.wake_up()

    return WeightCommands(
        path, idle, load, sleep, wake, EMPTIED, fixed, "" if tree.get("enable_sleep_mode") else NO_SLEEP
    )


def adapter_of(
    info: EngineInfo, runtime: EngineRuntime[VllmApi], options: VllmOptions, scheduler: SchedulerStats
) -> EngineAdapter[VllmCall]:
    """KV moves through vLLM's own NIXL connector: handoffs are ``opaque``. Memory is for images only."""
    images, consumed = options.images, ConsumedStates()
    vision = None if images is None else EmbeddingPool(images, images.mark_embedded, images.alike)

    def accept(request: SequenceRequest, lora: Any) -> ActiveSequence[VllmCall]:
        check(request, info, options)
        if request.media and vision is not None:
            vision.check(request.media, len(request.prompt), adopted=False)

        def without_handoff() -> VllmInputs:
            return prepare(msgspec.structs.replace(request, opaque=b""), info, options, consumed)

        prepared = prepare(request, info, options, consumed)
        return ActiveSequence(request, VllmCall(prepared, without_handoff, request.sampling.logprobs, lora))

    def load() -> tuple[int, int]:
        return round(scheduler.used * info.total_blocks), scheduler.preemptions

    follower = VllmFollower(runtime, options)
    follower.watch(lambda: runtime.llm.check_health(), HEALTH_S)
    return EngineAdapter(
        "vLLM",
        accept,
        follower,
        EventStreams(info, options.root, load),
        vision,
        [NativeSeries(PREFIX)],
        KV_EVENTS_S,
    )
