"""Computes the token masks of a step's constrained sequences, while the model computes the step."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.workers.engines.constraints.token_mask import BatchMasks, Matcher
from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.native.model.sampler import Allowed, place


class PendingMasks:
    """The masks of some rows of a step."""

    def __init__(self, rows: list[int], every: bool, masks: "Future[bytearray]") -> None:
        self._rows = rows
        self._every = every
        self._masks = masks

    def allowed(self, device: torch.device) -> Allowed:
        """Wait for the masks, and copy them to the device without waiting for it."""
        bits = np.frombuffer(self._masks.result(), np.int32)
        copied = _room(len(bits), device)
        copied.numpy()[:] = bits
        sent = copied.to(device, non_blocking=True).view(len(self._rows), -1)
        return Allowed(place(self._rows, torch.int64, device), sent, self._every)

    def by_row(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """As ``allowed``, for a kernel.

        Returns: (count,) int32, the number of each row's mask, -1: it has none; (n, words) int32, the masks.
        """
        bits = np.frombuffer(self._masks.result(), np.int32)
        both = _room(count + len(bits), device)
        array = both.numpy()  # torch would copy with all of its threads, which takes them longer to begin
        array[:count] = -1
        array[self._rows] = np.arange(len(self._rows))
        array[count:] = bits
        both = both.to(device, non_blocking=True)
        return both[:count], both[count:].view(len(self._rows), -1)


def _room(size: int, device: torch.device) -> Tensor:
    """Integers that can be copied to the device without waiting for it."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


class TokenMasks:
    """Owns the thread; ``close`` it.

    Args:
        vocab_size: width of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._batch = BatchMasks(vocab_size)
        self._thread: ThreadPoolExecutor | None = None

    def start(self, drawing: Seq[Sequence]) -> PendingMasks | None:
        """
        Args:
            drawing: the sequence of each row that is drawn from; unless it has ended, its tokens are known and do not
                change meanwhile.
        Returns: None if none of them is constrained.
        """
        constrained = [
            (row, s, s.constraint) for row, s in enumerate(drawing) if s.constraint is not None and not s.ended
        ]
        if not constrained:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        pairs = [(matcher, sequence) for _, sequence, matcher in constrained]
        masks = self._thread.submit(self._compute, pairs)
        return PendingMasks([row for row, _, _ in constrained], len(constrained) == len(drawing), masks)

    def _compute(self, pairs: list[tuple[Matcher, Sequence]]) -> bytearray:
        for matcher, sequence in pairs:
            matcher.follow(sequence.tokens)
        return self._batch.compute([matcher for matcher, _ in pairs])

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
