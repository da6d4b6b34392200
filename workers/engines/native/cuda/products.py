"""Matrix products whose rows do not depend on the number of rows. Libraries choose their kernels by that number.

Every sum runs over the inner dimension in the same order, in steps of the tensor cores, and is never split.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Shape(NamedTuple):
    """Rows, columns and depth of a tile; warps; stages of the pipeline that loads it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW = Shape(64, 32, 128, 4, 5)
SOME = Shape(128, 64, 64, 4, 4)
MANY = Shape(128, 256, 64, 8, 3)
GROUP = 8  # row tiles that share a column tile of the weight while it is in the cache


def shape_for(rows: int) -> Shape:
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


def invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """A linear layer over the rows of ``x``.

    Args:
        x: (..., in), weight: (out, in), bias: (out,).
        residual: (..., out), contiguous: the product is added to it, in place.
    """
    columns, inner = weight.shape
    flat = x.reshape(-1, inner)
    count = len(flat)
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device) if residual is None else residual
    shape = shape_for(count)
    product[(-(-count // shape.rows) * -(-columns // shape.columns),)](
        flat, weight, weight if bias is None else bias, out, out, count, columns, flat.stride(0), columns,
        K=inner, ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=shape.depth, GROUP_ROWS=GROUP,
        BIAS=bias is not None, ADDED=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.warps, num_stages=shape.stages if x.element_size() < 4 else 2,
    )  # fmt: skip
    return out
