"""LoRA adapters of a batch in two kernels per product: rows are grouped by adapter, and each tile of rows reads the
matrices of one.

The host sorts the rows by slot and cuts them into tiles, so rows without an adapter cost nothing. A CUDA graph has a
fixed number of tiles; those that a step does not use have no rows.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.model.adapters import NO_SLOT, TorchAdapters
from penstock.workers.engines.native.model.model import Model

LEAST_RANK = 16  # of tensor cores
FEW_ROWS = 256  # up to which tiles are small
BLOCK_K, BLOCK_N = 128, 128
SPLIT_K = 512  # inputs that one program reads, at least
MOST_SPLITS = 16
PROGRAMS = 1024  # that splitting inputs makes, at most; an H200 has 132 multiprocessors


@triton.jit
def shrink(
    x, x_stride, down, hidden, order, tiles, ranks, positions, K, ranks_stride,
    PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, part, split): ``x @ down.T`` of the tile's rows over some of the inputs.

    Args:
        x: (rows, K); down: (slots, PARTS, R, K).
        hidden: (SPLITS, positions, PARTS, R) float32; a row's position is that in ``order``.
        tiles: first position, rows, slot of each.
        ranks: (slots, …) int32, of each part; rows of ``down`` beyond it are not read.
    """
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    rank = tl.load(ranks + slot * ranks_stride + part)
    if (count > 0) & (rank > 0):
        m, r, k = tl.arange(0, BLOCK_M), tl.arange(0, R), tl.arange(0, BLOCK_K)
        rows = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
        size = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        start = split * size
        total = tl.zeros((BLOCK_M, R), tl.float32)
        x_rows = x + rows[:, None] * x_stride
        down_rows = down + ((slot * PARTS + part) * R + r[None, :]) * K
        for at in range(start, min(start + size, K), BLOCK_K):
            inputs = at + k
            values = tl.load(x_rows + inputs[None, :], mask=(m < count)[:, None] & (inputs < K)[None, :], other=0.0)
            weights = tl.load(down_rows + inputs[:, None], mask=(r < rank)[None, :] & (inputs < K)[:, None], other=0.0)
            total += tl.dot(values, weights, input_precision=PRECISION)
        place = ((split * positions + first + m[:, None]) * PARTS + part) * R + r[None, :]
        tl.store(hidden + place, total, mask=(m < count)[:, None])


@triton.jit
def expand(
    hidden, up, out, out_stride, order, tiles, ranks, columns, positions, N, ranks_stride,
    PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of columns): add ``hidden @ up`` to the tile's rows of ``out``.

    Args:
        up: (slots, R, N); out: (rows, N).
        columns: first column, the one after the last, and the part of each block.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    begin, end, part = tl.load(columns + 3 * block), tl.load(columns + 3 * block + 1), tl.load(columns + 3 * block + 2)
    rank = tl.load(ranks + slot * ranks_stride + part)
    if (count > 0) & (rank > 0):
        m, r, n = tl.arange(0, BLOCK_M), tl.arange(0, R), begin + tl.arange(0, BLOCK_N)
        rows = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
        total = tl.zeros((BLOCK_M, R), tl.float32)
        for split in range(SPLITS):
            place = ((split * positions + first + m[:, None]) * PARTS + part) * R + r[None, :]
            total += tl.load(hidden + place, mask=(m < count)[:, None], other=0.0)
        inside = (r < rank)[:, None] & (n < end)[None, :]
        weights = tl.load(up + (slot * R + r[:, None]) * N + n[None, :], mask=inside, other=0.0)
        added = tl.dot(total.to(weights.dtype), weights, input_precision=PRECISION)
        mask = (m < count)[:, None] & (n < end)[None, :]
        places = out + rows[:, None] * out_stride + n[None, :]
        value = tl.load(places, mask=mask, other=0.0).to(tl.float32) + added
        tl.store(places, value.to(out.dtype.element_ty), mask=mask)


class RowTiles(NamedTuple):
    """Rows of a batch by adapter, on the device.

    Attributes:
        order: (positions,) int32: rows, those of each slot one after the other.
        tiles: (n, 3) int32: first position, number of rows (0: none), slot.
        rows: of a tile, at most.
    """

    order: Tensor
    tiles: Tensor
    rows: int


def tile_rows(rows: int) -> int:
    return 16 if rows <= FEW_ROWS else 64


def most_tiles(rows: int, slots: int) -> int:
    """RowTiles that this many rows need, whatever slots they use."""
    return min(rows, -(-rows // tile_rows(rows)) + slots)


def grouped(slots: "list[int]", size: int) -> "tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], list[int]]":
    """Rows sorted by slot, without those that use none; and their tiles, three numbers for each.

    Args:
        slots: of each row; -1: none.
        size: of a tile.
    """
    used = np.array(slots, np.int32)
    order = np.argsort(used, kind="stable").astype(np.int32)
    order = order[np.count_nonzero(used == NO_SLOT) :]
    numbers, starts = np.unique(used[order], return_index=True)
    tiles: list[int] = []
    for slot, start, stop in zip(numbers.tolist(), starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        for first in range(start, stop, size):
            tiles += (first, min(size, stop - first), slot)
    return order, tiles


class CudaAdapters(TorchAdapters):
    """Adapters of a rewritten model. Instead of ``begin``: ``place`` once, then ``put`` for each step.

    Args and errors: as of ``TorchAdapters``.
    """

    def __init__(self, model: Model, slots: int, rank: int) -> None:
        super().__init__(model, slots, triton.next_power_of_2(max(rank, LEAST_RANK)))
        device = model.device
        self._columns = []
        for product in self.products:
            blocks = [
                (start, min(start + BLOCK_N, part.start + part.size), at)
                for at, part in enumerate(product.parts)
                for start in range(part.start, part.start + part.size, BLOCK_N)
            ]
            self._columns.append(torch.tensor(blocks, dtype=torch.int32, device=device))
        self._precision = "ieee" if model.dtype == torch.float32 else "tf32"
        self._batch = RowTiles(torch.empty(0), torch.empty(0), 1)

    def place(self, upload: Upload, offset: int, most_rows: int) -> None:
        """Set where the inputs of graphs lie: after ``offset`` in the upload buffer."""
        self._upload, self._offset = upload, offset
        self._tiles_offset = offset + -(-most_rows // 16) * 16

    def fix(self, size: int, *, active: bool) -> None:
        """Compute the next batches with the inputs of graphs of this many rows."""
        self.active = active
        count = most_tiles(size, self._slots)
        order = self._upload.device[self._offset : self._offset + size]
        tiles = self._upload.device[self._tiles_offset : self._tiles_offset + 3 * count]
        self._batch = RowTiles(order, tiles.view(-1, 3), tile_rows(size))

    def put(self, slots: list[int], size: int) -> bool:
        """Add the rows of a step to the upload; False: none has an adapter.

        Args:
            slots: of each row; -1: none.
            size: rows of the graph that computes the step; 0: none does.
        """
        self.active = max(slots, default=NO_SLOT) != NO_SLOT
        if not self.active:
            return False
        rows = size or len(slots)
        order, tiles = grouped(slots, tile_rows(rows))
        upload = self._upload
        if size:
            upload.put(order, self._offset)
            upload.put(tiles + [0] * (3 * most_tiles(size, self._slots) - len(tiles)), self._tiles_offset)
        else:
            self._batch = RowTiles(upload.put(order), upload.put(tiles).view(-1, 3), tile_rows(rows))
        return True

    def add(self, number: int, x: Tensor, out: Tensor) -> None:
        product, batch = self.products[number], self._batch
        parts, inputs = len(product.parts), product.inputs
        count, positions = len(batch.tiles), len(batch.order)
        x, out = x.reshape(-1, inputs), out.view(-1, product.outputs)
        splits = max(1, min(MOST_SPLITS, inputs // SPLIT_K, PROGRAMS // (count * parts)))
        hidden = torch.empty((splits, positions, parts, product.rank), dtype=torch.float32, device=out.device)
        shared = {"PARTS": parts, "R": product.rank, "SPLITS": splits, "BLOCK_M": batch.rows}
        shrink[(count, parts, splits)](
            x, x.stride(0), product.down, hidden, batch.order, batch.tiles, product.ranks, positions, inputs,
            product.ranks.stride(0), **shared, BLOCK_K=BLOCK_K, PRECISION=self._precision, num_warps=4, num_stages=3,
        )  # fmt: skip
        columns = self._columns[number]
        expand[(count, len(columns))](
            hidden, product.up, out, out.stride(0), batch.order, batch.tiles, product.ranks, columns, positions,
            product.outputs, product.ranks.stride(0), **shared, BLOCK_N=BLOCK_N, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip
