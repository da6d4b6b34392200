"""Kernels over rows: RMS norms, gated activations, products of one row, tokens of a step, draws."""

import triton
import triton.language as tl

ROUNDED, SHIFTED, WIDE = 0, 1, 2  # kinds of RMS norm, see ``rms_norm``
SILU, GELU_TANH = 0, 1


@triton.jit
def rms_norm(
    x, weight, out, eps, inner, outer_stride, inner_stride,
    N: tl.constexpr, N_P: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Kind 0: normal in x's dtype, times weight; 1: times 1 + weight, all in float32; 2: times weight, too.

    PDL, here and below: launched while the kernel before may still run, whose results are not to be touched, read or
    written, before ``gdc_wait``. The next kernel may be launched from ``gdc_launch_dependents`` on.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, N_P)
    fits = dims < N
    at = x + (row // inner) * outer_stride + (row % inner) * inner_stride + dims
    factor = tl.load(weight + dims, mask=fits, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(at, mask=fits, other=0.0)
    values = loaded.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    if KIND == 0:
        result = values.to(loaded.dtype).to(tl.float32) * factor.to(tl.float32)
    elif KIND == 1:
        result = values * (1.0 + factor.to(tl.float32))
    else:
        result = values * factor.to(tl.float32)
    tl.store(out + row * N + dims, result.to(out.dtype.element_ty), mask=fits)


@triton.jit
def _activated(value, ACT: tl.constexpr):
    """Of float32."""
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
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    legal = at < WIDTH
    source = x + row * (2 * WIDTH) + at
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(source, mask=legal, other=0.0)
    value = _activated(loaded.to(tl.float32), ACT)
    up = tl.load(source + WIDTH, mask=legal, other=0.0).to(tl.float32)
    result = value.to(loaded.dtype).to(tl.float32) * up
    tl.store(out + row * WIDTH + at, result.to(out.dtype.element_ty), mask=legal)


@triton.jit
def thin(
    x, weight, scales, norm, bias, added, out, N, eps, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T (+ bias) (+ added)`` for one row: bound by reading ``weight`` once.

    NORM: x is normalised first, as ``rms_norm`` does (SHIFT: by 1 + weight), without rounding in between.
    SCALED: a row of ``weight`` is multiplied by its number in ``scales``.
    GATED: ``weight`` has 2 N rows; ``out = act(x @ first half) * (x @ second half)``.

    It is no dependent launch: programs of the next product would crowd on few multiprocessors while this one ends.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    legal = columns < N
    depth = tl.arange(0, BLOCK_K)
    at = weight + columns.to(tl.int64)[:, None] * K + depth[None, :]
    second = tl.cast(N, tl.int64) * K
    inside = depth < K
    part = tl.load(at, mask=legal[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    if GATED:
        other = tl.load(at + second, mask=legal[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    vector = tl.load(x + depth, mask=inside, other=0.0).to(tl.float32)
    squares = vector * vector
    if NORM:
        vector = vector * (tl.load(norm + depth, mask=inside, other=0.0).to(tl.float32) + SHIFT)
    acc = part.to(tl.float32) * vector[None, :]
    if GATED:
        ups = other.to(tl.float32) * vector[None, :]
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        inside = depth + k < K
        part = tl.load(at + k, mask=legal[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        vector = tl.load(x + k + depth, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += vector * vector
            vector = vector * (tl.load(norm + k + depth, mask=inside, other=0.0).to(tl.float32) + SHIFT)
        acc += part.to(tl.float32) * vector[None, :]
        if GATED:
            other = tl.load(
                at + second + k, mask=legal[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            ups += other.to(tl.float32) * vector[None, :]
    result = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result = result * scale
    if SCALED:
        result = result * tl.load(scales + columns, mask=legal, other=0.0)
    if BIAS:
        result += tl.load(bias + columns, mask=legal, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1) * scale
        if SCALED:
            up = up * tl.load(scales + N + columns, mask=legal, other=0.0)
        if BIAS:
            up += tl.load(bias + N + columns, mask=legal, other=0.0).to(tl.float32)
        kind = out.dtype.element_ty
        result = _activated(result.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if ADDED:
        result += tl.load(added + columns, mask=legal, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=legal)


@triton.jit
def narrow(x, out, scales, stride, N: tl.constexpr, N_P: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr):
    """Program (row): the row in an 8-bit float, whose largest number is LARGEST, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, N_P)
    fits = dims < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * stride + dims, mask=fits, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, 1e-12)
    values = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    tl.store(out + row * N + dims, values.to(out.dtype.element_ty), mask=fits)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["count"])
def scatter(pairs, target, count, BLOCK: tl.constexpr):
    """``target[pairs[i]] = pairs[count + i]``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    legal = at < count
    where = tl.load(pairs + at, mask=legal, other=0)
    tl.store(target + where, tl.load(pairs + count + at, mask=legal, other=0), mask=legal)


@triton.jit(do_not_specialize=["count"])
def fetch(known, lanes, latest, tokens, count, BLOCK: tl.constexpr):
    """Token ids of a step: ``known``, or where that is -1 the last token drawn for the lane."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    legal = at < count
    token = tl.load(known + at, mask=legal, other=0)
    lane = tl.load(lanes + at, mask=legal, other=0)
    drawn = tl.load(latest + lane, mask=legal & (token < 0), other=0)
    tl.store(tokens + at, tl.where(token < 0, drawn, token).to(tl.int64), mask=legal)


@triton.jit
def _mixed(bits):
    """SplitMix64's output function."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def draw(
    logits, keys, temperatures, lanes, best, where, counters, latest, drawn, vocab, row_stride,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk of the vocabulary): the best token, after Gumbel noise where the temperature is above 0.

    The last chunk of a row to end writes the token to ``drawn[row]`` and, if it has a lane, to ``latest[lane]``.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    line = logits + row.to(tl.int64) * row_stride
    offsets = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    temperature = 0.0
    key = tl.full((), 0, tl.uint64)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    for at in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), BLOCK):
        token = at + offsets
        value = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        if RANDOM:
            if temperature > 0:
                bits = _mixed(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
                uniform = (bits >> 1).to(tl.float32) * 1.0842021724855044e-19
                uniform = tl.minimum(tl.maximum(uniform, 1.0842021724855044e-19), 0.999999940395)
                # log1p(-u): small values decide who wins, and must keep their precision
                u = uniform
                small = -u * (1.0 + u * (0.5 + u * (0.333333333 + u * (0.25 + u * (0.2 + u * 0.1666666667)))))
                log = tl.where(u < 0.05, small, tl.log(1.0 - u))
                value = value / temperature - tl.log(-log)
        value = tl.where(token < vocab, value, float("-inf"))
        better = value > tops
        tops = tl.where(better, value, tops)
        ids = tl.where(better, token, ids)
    top = tl.max(tops, 0)
    found = tl.min(tl.where(tops == top, ids, 0x7FFFFFFF), 0)
    tl.store(best + row * CHUNKS + chunk, top)
    tl.store(where + row * CHUNKS + chunk, found)
    tl.debug_barrier()
    done = tl.atomic_add(counters + row, 1)
    if done == CHUNKS - 1:
        tl.store(counters + row, 0)
        chunks = tl.arange(0, CHUNKS_P)
        there = chunks < CHUNKS
        values = tl.load(best + row * CHUNKS + chunks, mask=there, other=float("-inf"))
        tokens = tl.load(where + row * CHUNKS + chunks, mask=there, other=0x7FFFFFFF)
        token = tl.min(tl.where(values == tl.max(values, 0), tokens, 0x7FFFFFFF), 0)
        token = tl.where(token < vocab, token, 0)  # nothing but NaN
        tl.store(drawn + row, token)
        lane = tl.load(lanes + row)
        if lane >= 0:
            tl.store(latest + lane, token)
