"""The next token, by the fields of ``SamplingParams``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEVER = float("-inf")


def shaped(
    logits: Tensor,
    params: Any,
    prompt: list[int],
    generated: list[int],
    *,
    counted: int | None = None,
    narrow: bool = False,
) -> Tensor:
    """Logits (vocab,) with bias, penalties, and what may not come (yet).

    Args:
        counted: tokens that ``min_tokens`` is compared with; None: those of the output.
        narrow: no penalties, and an end id of -1 is the vocabulary's last token, as in TorchSampler of 1.2.
    """
    logits = logits.clone()
    if params.embedding_bias is not None:
        logits += params.embedding_bias
    if params.repetition_penalty not in (None, 1.0) and not narrow:
        ids = torch.tensor(sorted({*prompt, *generated}), dtype=torch.long)  # perhaps none yet
        values = logits[ids]
        factor = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / factor, values * factor)
    if generated and (params.presence_penalty or params.frequency_penalty) and not narrow:
        counts = torch.bincount(torch.tensor(generated), minlength=len(logits))
        logits -= (params.frequency_penalty or 0.0) * counts + (params.presence_penalty or 0.0) * (counts > 0)
    end, counted = params.end_id, len(generated) if counted is None else counted
    if params.min_tokens and counted < params.min_tokens and end is not None and (end >= 0 or narrow):
        logits[end] = NEVER  # of the end id only: stop words count from the first token on
    for word in params._get_bad_words():
        if not word[:-1] or generated[1 - len(word) :] == word[:-1]:
            logits[word[-1]] = NEVER
    return logits


def pick(logits: Tensor, params: Any, generator: torch.Generator, *, narrow: bool = False) -> int:
    """``narrow``: min_p is not read."""
    if params._greedy:
        return int(logits.argmax())
    logits = logits / (1.0 if params.temperature is None else params.temperature)
    if params.min_p and not narrow:
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
