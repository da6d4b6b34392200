"""Logits processors as somebody else would write them, for flags and requests to name."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NEVER = float("-inf")
_all = slice(None)


class Plus:
    """Adds a number to one logit; keeps what it was given, for tests to look at."""

    def __init__(self, token: int, by: float = 1.0) -> None:
        self.token = token
        self.by = by
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        self.seen.append(list(input_ids))
        logits[self.token] += self.by


class RaisesHalfway:
    """Spoils the logits, then raises."""

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        logits[: len(logits) // 2] = 1e9
        raise KeyError(f"after {len(input_ids)} tokens")


class Returns:
    """Leaves the logits alone and returns others, as processors of other engines do."""

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, 7.0)


class Spoils:
    """Leaves something that cannot be drawn from."""

    def __init__(self, value: str) -> None:
        self._value = float(value)
        self._where: Any = _all if value == "-inf" else 3

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        logits[self._where] = self._value


class Meddles:
    """Wants to change the tokens."""

    def __call__(self, input_ids: Any, logits: Tensor) -> None:
        logits[0] = 1e9
        input_ids.append(0)


class TopK:
    """Keeps the k best."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        logits[logits < logits.topk(self._k).values[-1]] = NEVER


class Curious:
    """Names everything that a constructor can ask for, and can hand it on."""

    last: "Curious"

    def __init__(
        self, mine: str, tokenizer: Any, *, prompt_len: int, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.given = (mine, tokenizer, prompt_len, vocab_size, tuple(eos_token_ids))
        Curious.last = self

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None: ...


class TakesOne:
    def __call__(self, logits: Tensor) -> None: ...


class CannotBeCalled:
    pass


def function(input_ids: Sequence[int], logits: Tensor) -> None: ...
