"""Inputs of all requests that wait to be embedded, and which of them form the next batch. Pure.

The requests take turns: a batch has the oldest input of the request whose turn it is, so a short request does not wait
for all of a large one. Beside it are inputs of nearly the same length, of any request: a matrix is as wide as its
longest row, and what pads the others is computed for nothing.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

LOOK_AHEAD = (
    4096  # waiting inputs that a batch is made of: the oldest ones of each request, as many of one as of another
)
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
        self._waiting: OrderedDict[K, dict[int, Sequence[int]]] = OrderedDict()  # the request whose turn it is first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: K, inputs: Sequence[Sequence[int]]) -> None:
        """
        Args:
            key: a request that is not in the queue.
        """
        if inputs:
            self._waiting[key] = dict(enumerate(inputs))
            self._size += len(inputs)

    def drop(self, key: K) -> None:
        """Forget what waits of a request."""
        self._size -= len(self._waiting.pop(key, ()))

    def take(self) -> list[Input[K]]:
        """The inputs of the next batch, removed from the queue; empty if none waits."""
        if not self._waiting:
            return []
        first = next(iter(self._waiting))
        each_of = max(1, LOOK_AHEAD // len(self._waiting))
        ahead = [
            (len(tokens), key, place)
            for key, inputs in islice(self._waiting.items(), LOOK_AHEAD)
            for place, tokens in islice(inputs.items(), each_of)
        ]
        wanted = ahead[0][0]
        by_length = sorted(ahead, key=lambda each: each[0])  # stable: ``ahead[0]`` leads those of its length
        begin, end = _window([length for length, _, _ in by_length], wanted, self._max_tokens, self._max_inputs)
        self._waiting.move_to_end(first)
        return [self._pop(key, place) for _, key, place in by_length[begin:end]]

    def _pop(self, key: K, place: int) -> Input[K]:
        inputs = self._waiting[key]
        tokens = inputs.pop(place)
        self._size -= 1
        if not inputs:
            del self._waiting[key]
        return Input(key, place, tokens)


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
