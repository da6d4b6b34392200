"""The interface of an embedding engine, and what its vectors go through afterwards.

A cross-encoder is one, too (``Embedder.scores``): its inputs are pairs of texts, its "vector" is their score.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Encoding, Tokenizer

from penstock.schemas.fleet import Embedder

TokenIds = Sequence[int]
SECOND = 1 << 31  # set in tokens of type 1: those of a pair's second text, for models that know types

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
            longest: longer texts are cut to this many tokens; 0: none is.
        """

    def tokenize_pairs(self, query: str, texts: Sequence[str], longest: int = 0, document: int = 0) -> list[TokenIds]:
        """Token ids of the query with each text, as ``pair_tokens``. Only of engines whose ``embedder.scores``."""

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
    heads = _beginnings(tokenizer, texts, limit, special=True)
    for at, (head, encoding) in enumerate(heads):
        if longest and len(encoding) > longest:
            plain = tokenizer.encode_batch([head], add_special_tokens=False)[0]
            plain.truncate(max(0, longest - tokenizer.num_special_tokens_to_add(is_pair=False)))
            heads[at] = head, tokenizer.post_process(plain, None, add_special_tokens=True)
    return [encoding.ids[: longest or None] for _, encoding in heads]


def pair_tokens(
    tokenizer: Tokenizer, query: str, texts: Sequence[str], limit: int, *, longest: int = 0, document: int = 0
) -> list[TokenIds]:
    """Token ids of the query with each text, as of transformers' tokenizers; those of type 1 have the bit ``SECOND``.

    Args:
        limit: tokens that the model takes. Of a text with far more, only the beginning is read.
        longest: the longer text of a longer pair is cut (transformers' "longest_first"); 0: none is.
        document: texts are cut to this many tokens before they meet the query; 0: they are not.
    """
    ((head, first),) = _beginnings(tokenizer, [query], limit, special=False)
    room = max(0, longest - tokenizer.num_special_tokens_to_add(is_pair=True))
    shorter = {len(first): first}  # of the query, by its tokens
    pairs: list[TokenIds] = []
    for _, second in _beginnings(tokenizer, texts, limit, special=False):
        if document:
            second.truncate(document)
        left, right = _longest_first(len(first), len(second), room) if longest else (len(first), len(second))
        if left not in shorter:
            shorter[left] = tokenizer.encode_batch([head], add_special_tokens=False)[0]
            shorter[left].truncate(left)
        second.truncate(right)
        pair = tokenizer.post_process(shorter[left], second, add_special_tokens=True)
        tokens = zip(pair.ids, pair.type_ids, strict=True)
        pairs.append(array("I", [token | SECOND if kind else token for token, kind in tokens]))
    return pairs


def _longest_first(left: int, right: int, room: int) -> tuple[int, int]:
    """Tokens of two texts that are kept of a pair, so that they have ``room``, as tokenizers does it."""
    less, more = sorted((left, right))
    more = less if less > room else min(more, max(less, room - less))
    if less + more > room:
        less, more = room // 2, room - room // 2
    return (less, more) if left <= right else (more, less)


def _beginnings(tokenizer: Tokenizer, texts: Sequence[str], limit: int, *, special: bool) -> list[tuple[str, Encoding]]:
    """Of each text what is read of it, and its tokens: all, or at least so many that it is longer than ``limit``."""
    size = window(limit)
    heads = [text[:size] for text in texts]
    encodings = tokenizer.encode_batch(heads, add_special_tokens=special)  # unlike ``encode``, it lets others run
    for at, text in enumerate(texts):
        while len(heads[at]) < len(text) and len(encodings[at]) <= limit + MARGIN:
            heads[at] = text[: 2 * len(heads[at])]
            encodings[at] = tokenizer.encode_batch([heads[at]], add_special_tokens=special)[0]
    return list(zip(heads, encodings, strict=True))


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
