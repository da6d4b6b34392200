"""Attention over the paged pool: one kernel stores (and rotates), one decodes, one computes chunks of prompts.

Keys and values lie as (blocks, layers, 2, page, kv heads, head dim). A sequence's row of ``tables`` lists its blocks;
its row number is its lane. A row of a batch is a token with a lane and a position; position -1 is padding.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer"])
def store(
    q, k, v, cos, sin, rotated, pool, tables, lanes, positions, layer,
    q_t, q_h, k_t, k_h, v_t, v_h, cos_t, cos_d, width, block_stride, layer_stride, part_stride, limit,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr, HALF_P: tl.constexpr,
    PAGE: tl.constexpr, ROTATE: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head): rotate its key and the queries that share it; store key and value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF_P)
    fits = dims < HALF
    position = tl.load(positions + token)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    low = tl.load(k + token * k_t + head * k_h + dims, mask=fits, other=0.0)
    high = tl.load(k + token * k_t + head * k_h + HALF + dims, mask=fits, other=0.0)
    v_low = tl.load(v + token * v_t + head * v_h + dims, mask=fits, other=0.0)
    v_high = tl.load(v + token * v_t + head * v_h + HALF + dims, mask=fits, other=0.0)
    if ROTATE:
        c = tl.load(cos + token * cos_t + dims * cos_d, mask=fits, other=0.0).to(tl.float32)
        s = tl.load(sin + token * cos_t + dims * cos_d, mask=fits, other=0.0).to(tl.float32)
        dtype = low.dtype
        k_low, k_high = low.to(tl.float32), high.to(tl.float32)
        low = (k_low * c - k_high * s).to(dtype)
        high = (k_high * c + k_low * s).to(dtype)
        group = tl.arange(0, GROUP_P)
        mine = (group < GROUP)[:, None] & fits[None, :]
        at = q + token * q_t + (head * GROUP + group)[:, None] * q_h + dims[None, :]
        q_low = tl.load(at, mask=mine, other=0.0).to(tl.float32)
        q_high = tl.load(at + HALF, mask=mine, other=0.0).to(tl.float32)
        to = rotated + (token * KV_HEADS * GROUP + head * GROUP + group)[:, None] * DIM + dims[None, :]
        tl.store(to, (q_low * c[None, :] - q_high * s[None, :]).to(dtype), mask=mine)
        tl.store(to + HALF, (q_high * c[None, :] + q_low * s[None, :]).to(dtype), mask=mine)
    if position >= 0:
        lane = tl.load(lanes + token).to(tl.int64)
        block = tl.load(tables + lane * width + position // PAGE).to(tl.int64)
        to_k = pool + block * block_stride + layer * layer_stride + ((position % PAGE) * KV_HEADS + head) * DIM + dims
        to_v = to_k + part_stride
        if LIMITED:
            low = tl.minimum(tl.maximum(low.to(tl.float32), -limit), limit)
            high = tl.minimum(tl.maximum(high.to(tl.float32), -limit), limit)
            v_low = tl.minimum(tl.maximum(v_low.to(tl.float32), -limit), limit)
            v_high = tl.minimum(tl.maximum(v_high.to(tl.float32), -limit), limit)
        kept = pool.dtype.element_ty
        tl.store(to_k, low.to(kept), mask=fits)
        tl.store(to_k + HALF, high.to(kept), mask=fits)
        tl.store(to_v, v_low.to(kept), mask=fits)
        tl.store(to_v + HALF, v_high.to(kept), mask=fits)


@triton.jit
def _capped(scores, scale, softcap, CAPPED: tl.constexpr):
    """Scores times log2(e), for exp2; capped by softcap * tanh(score / softcap)."""
    if CAPPED:
        inner = scores * (scale / softcap)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        return tanh * (softcap * 1.4426950408889634)
    return scores * (scale * 1.4426950408889634)


@triton.jit(do_not_specialize=["layer"])
def decode(
    q, pool, tables, lanes, positions, sinks, out, part_acc, part_max, part_sum, counters, layer, scale, softcap,
    q_t, q_h, width, block_stride, layer_stride, part_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr,
    DIM_P: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, split): one token's queries over a part of its keys; the last split adds them up."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    known = tl.load(positions + row) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(known - WINDOW, 0)
    begin = first // TILE
    end = tl.cdiv(known, TILE)
    per = tl.maximum(tl.cdiv(end - begin, SPLITS), 1)
    active = tl.maximum(tl.cdiv(end - begin, per), 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if split >= active:
        return
    low = begin + split * per
    high = tl.minimum(low + per, end)
    group, dims, tile = tl.arange(0, GROUP_P), tl.arange(0, DIM_P), tl.arange(0, TILE)
    mine = (group < GROUP)[:, None] & (dims < DIM)[None, :]
    at = q + row.to(tl.int64) * q_t + (head * GROUP + group)[:, None] * q_h + dims[None, :]
    query = tl.load(at, mask=mine, other=0.0)
    lane = tl.load(lanes + row).to(tl.int64)
    table = tables + lane * width
    base = pool + layer * layer_stride + head * DIM
    best = tl.full((GROUP_P,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_P,), tl.float32)
    acc = tl.zeros((GROUP_P, DIM_P), tl.float32)
    for number in range(low, high):
        places = number * TILE + tile
        seen = places < known
        if WINDOW > 0:
            seen = seen & (places >= first)
        block = tl.load(table + places // PAGE, mask=places < known, other=0).to(tl.int64)
        offset = block * block_stride + (places % PAGE) * (KV_HEADS * DIM)
        legal = seen[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + offset[:, None] + dims[None, :], mask=legal, other=0.0).to(query.dtype)
        values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=legal, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores = _capped(scores, scale, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(best - higher)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(query.dtype), values, acc, input_precision=PRECISION)
        best = higher
    to = out + (row.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + group)[:, None] * DIM + dims[None, :]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head * GROUP + group, mask=group < GROUP, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - best)
        total = tl.where(total > 0, total, 1.0)
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
    else:
        pair = row * KV_HEADS + head
        place = pair * SPLITS + split
        tl.store(part_max + place * GROUP_P + group, best)
        tl.store(part_sum + place * GROUP_P + group, total)
        tl.store(part_acc + (place * GROUP_P + group)[:, None] * DIM_P + dims[None, :], acc, mask=mine)
        tl.debug_barrier()
        done = tl.atomic_add(counters + pair, 1)
        if done == active - 1:
            tl.store(counters + pair, 0)
            # All loads before any store, which they could not pass.
            members, splits = tl.arange(0, MEMBERS), tl.arange(0, SPLITS)
            there = (members < GROUP)[:, None] & (splits < active)[None, :]
            where = (pair * SPLITS + splits)[None, :] * GROUP_P + members[:, None]
            bests = tl.load(part_max + where, mask=there, other=float("-inf"))
            sums = tl.load(part_sum + where, mask=there, other=0.0)
            top = tl.max(bests, 1)
            if SINKS:
                sink = tl.load(sinks + head * GROUP + members, mask=members < GROUP, other=0.0).to(tl.float32)
                sink = sink * 1.4426950408889634
                top = tl.maximum(top, sink)
            mass = tl.sum(tl.where(bests == float("-inf"), 0.0, tl.exp2(bests - top[:, None])) * sums, 1)
            if SINKS:
                mass += tl.exp2(sink - top)
            mass = tl.where(mass > 0, mass, 1.0)
            answer = tl.zeros((MEMBERS, DIM_P), tl.float32)
            CHUNK: tl.constexpr = 8 if SPLITS > 8 else SPLITS
            for first_split in tl.static_range(0, SPLITS, CHUNK):
                splits_here = first_split + tl.arange(0, CHUNK)
                exists = (members < GROUP)[:, None] & (splits_here < active)[None, :]
                place_here = (pair * SPLITS + splits_here)[None, :] * GROUP_P + members[:, None]
                best_here = tl.load(part_max + place_here, mask=exists, other=float("-inf"))
                shares = tl.where(best_here == float("-inf"), 0.0, tl.exp2(best_here - top[:, None]))
                accs = tl.load(
                    part_acc + place_here[:, :, None] * DIM_P + dims[None, None, :],
                    mask=exists[:, :, None] & (dims < DIM)[None, None, :], other=0.0,
                )  # fmt: skip
                answer += tl.sum(shares[:, :, None] * accs, 1)
            line = out + (row.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + members)[:, None] * DIM + dims[None, :]
            legal_out = (members < GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(line, (answer / mass[:, None]).to(out.dtype.element_ty), mask=legal_out)


@triton.jit(do_not_specialize=["layer"])
def prefill(
    q, pool, tables, tiles, sinks, out, layer, scale, softcap,
    q_t, q_h, width, block_stride, layer_stride, part_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (head, tile): up to ``ROWS`` neighbouring queries of one head over all keys up to their own.

    ``tiles``: (n, 4) int32, each first row in the batch, its position, count of rows, lane.
    """
    head, number = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + number * 4)
    start = tl.load(tiles + number * 4 + 1)
    count = tl.load(tiles + number * 4 + 2)
    lane = tl.load(tiles + number * 4 + 3).to(tl.int64)
    rows, dims, tile = tl.arange(0, ROWS), tl.arange(0, DIM_P), tl.arange(0, TILE)
    mine = (rows < count)[:, None] & (dims < DIM)[None, :]
    line = (first_row + rows).to(tl.int64)
    query = tl.load(q + line[:, None] * q_t + head * q_h + dims[None, :], mask=mine, other=0.0)
    place = start + rows
    known = start + count
    table = tables + lane * width
    base = pool + layer * layer_stride + (head // (HEADS // KV_HEADS)) * DIM
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_P), tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0) // TILE
    else:
        whole = (start + 1) // TILE  # tiles that every row sees all of
        for step in range(0, whole):
            places = step * TILE + tile
            block = tl.load(table + places // PAGE).to(tl.int64)
            offset = block * block_stride + (places % PAGE) * (KV_HEADS * DIM)
            there = (dims < DIM)[None, :]
            keys = tl.load(base + offset[:, None] + dims[None, :], mask=there, other=0.0).to(query.dtype)
            values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=there, other=0.0)
            scores = _capped(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, softcap, CAPPED)
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            decay = tl.exp2(best - higher)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * decay[:, None],
                         input_precision=PRECISION)  # fmt: skip
            best = higher
        low = whole
    for step in range(low, tl.cdiv(known, TILE)):
        places = step * TILE + tile
        exists = places < known
        block = tl.load(table + places // PAGE, mask=exists, other=0).to(tl.int64)
        offset = block * block_stride + (places % PAGE) * (KV_HEADS * DIM)
        legal = exists[:, None] & (dims < DIM)[None, :]
        keys = tl.load(base + offset[:, None] + dims[None, :], mask=legal, other=0.0).to(query.dtype)
        values = tl.load(base + part_stride + offset[:, None] + dims[None, :], mask=legal, other=0.0)
        scores = _capped(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, softcap, CAPPED)
        seen = places[None, :] <= place[:, None]
        if WINDOW > 0:
            seen = seen & (places[None, :] > place[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        calm = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - calm[:, None])
        decay = tl.exp2(best - calm)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * decay[:, None],
                     input_precision=PRECISION)  # fmt: skip
        best = higher
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(best, sink)
        share = tl.exp2(best - top)
        total = total * share + tl.exp2(sink - top)
        acc = acc * share[:, None]
    total = tl.where(total > 0, total, 1.0)
    to = out + (line[:, None] * HEADS + head) * DIM + dims[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
