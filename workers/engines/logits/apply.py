"""Runs logits processors one after another on a row of logits; each takes effect completely or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from penstock.workers.engines.logits.registry import Chain, ErrorCounter

NO_TOKEN_LEFT = "it left no token to draw: the largest logit is not a finite number"


class Edit(NamedTuple):
    """The edit of one processor. ``usable``: bool of shape () on the logits' device; False: it was undone."""

    name: str
    errors: ErrorCounter
    usable: Tensor


class ReadOnly(Sequence[int]):
    """Token ids that a processor cannot change: the names of KV blocks depend on them."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self._tokens[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


def run(chain: Chain, input_ids: Sequence[int], logits: Tensor) -> list[Edit]:
    """Edit (vocab,) logits in place, without waiting for the device.

    Returns: an edit for each processor that did not raise.
    """
    edits = []
    for name, processor in zip(chain.names, chain.processors, strict=True):
        before = logits.clone()
        try:
            processor(input_ids, logits)
        except Exception as error:  # must not fail the other sequences of the batch
            logits.copy_(before)
            chain.errors.add(name, type(error).__name__, repr(error)[:500])
            continue
        # The maximum is NaN if a logit is NaN, and minus infinity if all are.
        usable = logits.max().isfinite()
        logits.copy_(torch.where(usable, logits, before))
        edits.append(Edit(name, chain.errors, usable))
    return edits


def account(edits: Iterable[Edit]) -> None:
    """Count the edits that were undone; waits for the device once."""
    listed = list(edits)
    if not listed:
        return
    for edit, usable in zip(listed, torch.stack([edit.usable for edit in listed]).tolist(), strict=True):
        if not usable:
            edit.errors.add(edit.name, NO_TOKEN_LEFT, NO_TOKEN_LEFT)
