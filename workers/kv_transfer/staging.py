"""Reads between pools that hold different heads: whole blocks into a buffer, and from there the heads into place.

The heads of a block alternate, token by token, so that those of one rank are thousands of ranges of a kilobyte, and
each range of a transfer between GPUs costs microseconds. A block of the peer is one range. What is read of it beyond
the common heads is dropped: a rank with half of the heads of a peer's rank reads twice the bytes that it keeps.
"""

import ctypes
import time
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from penstock.schemas.transfer import Memory
from penstock.workers.kv_transfer.agent import MOST_BLOCKS, Agent, HeadCopy, whole_block_bytes
from penstock.workers.kv_transfer.transport_protocol import TransferError

log = structlog.get_logger("transfer")

PART_BYTES = 64 << 20  # read in 0.2 ms over NVLink; starting a read and a copy takes half of that
PARTS = 4  # so that two ranks of a peer are read at once, and one part is copied from meanwhile
BUFFER_BYTES = PARTS * PART_BYTES
READS = 2  # of one transfer at a time, so that one whose peer is stopped leaves parts for others
STUCK_S = 0.5  # for which all parts are taken by the same reads: their peers are stopped
COPY_S = 5.0  # until a GPU is taken to have failed
POLL_S = 0.0001
WORD = 8  # bytes that a copy moves at once where heads allow


class Copier(Protocol):
    """Memory of ``PARTS`` equal parts, and copies from them into a pool."""

    base: int

    def start(self, part: int, pool: Memory, copy: HeadCopy) -> None: ...

    def copied(self, part: int) -> bool:
        """Whether the last copy from this part has ended."""


class NoMemory(TransferError):
    """There is no memory for a staging buffer."""

    def __init__(self, part_bytes: int, where: str, hint: str = "") -> None:
        size = PARTS * part_bytes >> 20
        super().__init__("unavailable", f"no buffer of {size} MiB {where} for reads from workers of other widths{hint}")


class StagingBuffer:
    """The parts for one kind of memory. A part is taken until nothing can write to it and no copy reads it.

    Where memory is short, parts are smaller, down to a sixteenth, and reads slower.

    Args:
        part_bytes: of each part; 0: as large as memory allows.
    Raises:
        TransferError: unavailable; there is no memory for it, or it does not work.
    """

    def __init__(self, pool: Memory, part_bytes: int = 0) -> None:
        self.kind, self.device = pool.kind, pool.device
        units = [max(1, PART_BYTES >> shift) for shift in (0, 2, 4)]
        sizes = [-(-max(unit, whole_block_bytes(pool)) // unit) * unit for unit in units]
        make = _GpuCopier if pool.kind == "cuda" else _CpuCopier
        for size in [part_bytes] if part_bytes else sizes:
            try:
                self._copier: Copier = make(self.device, size)
                break
            except NoMemory as error:
                log.warning("transfer_buffer_without_memory", mib=PARTS * size >> 20, reason=error.message)
                if size == (part_bytes or sizes[-1]):
                    raise
        self.part_bytes = size
        self._free = list(range(PARTS))
        self._taken = 0.0  # when the last part was

    @property
    def bytes(self) -> int:
        return PARTS * self.part_bytes

    def register(self, agent: Agent) -> None:
        agent.register(self._copier.base, self.bytes, self.kind, self.device)

    def take(self, now: float) -> int | None:
        """A part; None: all are taken."""
        if not self._free:
            return None
        self._taken = now
        return self._free.pop(0)

    def stuck(self, now: float) -> bool:
        """Whether all parts have been taken for longer than reads from running peers last."""
        return not self._free and now - self._taken > STUCK_S

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
            raise NoMemory(part_bytes, "of host memory") from error
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
            self._stream = torch.cuda.current_stream(self._device)
            if self._stream == torch.cuda.default_stream(self._device):  # else that of an earlier buffer
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
        except torch.OutOfMemoryError as error:
            hint = f": {str(error).strip().splitlines()[0]}; lower kv_blocks or kv_memory_fraction"
            raise NoMemory(part_bytes, f"on GPU {device}", hint) from error
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TransferError("unavailable", f"GPU {device} copies nothing into a buffer: {reason}") from error
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
