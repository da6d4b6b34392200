"""Which workers of a model may answer a prompt: those with its tokenizer, and of these one revision at a time. Pure.

A function of the registrations alone, so that every gateway and router comes to the same result.
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.schemas.fleet import EMBED, Registration, State

NO_TOKENS = ("encode", EMBED)  # roles whose workers may serve a language model's name and generate nothing


class Revisions(NamedTuple):
    """Revisions of one model and tokenizer.

    Attributes:
        serving: the revision for new requests: that of the ready worker that registered first; None: no worker is
            ready.
        present: all revisions that have a ready worker.
    """

    serving: str | None
    present: frozenset[str]


def reads(registration: Registration, tokenizer: str) -> bool:
    """Whether the worker's tokenizer is the prompt's. Older builds do not register theirs and count as equal."""
    return not tokenizer or not registration.tokenizer or registration.tokenizer == tokenizer


def revisions(workers: Iterable[Registration], tokenizer: str) -> Revisions:
    """Pick the serving revision.

    Args:
        workers: of one model.
        tokenizer: digest of the tokenizer that made the prompts; "": unknown.
    """
    ready = [w for w in workers if w.state is State.ready and w.role not in NO_TOKENS and reads(w, tokenizer)]
    first = min(ready, key=lambda worker: (worker.epoch, worker.worker), default=None)
    return Revisions(first.revision if first is not None else None, frozenset(w.revision for w in ready))
