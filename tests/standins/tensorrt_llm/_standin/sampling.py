"""The next token, by the fields of ``SamplingParams``."""

from __future__ import annotations

from typing import Any

import regex
import torch
from torch import Tensor

NEVER = float("-inf")


def shaped(logits: Tensor, params: Any, prompt: list[int], generated: list[int]) -> Tensor:
    """Logits (vocab,) with bias, penalties, and what may not come (yet)."""
    logits = logits.clone()
    if params.embedding_bias is not None:
        logits += params.embedding_bias
    if params.repetition_penalty not in (None, 1.0):
        ids = torch.tensor(sorted({*prompt, *generated}))
        values = logits[ids]
        factor = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / factor, values * factor)
    if generated and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(generated), minlength=len(logits))
        logits -= (params.frequency_penalty or 0.0) * counts + (params.presence_penalty or 0.0) * (counts > 0)
    if params.min_tokens and len(generated) < params.min_tokens and params.end_id is not None and params.end_id >= 0:
        logits[params.end_id] = NEVER  # of the end id only: stop words count from the first token on
    for word in params._get_bad_words():
        if not word[:-1] or generated[1 - len(word) :] == word[:-1]:
            logits[word[-1]] = NEVER
    return logits


def pick(logits: Tensor, params: Any, generator: torch.Generator) -> int:
    if params._greedy:
        return int(logits.argmax())
    logits = logits / (1.0 if params.temperature is None else params.temperature)
    if params.min_p:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < params.min_p * probabilities.max(), NEVER)
    ordered, ids = logits.sort(descending=True, stable=True)
    if params.top_k:
        ordered[params.top_k :] = NEVER
    if params.top_p is not None and params.top_p < 1:
        mass = ordered.softmax(-1)
        cut = mass.cumsum(-1) - mass >= params.top_p
        cut[0] = False
        ordered = ordered.masked_fill(cut, NEVER)
    return int(ids[torch.multinomial(ordered.softmax(-1), 1, generator=generator)])


class Guide:
    """Keeps an answer inside a regular expression. Other guides are known by name only: they need a grammar library."""

    def __init__(self, pattern: str, tokenizer: Any, eos: list[int], vocab: int) -> None:
        self._pattern = regex.compile(pattern)
        self._tokenizer, self._eos, self._vocab = tokenizer, eos, vocab
        self._texts = [tokenizer.decode([token]) for token in range(vocab)]

    def mask(self, logits: Tensor, generated: list[int]) -> Tensor:
        text = self._tokenizer.decode(generated, skip_special_tokens=True)
        allowed = torch.full_like(logits, NEVER)
        for token, more in enumerate(self._texts):
            if more and token not in self._eos and self._pattern.fullmatch(text + more, partial=True):
                allowed[token] = 0.0
        if self._pattern.fullmatch(text):
            allowed[torch.tensor(self._eos)] = 0.0
        return logits + allowed
