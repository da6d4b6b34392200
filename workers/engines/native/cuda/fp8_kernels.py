"""Kernels of layers whose weights are 8-bit floats: rows narrowed to 8 bits, alone or after a norm or a gate, and the
product of a few rows.
"""

import triton
import triton.language as tl

from penstock.workers.engines.native.cuda.rows import activation


@triton.jit
def _store_narrowed(values, out_ptrs, scale_ptr, mask, LARGEST: tl.constexpr):
    """Store a row of float32 values as 8-bit floats with maximum LARGEST, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, 1e-12)
    values = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    tl.store(out_ptrs, values.to(out_ptrs.dtype.element_ty), mask=mask)
    tl.store(scale_ptr, scale)


@triton.jit
def narrow(x, out, scales, stride, N: tl.constexpr, N_P: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr):
    """Program (row): the row in 8-bit floats."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, N_P)
    mask = dims < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * stride + dims, mask=mask, other=0.0).to(tl.float32)
    _store_narrowed(values, out + row * N + dims, scales + row, mask, LARGEST)


@triton.jit
def norm_narrow(
    x, added, weight, out, scales, eps, N: tl.constexpr, N_P: tl.constexpr, KIND: tl.constexpr, ADDED: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the row after an RMS norm (see ``rows.rms_norm``) in 8-bit floats.

    ADDED: ``x += added`` first, in place.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, N_P)
    mask = dims < N
    factor = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(x + row * N + dims, mask=mask, other=0.0)
    dtype = loaded.dtype
    if ADDED:
        more = tl.load(added + row * N + dims, mask=mask, other=0.0)
        loaded = (loaded.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(x + row * N + dims, loaded, mask=mask)
    values = loaded.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    if KIND == 0:
        result = values.to(dtype).to(tl.float32) * factor
    elif KIND == 1:
        result = values * (1.0 + factor)
    else:
        result = values * factor
    result = result.to(dtype).to(tl.float32)
    _store_narrowed(result, out + row * N + dims, scales + row, mask, LARGEST)


@triton.jit
def gate_narrow(
    x, out, scales, WIDTH: tl.constexpr, ACT: tl.constexpr, WIDTH_P: tl.constexpr, LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): ``rows.gate`` in 8-bit floats."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_P)
    mask = columns < WIDTH
    gate_ptrs = x + row * (2 * WIDTH) + columns
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    value = activation(loaded.to(tl.float32), ACT)
    result = (value.to(loaded.dtype).to(tl.float32) * up).to(loaded.dtype).to(tl.float32)
    _store_narrowed(result, out + row * WIDTH + columns, scales + row, mask, LARGEST)


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x, x_scales, weight, scales, bias, added, out, parts, counters, rows, N,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (columns, split): ``out = x @ weight.T`` over a part of the inner dimension; x of up to ROWS rows.

    The product is computed transposed, because the tensor cores take at least 64 rows, and there are more columns. The
    last split of a tile adds all and scales the sum; then ``counters`` is 0 again.

    ADDED: the product is added to ``added``, which may be ``out``.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    columns, row_ids, ks = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, DEPTH)
    begin = split * (K // SPLITS)
    # Columns and rows beyond the last are read again, not stored.
    weight_ptrs = weight + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + (begin + ks)[None, :]
    x_ptrs = x + tl.minimum(row_ids, rows - 1)[None, :] * K + (begin + ks)[:, None]
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for _ in range(0, K // SPLITS, DEPTH):
        acc = tl.dot(tl.load(weight_ptrs), tl.load(x_ptrs), acc)
        weight_ptrs += DEPTH
        x_ptrs += DEPTH
    last = True
    if SPLITS > 1:
        offsets = tl.arange(0, COLUMNS)[:, None] * ROWS + row_ids[None, :]
        tile_parts = parts + tile.to(tl.int64) * (SPLITS * COLUMNS * ROWS)
        tl.store(tile_parts + split * (COLUMNS * ROWS) + offsets, acc)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1) == SPLITS - 1
        if last:
            tl.store(counters + tile, 0)
            acc = tl.zeros((COLUMNS, ROWS), tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(tile_parts + part * (COLUMNS * ROWS) + offsets)
    if last:
        mask = (columns < N)[:, None] & (row_ids < rows)[None, :]
        column_scales = tl.load(scales + columns, mask=columns < N, other=0.0)
        row_scales = tl.load(x_scales + row_ids, mask=row_ids < rows, other=0.0)
        acc = acc * column_scales[:, None] * row_scales[None, :]
        if BIAS:
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        out_offsets = row_ids.to(tl.int64)[None, :] * N + columns[:, None]
        if ADDED:
            acc += tl.load(added + out_offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=mask)
