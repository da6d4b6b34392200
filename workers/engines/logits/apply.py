"""How processors are run: one after another on a row of logits, each wholly or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from workers.engines.logits.base import BaseLogitsProcessor
from workers.engines.logits.error_counter import Faults

NOTHING_LEFT = "it left no token to draw: the largest logit is not a finite number"


class Chain(NamedTuple):
    """The processors of one sequence, in their order."""

    names: tuple[str, ...]
    processors: tuple[BaseLogitsProcessor, ...]
    faults: Faults


class Edit(NamedTuple):
    """A processor has run. ``usable``: () bool on the logits' device; False: it was undone."""

    name: str
    faults: Faults
    usable: Tensor


class ReadOnly(Sequence[int]):
    """Token ids that a processor cannot change: the engine names KV blocks by them."""

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
    """Let a chain edit (vocab,) logits in place, without waiting for the device.

    Returns: one for each processor that did not raise.
    """
    edits = []
    for name, processor in zip(chain.names, chain.processors, strict=True):
        before = logits.clone()
        try:
            processor(input_ids, logits)
        except Exception as error:  # of one sequence: its neighbours in the batch have no part in it
            logits.copy_(before)
            chain.faults.add(name, type(error).__name__, repr(error)[:500])
            continue
        # The maximum of a row with a NaN is NaN, of a row of nothing but minus infinity that.
        usable = logits.max().isfinite()
        logits.copy_(torch.where(usable, logits, before))
        edits.append(Edit(name, chain.faults, usable))
    return edits


def account(edits: Iterable[Edit]) -> None:
    """Count the edits that were undone; waits for the device once."""
    known = list(edits)
    if not known:
        return
    for edit, usable in zip(known, torch.stack([edit.usable for edit in known]).tolist(), strict=True):
        if not usable:
            edit.faults.add(edit.name, NOTHING_LEFT, NOTHING_LEFT)
