"""The interface of an embedding engine, and what its vectors go through afterwards."""

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from schemas.fleet import Embedder

TokenIds = Sequence[int]


class EmbeddingEngine(Protocol):
    """``tokenize`` may be called in any thread, everything else in the one that built the engine.

    Attributes:
        name: of the engine, for registrations.
        revision: of the model.
        model: the name clients use by default.
    """

    name: str
    revision: str
    model: str
    load_seconds: float
    embedder: Embedder

    def tokenize(self, texts: Sequence[str], longest: int = 0) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model wants.

        Args:
            longest: longer texts are cut to so many tokens; 0: none is.
        """

    def embed(self, batch: Sequence[TokenIds]) -> list[bytes]:
        """One vector per input: float32 values, ``embedder.dimensions`` of them.

        Raises:
            Exception: the engine is broken.
        """

    def close(self) -> None: ...


def tokenized(tokenizer: Tokenizer, texts: Sequence[str], longest: int) -> list[list[int]]:
    """See ``EmbeddingEngine.tokenize``. What is cut still has the special tokens at its end."""
    encodings = tokenizer.encode_batch(list(texts))
    if longest:
        room = max(0, longest - tokenizer.num_special_tokens_to_add(is_pair=False))
        for at, encoding in enumerate(encodings):
            if len(encoding) > longest:
                plain = tokenizer.encode(texts[at], add_special_tokens=False)
                plain.truncate(room)
                encodings[at] = tokenizer.post_process(plain, None, add_special_tokens=True)
    return [encoding.ids[: longest or None] for encoding in encodings]


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first ``dimensions`` values of a vector, scaled to length 1; the vector itself if it has no more."""
    if len(vector) <= 4 * dimensions:
        return vector
    values = array("f", vector[: 4 * dimensions])
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes() if length else values.tobytes()
