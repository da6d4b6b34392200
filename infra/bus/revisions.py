"""Which of a model's workers may answer a prompt: those of its tokenizer, and of these one revision at a time. Pure.

A function of the registrations alone, so that every gateway and every router comes to the same answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

from schemas.fleet import Registration, State

_ENCODE = "encode"  # the one role that answers nothing by itself


class Revisions(NamedTuple):
    """Of one model and tokenizer.

    Attributes:
        serving: the revision that new requests go to, of the worker that registered first among those that are
            ready; None: none is ready.
        present: all with a worker that is ready.
    """

    serving: str | None
    present: frozenset[str]


def reads(registration: Registration, tokenizer: str) -> bool:
    """Whether token ids mean to this worker what they mean to whoever made the prompt; older builds do not say."""
    return not tokenizer or not registration.tokenizer or registration.tokenizer == tokenizer


def revisions(workers: Iterable[Registration], tokenizer: str) -> Revisions:
    """
    Args:
        workers: of one model.
        tokenizer: digest of the one that makes its prompts; "": not known.
    """
    ready = [w for w in workers if w.state is State.ready and w.role != _ENCODE and reads(w, tokenizer)]
    first = min(ready, key=lambda worker: (worker.epoch, worker.worker), default=None)
    return Revisions(first.revision if first is not None else None, frozenset(w.revision for w in ready))
