"""Small registered buffers, reused, that the generations of a peer's blocks are read into."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from penstock.workers.kv_transfer.agent import Agent

SMALLEST_BYTES = 4096


class ScratchBuffers:
    """Buffers of one agent, kept until it is closed. Free one only when nothing can write to it any more."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._all: list[NDArray[np.uint32]] = []
        self._free: dict[int, list[NDArray[np.uint32]]] = defaultdict(list)

    def take(self, size: int) -> NDArray[np.uint32]:
        """At least ``size`` bytes."""
        room = max(SMALLEST_BYTES, 1 << (size - 1).bit_length())
        if self._free[room]:
            return self._free[room].pop()
        buffer = np.zeros(room // 4, np.uint32)
        self._agent.register(buffer.ctypes.data, room)
        self._all.append(buffer)
        return buffer

    def free(self, buffer: NDArray[np.uint32]) -> None:
        self._free[buffer.nbytes].append(buffer)
