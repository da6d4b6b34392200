"""Restricts logits to the tokens that constraints allow."""

from typing import NamedTuple

import torch
from torch import Tensor

_NEVER = float("-inf")


class Allowed(NamedTuple):
    """The tokens that may be drawn in some rows.

    Attributes:
        rows: (n,) int64, the constrained rows, ascending.
        bits: (n, words) int32, a bit per token, lowest first.
        every: all rows are constrained.
    """

    rows: Tensor
    bits: Tensor
    every: bool

    def apply(self, logits: Tensor) -> Tensor:
        """The logits with minus infinity for every other token; ``logits`` is not changed.

        Where the processors had left none of the allowed tokens, all of these are equally likely.
        """
        part = logits if self.every else logits[self.rows]
        allowed = self._unpacked(logits.shape[-1])
        narrowed = part.masked_fill(~allowed, _NEVER)
        lost = narrowed.amax(dim=-1, keepdim=True) == _NEVER
        narrowed = narrowed.masked_fill(allowed & lost, 0.0)
        return narrowed if self.every else logits.index_copy(0, self.rows, narrowed)

    def _unpacked(self, vocab: int) -> Tensor:
        """(n, vocab) bool."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        spread = (self.bits[:, :, None] >> shifts) & 1
        return spread.view(len(self.bits), -1)[:, :vocab].bool()
