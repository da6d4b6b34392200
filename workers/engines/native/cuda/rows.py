"""Kernels over rows: RMS norms, gated activations, products, token ids of a step, sampling.

A product of a single row has a kernel of its own. ``invariant_product`` is one whose rows do not depend on the number
of rows, by which libraries choose their kernels: every sum runs over the inner dimension in the same order, in steps of
the tensor cores, and is never split.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDED, SHIFTED, WIDE = 0, 1, 2  # kinds of RMS norm, see ``rms_norm``
SILU, GELU_TANH = 0, 1


@triton.jit
def rms_norm(
    x, weight, out, eps, inner, outer_stride, inner_stride,
    N: tl.constexpr, N_P: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): RMS norm.

    KIND: ROUNDED rounds the normalised row to x's dtype before it is multiplied by the weight. SHIFTED multiplies by
    1 + weight and WIDE by the weight, both in float32.

    PDL, here and below: the kernel is launched while the previous one may still run. It must not read or write what
    that one writes before ``gdc_wait``. The next kernel may be launched from ``gdc_launch_dependents`` on.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, N_P)
    dim_mask = dims < N
    x_ptrs = x + (row // inner) * outer_stride + (row % inner) * inner_stride + dims
    factor = tl.load(weight + dims, mask=dim_mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(x_ptrs, mask=dim_mask, other=0.0)
    values = loaded.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    if KIND == 0:
        result = values.to(loaded.dtype).to(tl.float32) * factor.to(tl.float32)
    elif KIND == 1:
        result = values * (1.0 + factor.to(tl.float32))
    else:
        result = values * factor.to(tl.float32)
    tl.store(out + row * N + dims, result.to(out.dtype.element_ty), mask=dim_mask)


@triton.jit
def activation(value, ACT: tl.constexpr):
    """The activation of a float32 value."""
    if ACT == 0:
        value = value / (1.0 + tl.exp(-value))
    else:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = 0.5 * value * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    return value


@triton.jit
def gate(x, out, WIDTH: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out[t, i] = act(x[t, i]) * x[t, WIDTH + i]``; program (row, part of the width)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_ptrs = x + row * (2 * WIDTH) + columns
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(gate_ptrs, mask=mask, other=0.0)
    value = activation(loaded.to(tl.float32), ACT)
    up = tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = value.to(loaded.dtype).to(tl.float32) * up
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gemv(
    x, weight, scales, norm, bias, added, out, N, eps, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T (+ bias) (+ added)`` for one row: bound by reading ``weight`` once.

    NORM: x is normalised first, as ``rms_norm`` does (SHIFT: by 1 + weight), without rounding in between.
    SCALED: a row of ``weight`` is multiplied by its entry of ``scales``.
    GATED: ``weight`` has 2 N rows; ``out = act(x @ first half) * (x @ second half)``.

    Not launched as a dependent: the next product's programs would share few multiprocessors while this one ends.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    ks = tl.arange(0, BLOCK_K)
    weight_ptrs = weight + columns.to(tl.int64)[:, None] * K + ks[None, :]
    up_offset = tl.cast(N, tl.int64) * K
    k_mask = ks < K
    mask = column_mask[:, None] & k_mask[None, :]
    weights = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_weights = tl.load(weight_ptrs + up_offset, mask=mask, other=0.0, eviction_policy="evict_first")
    x_chunk = tl.load(x + ks, mask=k_mask, other=0.0).to(tl.float32)
    squares = x_chunk * x_chunk
    if NORM:
        x_chunk = x_chunk * (tl.load(norm + ks, mask=k_mask, other=0.0).to(tl.float32) + SHIFT)
    acc = weights.to(tl.float32) * x_chunk[None, :]
    if GATED:
        up_acc = up_weights.to(tl.float32) * x_chunk[None, :]
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        k_mask = ks + k < K
        mask = column_mask[:, None] & k_mask[None, :]
        weights = tl.load(weight_ptrs + k, mask=mask, other=0.0, eviction_policy="evict_first")
        x_chunk = tl.load(x + k + ks, mask=k_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += x_chunk * x_chunk
            x_chunk = x_chunk * (tl.load(norm + k + ks, mask=k_mask, other=0.0).to(tl.float32) + SHIFT)
        acc += weights.to(tl.float32) * x_chunk[None, :]
        if GATED:
            up_weights = tl.load(weight_ptrs + up_offset + k, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc += up_weights.to(tl.float32) * x_chunk[None, :]
    result = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result = result * scale
    if SCALED:
        result = result * tl.load(scales + columns, mask=column_mask, other=0.0)
    if BIAS:
        result += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_acc, 1) * scale
        if SCALED:
            up = up * tl.load(scales + N + columns, mask=column_mask, other=0.0)
        if BIAS:
            up += tl.load(bias + N + columns, mask=column_mask, other=0.0).to(tl.float32)
        out_dtype = out.dtype.element_ty
        activated = activation(result.to(out_dtype).to(tl.float32), ACT).to(out_dtype).to(tl.float32)
        result = activated * up.to(out_dtype).to(tl.float32)
    if ADDED:
        result += tl.load(added + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=column_mask)


@triton.jit(do_not_specialize=["count"])
def scatter(pairs, table, count, BLOCK: tl.constexpr):
    """``table[pairs[i]] = pairs[count + i]``."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    indices = tl.load(pairs + offsets, mask=mask, other=0)
    tl.store(table + indices, tl.load(pairs + count + offsets, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["count"])
def fetch(known, table_rows, latest, tokens, count, BLOCK: tl.constexpr):
    """Token ids of a step: ``known``, or where that is -1 the last token sampled for the sequence."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    token = tl.load(known + offsets, mask=mask, other=0)
    table_row = tl.load(table_rows + offsets, mask=mask, other=0)
    sampled = tl.load(latest + table_row, mask=mask & (token < 0), other=0)
    tl.store(tokens + offsets, tl.where(token < 0, sampled, token).to(tl.int64), mask=mask)


@triton.jit
def _mix(bits):
    """SplitMix64's output function."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _scaled(logits, token, temperature, masks, number, vocab, MASKED: tl.constexpr, WORDS: tl.constexpr):
    """Logits of tokens, above temperature 0; minus infinity where a mask forbids them."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if MASKED:
        word_ptrs = masks + number.to(tl.int64) * WORDS + token // 32
        words = tl.load(word_ptrs, mask=(token < vocab) & (number >= 0), other=-1)
        value = tl.where((words >> (token % 32)) & 1 != 0, value, float("-inf"))
    return tl.div_rn(value, temperature)


@triton.jit
def _ordered(value):
    """Integers in the order of these floats."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _float(ordered):
    """The float of an integer of ``_ordered``."""
    bits = tl.where(ordered >> 31 != 0, ordered & 0x7FFFFFFF, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _search(
    logits, temperature, masks, number, vocab, most, floor, target, MASS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The least value behind which, among values from ``floor`` on, less than ``target`` is larger.

    Found four bits at a time. Values are integers of ``_ordered``.

    MASS: of the sum of exp(value - most), otherwise of their number.

    Returns: the value; the sum or number of those that are larger. The value is 0 if there is less than ``target`` in
    all.
    """
    digits = tl.arange(0, 16)
    base = tl.full((), 0, tl.uint32)
    larger = tl.full((), 0.0, tl.float64)
    inside = tl.full((), 0x7FFFFFFF, tl.int32)
    shift = tl.full((), 32, tl.uint32)
    for _ in range(8):
        shift -= 4
        if inside > 0:
            sums = tl.zeros((16,), tl.float64)
            counts = tl.zeros((16,), tl.int32)
            upper = base + (tl.full((), 15, tl.uint32) << shift) + ((tl.full((), 1, tl.uint32) << shift) - 1)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                value = _scaled(logits, token, temperature, masks, number, vocab, MASKED, WORDS)
                ordered = _ordered(value)
                here = (ordered >= floor) & (ordered >= base) & (ordered <= upper)
                if tl.max(here.to(tl.int32), 0) > 0:
                    digit = ((ordered - base) >> shift).to(tl.int32)
                    same = (digit[:, None] == digits[None, :]) & here[:, None]
                    counts += tl.sum(same.to(tl.int32), 0)
                    if MASS:
                        weight = tl.exp(value - most)
                        sums += tl.sum(tl.where(same, weight[:, None], 0.0), 0).to(tl.float64)
            if not MASS:
                sums = counts.to(tl.float64)
            after = larger + tl.sum(tl.where(digits[None, :] > digits[:, None], sums[None, :], 0.0), 1)
            found = tl.minimum(tl.sum((after >= target).to(tl.int32), 0), 15)
            larger = tl.sum(tl.where(digits == found, after, 0.0), 0)
            inside = tl.sum(tl.where(digits == found, counts, 0), 0)
            base += found.to(tl.uint32) << shift
    return tl.where(inside > 0, base, tl.full((), 0, tl.uint32)), larger


@triton.jit
def cutoff(
    logits, temperatures, top_ks, log_min_ps, top_ps, least, last, numbers, masks, vocab, row_stride,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (row): the tokens that min_p, then top_k, then top_p keep, as ``sampler.narrow`` does, without sorting.

    Kept are logits, divided by the temperature, above ``least[row]``, and those equal to it up to token ``last[row]``.
    """
    row = tl.program_id(0)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    log_min_p, top_p = tl.load(log_min_ps + row), tl.load(top_ps + row)
    lowest = float("-inf")
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1) & (log_min_p == lowest)):
        tl.store(least + row, lowest)
        tl.store(last + row, vocab)
    else:
        row_logits = logits + row.to(tl.int64) * row_stride
        number = tl.full((), -1, tl.int32)
        if MASKED:
            number = tl.load(numbers + row)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = _scaled(row_logits, token, temperature, masks, number, vocab, MASKED, WORDS)
            largest = tl.maximum(largest, value)
        most = tl.max(largest, 0)
        nothing = tl.full((), 0x00800000, tl.uint32)  # the least finite float; what is forbidden is below
        floor = tl.maximum(_ordered(most + log_min_p), nothing)
        ties = tl.full((), 0x7FFFFFFF, tl.int32)  # tokens with the value of the floor that are kept
        if top_k > 0:
            found, larger = _search(
                row_logits, temperature, masks, number, vocab, most, floor, top_k.to(tl.float64), False, BLOCK,
                MASKED, WORDS,
            )  # fmt: skip
            if found > 0:
                floor = found
                ties = top_k - larger.to(tl.int32)
        if top_p < 1:
            mass = tl.full((), 0.0, tl.float64)
            equal = tl.full((), 0, tl.int32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                value = _scaled(row_logits, token, temperature, masks, number, vocab, MASKED, WORDS)
                ordered = _ordered(value)
                mass += tl.sum(tl.where(ordered > floor, tl.exp(value - most), 0.0), 0).to(tl.float64)
                equal += tl.sum((ordered == floor).to(tl.int32), 0)
            mass += tl.minimum(equal, ties).to(tl.float64) * tl.exp(_float(floor) - most).to(tl.float64)
            target = tl.maximum(top_p * mass, 1e-300)
            found, larger = _search(
                row_logits, temperature, masks, number, vocab, most, floor, target, True, BLOCK, MASKED, WORDS
            )
            if found > 0:
                needed = tl.ceil((target - larger) / tl.exp(_float(found) - most).to(tl.float64))
                needed = tl.minimum(tl.maximum(needed, 1.0), 2147483647.0).to(tl.int32)
                ties = tl.where(found == floor, tl.minimum(ties, needed), needed)
                floor = found
        last_token = tl.full((), 0, tl.int32) + vocab
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = _scaled(row_logits, token, temperature, masks, number, vocab, MASKED, WORDS)
            equals = (_ordered(value) == floor).to(tl.int32)
            count = tl.sum(equals, 0)
            if (seen < ties) & (count >= ties - seen):
                places = tl.cumsum(equals, 0) + seen
                last_token = tl.max(tl.where((equals > 0) & (places == ties), token, -1), 0)
            seen += count
        tl.store(least + row, _float(floor))
        tl.store(last + row, last_token)


@triton.jit
def sample(
    logits, keys, temperatures, table_rows, chunk_values, chunk_tokens, counters, latest, sampled, numbers,
    masks, least, last, vocab, row_stride,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, RANDOM: tl.constexpr,
    MASKED: tl.constexpr, WORDS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk of the vocabulary): the token with the largest logit, plus Gumbel noise above temperature 0.

    The last chunk of a row to finish writes the token to ``sampled[row]`` and, if the row has a table row, to
    ``latest[table_row]``.

    MASKED: only tokens whose bit is set in the mask of this number are drawn, if it is at least 0.
    CUT: only tokens that ``cutoff`` keeps are drawn.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    row_logits = logits + row.to(tl.int64) * row_stride
    offsets = tl.arange(0, BLOCK)
    max_values = tl.full((BLOCK,), float("-inf"), tl.float32)
    max_ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    if MASKED:
        number = tl.load(numbers + row)
    temperature = 0.0
    key = tl.full((), 0, tl.uint64)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    if CUT:
        least_value, last_token = tl.load(least + row), tl.load(last + row)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), BLOCK):
        token = start + offsets
        value = tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        if MASKED:
            word_ptrs = masks + number.to(tl.int64) * WORDS + token // 32
            words = tl.load(word_ptrs, mask=(token < vocab) & (number >= 0), other=-1)
            value = tl.where((words >> (token % 32)) & 1 != 0, value, float("-inf"))
        if RANDOM:
            if temperature > 0:
                bits = _mix(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
                uniform = (bits >> 1).to(tl.float32) * 1.0842021724855044e-19
                uniform = tl.minimum(tl.maximum(uniform, 1.0842021724855044e-19), 0.999999940395)
                # log1p(-u): small values decide the winner and must keep their precision
                u = uniform
                small = -u * (1.0 + u * (0.5 + u * (0.333333333 + u * (0.25 + u * (0.2 + u * 0.1666666667)))))
                log_survival = tl.where(u < 0.05, small, tl.log(1.0 - u))
                scaled = tl.div_rn(value, temperature)  # as torch divides
                value = scaled - tl.log(-log_survival)
                if CUT:
                    kept = (scaled > least_value) | ((scaled == least_value) & (token <= last_token))
                    value = tl.where(kept, value, float("-inf"))
        value = tl.where(token < vocab, value, float("-inf"))
        larger = value > max_values
        max_values = tl.where(larger, value, max_values)
        max_ids = tl.where(larger, token, max_ids)
    chunk_max = tl.max(max_values, 0)
    chunk_token = tl.min(tl.where(max_values == chunk_max, max_ids, 0x7FFFFFFF), 0)
    tl.store(chunk_values + row * CHUNKS + chunk, chunk_max)
    tl.store(chunk_tokens + row * CHUNKS + chunk, chunk_token)
    tl.debug_barrier()
    finished = tl.atomic_add(counters + row, 1)
    if finished == CHUNKS - 1:
        tl.store(counters + row, 0)
        chunks = tl.arange(0, CHUNKS_P)
        chunk_mask = chunks < CHUNKS
        values = tl.load(chunk_values + row * CHUNKS + chunks, mask=chunk_mask, other=float("-inf"))
        tokens = tl.load(chunk_tokens + row * CHUNKS + chunks, mask=chunk_mask, other=0x7FFFFFFF)
        token = tl.min(tl.where(values == tl.max(values, 0), tokens, 0x7FFFFFFF), 0)
        token = tl.where(token < vocab, token, 0)  # every logit is NaN
        tl.store(sampled + row, token)
        table_row = tl.load(table_rows + row)
        if table_row >= 0:
            tl.store(latest + table_row, token)


class TileShape(NamedTuple):
    """Rows, columns and depth of a tile; warps; stages of the pipeline that loads it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW = TileShape(64, 32, 128, 4, 5)
SOME = TileShape(128, 64, 64, 4, 4)
MANY = TileShape(128, 256, 64, 8, 3)
GROUP = 8  # row tiles that share a column tile of the weight while it is in the cache


def shape_for(rows: int) -> TileShape:
    """The tile of a product: it changes the speed, not the result (checked by ``tests.gpu.invariant``)."""
    if rows <= FEW.rows:
        return FEW
    return SOME if rows <= 2 * SOME.rows else MANY


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, added, out, rows, columns, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile): ``out = x @ weight.T (+ bias) (+ added)``."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tile // (GROUP_ROWS * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP_ROWS, GROUP_ROWS)
    row_tile = group * GROUP_ROWS + (tile % (GROUP_ROWS * column_tiles)) % group_rows
    column_tile = (tile % (GROUP_ROWS * column_tiles)) // group_rows
    row_ids, column_ids = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    ks = tl.arange(0, DEPTH)
    row_mask = (row_ids < rows)[:, None]
    wrapped_columns = (column_ids % columns).to(tl.int64)  # columns that wrap around are not stored
    x_ptrs = x + row_ids.to(tl.int64)[:, None] * x_stride + ks[None, :]
    weight_ptrs = weight + wrapped_columns[None, :] * K + ks[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        if K % DEPTH == 0:
            x_tile, weight_tile = tl.load(x_ptrs, mask=row_mask, other=0.0), tl.load(weight_ptrs)
        else:
            x_tile = tl.load(x_ptrs, mask=row_mask & (ks[None, :] < K - k), other=0.0)
            weight_tile = tl.load(weight_ptrs, mask=ks[:, None] < K - k, other=0.0)
        acc = tl.dot(x_tile, weight_tile, acc, input_precision=PRECISION)
        x_ptrs += DEPTH
        weight_ptrs += DEPTH
    if BIAS:
        acc += tl.load(bias + wrapped_columns).to(tl.float32)[None, :]
    out_offsets = row_ids.to(tl.int64)[:, None] * out_stride + column_ids[None, :]
    mask = (row_ids < rows)[:, None] & (column_ids < columns)[None, :]
    if ADDED:
        acc += tl.load(added + out_offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=mask)


def invariant_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A linear layer over the rows of ``x``.

    Args:
        x: (..., in), weight: (out, in), bias: (out,).
        residual: (..., out), contiguous: the product is added to it, in place.
        out_dtype: of the result; None: that of ``x``.
    """
    columns, inner = weight.shape
    flat = x.reshape(-1, inner)
    count = len(flat)
    out = residual
    if out is None:
        out = torch.empty((*x.shape[:-1], columns), dtype=out_dtype or x.dtype, device=x.device)
    shape = shape_for(count)
    product[(-(-count // shape.rows) * -(-columns // shape.columns),)](
        flat, weight, weight if bias is None else bias, out, out, count, columns, flat.stride(0), columns,
        K=inner, ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=shape.depth, GROUP_ROWS=GROUP,
        BIAS=bias is not None, ADDED=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.warps, num_stages=shape.stages if x.element_size() < 4 else 2,
    )  # fmt: skip
    return out
