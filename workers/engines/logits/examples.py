"""Processors that every worker registers, for use and as examples."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

NEVER = float("-inf")


class Temperature:
    """Flattens the distribution (above 1) or sharpens it (below 1), like the sampling option of that name."""

    def __init__(self, temperature: float) -> None:
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be a number above 0, not {temperature!r}")
        self._temperature = float(temperature)

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        logits.div_(self._temperature)


class ForcedText:
    """Forces the answer to be ``text``, whatever the model's logits are: for tests of everything around a model."""

    def __init__(self, text: str, *, tokenizer: Tokenizer, prompt_len: int, eos_token_ids: Sequence[int]) -> None:
        if not isinstance(text, str) or not text:
            raise ValueError(f"text must be a string of at least one character, not {text!r}")
        self._tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self._end = eos_token_ids[0] if eos_token_ids else None
        self._prompt_len = prompt_len

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        at = len(input_ids) - self._prompt_len
        token = self._tokens[at] if at < len(self._tokens) else self._end
        if token is not None:
            logits.fill_(NEVER)
            logits[token].fill_(0.0)  # ``logits[token] = 0.0`` would copy from the host and wait for the GPU


class AllowedTokens:
    """Allows only these tokens and, unless ``end`` is false, those that end the answer."""

    def __init__(self, tokens: list[int], end: bool = True, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not isinstance(tokens, list) or not tokens or not all(_is_token(token, vocab_size) for token in tokens):
            raise ValueError(f"tokens must be a list of at least one token id from 0 to {vocab_size - 1}")
        if not isinstance(end, bool):
            raise ValueError(f"end must be true or false, not {end!r}")
        self._tokens = sorted({*tokens, *(eos_token_ids if end else ())})
        self._excluded: Tensor | None = None  # (vocab,) bool, on the logits' device

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        if self._excluded is None:
            self._excluded = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            self._excluded[self._tokens] = False
        logits.masked_fill_(self._excluded, NEVER)


def _is_token(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
