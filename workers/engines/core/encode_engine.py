"""The engine of an encode worker: it embeds images and generates nothing."""

from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.base import (
    EngineInfo,
    EngineStats,
    Grammars,
    KvTransfer,
    RequestError,
    SequenceRequest,
    StepResult,
)
from penstock.workers.engines.core.embedding_pool import EmbeddingPool
from penstock.workers.engines.core.embeddings import VisionEncoder


class EncodeEngine:
    """Implements the part of ``penstock.workers.engines.base.Engine`` that every worker needs; all work is in
    ``vision``.

    Its blocks, in ``info`` and ``stats``, are slots of the embedding pool. Owns ``encoder`` and closes it.
    """

    def __init__(self, info: EngineInfo, encoder: VisionEncoder) -> None:
        self.info = info
        self.kv_transfer: KvTransfer | None = None
        self.vision = EmbeddingPool(encoder)
        self.grammars: Grammars | None = None
        self.short_steps = False  # it encodes

    def submit(self, request: SequenceRequest) -> None:
        """
        Raises:
            RequestError: always.
        """
        raise RequestError(Code.unsupported, "an encode worker generates nothing; submit to another worker")

    def cancel(self, key: object) -> bool:
        return False

    def has_work(self) -> bool:
        return False

    def step(self) -> StepResult:
        return StepResult([], [], [], [], 0)

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        cache = self.vision.cache
        return EngineStats(
            running=0,
            waiting=0,
            used_blocks=cache.used_slots,
            cached_blocks=cache.cached_slots,
            free_blocks=cache.free_slots,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return []

    def memory(self) -> dict[str, Memory]:
        return self.vision.memory()

    def release_held(self, key: object) -> bool:
        return False

    def close(self) -> None:
        self.vision.close()
