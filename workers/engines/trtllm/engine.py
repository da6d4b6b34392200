"""TensorRT-LLM behind our engine protocol; see ``workers.engines.external.engine``."""

from collections.abc import Sequence as Seq

from prometheus_client.registry import Collector

from schemas.errors import Code
from schemas.kv import KvEvent
from schemas.transfer import Memory
from workers.engines.base import EngineInfo, EngineStats, RequestError, SequenceRequest
from workers.engines.core.embedding_pool import TEXT_ONLY, EmbeddingPool
from workers.engines.external.engine import EngineRuntime, ExternalEngine
from workers.engines.external.handoff_state import ConsumedStates
from workers.engines.trtllm import stats
from workers.engines.trtllm.api import Api
from workers.engines.trtllm.follower import ActiveSequence, Follower, KvEvents, Stat
from workers.engines.trtllm.image_slots import ImageSlotStore
from workers.engines.trtllm.kv_events import Roots, Translator, by_rank
from workers.engines.trtllm.metrics import NativeMetrics
from workers.engines.trtllm.prepare import Options, check, prepare


class TrtllmEngine(ExternalEngine[ActiveSequence]):
    """Implements ``workers.engines.base.Engine``.

    Args:
        runtime: closed with it, first the engine, then its loop.
        image_slots: images of prompts; None: the model takes none.

    KV moves through TensorRT-LLM's own cache transceiver: handoffs are ``opaque``, ``memory`` has embeddings only.
    """

    _follower: Follower

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[Api],
        options: Options,
        metrics: NativeMetrics,
        image_slots: ImageSlotStore | None = None,
    ) -> None:
        super().__init__("TensorRT-LLM", info, runtime)
        self._images = None if image_slots is None else EmbeddingPool(image_slots, image_slots.mark_embedded)
        self.vision = self._images
        self._options = options
        self._metrics = metrics
        self._follower = Follower(runtime, options, metrics, self._enqueue)
        self._roots = Roots(info.block_size, options.root)
        self._translators = [Translator(info.block_size, self._roots) for _ in range(info.dp_size)]
        self._blocks = stats.Blocks(info.total_blocks, 0, info.total_blocks)
        self._consumed = ConsumedStates()
        self._following = False

    def _accept(self, request: SequenceRequest) -> ActiveSequence:
        check(request, self.info, self._options.prompt_limit)
        if request.media:
            if self._images is None:
                raise RequestError(Code.invalid_request, TEXT_ONLY)
            self._images.check(request.media, len(request.prompt), adopted=bool(request.opaque))
        sequence = ActiveSequence(request, prepare(request, self.info, self._options, self._consumed))
        self._roots.learn(request.prompt, request.root or self._options.root, (m.digest for m in request.media))
        return sequence

    def submit(self, request: SequenceRequest) -> None:
        super().submit(request)
        if not self._following:
            self._following = True
            self._loop.post(self._follow)

    def _follow(self) -> None:
        self._follower.start(events=self.info.kv_events, stats=self._options.publish)

    def _on_event(self, event: KvEvents | Stat, events: list[KvEvent], others: dict[int, list[KvEvent]]) -> None:
        if isinstance(event, KvEvents):
            for rank, received in by_rank(event.events).items():
                if rank < len(self._translators) and (named := self._translators[rank].feed(received)):
                    (others.setdefault(rank, []) if rank else events).extend(named)
        else:
            self._blocks = stats.blocks(event.stat) or self._blocks
            self._metrics.observe(event.stat)

    def stats(self) -> EngineStats:
        total, used, free = self._blocks
        if not self._active and not self._held:  # its last statistic may be from before the end of the last request
            used, free = 0, total
        cached = min(free, sum(translator.names for translator in self._translators))
        return EngineStats(
            running=self._running,
            waiting=len(self._active) - self._running,
            used_blocks=used,
            cached_blocks=cached,
            free_blocks=max(0, total - used - cached),
            pinned_blocks=sum(self._held.values()),
            hit_tokens=self._hit,
            prompt_tokens=self._prompt,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._translators[rank].dump()

    def collectors(self) -> Seq[Collector]:
        """The engine's own metrics, for the worker's registry."""
        return [self._metrics]

    def memory(self) -> dict[str, Memory]:
        return {} if self._images is None else self._images.memory()
