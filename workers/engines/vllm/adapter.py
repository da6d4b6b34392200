"""The vLLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.
"""

import itertools
from pathlib import Path
from typing import Any

import msgspec

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.workers.engines.core.embeddings import EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, SequenceRequest
from penstock.workers.engines.external.engine import LORA_S, Adapter, EngineLoras, WeightCommands, unreadable
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.external.event_streams import EMPTIED, KV_EVENTS_S, EventStreams
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.vllm.api import VllmApi
from penstock.workers.engines.vllm.engine_inputs import VllmInputs, VllmOptions, check, prepare
from penstock.workers.engines.vllm.follower import VllmCall, VllmFollower

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
) -> Adapter[VllmCall]:
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
    return Adapter(
        "vLLM",
        accept,
        follower,
        EventStreams(info, options.root, load),
        vision,
        [NativeSeries(PREFIX)],
        KV_EVENTS_S,
    )
