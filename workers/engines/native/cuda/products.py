"""Products whose rows do not depend on how many rows there are, unlike those of libraries, which choose by that number.

All sums run over the inner dimension in the same order, in steps of the tensor cores; none is split.
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
GROUP = 8  # tiles of rows that go through the weight together, while it is in the cache


def shape_for(rows: int) -> Shape:
    """The tile of a product: speed depends on it, the result does not (``python -m tests.gpu.invariant`` checks it)."""
    if rows <= FEW.rows:
        return FEW
    return SOME if rows <= 2 * SOME.rows else MANY


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, added, out, rows, columns, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BIAS: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T (+ bias) (+ added)``; program (tile)."""
    number = tl.program_id(0)
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = number // (GROUP_ROWS * wide)
    height = tl.minimum(tall - group * GROUP_ROWS, GROUP_ROWS)
    down = group * GROUP_ROWS + (number % (GROUP_ROWS * wide)) % height
    right = (number % (GROUP_ROWS * wide)) // height
    mine, theirs = down * ROWS + tl.arange(0, ROWS), right * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    exists = (mine < rows)[:, None]
    column = (theirs % columns).to(tl.int64)  # what wraps around is not stored
    left = x + mine.to(tl.int64)[:, None] * x_stride + depth[None, :]
    above = weight + column[None, :] * K + depth[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a, b = tl.load(left, mask=exists, other=0.0), tl.load(above)
        else:
            a = tl.load(left, mask=exists & (depth[None, :] < K - at), other=0.0)
            b = tl.load(above, mask=depth[:, None] < K - at, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        left += DEPTH
        above += DEPTH
    if BIAS:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    to = mine.to(tl.int64)[:, None] * out_stride + theirs[None, :]
    legal = (mine < rows)[:, None] & (theirs < columns)[None, :]
    if ADDED:
        acc += tl.load(added + to, mask=legal, other=0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=legal)


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
