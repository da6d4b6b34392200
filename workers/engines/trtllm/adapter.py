"""The TensorRT-LLM-specific part of an external engine; see ``penstock.workers.engines.external.engine``."""

from collections.abc import Sequence as Seq

from prometheus_client.registry import Collector

from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.embeddings import TEXT_ONLY, EmbeddingPool
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external.engine import BlockCounts
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.runtime import EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence
from penstock.workers.engines.support import ServedOptions
from penstock.workers.engines.trtllm import trtllm_metrics as stats
from penstock.workers.engines.trtllm.api import TrtllmApi
from penstock.workers.engines.trtllm.engine_health import KvEvents, QueueReader, Stats
from penstock.workers.engines.trtllm.engine_inputs import TrtllmOptions, check, prepare
from penstock.workers.engines.trtllm.follower import TrtllmCall, TrtllmFollower
from penstock.workers.engines.trtllm.image_slots import ImageSlotStore
from penstock.workers.engines.trtllm.kv_events import Roots, TrtllmEventTranslator, by_rank
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics


class TrtllmAdapter:
    """Implements ``penstock.workers.engines.external.engine.Adapter``.

    KV moves through TensorRT-LLM's own cache transceiver: handoffs are ``opaque``, ``memory`` has embeddings only.

    Args:
        runtime: its resources are the engine, then its loop.
        image_slots: images of prompts; None: the model takes none.
    Attributes:
        watch: reads the engine's queues.
        liveness: what it sees of the engine.
    """

    title = "TensorRT-LLM"
    linger_s = 0.0

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[TrtllmApi],
        options: TrtllmOptions,
        metrics: NativeMetrics,
        image_slots: ImageSlotStore | None = None,
    ) -> None:
        self.vision = None if image_slots is None else EmbeddingPool(image_slots, image_slots.mark_embedded)
        self._info = info
        self.options = options
        self._metrics = metrics
        self._follower = TrtllmFollower(runtime, options, metrics)
        self.liveness = self._follower.liveness
        self._roots = Roots(info.block_size, options.root)
        self._translators = [TrtllmEventTranslator(info.block_size, self._roots) for _ in range(info.dp_size)]
        self._blocks = stats.PoolCounts(info.total_blocks, 0, info.total_blocks)
        self._consumed = ConsumedStates()
        self.watch = QueueReader(
            runtime.llm,
            self.liveness,
            runtime.inbox.put,
            self._follower.broken,
            ask=self._follower.ask,
            beat=self._follower.beat,
            events=info.kv_events,
            stats=options.publish,
        )
        self.watch.start()
        runtime.resources.callback(self.watch.close)  # before the engine

    def accept(self, request: SequenceRequest) -> ActiveSequence[TrtllmCall]:
        check(request, self._info, self.options.prompt_limit)
        if request.media:
            if self.vision is None:
                raise RequestError(Code.invalid_request, TEXT_ONLY)
            self.vision.check(request.media, len(request.prompt), adopted=bool(request.opaque))
        prepared = prepare(request, self._info, self.options, self._consumed)
        self._roots.learn(request.prompt, request.root or self.options.root, (m.digest for m in request.media))
        return ActiveSequence(request, TrtllmCall(prepared.adopted, prepared))

    def launch(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        """Submit a sequence; called in the loop thread."""
        self._follower.launch(sequence)
        self.watch.read()

    def abort(self, sequence: ActiveSequence[TrtllmCall]) -> None:
        self._follower.abort(sequence)

    def kv_events(self, event: KvEvents | Stats) -> dict[int, list[KvEvent]]:
        if isinstance(event, Stats):
            for stat in event.stats:
                self._blocks = stats.pool_counts(stat) or self._blocks
                self._metrics.observe(stat)
            return {}
        found = {rank: translator.forget() for rank, translator in enumerate(self._translators)} if event.lost else {}
        for rank, received in by_rank(event.events).items():
            if rank < len(self._translators):
                found.setdefault(rank, []).extend(self._translators[rank].feed(received))
        self._metrics.lost(sum(translator.counts.lost for translator in self._translators))
        return found

    def block_counts(self, *, active: bool, pinned: int) -> BlockCounts:
        total, used, free = self._blocks
        if not active and not pinned:  # its last statistic may be from before the end of the last request
            used, free = 0, total
        cached = min(free, sum(translator.names for translator in self._translators))
        return BlockCounts(used, cached, max(0, total - used - cached), pinned)

    def dump(self, rank: int) -> list[KvEvent]:
        return self._translators[rank].dump()

    @property
    def served(self) -> ServedOptions:
        """What the engine does with sampling options."""
        return self.options.served

    def ask_for_token(self, seconds: float) -> bool:
        """Have the engine generate a token outside of all requests; False: it did not come in time."""
        return self._follower.ask().wait(seconds)

    def memory(self) -> dict[str, Memory]:
        return {} if self.vision is None else self.vision.memory()

    def collectors(self) -> Seq[Collector]:
        return [self._metrics]
