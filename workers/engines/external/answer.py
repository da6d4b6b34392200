"""What is told of one sequence: tokens, or how it failed. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from schemas.tokens import Logprob

MISSING = -9999.0  # as the log-probability of a token that the engine gave none for; the API's word for "very unlikely"


class Token(NamedTuple):
    """One new token; fields as of ``workers.engines.base.Output``."""

    token: int
    finish: str = ""
    logprob: Logprob | None = None
    stop_token: int | None = None


class Ending(NamedTuple):
    """The sequence ended by an error of its own, without a token that could carry it."""

    code: str
    message: str


def logprob_of(entry: Any, token: int, top: int) -> Logprob:
    """One position of the engine's list: a number, or token id → object with ``logprob``; the ``top`` best of those."""
    if not isinstance(entry, Mapping):
        return Logprob(float(entry))
    values = {int(known): float(value.logprob) for known, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    return Logprob(values.get(token, MISSING), tuple(best))
