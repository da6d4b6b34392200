"""An embedding engine without weights: a vector is drawn from the hash of its tokens, so that every worker agrees."""

import math
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import embedding_model, modeldir
from penstock.schemas.fleet import Embedder
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.embed.embedding_protocol import TokenIds, pair_tokens, tokenized

DIMENSIONS = 64
TOKENS_PER_S = 100_000.0  # with ``--mock-speedup 1``


class MockEmbeddingEngine:
    """See ``EmbeddingEngine``. ``speedup``: 0: without delays."""

    name = "mock"
    load_seconds = 0.0

    def __init__(self, path: Path, *, max_len: int = 0, speedup: float = 1.0) -> None:
        described = modeldir.load(path)
        self._tokenizer = described.tokenizer
        self._seconds_per_token = 1 / (TOKENS_PER_S * speedup) if speedup else 0.0
        self.model, self.revision = described.name, described.revision
        limit = min(described.max_model_len, max_len or described.max_model_len)
        self.embedder = Embedder(DIMENSIONS, limit, described.vocab_size, "mock")
        if embedding_model.scores_pairs(path):
            self.embedder = Embedder(1, limit, described.vocab_size, "mock", scores=True)

    def prompt(self, name: str) -> str | None:
        return "" if name in ("", "query", "document") else None

    def tokenize(self, texts: Sequence[str], longest: int = 0) -> list[list[int]]:
        return tokenized(self._tokenizer, texts, longest, self.embedder.max_tokens)

    def tokenize_pairs(self, query: str, texts: Sequence[str], longest: int = 0, document: int = 0) -> list[TokenIds]:
        return pair_tokens(self._tokenizer, query, texts, self.embedder.max_tokens, longest=longest, document=document)

    def embed(self, batch: Sequence[TokenIds]) -> list[bytes]:
        time.sleep(self._seconds_per_token * sum(map(len, batch)))
        return [mock_score(tokens) if self.embedder.scores else mock_vector(tokens) for tokens in batch]

    def close(self) -> None:
        """Nothing to do."""


def mock_vector(tokens: TokenIds) -> bytes:
    """The vector of an input: 64 float32 values, of length 1."""
    drawn = blake3(pack_tokens(tokens)).digest(length=2 * DIMENSIONS)
    values = [int.from_bytes(drawn[at : at + 2], "little") - 32_767.5 for at in range(0, len(drawn), 2)]
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes()


def mock_score(tokens: TokenIds) -> bytes:
    """The score of a pair: one float32 value from 0 to 1."""
    return array("f", [int.from_bytes(blake3(pack_tokens(tokens)).digest(length=2), "little") / 65_536]).tobytes()


def from_settings(settings: WorkerSettings, path: Path) -> MockEmbeddingEngine:
    return MockEmbeddingEngine(path, max_len=settings.max_model_len, speedup=settings.mock_speedup)
