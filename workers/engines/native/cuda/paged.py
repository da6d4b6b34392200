"""``Paged`` on CUDA: calls the kernels of ``attend`` for one batch. Decode rows come first, then prompts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.engines.native.cuda import attend
from penstock.workers.engines.native.cuda.dense import DenseAttention, PooledKeys
from penstock.workers.engines.native.cuda.fusions import dependent
from penstock.workers.engines.native.cuda.modules import Rotation, launch_options, next_power_of_2
from penstock.workers.engines.native.cuda.packing import Group, adjoin
from penstock.workers.engines.native.model.attention import AttentionParams
from penstock.workers.engines.native.model.pool import KvPool
from penstock.workers.engines.native.model.quantize import FP8

PROGRAMS = 256  # programs that a decode step's attention is split into: about two per multiprocessor
MAX_SPLITS = 32
FIXED_SPLITS = 8  # keeps results independent of the number of rows
LEAST_ROWS = 2  # whose keys are divided by ``attend.divide``
MOST_ITEMS = 64  # of a row
COMPARED = 1 << 13  # pairs of a row and an item in a program of ``attend.divide``


class DecodeShape(NamedTuple):
    """How a program of a decode step's attention reads keys: positions at a time; warps; stages of the pipeline."""

    tile: int
    warps: int
    stages: int


DECODE, DECODE_FP8, DECODE_FLOAT32 = DecodeShape(64, 4, 3), DecodeShape(128, 4, 3), DecodeShape(32, 4, 2)


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a prompt per program of ``attend.prefill``."""
    return 128 if dtype.itemsize < 4 else 32


def num_splits(rows: int, kv_heads: int) -> int:
    return max(1, min(MAX_SPLITS, next_power_of_2(-(-PROGRAMS // (rows * kv_heads)))))


class Division(NamedTuple):
    """How ``attend.divide`` divides the keys of some rows among programs, for each of their heads.

    Attributes:
        target: items of all rows, besides one for each.
        splits: items of a row, at most; a power of two.
        most: items.
    """

    target: int
    splits: int
    most: int


def division(rows: int, kv_heads: int) -> Division:
    """Rows of equal length are whole if they fill the GPU; of unequal ones, those far above the mean are divided."""
    target = max(-(-PROGRAMS // kv_heads), rows - rows // 5)
    return Division(target, min(MOST_ITEMS, next_power_of_2(target)), rows + target)


class Scratch:
    """Partial results of split decodes, for batches of up to ``rows``. Its counters are 0 between kernels.

    Args:
        fixed: split the keys of a row in the same way for any number of rows.
        parts: rows times splits of a batch that sets its own number of splits.
    """

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        fixed: bool = False,
        *,
        parts: int = 0,
    ) -> None:
        self.rows = rows
        self._fixed = fixed
        self.padded_group = max(16, next_power_of_2(heads // kv_heads))
        self.padded_dim = max(16, next_power_of_2(head_dim))
        parts = max(parts, *(n * self.num_splits(n, kv_heads) for n in range(1, rows + 1)))
        most = division(rows, kv_heads).most
        parts = max(parts, most) * kv_heads
        self.shares = torch.zeros(2 + most + rows, dtype=torch.int32, device=device)
        self.accumulators = torch.empty(parts * self.padded_group * self.padded_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(parts * self.padded_group, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.maxima)
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    def num_splits(self, rows: int, kv_heads: int) -> int:
        return FIXED_SPLITS if self._fixed else num_splits(rows, kv_heads)

    def divides(self, rows: int) -> bool:
        """Whether the keys of a batch of so many decode rows are divided by ``attend.divide``."""
        return not self._fixed and LEAST_ROWS <= rows <= self.rows

    def divide(self, positions: Tensor, rows: int, kv_heads: int, tile: int) -> Division:
        """Divide the keys of a batch's decode rows: once, for all layers without a window."""
        found, padded = division(rows, kv_heads), next_power_of_2(rows)
        items = max(1, COMPARED // padded)
        attend.divide[(-(-found.most // items),)](
            positions, self.shares, rows, found.most, found.target, found.splits,
            TILE=tile, ROWS_P=padded, ITEMS=items, num_warps=4,
        )  # fmt: skip
        return found


@dataclass(slots=True)
class PagedBatch:
    """The rows of a batch.

    Args:
        tables: (table_rows, width) int32, the blocks of each sequence.
        table_rows, positions: (tokens,) int32; position -1: padding.
        decodes: number of leading rows, each of a sequence of its own.
        tiles: (n, 4) int32, the other rows; see ``attend.prefill``.
        long: chunks that ``DenseAttention`` may attend to instead.
        rest: as ``tiles``, without these chunks.
        decode_positions: of the leading rows; -1: the row is in a tile, or padding. None: ``positions``.
        splits: of the keys of decode rows; 0: chosen by their number.
    """

    tables: Tensor
    table_rows: Tensor
    positions: Tensor
    decodes: int
    tiles: Tensor | None = None
    long: tuple[Group, ...] = ()
    rest: Tensor | None = None
    decode_positions: Tensor | None = None
    splits: int = 0

    @property
    def row_positions(self) -> Tensor:
        """Positions of the leading rows."""
        return self.positions if self.decode_positions is None else self.decode_positions

    @property
    def one_group(self) -> bool:
        """Whether all rows are one group of whole prompts without padding."""
        if len(self.long) != 1 or self.decodes or self.rest is not None:
            return False
        (group,) = self.long
        return group[0].start == 0 and adjoin(group) and len(group) * group[0].rows == len(self.positions)


class PagedAttention:
    """Implements ``penstock.workers.engines.native.model.attention.Paged``.

    Args:
        rotation: provides cosines and sines if the model leaves rotation to its attention.
        dense: attends to the batch's long chunks where it can.
    """

    def __init__(
        self, pool: KvPool, scratch: Scratch, rotation: Rotation, batch: PagedBatch, dense: DenseAttention | None = None
    ) -> None:
        self._pool, self._scratch, self._rotation, self._batch = pool, scratch, rotation, batch
        self._dense = dense
        data = pool.data
        self._strides = (data.stride(0), data.stride(1), data.stride(2))
        self._divided: Division | None = None  # the scratch's shares are of this batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        scale, window, softcap, sinks = params.scale, params.window, params.softcap, params.sinks
        batch, rotated = self._batch, self._store(layer, query, key, value)
        tokens, heads, dim = query.shape
        long = self._suited(query, params)
        if long and self._dense is not None and batch.one_group:
            keys = PooledKeys(self._pool, batch.tables, layer)
            answers = self._dense.attend_whole(long[0], rotated, keys, scale)
            return answers.flatten(0, 1)
        out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
        common: dict[str, Any] = {
            "KV_HEADS": key.shape[1],
            "DIM": dim,
            "DIM_P": self._scratch.padded_dim,
            "PAGE": self._pool.block_size,
            "WINDOW": window or 0,
            "CAPPED": softcap > 0,
            "SINKS": sinks is not None,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }
        strides = (rotated.stride(0), rotated.stride(1), batch.tables.stride(0), *self._strides)
        sinks_or_unused = out if sinks is None else sinks
        for first in range(0, batch.decodes, self._scratch.rows):
            self._decode(layer, rotated, sinks_or_unused, out, (scale, softcap or 1.0), strides, common, first)
        for group in long:
            assert self._dense is not None
            self._dense.attend(group, rotated, PooledKeys(self._pool, batch.tables, layer), scale, out)
        tiles = batch.rest if long else batch.tiles
        if tiles is not None:
            attend.prefill[(heads, tiles.shape[0])](
                rotated, self._pool.data, batch.tables, tiles, sinks_or_unused, out, layer, scale, softcap or 1.0,
                *strides,
                HEADS=heads, ROWS=tile_rows(query.dtype),
                TILE=64 if query.element_size() < 4 else 32,
                num_warps=4, num_stages=2 if query.element_size() < 4 else 1,
                **common,
            )  # fmt: skip
        return out

    def _suited(self, query: Tensor, params: AttentionParams) -> tuple[Group, ...]:
        """The batch's long chunks, if ``DenseAttention`` computes what this layer asks for; otherwise none."""
        batch, dense, page = self._batch, self._dense, self._pool.block_size
        if dense is None or not all(dense.suits(each, query, params, page) for group in batch.long for each in group):
            return ()
        return batch.long

    def _decode(
        self,
        layer: int,
        query: Tensor,
        sinks: Tensor,
        out: Tensor,
        scales: tuple[float, float],
        strides: tuple[int, ...],
        common: dict[str, Any],
        first: int,
    ) -> None:
        """Attend decode rows from ``first`` on, as many as the scratch holds."""
        batch, scratch = self._batch, self._scratch
        rows = min(scratch.rows, batch.decodes - first)
        table_rows, positions = batch.table_rows, batch.row_positions
        if first:
            query, out, table_rows, positions = (each[first:] for each in (query, out, table_rows, positions))
        kv_heads, heads = common["KV_HEADS"], query.shape[1]
        split_count, pdl = batch.splits or scratch.num_splits(rows, kv_heads), dependent(query.device, rows)
        shape, pairs = DECODE_FLOAT32 if query.element_size() == 4 else DECODE, False
        if self._pool.data.dtype == FP8 and query.element_size() == 2:
            shape, pairs = DECODE_FP8, common["DIM"] % 2 == 0 and scratch.padded_dim >= 32
        grid, most = (rows, kv_heads, split_count), 0
        divided = scratch.divides(batch.decodes) and not common["WINDOW"]
        fresh = divided and self._divided is None
        if divided:
            if self._divided is None:
                self._divided = scratch.divide(positions, rows, kv_heads, shape.tile)
            _, split_count, most = self._divided
            grid = (most, kv_heads, 1)
        attend.decode[grid](
            query, self._pool.data, batch.tables, table_rows, positions, sinks, out,
            scratch.accumulators, scratch.maxima, scratch.sums, scratch.counters, scratch.shares, most,
            layer, *scales, *strides,
            GROUP=heads // kv_heads, MEMBERS=next_power_of_2(heads // kv_heads), GROUP_P=scratch.padded_group,
            TILE=shape.tile, SPLITS=split_count, PDL=pdl, PAIRS=pairs, DIVIDED=divided, FRESH=fresh,
            num_warps=shape.warps, num_stages=shape.stages, **common, **launch_options(pdl),
        )  # fmt: skip

    def _store(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, pool, rotation = self._batch, self._pool, self._rotation.take()
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        cos, sin = rotation if rotation is not None else (query, query)
        rotated = (
            query if rotation is None else torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
        )
        pdl = dependent(query.device, tokens)
        attend.store[(tokens, kv_heads)](
            query, key, value, cos, sin, rotated, pool.data, batch.tables, batch.table_rows, batch.positions, layer,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            cos.stride(-2), cos.stride(-1), batch.tables.stride(0), *self._strides, pool.limit or 1.0,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_P=next_power_of_2(heads // kv_heads), DIM=dim,
            HALF_P=next_power_of_2(dim // 2), PAGE=pool.block_size, ROTATE=rotation is not None, LIMITED=pool.limit > 0,
            PDL=pdl, num_warps=2, **launch_options(pdl),
        )  # fmt: skip
        return rotated
