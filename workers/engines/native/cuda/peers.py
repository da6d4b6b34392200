"""Sums over the GPUs of one host, by a kernel that writes into the memory of the others.

A program has a row: it writes it to every other rank, raises their flags, waits for its own, and adds up what has come
in the order of the ranks, so that all get the same bits. The residual and the norm after a sum are in the same kernel.
A row's place and flags are used in turns: a rank that begins the second next sum of a row has seen that the others have
read this one. Larger sums are NCCL's, see ``most_rows``.
"""

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import structlog
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.engines.native.cuda.fusions import dependent
from penstock.workers.engines.native.cuda.modules import RmsNorm, launch_options, next_power_of_2
from penstock.workers.engines.native.model.parallel import RankGroup

log = structlog.get_logger("engine")

# Of a sum, by ranks. On two H200, 1 to 512 rows of 4,096 values take 3.3 to 17.4 us, and NCCL 9.4 to 34.5. A GPU runs
# about as many programs at once. ``python -m tests.gpu.parallel sums``
MOST_BYTES = {2: 4 << 20, 3: 1 << 20, 4: 1 << 20}
WIDE_BYTES = 512 << 10  # likewise with more ranks
LEAST_ROW = 4096  # bytes of a row's place
AT_ONCE = 256  # programs that surely run at once
SPREAD = 1024  # integers that a program spreads
PATIENCE = tl.constexpr(200_000_000)  # looks at a flag, each of about a microsecond, before a rank is given up
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_HANDLE = 64  # bytes of the driver's handle of memory


@triton.jit(do_not_specialize=["total"])
def exchange(
    part, residual, weight, out, normal, bases, epochs, tickets, stop, lost, total, eps,
    N: tl.constexpr, N_P: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr, FLAGS: tl.constexpr, SUM: tl.constexpr, ADDED: tl.constexpr, NORMED: tl.constexpr,
    KIND: tl.constexpr, TICKETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): ``out = (residual +) sum of all ranks' part``, or rank 0's part; ``normal``: its RMS norm.

    Args:
        bases: (SIZE,) int64, where each rank's memory is: (2, SIZE, ROWS) places of ROW_BYTES, from FLAGS on (SIZE,
            ROWS) int32 flags that count the rows that came.
        epochs: (ROWS,) int32, how many were sent.
        tickets: (1,) int32, 0 between kernels. TICKETS: more programs than run at once take their rows in turn, so that
            those that run are of the same rows on all ranks.
        stop: do not wait for other ranks, if it is not 0. In this GPU's memory: reading the host's takes 0.6 us, one
            program after the other.
        lost: set if a rank is given up. In the host's memory.
        total: values of ``part``, if it is no sum.
        KIND: as of ``rows.rms_norm``.
    """
    if TICKETS:
        row = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        if row == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
    else:
        row = tl.program_id(0)
    dims = tl.arange(0, N_P)
    offsets = row.to(tl.int64) * N + dims
    mask = dims < N
    if not SUM:
        mask = mask & (offsets < total)
    if NORMED:
        factor = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    element: tl.constexpr = part.dtype.element_ty
    WIDTH: tl.constexpr = ROW_BYTES // (part.dtype.element_ty.primitive_bitwidth // 8)
    epoch = tl.load(epochs + row) + 1
    first = ((epoch & 1) * SIZE * ROWS + row).to(tl.int64)
    mine = tl.load(part + offsets, mask=mask, other=0)
    if ADDED:
        before = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(SIZE):
        if peer != RANK and (SUM or RANK == 0):
            place = tl.multiple_of(tl.load(bases + peer).to(tl.pointer_type(element)), 16)
            tl.store(place + (first + RANK * ROWS) * WIDTH + dims, mine, mask=mask)
    tl.debug_barrier()  # before the flags, the stores of all threads
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = (tl.load(bases + peer) + FLAGS).to(tl.pointer_type(tl.int32)) + RANK * ROWS + row
            tl.atomic_add(flag, 1, sem="release", scope="sys")
    tl.store(epochs + row, epoch)
    own = tl.load(bases + RANK)
    acc = tl.zeros((N_P,), tl.float32 if SUM else element)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            values = mine
        else:
            flag = (own + FLAGS).to(tl.pointer_type(tl.int32)) + peer * ROWS + row
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            tries = 0
            while seen - epoch < 0:
                tries += 1
                stopped = tl.load(stop, mask=tries % 256 == 0, other=0, volatile=True)
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                seen = tl.where((stopped != 0) | (tries >= PATIENCE), epoch, seen)
            if tries >= PATIENCE:
                tl.store(lost, 1)
            tl.debug_barrier()  # after the flag, the loads of all threads
            place = tl.multiple_of(own.to(tl.pointer_type(element)), 16) + (first + peer * ROWS) * WIDTH
            values = tl.load(place + dims, mask=mask, other=0, volatile=True)
        if SUM:
            acc += values.to(tl.float32)
        elif peer == 0:
            acc = values
    if ADDED:
        acc += before
    result = acc.to(out.dtype.element_ty)
    tl.store(out + offsets, result, mask=mask)
    if NORMED:
        values = result.to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / N + eps)
        if KIND == 0:
            values = values.to(result.dtype).to(tl.float32) * factor
        elif KIND == 1:
            values = values * (1.0 + factor)
        else:
            values = values * factor
        tl.store(normal + offsets, values.to(normal.dtype.element_ty), mask=mask)


class PeerSums:
    """Implements ``parallel.Peers``. Used from one stream, by all ranks in the same order.

    Args:
        bases: address of each rank's memory here, of ``memory_bytes`` and zeros at the beginning.
        rows, row_bytes: of its places.
    """

    def __init__(self, rank: int, bases: Seq[int], rows: int, row_bytes: int, device: torch.device) -> None:
        self.rows, self._row_bytes = rows, row_bytes
        self._rank, self._size = rank, len(bases)
        self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._epochs, self._tickets = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, 1))
        pinned = device.type == "cuda"
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost, self._one = (torch.full((1,), n, dtype=torch.int32, pin_memory=pinned) for n in (0, 1))
        self._beside = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        self._stopped = False

    def add_up(self, part: Tensor, residual: Tensor | None = None, norm: RmsNorm | None = None) -> Tensor:
        """As of ``parallel.Peers``; ``part``: (…, n), contiguous, may be overwritten."""
        columns = part.shape[-1]
        out = part if residual is None else residual
        normal = out if norm is None else torch.empty(out.shape, dtype=norm.out_dtype(out), device=out.device)
        self._launch(part, residual, norm, out, normal, columns, sum_up=True)
        if norm is not None:
            norm.given = (out, normal)
        return out

    def spread(self, values: Tensor) -> None:
        """Replace (n,) int32 by those of rank 0."""
        self._launch(values, None, None, values, values, SPREAD, sum_up=False)

    def _launch(
        self, part: Tensor, residual: Tensor | None, norm: RmsNorm | None, out: Tensor, normal: Tensor, columns: int,
        *, sum_up: bool,
    ) -> None:  # fmt: skip
        rows, padded = -(-part.numel() // columns), next_power_of_2(columns)
        pdl = dependent(part.device, rows)
        exchange[(rows,)](
            part, out if residual is None else residual, out if norm is None else norm.weight, out, normal,
            self._bases, self._epochs, self._tickets, self._stop, self._lost, part.numel(),
            0.0 if norm is None else norm.eps,
            N=columns, N_P=padded, RANK=self._rank, SIZE=self._size, ROWS=self.rows, ROW_BYTES=self._row_bytes,
            FLAGS=2 * self._size * self.rows * self._row_bytes, SUM=sum_up, ADDED=residual is not None,
            NORMED=norm is not None, KIND=0 if norm is None else norm.kind,
            TICKETS=rows > AT_ONCE, PDL=pdl,
            num_warps=max(1, min(8, padded // 512)), **launch_options(pdl),
        )  # fmt: skip

    @property
    def stopped(self) -> bool:
        return self._stopped or bool(self._lost[0])

    def stop(self) -> None:
        self._stopped = True
        with torch.inference_mode(), torch.cuda.stream(self._beside):
            self._stop.copy_(self._one, non_blocking=True)  # by a copy engine, whatever the kernels do


def memory_bytes(size: int, rows: int, row_bytes: int) -> int:
    """Of each of ``size`` ranks: places of rows, in turns, and flags."""
    return 2 * size * rows * row_bytes + 4 * size * rows


def connect(
    group: RankGroup, columns: int, dtype: torch.dtype, device: torch.device, most_bytes: int = 0
) -> PeerSums | None:
    """Sums of rows of this many values; None, on all ranks: NCCL is to compute them. All ranks call it together.

    Args:
        most_bytes: of a sum; 0: as long as it is faster than NCCL's.
    """
    row_bytes = max(LEAST_ROW, columns * dtype.itemsize)
    rows = max(1, (most_bytes or MOST_BYTES.get(group.size, WIDE_BYTES)) // row_bytes)
    reason, handle, memory = "", bytes(_HANDLE), None
    try:
        memory = _Driver()
        memory.check(group.rank, group.size)
        handle = memory.allocate(memory_bytes(group.size, rows, row_bytes))
    except (OSError, RuntimeError) as error:
        reason = str(error)
    given = torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device)
    handles = bytes(group.join(given).cpu().tolist())
    found = None
    if memory is not None and not reason:
        try:
            places = [
                memory.own if rank == group.rank else memory.open(handles[rank * _HANDLE : (rank + 1) * _HANDLE])
                for rank in range(group.size)
            ]
            found = PeerSums(group.rank, places, rows, row_bytes, device)
        except RuntimeError as error:
            reason = str(error)
    if group.least(int(found is not None), device) and found is not None:
        reason = "" if group.least(int(_agrees(found, group, columns, dtype, device)), device) else "wrong sums"
    if not reason and found is not None:
        return found
    log.warning("ranks_without_peer_memory", reason=reason or "another rank has none")
    return None


def _agrees(sums: PeerSums, group: RankGroup, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel adds up as NCCL does."""
    generator = torch.Generator(device=device).manual_seed(1 + group.rank)
    same = True
    for rows in (1, min(5, sums.rows), sums.rows):
        part = torch.randn((rows, columns), generator=generator, device=device).to(dtype)
        expected = group.add_up(part.double())
        found = sums.add_up(part).double()
        same = same and bool((found - expected).norm() <= 1e-2 * expected.norm())
    return same


class _Driver:
    """Memory of the CUDA driver that other processes can open.

    Raises:
        OSError: there is no driver.
    """

    def __init__(self) -> None:
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self.own = 0

    def check(self, rank: int, size: int) -> None:
        """
        Raises:
            RuntimeError: this rank's GPU cannot add to flags in the memory of another one, as without NVLink.
        """
        for other in range(size):
            able = ctypes.c_int(1)
            if other != rank:
                self._call("cuDeviceGetP2PAttribute", ctypes.byref(able), _ATOMICS, rank, other)
            if not able.value:
                raise RuntimeError(f"GPU {rank} has no atomic operations in the memory of GPU {other}")

    def allocate(self, size: int) -> bytes:
        """Allocate zeros, at ``own``; returns their handle. They are freed when the process ends.

        Raises:
            RuntimeError: that failed; so below.
        """
        address, handle = ctypes.c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.own = address.value
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory."""
        address = ctypes.c_uint64()
        lazily = ctypes.c_uint(1)  # enable access to the other GPU
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazily)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} failed with CUDA error {status}")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE),)
