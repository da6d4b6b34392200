"""``Paged`` on CUDA: the arguments of the kernels in ``attend`` for one batch; decodes come first, then prompts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.engines.native.attention import AttentionParams
from workers.engines.native.cuda import attend
from workers.engines.native.cuda.fusions import dependent
from workers.engines.native.cuda.modules import Rotation, launch
from workers.engines.native.pool import Pool

PROGRAMS = 256  # that a decode step's attention should be split into: about two for each multiprocessor
MOST_SPLITS = 32
FIXED_SPLITS = 8  # for any number of rows
DECODE_TILE = 64


def power(value: int) -> int:
    """The next power of two."""
    return 1 << max(0, value - 1).bit_length()


def tile_rows(dtype: torch.dtype) -> int:
    """Queries of one program of a prompt."""
    return 128 if dtype.itemsize < 4 else 32


def splits(rows: int, kv_heads: int) -> int:
    return max(1, min(MOST_SPLITS, power(-(-PROGRAMS // (rows * kv_heads)))))


class Scratch:
    """Partial results of split decodes, for batches of up to ``rows``. Counters are 0 between kernels.

    Args:
        fixed: split the keys of a row in the same way for any number of rows.
    """

    def __init__(
        self, rows: int, kv_heads: int, heads: int, head_dim: int, device: torch.device, fixed: bool = False
    ) -> None:
        self.rows = rows
        self._fixed = fixed
        self.group = max(16, power(heads // kv_heads))
        self.dim = max(16, power(head_dim))
        most = max(n * self.splits(n, kv_heads) for n in range(1, rows + 1)) * kv_heads
        self.acc = torch.empty(most * self.group * self.dim, dtype=torch.float32, device=device)
        self.best = torch.empty(most * self.group, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.best)
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    def splits(self, rows: int, kv_heads: int) -> int:
        return FIXED_SPLITS if self._fixed else splits(rows, kv_heads)


@dataclass(slots=True)
class Batch:
    """Where the tokens of a batch are.

    Args:
        tables: (lanes, width) int32, blocks of each lane.
        lanes, positions: (tokens,) int32; position -1: padding.
        decodes: leading tokens that are one sequence each.
        tiles: (n, 4) int32 of the others, see ``attend.prefill``.
    """

    tables: Tensor
    lanes: Tensor
    positions: Tensor
    decodes: int
    tiles: Tensor | None = None


class PagedAttention:
    """Implements ``workers.engines.native.attention.Paged``.

    Args:
        rotation: provides cosines and sines if the model leaves rotation to its attention.
    """

    def __init__(self, pool: Pool, scratch: Scratch, rotation: Rotation, batch: Batch) -> None:
        self._pool, self._scratch, self._rotation, self._batch = pool, scratch, rotation, batch
        data = pool.data
        self._strides = (data.stride(0), data.stride(1), data.stride(2))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        scale, window, softcap, sinks = params
        batch, rotated = self._batch, self._store(layer, query, key, value)
        tokens, heads, dim = query.shape
        out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
        common: dict[str, Any] = {
            "KV_HEADS": key.shape[1],
            "DIM": dim,
            "DIM_P": self._scratch.dim,
            "PAGE": self._pool.block_size,
            "WINDOW": window or 0,
            "CAPPED": softcap > 0,
            "SINKS": sinks is not None,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }
        places = (rotated.stride(0), rotated.stride(1), batch.tables.stride(0), *self._strides)
        given = out if sinks is None else sinks
        for first in range(0, batch.decodes, self._scratch.rows):
            self._decode(layer, rotated, given, out, (scale, softcap or 1.0), places, common, first)
        if batch.tiles is not None:
            attend.prefill[(heads, batch.tiles.shape[0])](
                rotated, self._pool.data, batch.tables, batch.tiles, given, out, layer, scale, softcap or 1.0, *places,
                HEADS=heads, ROWS=tile_rows(query.dtype),
                TILE=64 if query.element_size() < 4 else 32,
                num_warps=4, num_stages=2 if query.element_size() < 4 else 1,
                **common,
            )  # fmt: skip
        return out

    def _decode(
        self,
        layer: int,
        query: Tensor,
        sinks: Tensor,
        out: Tensor,
        scales: tuple[float, float],
        places: tuple[int, ...],
        common: dict[str, Any],
        first: int,
    ) -> None:
        """Attend decode rows from ``first`` on, as many as the scratch holds."""
        batch, scratch = self._batch, self._scratch
        rows = min(scratch.rows, batch.decodes - first)
        lanes, positions = batch.lanes, batch.positions
        if first:
            query, out, lanes, positions = (each[first:] for each in (query, out, lanes, positions))
        kv_heads, heads = common["KV_HEADS"], query.shape[1]
        parts, pdl = scratch.splits(rows, kv_heads), dependent(query.device, rows)
        attend.decode[(rows, kv_heads, parts)](
            query, self._pool.data, batch.tables, lanes, positions, sinks, out,
            scratch.acc, scratch.best, scratch.total, scratch.counters, layer, *scales, *places,
            GROUP=heads // kv_heads, MEMBERS=power(heads // kv_heads), GROUP_P=scratch.group,
            TILE=DECODE_TILE if query.element_size() < 4 else 32,
            SPLITS=parts, PDL=pdl, num_warps=4, num_stages=3 if query.element_size() < 4 else 2, **common,
            **launch(pdl),
        )  # fmt: skip

    def _store(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, pool, turned = self._batch, self._pool, self._rotation.take()
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        cos, sin = turned if turned is not None else (query, query)
        rotated = query if turned is None else torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
        pdl = dependent(query.device, tokens)
        attend.store[(tokens, kv_heads)](
            query, key, value, cos, sin, rotated, pool.data, batch.tables, batch.lanes, batch.positions, layer,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            cos.stride(-2), cos.stride(-1), batch.tables.stride(0), *self._strides, pool.limit or 1.0,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_P=power(heads // kv_heads), DIM=dim,
            HALF_P=power(dim // 2), PAGE=pool.block_size, ROTATE=turned is not None, LIMITED=pool.limit > 0,
            PDL=pdl, num_warps=2, **launch(pdl),
        )  # fmt: skip
        return rotated
