"""The TensorRT-LLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``."""

import itertools
from collections.abc import Callable
from typing import Any

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.workers.engines.core.embeddings import TEXT_ONLY, EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.events.translator import EventTranslator
from penstock.workers.engines.external.engine import LORA_S, Adapter, BlockCounts, EngineLoras, unreadable
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.trtllm import trtllm_metrics as stats
from penstock.workers.engines.trtllm.api import TrtllmApi
from penstock.workers.engines.trtllm.args import LORA_MODULES
from penstock.workers.engines.trtllm.engine_health import KvEvents, Stats
from penstock.workers.engines.trtllm.engine_inputs import TrtllmOptions, check, prepare
from penstock.workers.engines.trtllm.follower import TrtllmCall, TrtllmFollower
from penstock.workers.engines.trtllm.kv_events import Roots, TrtllmFormat, by_rank
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics


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
) -> Adapter[TrtllmCall]:
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
    return Adapter("TensorRT-LLM", accept, follower, TrtllmBlocks(info, roots, metrics), vision, [metrics])
