"""Multi-head latent attention over a pool of latents: kernels, and ``Paged`` made of them.

A pool's block has one head of latents followed by the rotated part of keys. A decoded token, or a few tokens of a short
chunk, attend to latents as they are: all heads read the same ones, so the heads of these tokens are the rows of one
product. Long chunks expand latents to keys and values, some heads at a time, which takes a third of the work per key.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.engines.native.cuda.attend import stored
from penstock.workers.engines.native.cuda.dense import DenseAttention, gathered
from penstock.workers.engines.native.cuda.fusions import dependent
from penstock.workers.engines.native.cuda.modules import Rotation, launch_options, next_power_of_2
from penstock.workers.engines.native.cuda.packing import Group, PromptChunk
from penstock.workers.engines.native.cuda.paged import Division, PagedAttention, PagedBatch, Scratch, tile_rows
from penstock.workers.engines.native.model.attention import AttentionParams, Expansion, Paged, UnsupportedAttention
from penstock.workers.engines.native.model.pool import KvPool, KvShape

COLUMNS = 32  # of a program for short chunks: tokens times heads. With 64, registers do not suffice
EXPANDED_VALUES = 1 << 27  # that exist at once while keys and values are made: 256 MiB in 16 bits
COMBINED = 512  # values of a latent per program of ``combine``
CHUNK = tl.constexpr(8)  # splits that it reads at once


@triton.jit(do_not_specialize=["layer"])
def store(
    q, latents, rotated, cos, sin, pool, tables, table_rows, positions, layer,
    q_t, q_h, latents_t, rotated_t, cos_t, cos_d, width, block_stride, layer_stride, limit,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, LATENT: tl.constexpr, LATENT_P: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr, IN_PAIRS: tl.constexpr, OUT_PAIRS: tl.constexpr,
    LIMITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): rotate the last part of its queries in place, and its key part; store that after its latent.

    ``q`` points at the part of the first head. IN_PAIRS: values that are rotated together are neighbours, otherwise a
    half apart. OUT_PAIRS: likewise of the result.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    dims = tl.arange(0, HALF_P)
    there = dims < HALF
    IN_STEP: tl.constexpr = 2 if IN_PAIRS else 1
    IN_APART: tl.constexpr = 1 if IN_PAIRS else HALF
    OUT_STEP: tl.constexpr = 2 if OUT_PAIRS else 1
    OUT_APART: tl.constexpr = 1 if OUT_PAIRS else HALF
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    low = tl.load(rotated + token * rotated_t + dims * IN_STEP, mask=there, other=0.0)
    high = tl.load(rotated + token * rotated_t + dims * IN_STEP + IN_APART, mask=there, other=0.0)
    if ROTATE:
        cosine = tl.load(cos + token * cos_t + dims * cos_d, mask=there, other=0.0).to(tl.float32)
        sine = tl.load(sin + token * cos_t + dims * cos_d, mask=there, other=0.0).to(tl.float32)
        dtype = low.dtype
        low_f32, high_f32 = low.to(tl.float32), high.to(tl.float32)
        low = (low_f32 * cosine - high_f32 * sine).to(dtype)
        high = (high_f32 * cosine + low_f32 * sine).to(dtype)
        heads = tl.arange(0, HEADS_P)
        legal = (heads < HEADS)[:, None] & there[None, :]
        of_heads = q + token * q_t + heads[:, None] * q_h
        in_ptrs, out_ptrs = of_heads + (dims * IN_STEP)[None, :], of_heads + (dims * OUT_STEP)[None, :]
        q_low = tl.load(in_ptrs, mask=legal, other=0.0).to(tl.float32)
        q_high = tl.load(in_ptrs + IN_APART, mask=legal, other=0.0).to(tl.float32)
        tl.debug_barrier()  # another thread may write what this one reads
        tl.store(out_ptrs, (q_low * cosine[None, :] - q_high * sine[None, :]).to(dtype), mask=legal)
        tl.store(out_ptrs + OUT_APART, (q_high * cosine[None, :] + q_low * sine[None, :]).to(dtype), mask=legal)
    if position >= 0:
        values = tl.arange(0, LATENT_P)
        latent = tl.load(latents + token * latents_t + values, mask=values < LATENT, other=0.0)
        table_row = tl.load(table_rows + token).to(tl.int64)
        block = tl.load(tables + table_row * width + position // PAGE).to(tl.int64)
        row = pool + block * block_stride + layer * layer_stride + (position % PAGE) * (LATENT + 2 * HALF)
        dtype_there = pool.dtype.element_ty
        tl.store(row + values, stored(latent, limit, dtype_there, LIMITED), mask=values < LATENT)
        rotated_ptrs = row + LATENT + dims * OUT_STEP
        tl.store(rotated_ptrs, stored(low, limit, dtype_there, LIMITED), mask=there)
        tl.store(rotated_ptrs + OUT_APART, stored(high, limit, dtype_there, LIMITED), mask=there)


@triton.jit(do_not_specialize=["layer", "most", "splits"])
def attend(
    absorbed, q, pool, tables, table_rows, positions, tiles, out, part_acc, part_max, part_sum, shares, most, splits,
    layer, scale, absorbed_t, absorbed_h, q_t, q_h, out_t, out_h, width, block_stride, layer_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr, LATENT_P: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_P: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PER_TILE: tl.constexpr,
    DIVIDED: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tokens, heads, split): ``ROWS`` tokens and ``BLOCK`` heads over a part of the latents before them.

    PER_TILE: programs per tile of consecutive tokens, see ``attend.prefill``; 0: each row is of a sequence of its own.
    DIVIDED, FRESH: see ``attend.decode``. ``q`` points at the rotated part of the first head. Partial results of a row
    are left to ``combine``. Heads are columns, as the tensor cores take 64 rows at least, and read latents in both
    directions from one copy.
    """
    number, split = tl.program_id(0), tl.program_id(2)
    first_part = number * splits
    if DIVIDED:
        if PDL and FRESH:
            # In this order: ``combine`` reads the shares before it waits for this kernel.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        item = number
        number = tl.load(shares + 1 + item)
        if number < 0:
            return
        first_part = tl.load(shares + 1 + most + number)
        split = item - first_part
        splits = tl.load(shares + 2 + most + number) - first_part
    if PER_TILE > 0:
        tile_number, first = number // PER_TILE, (number % PER_TILE) * ROWS
        first_row = tl.load(tiles + tile_number * 4) + first
        start = tl.load(tiles + tile_number * 4 + 1) + first
        count = tl.minimum(tl.load(tiles + tile_number * 4 + 2) - first, ROWS)
        table_row = tl.load(tiles + tile_number * 4 + 3).to(tl.int64)
        if count <= 0:
            return
        context_len = start + count
    else:
        first_row, count = number, 1
        start = tl.load(positions + number)
        table_row = tl.load(table_rows + number).to(tl.int64)
        context_len = start + 1
    all_tiles = tl.cdiv(context_len, TILE)
    tiles_per_split = tl.load(shares) if DIVIDED else tl.maximum(tl.cdiv(all_tiles, splits), 1)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, all_tiles)
    members, dims, far_dims = tl.arange(0, ROWS * BLOCK), tl.arange(0, LATENT_P), tl.arange(0, ROTATED_P)
    token, head = members // BLOCK, tl.program_id(1) * BLOCK + members % BLOCK
    there = (token < count) & (head < HEADS)
    rows = (first_row + token).to(tl.int64)
    if PDL and not FRESH:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    near = tl.load(
        absorbed + (rows * absorbed_t + head * absorbed_h)[None, :] + dims[:, None],
        mask=there[None, :] & (dims < LATENT)[:, None], other=0.0,
    )  # fmt: skip
    far = tl.load(
        q + (rows * q_t + head * q_h)[None, :] + far_dims[:, None],
        mask=there[None, :] & (far_dims < ROTATED)[:, None], other=0.0,
    )  # fmt: skip
    table = tables + table_row * width
    base = pool + layer * layer_stride
    running_max = tl.full((ROWS * BLOCK,), float("-inf"), tl.float32)
    running_sum = tl.zeros((ROWS * BLOCK,), tl.float32)
    acc = tl.zeros((LATENT_P, ROWS * BLOCK), tl.float32)
    offsets = tl.arange(0, TILE)
    for tile in range(begin, end):
        key_positions = tile * TILE + offsets
        known = key_positions < context_len
        block = tl.load(table + key_positions // PAGE, mask=known, other=0).to(tl.int64)
        at = base + block * block_stride + (key_positions % PAGE) * (LATENT + ROTATED)
        latents = tl.load(at[:, None] + dims[None, :], mask=known[:, None] & (dims < LATENT)[None, :], other=0.0)
        rotated = tl.load(
            at[:, None] + LATENT + far_dims[None, :], mask=known[:, None] & (far_dims < ROTATED)[None, :], other=0.0
        )
        latents, rotated = latents.to(near.dtype), rotated.to(near.dtype)
        scores = tl.dot(latents, near, input_precision=PRECISION)
        scores = tl.dot(rotated, far, scores, input_precision=PRECISION)
        scores = scores * (scale * 1.4426950408889634)
        scores = tl.where(key_positions[:, None] <= (start + token)[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 0))
        weights = tl.exp2(scores - new_max[None, :])
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latents), weights.to(near.dtype), acc * decay[None, :], input_precision=PRECISION)
        running_max = new_max
    legal = there[None, :] & (dims < LATENT)[:, None]
    if splits == 1:
        running_sum = tl.where(running_sum > 0, running_sum, 1.0)
        out_ptrs = out + (rows * out_t + head * out_h)[None, :] + dims[:, None]
        tl.store(out_ptrs, (acc / running_sum[None, :]).to(out.dtype.element_ty), mask=legal)
    else:
        part = (first_part + split) * HEADS + head
        tl.store(part_max + part, running_max, mask=there)
        tl.store(part_sum + part, running_sum, mask=there)
        tl.store(part_acc + part.to(tl.int64)[None, :] * LATENT + dims[:, None], acc, mask=legal)


@triton.jit(do_not_specialize=["most", "splits"])
def combine(
    part_acc, part_max, part_sum, shares, most, splits, out, out_t, out_h,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr, DIVIDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, part of the latent): a row's attention of its splits; whole rows are left as they are."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_part = row * splits
    if DIVIDED:
        first_part = tl.load(shares + 1 + most + row).to(tl.int64)
        splits = tl.load(shares + 2 + most + row) - first_part.to(tl.int32)
        # One row waits in any case: the kernel after this one takes its end for that of ``attend``.
        if (splits == 1) & (row > 0):
            return
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if splits == 1:
        return
    dims, offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    legal = dims < LATENT
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    answer = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, CHUNK):
        known = first + offsets < splits
        part = (first_part + first + offsets) * HEADS + head
        maxima = tl.load(part_max + part, mask=known, other=float("-inf"))
        sums = tl.load(part_sum + part, mask=known, other=0.0)
        acc = tl.load(
            part_acc + part[:, None] * LATENT + dims[None, :], mask=known[:, None] & legal[None, :], other=0.0
        )
        newest = tl.maximum(best, tl.max(maxima, 0))
        decay = tl.where(best == float("-inf"), 0.0, tl.exp2(best - newest))
        weights = tl.where(maxima == float("-inf"), 0.0, tl.exp2(maxima - newest))
        total = total * decay + tl.sum(weights * sums, 0)
        answer = answer * decay + tl.sum(acc * weights[:, None], 0)
        best = newest
    total = tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_t + head * out_h + dims, (answer / total).to(out.dtype.element_ty), mask=legal)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """How a program of ``attend`` works.

    Attributes:
        tile: positions at a time.
        warps, stages: see ``triton.Config``.
    """

    tile: int
    warps: int
    stages: int


# Two tiles of latents fill the shared memory of a multiprocessor: one is read while the next one comes.
DECODE, WIDE, FLOAT32 = LatentShape(64, 4, 3), LatentShape(64, 8, 3), LatentShape(16, 4, 1)


def head_block(heads: int) -> int:
    """Heads per program."""
    return 16 if heads <= 16 else 32


def make_scratch(
    shape: KvShape, heads: int, rows: int, device: torch.device, fixed: bool, *, parts: int = 0
) -> Scratch:
    """For ``paged_attention``; arguments as of ``Scratch``."""
    if not shape.latent:
        return Scratch(rows, shape.kv_heads, heads, shape.head_dim, device, fixed, parts=parts)
    blocks = -(-heads // head_block(heads))
    return Scratch(rows, blocks, blocks * head_block(heads), shape.latent, device, fixed, parts=parts)


def paged_attention(
    pool: KvPool, scratch: Scratch, rotation: Rotation, batch: PagedBatch, dense: DenseAttention | None = None
) -> Paged:
    """The attention of a batch over a pool of keys and values, or of latents."""
    kind = LatentAttention if pool.shape.latent else PagedAttention
    return kind(pool, scratch, rotation, batch, dense)


class LatentAttention:
    """Implements ``penstock.workers.engines.native.model.attention.Paged``; arguments as of ``PagedAttention``.

    Rotated parts of queries are rotated in place.
    """

    def __init__(
        self, pool: KvPool, scratch: Scratch, rotation: Rotation, batch: PagedBatch, dense: DenseAttention | None = None
    ) -> None:
        self._pool, self._scratch, self._rotation, self._batch = pool, scratch, rotation, batch
        self._dense = dense
        self._strides = (pool.data.stride(0), pool.data.stride(1))
        self._divided: Division | None = None  # the scratch's shares are of this batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """
        Raises:
            UnsupportedAttention: there is a window, sinks or a soft cap.
        """
        expansion, batch = params.expansion, self._batch
        assert expansion is not None
        if params.window is not None or params.softcap or params.sinks is not None:
            raise UnsupportedAttention("latents with a window, sinks or a soft cap")
        self._store(layer, query, key[:, 0], value[:, 0])
        long = self._long(query, expansion, params)
        tokens, heads, _ = query.shape
        out = query.new_empty((tokens, heads, expansion.values.shape[1]))
        tiles = batch.rest if long else batch.tiles
        count = batch.decodes if tiles is None else tokens
        if count:
            absorbed = torch.bmm(query[:count, :, : expansion.key_dim].transpose(0, 1), expansion.keys)
            attended = torch.empty_like(absorbed)
            rotated = query[..., expansion.key_dim :]
            for first in range(0, batch.decodes, self._scratch.rows):
                self._decode(layer, absorbed, rotated, attended, params.scale, first)
            if tiles is not None:
                self._launch(layer, absorbed, rotated, attended, params.scale, tiles=tiles)
            torch.bmm(attended, expansion.values.transpose(1, 2), out=out[:count].transpose(0, 1))
        for group in long:
            self._expand(group, layer, query, expansion, params.scale, out)
        return out

    def _long(self, query: Tensor, expansion: Expansion, params: AttentionParams) -> tuple[Group, ...]:
        batch, dense = self._batch, self._dense
        if dense is None or not batch.long or not dense.prepare(query, expansion.values.shape[1]):
            return ()
        page = self._pool.block_size
        suited = all(dense.suits(each, query, params, page) for group in batch.long for each in group)
        return batch.long if suited else ()

    def _store(self, layer: int, query: Tensor, latents: Tensor, rotated: Tensor) -> None:
        batch, pool, rotation = self._batch, self._pool, self._rotation.take()
        cos, sin = rotation if rotation is not None else (query, query)
        form = self._rotation.form
        tokens, heads, dim = query.shape
        size, half = latents.shape[1], rotated.shape[1] // 2
        pdl = dependent(query.device, tokens)
        store[(tokens,)](
            query[..., dim - 2 * half :], latents, rotated, cos, sin, pool.data, batch.tables, batch.table_rows,
            batch.positions, layer, query.stride(0), query.stride(1), latents.stride(0), rotated.stride(0),
            cos.stride(1), cos.stride(2), batch.tables.stride(0), *self._strides, pool.limit or 1.0,
            HEADS=heads, HEADS_P=next_power_of_2(heads), LATENT=size, LATENT_P=next_power_of_2(size), HALF=half,
            HALF_P=next_power_of_2(half), PAGE=pool.block_size, ROTATE=rotation is not None, IN_PAIRS=form.in_pairs,
            OUT_PAIRS=form.out_pairs, LIMITED=pool.limit > 0, PDL=pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip

    def _decode(
        self, layer: int, absorbed: Tensor, rotated: Tensor, attended: Tensor, scale: float, first: int
    ) -> None:
        """Attend decode rows from ``first`` on, as many as the scratch holds."""
        batch, scratch = self._batch, self._scratch
        rows = min(scratch.rows, batch.decodes - first)
        given = (absorbed[:, first:], rotated[first:], attended[:, first:])
        heads, _, size = absorbed.shape
        blocks, most = -(-heads // head_block(heads)), 0
        splits = batch.splits or scratch.num_splits(rows, blocks)
        divided = scratch.divides(batch.decodes)
        fresh = divided and self._divided is None
        if divided:
            if self._divided is None:
                self._divided = scratch.divide(batch.row_positions, rows, blocks, self._shape(absorbed, heads).tile)
            _, splits, most = self._divided
        self._launch(layer, *given, scale, rows=rows, first=first, splits=splits, most=most, fresh=fresh)
        if splits > 1:
            out, pdl, part = given[2], dependent(rotated.device, rows), min(COMBINED, next_power_of_2(size))
            combine[(rows, heads, -(-size // part))](
                scratch.accumulators, scratch.maxima, scratch.sums, scratch.shares, most, splits,
                out, out.stride(1), out.stride(0),
                HEADS=heads, LATENT=size, BLOCK=part, DIVIDED=divided, PDL=pdl, num_warps=4, **launch_options(pdl),
            )  # fmt: skip

    def _shape(self, absorbed: Tensor, heads: int, tiles: Tensor | None = None) -> LatentShape:
        few = tiles is None and head_block(heads) == 16 and self._pool.data.itemsize > 1
        return (DECODE if few else WIDE) if absorbed.element_size() < 4 else FLOAT32

    def _launch(
        self,
        layer: int,
        absorbed: Tensor,
        rotated: Tensor,
        attended: Tensor,
        scale: float,
        *,
        tiles: Tensor | None = None,
        rows: int = 0,
        first: int = 0,
        splits: int = 1,
        most: int = 0,
        fresh: bool = False,
    ) -> None:
        """Launch ``attend`` for rows from ``first`` on, or for tiles.

        Args:
            absorbed, attended: (heads, rows, latent).
            rotated: (rows, heads, rotated).
            most: items that the rows are divided into; 0: into ``splits`` each.
        """
        batch, scratch, pool = self._batch, self._scratch, self._pool
        heads, _, size = absorbed.shape
        narrow, block, per_tile, tokens = absorbed.element_size() < 4, head_block(heads), 0, 1
        shape, pdl = self._shape(absorbed, heads, tiles), tiles is None and dependent(rotated.device, rows)
        if tiles is not None:
            tokens = COLUMNS // block if narrow else 1
            per_tile = tile_rows(absorbed.dtype) // tokens
            rows = len(tiles) * per_tile
        attend[(most or rows, -(-heads // block), 1 if most else splits)](
            absorbed, rotated, pool.data, batch.tables, batch.table_rows[first:], batch.row_positions[first:],
            batch.tables if tiles is None else tiles, attended,
            scratch.accumulators, scratch.maxima, scratch.sums, scratch.shares, most, splits, layer, scale,
            absorbed.stride(1), absorbed.stride(0), rotated.stride(0), rotated.stride(1), attended.stride(1),
            attended.stride(0), batch.tables.stride(0), *self._strides,
            HEADS=heads, BLOCK=block, LATENT=size, LATENT_P=max(16, next_power_of_2(size)), ROTATED=rotated.shape[2],
            ROTATED_P=max(16, next_power_of_2(rotated.shape[2])), PAGE=pool.block_size, TILE=shape.tile, ROWS=tokens,
            PER_TILE=per_tile, DIVIDED=most > 0, FRESH=fresh, PRECISION="tf32" if narrow else "ieee", PDL=pdl,
            num_warps=shape.warps, num_stages=shape.stages, **launch_options(pdl),
        )  # fmt: skip

    def _expand(self, group: Group, layer: int, query: Tensor, expansion: Expansion, scale: float, out: Tensor) -> None:
        """Attend long chunks to keys and values, made of as many heads at a time as ``EXPANDED_VALUES`` allows."""
        assert self._dense is not None
        heads, each = query.shape[1], query.shape[2] + expansion.weight.shape[1]
        most = len(group) * max(max(chunk.unmasked, chunk.rows) for chunk in group)
        portion = heads
        while portion > 1 and most * portion * each > EXPANDED_VALUES:
            portion = -(-portion // 2)
        for first in range(0, heads, portion):
            some = slice(first, first + portion)
            keys = ExpandedKeys(self._pool, self._batch.tables, layer, expansion, some)
            self._dense.attend(group, query[:, some], keys, scale, out[:, some])


@dataclass(frozen=True, slots=True)
class ExpandedKeys:
    """Implements ``dense.KeySource``: keys and values of some heads, made of a layer's latents."""

    pool: KvPool
    tables: Tensor
    layer: int
    expansion: Expansion
    heads: slice

    def read(
        self, chunks: tuple[PromptChunk, ...], first: int, known: list[int], positions: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        (latents,) = gathered(self.pool, self.tables, self.layer, chunks, first, known, positions, dtype)
        latents = latents[:, :, 0]  # (chunks, positions, latent + rotated)
        weight, key_dim = self.expansion.weight[self.heads], self.expansion.key_dim
        heads, _, size = weight.shape
        both = torch.matmul(latents[..., :size], weight.flatten(0, 1).t())
        both = both.view(*both.shape[:-1], heads, -1)
        keys = both.new_empty((*both.shape[:-1], key_dim + latents.shape[-1] - size))
        keys[..., :key_dim] = both[..., :key_dim]
        keys[..., key_dim:] = latents[..., None, size:]
        return keys, both[..., key_dim:]
