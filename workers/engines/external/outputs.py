"""Tokens and failures of one sequence, as the followers report them. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.schemas.tokens import Logprob

MISSING = -9999.0  # log-probability of a token for which the engine returned none; the API's value for "very unlikely"


class Token(NamedTuple):
    """One new token; fields as of ``penstock.workers.engines.base.Output``."""

    token: int
    finish: str = ""
    logprob: Logprob | None = None
    stop_token: int | None = None


class SequenceFailure(NamedTuple):
    """The sequence ended with an error of its own instead of a last token."""

    code: str
    message: str


def logprob_of(entry: Any, token: int, top: int) -> Logprob:
    """Convert one entry of the engine's list: a number, or a mapping of token id to an object with ``logprob``."""
    if not isinstance(entry, Mapping):
        return Logprob(float(entry))
    values = {int(token_id): float(value.logprob) for token_id, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: -pair[1])[:top]
    return Logprob(values.get(token, MISSING), tuple(best))
