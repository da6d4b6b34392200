"""Copies many short lists of integers to the device at once, without waiting."""

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # of each list, in integers: kernels are compiled for aligned pointers
RING = 3  # copies that may be under way


def new_event() -> torch.cuda.Event:
    made: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return made


class Upload:
    """``begin``, ``put`` any number of lists, ``send``; the places on the device are the same each time.

    Args:
        room: integers of all lists of one step.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.device = torch.zeros(room, dtype=torch.int32, device=device)
        self._room = room
        self._pinned = [torch.zeros(room, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._arrays = [pinned.numpy() for pinned in self._pinned]
        self._sent: list[torch.cuda.Event | None] = [None] * RING
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        self._turn = (self._turn + 1) % RING
        self._used = 0
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # of some steps ago

    def put(self, values: "list[int] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]", at: int = -1) -> Tensor:
        """Where the values will be on the device. ``at``: a fixed place, behind which the next list follows."""
        start = self._used if at < 0 else at
        count = len(values)
        self._arrays[self._turn][start : start + count] = values
        self._used = max(self._used, start + -(-count // ALIGN) * ALIGN)
        return self.device[start : start + count]

    def left(self) -> int:
        return self._room - self._used - ALIGN

    def send(self) -> None:
        if self.device.device.type != "cuda":
            self.device[: self._used] = self._pinned[self._turn][: self._used]
            return
        self.device[: self._used].copy_(self._pinned[self._turn][: self._used], non_blocking=True)
        event = self._sent[self._turn] = self._sent[self._turn] or new_event()
        event.record()
