"""Inputs of all requests that wait to be embedded, and which of them form the next batch. Pure.

A batch always has the oldest input, so that none waits forever, and beside it inputs of nearly the same length: a
matrix is as wide as its longest row, and what pads the others is computed for nothing.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

LOOK_AHEAD = 4096  # waiting inputs that a batch is made of, the oldest ones
NEAR_SHARE = 0.25  # rows may be shorter than the longest by this share,
NEAR_TOKENS = 16  # or by so many tokens

K = TypeVar("K", bound=Hashable)


class Input(NamedTuple, Generic[K]):
    """The input at ``place`` of the request ``key``."""

    key: K
    place: int
    tokens: Sequence[int]


class InputQueue(Generic[K]):
    """
    Args:
        max_tokens: of a batch, padding included; an input that is longer forms a batch of its own.
        max_inputs: of a batch.
    """

    def __init__(self, max_tokens: int, max_inputs: int = 1024) -> None:
        self._max_tokens = max_tokens
        self._max_inputs = max_inputs
        self._waiting: dict[tuple[K, int], Sequence[int]] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K, inputs: Sequence[Sequence[int]]) -> None:
        for index, tokens in enumerate(inputs):
            self._waiting[key, index] = tokens

    def drop(self, key: K, count: int) -> None:
        """Forget what waits of a request with ``count`` inputs."""
        for index in range(count):
            self._waiting.pop((key, index), None)

    def take(self) -> list[Input[K]]:
        """The inputs of the next batch, removed from the queue; empty if none waits."""
        if not self._waiting:
            return []
        ahead = [(len(tokens), name) for name, tokens in islice(self._waiting.items(), LOOK_AHEAD)]
        oldest = ahead[0][0]
        by_length = sorted(ahead, key=lambda each: each[0])  # stable: the oldest is the first of its length
        first, last = _window([length for length, _ in by_length], oldest, self._max_tokens, self._max_inputs)
        return [Input(*name, self._waiting.pop(name)) for _, name in by_length[first:last]]


def _window(lengths: Sequence[int], wanted: int, max_tokens: int, max_inputs: int) -> tuple[int, int]:
    """The part of sorted lengths that begins at ``wanted`` or before it, and fits.

    Longer rows are added before shorter ones: they make the matrix wider, but each adds more tokens than padding.
    """
    first = bisect_left(lengths, wanted)
    last = first + 1
    while last < len(lengths) and last - first < max_inputs:
        longest = lengths[last]
        if longest * (last + 1 - first) > max_tokens or longest - wanted > _near(longest):
            break
        last += 1
    longest = lengths[last - 1]
    while first and last - first < max_inputs:
        if longest * (last + 1 - first) > max_tokens or longest - lengths[first - 1] > _near(longest):
            break
        first -= 1
    return first, last


def _near(longest: int) -> float:
    return max(NEAR_TOKENS, NEAR_SHARE * longest)
