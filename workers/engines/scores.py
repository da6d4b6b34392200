"""Log-probabilities of a prompt as engines of others tell them: TensorRT-LLM's and vLLM's lists. Pure."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from schemas.tokens import Logprob

MISSING = -9999.0  # of a token that the engine gave none for; the API's word for "very unlikely"


def scores(entries: Seq[Any], prompt: Seq[int], first: int, top: int) -> list[Logprob]:
    """Of the prompt's tokens from ``first`` on.

    Args:
        entries: token id → object with ``logprob`` and ``rank``, of the prompt's tokens from the second on.
        top: best ones of each that were asked for.
    Returns: nothing if there are fewer than tokens: nobody can say whose they are.
    """
    if len(entries) < len(prompt) - 1:
        return []
    return [_score(entries[at - 1], prompt[at], top) for at in range(first, len(prompt))]


def _score(entry: Mapping[int, Any], token: int, top: int) -> Logprob:
    values = {int(known): float(value.logprob) for known, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    own = entry.get(token)
    return Logprob(MISSING, tuple(best)) if own is None else Logprob(float(own.logprob), tuple(best), own.rank or 0)
