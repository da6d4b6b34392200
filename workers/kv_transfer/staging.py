"""Reads between pools that hold different heads: whole blocks into a buffer, and from there the heads into place.

The heads of a block alternate, token by token, so that those of one rank are thousands of ranges of a kilobyte, and
each range of a transfer between GPUs costs microseconds. A block of the peer is one range. What is read of it beyond
the common heads is dropped: a rank with half of the heads of a peer's rank reads twice the bytes that it keeps.
"""

import ctypes
import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schemas.transfer import Memory
from penstock.workers.kv_transfer.agent import MOST_BLOCKS, Agent, HeadCopy, whole_block_bytes
from penstock.workers.kv_transfer.transport_protocol import TransferError

PART_BYTES = 64 << 20  # read in 0.2 ms over NVLink; starting a read and a copy takes half of that
PARTS = 4  # so that two ranks of a peer are read at once, and one part is copied from meanwhile
READS = 2  # of one transfer at a time, so that one whose peer is stopped leaves parts for others
COPY_S = 5.0  # until a GPU is taken to have failed
POLL_S = 0.0001
WORD = 8  # bytes that a copy moves at once where heads allow


class Copier(Protocol):
    """Memory of ``PARTS`` equal parts, and copies from them into a pool."""

    base: int

    def start(self, part: int, pool: Memory, copy: HeadCopy) -> None: ...

    def copied(self, part: int) -> bool:
        """Whether the last copy from this part has ended."""


class StagingBuffer:
    """The parts for one kind of memory. A part is taken until nothing can write to it and no copy reads it.

    Raises:
        TransferError: unavailable; there is no memory for it, or it does not work.
    """

    def __init__(self, pool: Memory) -> None:
        self.kind, self.device = pool.kind, pool.device
        self.part_bytes = -(-max(PART_BYTES, whole_block_bytes(pool)) // PART_BYTES) * PART_BYTES
        make = _GpuCopier if pool.kind == "cuda" else _CpuCopier
        self._copier: Copier = make(self.device, self.part_bytes)
        self._free = list(range(PARTS))

    @property
    def bytes(self) -> int:
        return PARTS * self.part_bytes

    def register(self, agent: Agent) -> None:
        agent.register(self._copier.base, self.bytes, self.kind, self.device)

    def take(self) -> int | None:
        """A part; None: all are taken."""
        return self._free.pop(0) if self._free else None

    def free(self, part: int) -> None:
        self._free.append(part)

    def blocks(self, part: int, block_bytes: int) -> Memory:
        """A part as a pool of blocks of a peer."""
        base = self._copier.base + part * self.part_bytes
        return Memory(base, block_bytes, self.part_bytes // block_bytes, self.kind, self.device)

    def start(self, part: int, pool: Memory, copy: HeadCopy) -> None:
        self._copier.start(part, pool, copy)

    def copied(self, part: int) -> bool:
        return self._copier.copied(part)

    def wait(self, part: int) -> bool:
        """Wait for the copy from a part; False: the GPU has failed."""
        try:
            return _wait(self._copier, part)
        except RuntimeError:  # of torch's
            return False


def _wait(copier: Copier, part: int) -> bool:
    until = time.monotonic() + COPY_S
    while not copier.copied(part):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


class _CpuCopier:
    def __init__(self, device: int, part_bytes: int) -> None:
        try:
            self._parts = np.empty((PARTS, part_bytes), np.uint8)
        except MemoryError as error:
            raise TransferError(
                "unavailable",
                f"no buffer of {PARTS * part_bytes >> 20} MiB of host memory for reads from workers of other widths",
            ) from error
        self.base: int = self._parts.ctypes.data

    def start(self, part: int, pool: Memory, copy: HeadCopy) -> None:
        memory: Any = (ctypes.c_uint8 * (pool.blocks * pool.block_bytes)).from_address(pool.base)
        read = self._parts[part, : len(copy.blocks) * copy.rows * copy.heads * copy.size]
        source = read.reshape(-1, copy.rows, copy.heads, copy.size)[:, :, copy.start : copy.start + copy.taken]
        target: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(-1, copy.rows, copy.own_heads, copy.size)
        target[copy.blocks, :, copy.own_start : copy.own_start + copy.taken] = source

    def copied(self, part: int) -> bool:
        return True


class _GpuCopier:
    """Copies on a stream of its own. Everything that a copy needs is allocated here: an allocation may wait for steps.

    Used in one thread, whose device and stream it sets for good: that thread runs nothing else of torch's.
    """

    def __init__(self, device: int, part_bytes: int) -> None:
        import torch as library

        torch: Any = library
        self._torch, self._device = torch, torch.device("cuda", device)
        self._pools: dict[tuple[Memory, int, int], Any] = {}
        try:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            torch.cuda.set_stream(self._stream)
            # Allocated for this stream: memory that another stream used before may still be written by it.
            self._parts = torch.empty((PARTS, part_bytes), dtype=torch.uint8, device=self._device)
            self._ids = torch.empty((PARTS, MOST_BLOCKS), dtype=torch.int64, device=self._device)
            self._host_ids = torch.empty((PARTS, MOST_BLOCKS), dtype=torch.int64, pin_memory=True)
            self._ends = [torch.cuda.Event() for _ in range(PARTS)]
            self.base: int = self._parts.data_ptr()
            # The first copy loads the kernel. It reads one part and writes another.
            pool = Memory(self.base + part_bytes, WORD * 2, 1, "cuda", device)
            self.start(0, pool, HeadCopy(np.zeros(1, np.int64), 1, WORD, 2, 0, 2, 1, 1))
            if not _wait(self, 0):
                raise TransferError("unavailable", f"GPU {device} copied nothing within {COPY_S:g} s")
        except RuntimeError as error:
            raise TransferError(
                "unavailable",
                f"no buffer of {PARTS * part_bytes >> 20} MiB on GPU {device} for reads from workers of other widths: "
                f"{str(error).strip().splitlines()[0]}; lower kv_blocks if memory is short",
            ) from error
        self._pools.clear()

    def start(self, part: int, pool: Memory, copy: HeadCopy) -> None:
        torch, number = self._torch, len(copy.blocks)
        word = torch.int64 if copy.size % WORD == 0 else torch.uint8
        read = self._parts[part, : number * copy.rows * copy.heads * copy.size].view(word)
        source = read.view(number, copy.rows, copy.heads, -1)[:, :, copy.start : copy.start + copy.taken]
        key = (pool, copy.own_heads, copy.rows)
        if (target := self._pools.get(key)) is None:
            target = _tensor(torch, pool, self._device).view(word).view(pool.blocks, copy.rows, copy.own_heads, -1)
            self._pools[key] = target
        self._host_ids[part, :number].copy_(torch.from_numpy(copy.blocks))
        ids = self._ids[part, :number]
        ids.copy_(self._host_ids[part, :number], non_blocking=True)
        target[:, :, copy.own_start : copy.own_start + copy.taken].index_copy_(0, ids, source)
        self._ends[part].record(self._stream)

    def copied(self, part: int) -> bool:
        return bool(self._ends[part].query())


class _Range:
    """Memory by its address, as torch takes it."""

    def __init__(self, pool: Memory) -> None:
        size = pool.blocks * pool.block_bytes
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pool.base, False), "version": 2}


def _tensor(torch: Any, pool: Memory, device: Any) -> Any:
    found = torch.as_tensor(_Range(pool), device=device)
    if found.data_ptr() != pool.base:
        raise TransferError("unavailable", f"the pool at {pool.base:#x} is not memory of {device}")
    return found
