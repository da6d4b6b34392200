"""The interface of an embedding engine, and what its vectors go through afterwards."""

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from penstock.schemas.fleet import Embedder

TokenIds = Sequence[int]

CHARACTERS = 8  # of a token, more than in most texts
MARGIN = 64  # tokens at the end of what was read of a text, which may differ from those of the whole text


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

    def prompt(self, name: str) -> str | None:
        """What is put before a text.

        Args:
            name: of the prompt; "": the model's default.
        Returns: None if there is none of this name.
        """

    def tokenize(self, texts: Sequence[str], longest: int = 0) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model wants; of a text with far more tokens than the
        model takes, those of its beginning.

        Args:
            longest: longer texts are cut to so many tokens; 0: none is.
        """

    def embed(self, batch: Sequence[TokenIds]) -> list[bytes]:
        """One vector per input: float32 values, ``embedder.dimensions`` of them.

        Raises:
            Exception: the engine is broken.
        """

    def close(self) -> None: ...


def tokenized(tokenizer: Tokenizer, texts: Sequence[str], longest: int, limit: int) -> list[list[int]]:
    """See ``EmbeddingEngine.tokenize``. What is cut still has the special tokens at its end.

    Args:
        limit: tokens that the model takes. Of a text with far more, only the beginning is read.
    """
    size = window(limit)
    heads = [text[:size] for text in texts]
    encodings = tokenizer.encode_batch(heads)  # unlike ``encode``, it lets other threads run
    for at, text in enumerate(texts):
        while len(heads[at]) < len(text) and len(encodings[at]) <= limit + MARGIN:
            heads[at] = text[: 2 * len(heads[at])]
            encodings[at] = tokenizer.encode_batch([heads[at]])[0]
        if longest and len(encodings[at]) > longest:
            plain = tokenizer.encode_batch([heads[at]], add_special_tokens=False)[0]
            plain.truncate(max(0, longest - tokenizer.num_special_tokens_to_add(is_pair=False)))
            encodings[at] = tokenizer.post_process(plain, None, add_special_tokens=True)
    return [encoding.ids[: longest or None] for encoding in encodings]


def window(limit: int) -> int:
    """Characters of a text that are read at first: a token takes up to 450 bytes of memory until it is a number."""
    return CHARACTERS * (limit + MARGIN)


def finite(vector: bytes) -> bool:
    """Whether all its values are numbers: others have no place in JSON."""
    return math.isfinite(sum(array("f", vector)))


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first ``dimensions`` values of a vector, scaled to length 1; the vector itself if it has no more."""
    if len(vector) <= 4 * dimensions:
        return vector
    values = array("f", vector[: 4 * dimensions])
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes() if length else values.tobytes()
