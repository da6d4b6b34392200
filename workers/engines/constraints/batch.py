"""The token masks of a batch of sequences, computed in parallel. No torch."""

import ctypes
import os
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from penstock.workers.engines.constraints.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

THREADS = 2  # at most: a mask takes 1 to 50 microseconds, and more threads took longer to begin than they saved
FEW = 4  # masks that one thread computes sooner than several could begin


class BatchMasks:
    """
    Args:
        vocab_size: width of the logits.
    Attributes:
        row_bytes: of a row; whole 32-bit words, lowest bit first.
    """

    def __init__(self, vocab_size: int) -> None:
        self.row_bytes = 4 * -(-vocab_size // 32)
        self._executor: LLExecutor | None = None

    def compute(self, matchers: Seq[Matcher]) -> bytearray:
        """The masks of matchers that have followed their sequences, a row each. One with an ``error`` allows all."""
        size = self.row_bytes
        rows = bytearray(len(matchers) * size)
        if len(matchers) > FEW:
            from llguidance import LLExecutor

            if self._executor is None:
                self._executor = LLExecutor(min(THREADS, os.cpu_count() or 1))
            place = ctypes.addressof(ctypes.c_char.from_buffer(rows))
            work = [(each.matcher, row) for row, each in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(work, place, size, len(matchers))
        else:
            for row, each in enumerate(matchers):
                place = ctypes.addressof(ctypes.c_char.from_buffer(rows, row * size))
                each.matcher.unsafe_compute_mask_ptr(place, size)
        for row, each in enumerate(matchers):
            each.finish(memoryview(rows)[row * size : (row + 1) * size])
        return rows
