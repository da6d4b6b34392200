"""Attention over the paged pool: one kernel rotates and stores, one decodes, one computes chunks of prompts.

The pool is (blocks, layers, 2, page, kv heads, head dim), keys before values. A sequence's row of ``tables`` lists its
blocks; the index of that row is its table row. A row of a batch is a token
with a table row and a position; position -1: padding.
"""

import triton
import triton.language as tl


@triton.jit
def stored(values, limit, dtype: tl.constexpr, LIMITED: tl.constexpr):
    """Values in the pool's data type; limited, if larger ones become NaN in it."""
    if LIMITED:
        return tl.minimum(tl.maximum(values.to(tl.float32), -limit), limit).to(dtype)
    return values.to(dtype)


@triton.jit(do_not_specialize=["layer"])
def store(
    q, k, v, cos, sin, rotated, pool, tables, table_rows, positions, layer,
    q_t, q_h, k_t, k_h, v_t, v_h, cos_t, cos_d, width, block_stride, layer_stride, part_stride, limit,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr, HALF_P: tl.constexpr,
    PAGE: tl.constexpr, ROTATE: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head): rotate the key and the queries that attend to it; store key and value in the pool."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF_P)
    dim_mask = dims < HALF
    position = tl.load(positions + token)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k_low = tl.load(k + token * k_t + head * k_h + dims, mask=dim_mask, other=0.0)
    k_high = tl.load(k + token * k_t + head * k_h + HALF + dims, mask=dim_mask, other=0.0)
    v_low = tl.load(v + token * v_t + head * v_h + dims, mask=dim_mask, other=0.0)
    v_high = tl.load(v + token * v_t + head * v_h + HALF + dims, mask=dim_mask, other=0.0)
    if ROTATE:
        cos_row = tl.load(cos + token * cos_t + dims * cos_d, mask=dim_mask, other=0.0).to(tl.float32)
        sin_row = tl.load(sin + token * cos_t + dims * cos_d, mask=dim_mask, other=0.0).to(tl.float32)
        dtype = k_low.dtype
        k_low_f32, k_high_f32 = k_low.to(tl.float32), k_high.to(tl.float32)
        k_low = (k_low_f32 * cos_row - k_high_f32 * sin_row).to(dtype)
        k_high = (k_high_f32 * cos_row + k_low_f32 * sin_row).to(dtype)
        members = tl.arange(0, GROUP_P)
        q_mask = (members < GROUP)[:, None] & dim_mask[None, :]
        q_ptrs = q + token * q_t + (head * GROUP + members)[:, None] * q_h + dims[None, :]
        q_low = tl.load(q_ptrs, mask=q_mask, other=0.0).to(tl.float32)
        q_high = tl.load(q_ptrs + HALF, mask=q_mask, other=0.0).to(tl.float32)
        rotated_ptrs = rotated + (token * KV_HEADS * GROUP + head * GROUP + members)[:, None] * DIM + dims[None, :]
        tl.store(rotated_ptrs, (q_low * cos_row[None, :] - q_high * sin_row[None, :]).to(dtype), mask=q_mask)
        tl.store(rotated_ptrs + HALF, (q_high * cos_row[None, :] + q_low * sin_row[None, :]).to(dtype), mask=q_mask)
    if position >= 0:
        table_row = tl.load(table_rows + token).to(tl.int64)
        block = tl.load(tables + table_row * width + position // PAGE).to(tl.int64)
        k_ptrs = pool + block * block_stride + layer * layer_stride + ((position % PAGE) * KV_HEADS + head) * DIM + dims
        v_ptrs = k_ptrs + part_stride
        stored_dtype = pool.dtype.element_ty
        tl.store(k_ptrs, stored(k_low, limit, stored_dtype, LIMITED), mask=dim_mask)
        tl.store(k_ptrs + HALF, stored(k_high, limit, stored_dtype, LIMITED), mask=dim_mask)
        tl.store(v_ptrs, stored(v_low, limit, stored_dtype, LIMITED), mask=dim_mask)
        tl.store(v_ptrs + HALF, stored(v_high, limit, stored_dtype, LIMITED), mask=dim_mask)


@triton.jit
def _computable(query, pool):
    """Queries in the type in which they are multiplied by keys.

    With a pool of 8-bit floats that is float16: it holds all of their values, and the GPU widens two of them in one
    instruction. To bfloat16 it takes four.
    """
    if pool.dtype.element_ty == tl.float8e4nv:
        computable = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    else:
        computable = query
    return computable


@triton.jit
def _widened(pairs):
    """Two float16 tensors of an int16 one whose elements are pairs of 8-bit floats.

    The tensor cores take values with their positions side by side. Those of 8 bits would be read from shared memory one
    by one; pairs can be transposed while they are read.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, $2; mov.b32 {$0, $1}, both; }", "=h,=h,h", [pairs],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _capped(scores, scale, softcap, CAPPED: tl.constexpr):
    """Scores times log2(e), for exp2; capped by softcap * tanh(score / softcap)."""
    if CAPPED:
        inner = scores * (scale / softcap)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        return tanh * (softcap * 1.4426950408889634)
    return scores * (scale * 1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "most", "target", "splits"])
def divide(
    positions, shares, rows, most, target, splits, TILE: tl.constexpr, ROWS_P: tl.constexpr, ITEMS: tl.constexpr
):  # fmt: skip
    """Divide the keys of all rows into items of equal size, so that a long row among short ones does not take longest.

    Program (part of the items). ``shares``: the tiles of an item; the row of each of ``most`` items, -1: there is no
    such item; the first item of each row, and after them the number of items. A row has ``splits`` items at most, all
    rows together ``target`` and one for each row.
    """
    numbers = tl.arange(0, ROWS_P)
    known = numbers < rows
    tiles = tl.cdiv(tl.load(positions + numbers, mask=known, other=-1) + 1, TILE)
    size = tl.maximum(tl.maximum(tl.cdiv(tl.sum(tiles, 0), target), tl.cdiv(tl.max(tiles, 0), splits)), 1)
    counts = tl.where(known, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    ends = tl.cumsum(counts, 0)
    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row_of = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), 1)
    tl.store(shares + 1 + items, tl.where(row_of < rows, row_of, -1), mask=items < most)
    if tl.program_id(0) == 0:
        tl.store(shares, size)
        tl.store(shares + 1 + most + numbers, ends - counts, mask=known)
        tl.store(shares + 1 + most + rows, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["layer", "most"])
def decode(
    q, pool, tables, table_rows, positions, sinks, out, part_acc, part_max, part_sum, counters, shares, most,
    layer, scale, softcap, q_t, q_h, width, block_stride, layer_stride, part_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr,
    DIM_P: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PAIRS: tl.constexpr,
    DIVIDED: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, split): one token's queries over a part of its keys. The last split combines all.

    DIVIDED: program (item of ``divide``, kv head) instead.
    FRESH: ``divide`` came just before, so that what it wrote has to be waited for.
    PAIRS: the pool is of 8-bit floats, whose values are read in pairs; see ``_widened``.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    item = row
    if DIVIDED:
        if PDL and FRESH:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.load(shares + 1 + item)
        if row < 0:
            return
        split = item - tl.load(shares + 1 + most + row)
    context_len = tl.load(positions + row) + 1
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(context_len - WINDOW, 0)
    first_tile = window_start // TILE
    end_tile = tl.cdiv(context_len, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, SPLITS), 1)
    if DIVIDED:
        tiles_per_split = tl.load(shares)
    active_splits = tl.maximum(tl.cdiv(end_tile - first_tile, tiles_per_split), 1)
    if PDL and not FRESH:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if split >= active_splits:
        return
    begin = first_tile + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, end_tile)
    padded_heads, dims, tile_offsets = tl.arange(0, GROUP_P), tl.arange(0, DIM_P), tl.arange(0, TILE)
    q_mask = (padded_heads < GROUP)[:, None] & (dims < DIM)[None, :]
    q_ptrs = q + row.to(tl.int64) * q_t + (head * GROUP + padded_heads)[:, None] * q_h + dims[None, :]
    query = _computable(tl.load(q_ptrs, mask=q_mask, other=0.0), pool)
    table_row = tl.load(table_rows + row).to(tl.int64)
    table = tables + table_row * width
    base = pool + layer * layer_stride + head * DIM
    running_max = tl.full((GROUP_P,), float("-inf"), tl.float32)
    running_sum = tl.zeros((GROUP_P,), tl.float32)
    acc = tl.zeros((GROUP_P, DIM_P // 2 if PAIRS else DIM_P), tl.float32)
    odd_acc = acc
    for tile_index in range(begin, end):
        key_positions = tile_index * TILE + tile_offsets
        visible = key_positions < context_len
        if WINDOW > 0:
            visible = visible & (key_positions >= window_start)
        block = tl.load(table + key_positions // PAGE, mask=key_positions < context_len, other=0).to(tl.int64)
        offset = block * block_stride + (key_positions % PAGE) * (KV_HEADS * DIM)
        kv_mask = visible[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + offset[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(query.dtype)
        if PAIRS:
            pairs = tl.arange(0, DIM_P // 2)
            pair_ptrs = (base + part_stride).to(tl.pointer_type(tl.int16)) + (offset // 2)[:, None] + pairs[None, :]
            even, odd = _widened(tl.load(pair_ptrs, mask=visible[:, None] & (pairs < DIM // 2)[None, :], other=0))
        else:
            values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores = _capped(scores, scale, softcap, CAPPED)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if PAIRS:
            acc = tl.dot(weights.to(query.dtype), even, acc)
            odd_acc = tl.dot(weights.to(query.dtype), odd, odd_acc * decay[:, None])
        else:
            acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc, input_precision=PRECISION)
        running_max = new_max
    if PAIRS:
        acc = tl.interleave(acc, odd_acc)
    out_ptrs = out + (row.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + padded_heads)[:, None] * DIM + dims[None, :]
    whole = SPLITS == 1
    if DIVIDED:
        whole = active_splits == 1
    if whole:
        if SINKS:
            sink = tl.load(sinks + head * GROUP + padded_heads, mask=padded_heads < GROUP, other=0.0).to(tl.float32)
            running_sum += tl.exp2(sink * 1.4426950408889634 - running_max)
        running_sum = tl.where(running_sum > 0, running_sum, 1.0)
        tl.store(out_ptrs, (acc / running_sum[:, None]).to(out.dtype.element_ty), mask=q_mask)
    else:
        pair = row * KV_HEADS + head
        first_part = pair * SPLITS
        if DIVIDED:
            first_part = head * most + item - split
        part = first_part + split
        tl.store(part_max + part * GROUP_P + padded_heads, running_max)
        tl.store(part_sum + part * GROUP_P + padded_heads, running_sum)
        tl.store(part_acc + (part * GROUP_P + padded_heads)[:, None] * DIM_P + dims[None, :], acc, mask=q_mask)
        tl.debug_barrier()
        done = tl.atomic_add(counters + pair, 1)
        if done == active_splits - 1:
            tl.store(counters + pair, 0)
            # All loads come before any store: a load cannot be moved above one.
            heads, splits = tl.arange(0, MEMBERS), tl.arange(0, SPLITS)
            part_mask = (heads < GROUP)[:, None] & (splits < active_splits)[None, :]
            part_offsets = (first_part + splits)[None, :] * GROUP_P + heads[:, None]
            part_maxima = tl.load(part_max + part_offsets, mask=part_mask, other=float("-inf"))
            part_sums = tl.load(part_sum + part_offsets, mask=part_mask, other=0.0)
            row_max = tl.max(part_maxima, 1)
            if SINKS:
                sink = tl.load(sinks + head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32)
                sink = sink * 1.4426950408889634
                row_max = tl.maximum(row_max, sink)
            row_sum = tl.sum(
                tl.where(part_maxima == float("-inf"), 0.0, tl.exp2(part_maxima - row_max[:, None])) * part_sums, 1
            )
            if SINKS:
                row_sum += tl.exp2(sink - row_max)
            row_sum = tl.where(row_sum > 0, row_sum, 1.0)
            row_acc = tl.zeros((MEMBERS, DIM_P), tl.float32)
            CHUNK: tl.constexpr = 8 if SPLITS > 8 else SPLITS
            combined = SPLITS  # all loads at once; of a few among many, one by one is faster
            if DIVIDED:
                combined = active_splits
            for chunk_start in tl.static_range(0, SPLITS, CHUNK):
                if chunk_start < combined:
                    chunk_splits = chunk_start + tl.arange(0, CHUNK)
                    chunk_mask = (heads < GROUP)[:, None] & (chunk_splits < active_splits)[None, :]
                    chunk_offsets = (first_part + chunk_splits)[None, :] * GROUP_P + heads[:, None]
                    chunk_max = tl.load(part_max + chunk_offsets, mask=chunk_mask, other=float("-inf"))
                    chunk_weights = tl.where(chunk_max == float("-inf"), 0.0, tl.exp2(chunk_max - row_max[:, None]))
                    chunk_acc = tl.load(
                        part_acc + chunk_offsets[:, :, None] * DIM_P + dims[None, None, :],
                        mask=chunk_mask[:, :, None] & (dims < DIM)[None, None, :], other=0.0,
                    )  # fmt: skip
                    row_acc += tl.sum(chunk_weights[:, :, None] * chunk_acc, 1)
            row_ptrs = out + (row.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + heads)[:, None] * DIM + dims[None, :]
            row_mask = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(row_ptrs, (row_acc / row_sum[:, None]).to(out.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["layer"])
def prefill(
    q, pool, tables, tiles, sinks, out, layer, scale, softcap,
    q_t, q_h, width, block_stride, layer_stride, part_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (head, tile): up to ``ROWS`` consecutive queries of one head over all keys up to their own.

    ``tiles``: (n, 4) int32: first row in the batch, its position, number of rows, table row.
    """
    head, number = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + number * 4)
    start = tl.load(tiles + number * 4 + 1)
    count = tl.load(tiles + number * 4 + 2)
    table_row = tl.load(tiles + number * 4 + 3).to(tl.int64)
    rows, dims, tile_offsets = tl.arange(0, ROWS), tl.arange(0, DIM_P), tl.arange(0, TILE)
    q_mask = (rows < count)[:, None] & (dims < DIM)[None, :]
    q_rows = (first_row + rows).to(tl.int64)
    query = tl.load(q + q_rows[:, None] * q_t + head * q_h + dims[None, :], mask=q_mask, other=0.0)
    query = _computable(query, pool)
    q_positions = start + rows
    context_len = start + count
    table = tables + table_row * width
    base = pool + layer * layer_stride + (head // (HEADS // KV_HEADS)) * DIM
    running_max = tl.full((ROWS,), float("-inf"), tl.float32)
    running_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_P), tl.float32)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(start - WINDOW + 1, 0) // TILE
    else:
        full_tiles = (start + 1) // TILE  # tiles without a causal mask: every row attends to all of them
        for tile_index in range(0, full_tiles):
            key_positions = tile_index * TILE + tile_offsets
            block = tl.load(table + key_positions // PAGE).to(tl.int64)
            offset = block * block_stride + (key_positions % PAGE) * (KV_HEADS * DIM)
            dim_mask = (dims < DIM)[None, :]
            keys = tl.load(base + offset[:, None] + dims[None, :], mask=dim_mask, other=0.0).to(query.dtype)
            values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=dim_mask, other=0.0)
            scores = _capped(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, softcap, CAPPED)
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            decay = tl.exp2(running_max - new_max)
            running_sum = running_sum * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * decay[:, None],
                         input_precision=PRECISION)  # fmt: skip
            running_max = new_max
        first_tile = full_tiles
    for tile_index in range(first_tile, tl.cdiv(context_len, TILE)):
        key_positions = tile_index * TILE + tile_offsets
        key_mask = key_positions < context_len
        block = tl.load(table + key_positions // PAGE, mask=key_mask, other=0).to(tl.int64)
        offset = block * block_stride + (key_positions % PAGE) * (KV_HEADS * DIM)
        kv_mask = key_mask[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + offset[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(query.dtype)
        values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = _capped(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, softcap, CAPPED)
        visible = key_positions[None, :] <= q_positions[:, None]
        if WINDOW > 0:
            visible = visible & (key_positions[None, :] > q_positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row without a visible key so far
        weights = tl.exp2(scores - finite_max[:, None])
        decay = tl.exp2(running_max - finite_max)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * decay[:, None],
                     input_precision=PRECISION)  # fmt: skip
        running_max = new_max
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        sink_max = tl.maximum(running_max, sink)
        sink_decay = tl.exp2(running_max - sink_max)
        running_sum = running_sum * sink_decay + tl.exp2(sink - sink_max)
        acc = acc * sink_decay[:, None]
    running_sum = tl.where(running_sum > 0, running_sum, 1.0)
    out_ptrs = out + (q_rows[:, None] * HEADS + head) * DIM + dims[None, :]
    tl.store(out_ptrs, (acc / running_sum[:, None]).to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["layer", "first", "known"])
def gather(
    pool, table, out, layer, first, known, block_stride, layer_stride, part_stride, out_part,
    ROW: tl.constexpr, PAGE: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Program (page, keys or values, piece): copy a page from position ``first`` on; zeros for positions not known."""
    page, part, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = first + page * PAGE
    block = tl.load(table + start // PAGE, mask=start < known, other=0).to(tl.int64)
    at = piece * COPY + tl.arange(0, COPY)
    within = at < PAGE * ROW
    seen = within & (start + at // ROW < known)
    source = pool + block * block_stride + layer * layer_stride + part * part_stride
    value = tl.load(source + at, mask=seen, other=0.0).to(out.dtype.element_ty)
    tl.store(out + part.to(tl.int64) * out_part + page.to(tl.int64) * (PAGE * ROW) + at, value, mask=within)


@triton.jit(do_not_specialize=["front", "rows"])
def merge(
    near, far, near_mass, far_mass, out, front, near_t, near_h, far_t, far_h, out_t, rows,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
):  # fmt: skip
    """Program (token): one token's attention over all keys, of its attention over two parts of them.

    ``near_mass``, ``far_mass``: (heads, rows), logarithms of the softmax's sums. Tokens begin at row ``front``.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token + front
    heads, dims = tl.arange(0, HEADS_P), tl.arange(0, DIM_P)
    there = heads < HEADS
    legal = there[:, None] & (dims < DIM)[None, :]
    one = tl.load(near_mass + heads * rows + row, mask=there, other=0.0)
    other = tl.load(far_mass + heads * rows + row, mask=there, other=0.0)
    share = 1.0 / (1.0 + tl.exp(other - one))
    a = tl.load(near + row * near_t + heads[:, None] * near_h + dims[None, :], mask=legal, other=0.0).to(tl.float32)
    b = tl.load(far + row * far_t + heads[:, None] * far_h + dims[None, :], mask=legal, other=0.0).to(tl.float32)
    answer = a * share[:, None] + b * (1.0 - share)[:, None]
    tl.store(out + token * out_t + heads[:, None] * DIM + dims[None, :], answer.to(out.dtype.element_ty), mask=legal)
