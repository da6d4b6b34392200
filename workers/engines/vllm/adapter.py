"""The vLLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``.

Besides the engine thread and the loop thread, one thread per rank reads KV events into the same queue.

Statistics of vLLM's scheduler for ``EngineStats``, in addition to vLLM's own metrics.
"""

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.embeddings import EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, SequenceRequest
from penstock.workers.engines.external.engine import LORA_S, BlockCounts, EngineLoras, unreadable
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.engines.external.event_streams import EventStreams, KvPayloads
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.vllm.api import VllmApi
from penstock.workers.engines.vllm.engine_inputs import VllmOptions, check, prepare
from penstock.workers.engines.vllm.follower import VllmCall, VllmFollower

PREFIX = "vllm:"  # of vLLM's own metrics


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
        """Not used: the engine never sleeps."""


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


class VllmAdapter:
    """Implements ``penstock.workers.engines.external.engine.Adapter``.

    KV moves through vLLM's own NIXL connector: handoffs are ``opaque``, ``memory`` has embeddings of images alone.

    Args:
        runtime: its resources are the subscribers, then the engine, then its loop.
    """

    title = "vLLM"
    linger_s = 0.1  # KV events come over another channel than the outputs

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[VllmApi],
        options: VllmOptions,
        scheduler: SchedulerStats,
    ) -> None:
        self._info = info
        self._options = options
        self._scheduler = scheduler
        self.vision: EmbeddingPool | None = None
        if (images := options.images) is not None:
            self.vision = EmbeddingPool(images, images.mark_embedded, images.alike)
        self._follower = VllmFollower(runtime, options)
        self._streams = EventStreams(info.dp_size, info.block_size, options.root)
        self._consumed = ConsumedStates()
        loop = runtime.loop
        loop.post(lambda: loop.task(self._follower.watch(), "health"))

    def accept(self, request: SequenceRequest, lora: Any = None) -> ActiveSequence[VllmCall]:
        check(request, self._info, self._options)
        if request.media and self.vision is not None:
            self.vision.check(request.media, len(request.prompt), adopted=False)

        def without_handoff() -> Any:
            return prepare(msgspec.structs.replace(request, opaque=b""), self._info, self._options, self._consumed)

        prepared = prepare(request, self._info, self._options, self._consumed)
        return ActiveSequence(request, VllmCall(prepared, without_handoff, request.sampling.logprobs, lora))

    def launch(self, sequence: ActiveSequence[VllmCall]) -> None:
        self._follower.launch(sequence)

    def abort(self, sequence: ActiveSequence[VllmCall]) -> None:
        self._follower.abort(sequence)

    def kv_events(self, event: KvPayloads) -> dict[int, list[KvEvent]]:
        return self._streams.feed(event)

    def block_counts(self, *, active: bool, pinned: int) -> BlockCounts:
        total = self._info.total_blocks
        used = round(self._scheduler.used * total) if active else 0  # outdated once nothing runs
        return self._streams.block_counts(total, used, pinned, self._scheduler.preemptions)

    def dump(self, rank: int) -> list[KvEvent]:
        return self._streams.dump(rank)

    def memory(self) -> dict[str, Memory]:
        images = self._options.images
        return {} if self.vision is None or images is None or images.pool is None else self.vision.memory()

    def collectors(self) -> Seq[Collector]:
        return [NativeSeries(PREFIX)]
