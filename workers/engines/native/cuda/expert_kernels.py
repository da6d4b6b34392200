"""Kernels of mixtures of experts: choosing experts, collecting each one's rows, their products, and the weighted sum.

A *pair* is a row and one of its chosen experts; pair ``row * TOP + n`` is the row's choice number n. No kernel adds in
an order that depends on other rows, so a row's result is the same bits in any batch.
"""

import triton
import triton.language as tl

from penstock.workers.engines.native.cuda.rows import activation

SOFTMAX, CHOSEN, SIGMOID, SPARSE = 0, 1, 2, 3  # how a router scores experts, see ``route``
CLAMPED = 2  # the activation of GPT-OSS, beside ``rows.SILU`` and ``rows.GELU_TANH``
WIDE, NARROW, MXFP4 = 0, 1, 2  # how weights are stored: in the input's dtype; as 8-bit floats; see ``widened``
STEP: tl.constexpr = tl.constexpr(
    64
)  # values of a row that a step of ``MXFP4`` takes, and rows that are stored together


@triton.jit(do_not_specialize=["rows"])
def route(
    x, weight, bias, correction, parts, counters, ids, factors, rows, scale, jitter,
    K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOP: tl.constexpr, TOP_P: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, SCORE: tl.constexpr, NORMALISED: tl.constexpr,
    BIAS: tl.constexpr, CORRECTED: tl.constexpr, ROUNDED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (rows, split): logits over a part of K. The last split of a tile adds all and chooses TOP experts a row.

    SCORE: SOFTMAX of all logits; CHOSEN: softmax of the chosen ones' logits; SIGMOID; SPARSE: of each chosen one among
        those left whose logits are near its own (PhiMoE's sparse mixer; ``jitter``).
    CORRECTED: ``correction`` is added to scores for the choice, not for the factors.
    GROUPS: experts are in this many groups, and only KEPT of them are chosen from: those with the largest sums of their
        BEST (1 or 2) largest scores.
    ROUNDED: logits are rounded to the dtype of ``x`` first.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    experts, ks = tl.arange(0, EXPERTS_P), tl.arange(0, DEPTH)
    row_ids = tile * ROWS + tl.arange(0, ROWS)
    begin = split * (K // SPLITS)
    weight_ptrs = weight + tl.minimum(experts, EXPERTS - 1)[:, None] * K + (begin + ks)[None, :]
    x_ptrs = x + tl.minimum(row_ids, rows - 1).to(tl.int64)[None, :] * K + (begin + ks)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((EXPERTS_P, ROWS), tl.float32)
    for k in range(0, K // SPLITS, DEPTH):
        if (K // SPLITS) % DEPTH == 0:
            weight_tile, x_tile = tl.load(weight_ptrs), tl.load(x_ptrs)
        else:
            left = K // SPLITS - k
            weight_tile = tl.load(weight_ptrs, mask=ks[None, :] < left, other=0.0)
            x_tile = tl.load(x_ptrs, mask=ks[:, None] < left, other=0.0)
        acc = tl.dot(weight_tile, x_tile.to(weight_tile.dtype), acc, input_precision=PRECISION)
        weight_ptrs += DEPTH
        x_ptrs += DEPTH
    logits = tl.trans(acc)
    last = True
    if SPLITS > 1:
        # Rows of experts beside each other, so that what is read below needs no other warp's values to be compared.
        offsets = tl.arange(0, ROWS)[:, None] * EXPERTS_P + experts[None, :]
        tile_parts = parts + tile.to(tl.int64) * (SPLITS * EXPERTS_P * ROWS)
        tl.store(tile_parts + split * (EXPERTS_P * ROWS) + offsets, logits)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1) == SPLITS - 1
        if last:
            tl.store(counters + tile, 0)
            logits = tl.zeros((ROWS, EXPERTS_P), tl.float32)
            for part in tl.static_range(SPLITS):
                logits += tl.load(tile_parts + part * (EXPERTS_P * ROWS) + offsets)
    if last:
        if BIAS:
            logits += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)[None, :]
        if ROUNDED:
            logits = logits.to(x.dtype.element_ty).to(tl.float32)
        inside = (experts < EXPERTS)[None, :]
        if SCORE == 0:
            scores = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, -1e30), 1)[:, None]), 0.0)
            scores = scores / tl.sum(scores, 1)[:, None]
        elif SCORE == 2:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            scores = logits
        choice = scores
        if CORRECTED:
            choice += tl.load(correction + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)[None, :]
        # Finite, whatever the logits are: an expert that is chosen becomes -inf, and so none is chosen twice.
        choice = tl.where(choice > -1e30, choice, -1e30)
        choice = tl.where(inside, choice, float("-inf"))
        if GROUPS > 1:
            choice = _keep_groups(choice, EXPERTS_P, ROWS, GROUPS, KEPT, BEST)
        numbers = tl.arange(0, TOP_P)[None, :]
        values = tl.full((ROWS, TOP_P), float("-inf") if SCORE == 1 else 0.0, tl.float32)
        for number in tl.static_range(TOP):
            best = tl.max(choice, 1)
            chosen = tl.min(tl.where(choice == best[:, None], experts[None, :], EXPERTS - 1), 1)
            here = experts[None, :] == chosen[:, None]
            value = best
            if CORRECTED:
                value = tl.sum(tl.where(here, scores, 0.0), 1)
            if SCORE == 3:
                left = choice > -1e30
                far = (best[:, None] - logits) > 2 * jitter * tl.maximum(tl.abs(logits), best[:, None])
                value = 1.0 / tl.sum(tl.where(left & ~far, tl.exp(logits - best[:, None]), 0.0), 1)
            values = tl.where(numbers == number, value[:, None], values)
            choice = tl.where(here, float("-inf"), choice)
            tl.store(ids + row_ids * TOP + number, chosen, mask=row_ids < rows)
        if SCORE == 1:
            values = tl.exp(values - tl.max(values, 1)[:, None])
        if NORMALISED or SCORE == 1:
            values = values / (tl.sum(values, 1)[:, None] + 1e-20)
        values = values * scale
        pairs = row_ids[:, None] * TOP + numbers
        tl.store(factors + pairs, values.to(factors.dtype.element_ty), mask=(row_ids < rows)[:, None] & (numbers < TOP))


@triton.jit
def _keep_groups(
    choice, EXPERTS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Make scores outside of the best groups the lowest."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    grouped = tl.reshape(choice, (ROWS, GROUPS, SIZE))
    totals = tl.max(grouped, 2)
    if BEST == 2:
        places = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == totals[:, :, None], places, SIZE), 2)
        totals += tl.max(tl.where(places == first[:, :, None], float("-inf"), grouped), 2)
    numbers = tl.arange(0, GROUPS)[None, :]
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        best = tl.max(totals, 1)
        chosen = tl.min(tl.where(totals == best[:, None], numbers, GROUPS - 1), 1)
        here = numbers == chosen[:, None]
        kept = tl.where(here, 1, kept)
        totals = tl.where(here, float("-inf"), totals)
    grouped = tl.where(kept[:, :, None] > 0, grouped, -2e30)
    return tl.reshape(grouped, (ROWS, EXPERTS))


@triton.jit(do_not_specialize=["pairs", "stride"])
def collect(ids, members, sizes, pairs, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (expert): ``members[expert * stride:]``, the pairs of this expert in ascending order; their number."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    size = 0
    for first in range(0, pairs, BLOCK):
        here = tl.load(ids + first + offsets, mask=first + offsets < pairs, other=-1) == expert
        places = size + tl.cumsum(here.to(tl.int32), 0) - 1
        # A row has an expert once, so there are at most ``stride``; ids from elsewhere must not write beyond them.
        kept = here & (places < stride)
        tl.store(members + expert.to(tl.int64) * stride + places, first + offsets, mask=kept)
        size += tl.sum(kept.to(tl.int32), 0)
    tl.store(sizes + expert, size)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, ACT: tl.constexpr, alpha, limit):
    """``act(gate) * up`` of float32 values, rounded where torch would round."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACT == 2:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    return activation(gate, ACT).to(dtype).to(tl.float32) * up


PAIRED: tl.constexpr = tl.constexpr("""
{
  .reg .b32 both, low, high;
  prmt.b32 both, $4, 0, 0x4140;
  shl.b32 low, both, 6;   and.b32 low, low, 0x01C001C0;
  shl.b32 high, both, 12; and.b32 high, high, 0x80008000;
  or.b32 $0, low, high;
  shl.b32 low, both, 2;   and.b32 low, low, 0x01C001C0;
  shl.b32 high, both, 8;  and.b32 high, high, 0x80008000;
  or.b32 $2, low, high;
  prmt.b32 both, $4, 0, 0x4342;
  shl.b32 low, both, 6;   and.b32 low, low, 0x01C001C0;
  shl.b32 high, both, 12; and.b32 high, high, 0x80008000;
  or.b32 $1, low, high;
  shl.b32 low, both, 2;   and.b32 low, low, 0x01C001C0;
  shl.b32 high, both, 8;  and.b32 high, high, 0x80008000;
  or.b32 $3, low, high;
  prmt.b32 both, $5, $6, 0x5410; mul.rn.bf16x2 $0, $0, both;
  prmt.b32 both, $7, $8, 0x5410; mul.rn.bf16x2 $1, $1, both;
  prmt.b32 both, $5, $6, 0x7632; mul.rn.bf16x2 $2, $2, both;
  prmt.b32 both, $7, $8, 0x7632; mul.rn.bf16x2 $3, $3, both;
}
""")


@triton.jit
def widened(packed, scales, dtype: tl.constexpr):
    """The values of the low and of the high four bits of bytes, times 2**-63.

    Four bits are a sign, two bits of exponent and one of fraction. As the bits of a wider float they are the value
    times 2**-126. ``scales`` are two bfloat16 in an integer, of the low and the high values: the powers of two times
    2**63.
    """
    scales = tl.broadcast_to(scales[:, None], packed.shape)
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            PAIRED, "=r,=r,=r,=r,r,r,r,r,r", [packed, scales], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        bits = packed.to(tl.int32)
        low = ((bits & 7) << 22 | (bits & 8) << 28).to(tl.float32, bitcast=True)
        high = ((bits & 0x70) << 18 | (bits & 0x80) << 24).to(tl.float32, bitcast=True)
        low = (low * (scales << 16).to(tl.float32, bitcast=True)).to(dtype)
        high = (high * (scales & -65536).to(tl.float32, bitcast=True)).to(dtype)
    return low, high


@triton.jit(do_not_specialize=["stride"])
def product(
    x, weight, scales, bias, factors, ids, members, sizes, out, stride, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOP: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows of an expert): ``out[pair] = x[pair // TOP] @ weight[expert].T (+ bias) (* factor)``.

    Computed transposed: the tensor cores take at least 64 rows at a time, and an expert has more columns than rows.
    Every sum runs over K in the same order, in steps of the tensor cores, and is never split.

    GATED: ``weight`` has 2 N rows; ``out = act(x @ first half) * (x @ second half)``.
    SINGLE: there is one row; its pairs are the tiles. ``members`` and ``sizes`` are unused.
    BULK: ``weight`` is a descriptor of all experts' rows, for bulk tensor copies.
    KIND: WIDE; NARROW: a row's values times its entry of ``scales``; MXFP4: STEP rows are stored together, step after
        step of their values: (STEP rows, STEP / 2 bytes), a byte with a value of the first half of the step in its low
        bits and one of the second half in its high bits, and as many ``scales`` as rows. See ``widened``.
    """
    column_tile, tile = tl.program_id(0), tl.program_id(1)
    places = tl.arange(0, ROWS)
    if SINGLE:
        expert, size, total = tl.load(ids + tile), 1, tile + 1
        pairs = tile + tl.zeros((ROWS,), tl.int32)
    else:
        experts = tl.arange(0, EXPERTS_P)
        all_sizes = tl.load(sizes + experts, mask=experts < EXPERTS, other=0)
        tiles = (all_sizes + (ROWS - 1)) // ROWS
        total = tl.sum(tiles, 0)
        expert = tl.minimum(tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0), EXPERTS - 1)
        size = tl.sum(tl.where(experts == expert, all_sizes, 0), 0)
        places += (tile - tl.sum(tl.where(experts < expert, tiles, 0), 0)) * ROWS
    if tile < total:
        if not SINGLE:  # rows beyond the last are computed again, not stored
            pairs = tl.load(members + expert.to(tl.int64) * stride + tl.minimum(places, size - 1))
        columns, ks = column_tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        inside = columns < N
        base = expert.to(tl.int64) * (2 * N if GATED else N)
        x_ptrs = x + (pairs // TOP).to(tl.int64)[None, :] * K
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        if GATED:
            up_acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        if KIND == 2:
            halves = tl.arange(0, STEP // 2)
            x_ptrs += halves[:, None]
            kept = columns if N % COLUMNS == 0 else tl.minimum(columns, N - 1)
            stored = base // STEP + kept // STEP  # N is a multiple of STEP
            steps: tl.constexpr = K // STEP
            word_ptrs = scales + stored * (steps * STEP) + kept % STEP
            weight_ptrs = weight + (stored * (steps * STEP) + kept % STEP)[:, None] * (STEP // 2) + halves[None, :]
            for _ in range(steps):
                x_low, x_high = tl.load(x_ptrs), tl.load(x_ptrs + STEP // 2)
                low, high = widened(tl.load(weight_ptrs), tl.load(word_ptrs), x_low.dtype)
                acc = tl.dot(low, x_low, acc, input_precision=PRECISION)
                acc = tl.dot(high, x_high, acc, input_precision=PRECISION)
                if GATED:
                    low, high = widened(
                        tl.load(weight_ptrs + N * (K // 2)), tl.load(word_ptrs + N * steps), x_low.dtype
                    )
                    up_acc = tl.dot(low, x_low, up_acc, input_precision=PRECISION)
                    up_acc = tl.dot(high, x_high, up_acc, input_precision=PRECISION)
                x_ptrs += STEP
                weight_ptrs += STEP * (STEP // 2)
                word_ptrs += STEP
            acc *= 9223372036854775808.0
            if GATED:
                up_acc *= 9223372036854775808.0
        else:
            first_row = (base + column_tile * COLUMNS).to(tl.int32)
            if not BULK:
                weight_ptrs = weight + (base + tl.minimum(columns, N - 1))[:, None] * K + ks[None, :]
            x_ptrs += ks[:, None]
            for k in range(0, K, DEPTH):
                x_tile = tl.load(x_ptrs) if K % DEPTH == 0 else tl.load(x_ptrs, mask=ks[:, None] < K - k, other=0.0)
                if BULK:
                    weight_tile = weight.load([first_row, k])
                    if GATED:
                        up_tile = weight.load([first_row + N, k])
                elif K % DEPTH == 0:
                    weight_tile = tl.load(weight_ptrs)
                    if GATED:
                        up_tile = tl.load(weight_ptrs + N * K)
                else:
                    weight_tile = tl.load(weight_ptrs, mask=ks[None, :] < K - k, other=0.0)
                    if GATED:
                        up_tile = tl.load(weight_ptrs + N * K, mask=ks[None, :] < K - k, other=0.0)
                acc = tl.dot(weight_tile.to(x_tile.dtype), x_tile, acc, input_precision=PRECISION)
                if GATED:
                    up_acc = tl.dot(up_tile.to(x_tile.dtype), x_tile, up_acc, input_precision=PRECISION)
                if not BULK:
                    weight_ptrs += DEPTH
                x_ptrs += DEPTH
            if KIND == 1:
                acc *= tl.load(scales + base + columns, mask=inside, other=0.0)[:, None]
                if GATED:
                    up_acc *= tl.load(scales + base + N + columns, mask=inside, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias + base + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                up_acc += tl.load(bias + base + N + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
            acc = gated(acc, up_acc, out.dtype.element_ty, ACT, alpha, limit)
        if WEIGHTED:
            acc = acc.to(out.dtype.element_ty).to(tl.float32) * tl.load(factors + pairs).to(tl.float32)[None, :]
        out_ptrs = out + pairs.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside[:, None] & (places < size)[None, :])


@triton.jit
def combine(
    x, added, out, N: tl.constexpr, TOP: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (row, columns): ``out[row] = x[row * TOP] + … + x[row * TOP + TOP - 1] (+ added[row])``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(TOP):
        total += tl.load(x + (row * TOP + number) * N + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(added + row * N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=inside)
