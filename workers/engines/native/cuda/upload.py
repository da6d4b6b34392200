"""Copies many short lists of integers to the device at once, without waiting."""

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # of each list, in integers: kernels are compiled for aligned pointers
BUFFERS = 3  # copies that may be under way


def new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


class Upload:
    """Collects the lists of a step between ``begin`` and ``send``, then copies all of them at once.

    Args:
        capacity: integers of all lists of one step.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._capacity = capacity
        self._pinned = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(BUFFERS)
        ]
        self._arrays = [pinned.numpy() for pinned in self._pinned]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._current = 0
        self._used = 0

    def begin(self) -> None:
        """Start the lists of the next step."""
        self._current = (self._current + 1) % BUFFERS
        self._used = 0
        event = self._copied[self._current]
        if event is not None:
            event.synchronize()  # the copy from this buffer, some steps ago

    def put(self, values: "list[int] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]", offset: int = -1) -> Tensor:
        """Add a list; returns the part of the device buffer that will have it.

        Args:
            offset: where in the buffer; the next list follows behind it. -1: behind the last list.
        """
        start = self._used if offset < 0 else offset
        count = len(values)
        self._arrays[self._current][start : start + count] = values
        self._used = max(self._used, start + -(-count // ALIGN) * ALIGN)
        return self.device[start : start + count]

    def room(self) -> int:
        """Integers that one more list can have."""
        return self._capacity - self._used - ALIGN

    def send(self) -> None:
        """Start the copy."""
        if self.device.device.type != "cuda":
            self.device[: self._used] = self._pinned[self._current][: self._used]
            return
        self.device[: self._used].copy_(self._pinned[self._current][: self._used], non_blocking=True)
        event = self._copied[self._current] = self._copied[self._current] or new_event()
        event.record()
