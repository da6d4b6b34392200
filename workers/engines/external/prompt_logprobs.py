"""Log-probabilities of a prompt from the lists of TensorRT-LLM and vLLM. Pure."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.outputs import MISSING


def scores(entries: Seq[Any], prompt: Seq[int], first: int, top: int) -> list[Logprob]:
    """Log-probabilities of the prompt's tokens from ``first`` on.

    Args:
        entries: for each prompt token but the first, token id → object with ``logprob`` and ``rank``.
        top: number of alternatives per token.
    Returns: an empty list if entries are missing: they could not be assigned to tokens.
    """
    if len(entries) < len(prompt) - 1:
        return []
    return [_score(entries[at - 1], prompt[at], top) for at in range(first, len(prompt))]


def _score(entry: Mapping[int, Any], token: int, top: int) -> Logprob:
    values = {int(token_id): float(value.logprob) for token_id, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    own = entry.get(token)
    return Logprob(MISSING, tuple(best)) if own is None else Logprob(float(own.logprob), tuple(best), own.rank or 0)
