"""Packs conversations into batches with a fixed number of tokens. Batch k of a seed is the same on every machine."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.demo_model.sample import CHARS, Message, Sample
from tests.demo_model.task_mix import conversation, long_conversation
from tests.demo_model.template import END, IMAGE, segments
from tests.demo_model.vision import SIDE, pixels, vision_conversation

PROMPT_WEIGHT = 0.05  # loss weight of user tokens; assistant tokens have 1
SHORT, LONGEST = 1024, 6144  # tokens; the longest conversations of the two parts

Conversation = tuple[Sample, tuple[Message, ...]]


@dataclass(frozen=True)
class Batch:
    """Short conversations, packed one after another, then long ones.

    Attributes:
        tokens: (n,) int32.
        weights: (n,) float32, loss weight of this token; 0 at the start of each conversation.
        pictures: (pictures, 3, SIDE, SIDE) uint8.
        spots: (pictures * TOKENS,) int64, positions of their placeholder tokens.
        short, long: int32, starts of the conversations within each part; padded with its length.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    short: NDArray[np.int32]
    long: NDArray[np.int32]
    pictures: NDArray[np.uint8]
    spots: NDArray[np.int64]


class Batches:
    """A map-style data set: ``self[k]`` is the k-th batch."""

    def __init__(self, tokenizer: str, seed: int, size: int, count: int, *, pictures: bool = True) -> None:
        """
        Args:
            tokenizer: path of tokenizer.json.
            size: tokens per batch; a quarter of them, but at least LONGEST, is for long contexts.
        """
        self.path, self.seed, self.count = tokenizer, seed, count
        long = max(size // 4, LONGEST)
        self.sizes = size - long, long
        self.pictures = self.sizes[0] // 768 if pictures else 0
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if self._tokenizer is None:  # not in __init__: each data loader process has its own
            self._tokenizer = Tokenizer.from_file(self.path)
        rng = Random(f"{self.seed}:{index}")
        seen = [vision_conversation(rng) for _ in range(self.pictures)]
        queue = iter(seen)  # first, so that all fit
        short = _fill(
            self._tokenizer, lambda: next(queue, None) or conversation(rng), self.sizes[0], SHORT, self.sizes[0] // 64
        )
        long = _fill(self._tokenizer, lambda: long_conversation(rng), self.sizes[1], LONGEST, 64, group=8)
        tokens, weights = (np.concatenate(parts) for parts in zip(short[:2], long[:2], strict=True))
        spots = np.flatnonzero(tokens == self._tokenizer.token_to_id(IMAGE)).astype(np.int64)
        weights[spots] = 0
        pictures = (
            np.stack([pixels(sample.scene) for sample, _ in seen]) if seen else np.zeros((0, 3, SIDE, SIDE), np.uint8)
        )
        return Batch(tokens, weights, short[2], long[2], pictures, spots)


def _fill(
    tokenizer: Tokenizer, make: Callable[[], Conversation], size: int, longest: int, most: int, group: int = 64
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Tokens, weights and starts of ``size`` tokens of at most ``most`` conversations, none longer than ``longest``."""
    tokens = np.full(size, tokenizer.token_to_id(END), np.int32)
    weights = np.zeros(size, np.float32)
    starts = np.full(most + 1, size, np.int32)
    begin = count = 0
    while True:
        for ids, wanted in encode(tokenizer, [make() for _ in range(group)]):
            end = begin + len(ids)
            if len(ids) > longest:
                continue
            # the last entries cover the rest of the batch, in pieces of at most ``longest``
            if end > size or count == most - size // longest - 1:
                while begin < size:
                    starts[count], begin, count = begin, begin + longest, count + 1
                return tokens, weights, starts
            tokens[begin:end], weights[begin:end] = ids, wanted
            weights[begin] = 0
            starts[count], begin, count = begin, end, count + 1


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[tuple[list[int], list[float]]]:
    """Token ids and weights of each conversation."""
    texts: list[str] = []
    shapes: list[list[tuple[int, float]]] = []  # pieces of text and their weight, by conversation
    for sample, messages in conversations:
        shape: list[tuple[int, float]] = []
        for text, ours in segments(messages, sample.tools):
            pieces = _pieces(text) if CHARS[0] in text else [text]
            texts += pieces
            shape.append((len(pieces), 1.0 if ours else 0.0 if sample.task == "needle" else PROMPT_WEIGHT))
        shapes.append(shape)
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    result = []
    for shape in shapes:
        ids: list[int] = []
        weights: list[float] = []
        for count, weight in shape:
            for _ in range(count):
                piece = next(encoded).ids
                ids += piece
                weights += [weight] * len(piece)
        result.append((ids, weights))
    return result


def _pieces(text: str) -> list[str]:
    """Split text between the marks into characters."""
    pieces: list[str] = []
    for i, part in enumerate(text.replace(CHARS[1], CHARS[0]).split(CHARS[0])):
        pieces += list(part) if i % 2 else [part]
    return [piece for piece in pieces if piece]
