"""How a product of few rows by weights of 8-bit floats is split into programs. No torch."""

from typing import NamedTuple

FEW = 64  # rows up to which a kernel of our own computes products
MORE = 128  # likewise products of so few columns that torch leaves half of the multiprocessors idle
FEW_TILES = 66
PROGRAMS = 200  # of products whose columns alone make fewer
COLUMNS = 64  # per program
DEPTHS = (256, 128, 64)  # of the inner dimension that a program takes at a time
LOADED = 150_000, 100_000  # bytes that a program loads ahead: of split products, of others


class FewRowsShape(NamedTuple):
    """How a product of few rows is computed.

    Attributes:
        rows: those of the input, padded; at least 16.
        columns, depth: of the weight that a program takes at a time.
        splits: programs that compute parts of the same outputs.
        warps, stages: see ``triton.Config``.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


def shape_for(rows: int, columns: int, inner: int) -> FewRowsShape | None:
    """How to compute a product of this many rows; None: by torch. Measured by ``tests.gpu.times``.

    Args:
        columns, inner: of the layer's weight.
    """
    tiles, padded = -(-columns // COLUMNS), max(16, 1 << (rows - 1).bit_length())
    large = padded > (FEW if tiles < PROGRAMS else FEW // 2)  # a deep tile would leave too little shared memory
    depth = next((depth for depth in DEPTHS[large:] if inner % depth == 0), 0)
    if not depth or rows > (MORE if tiles <= FEW_TILES else FEW):
        return None
    splits = 1
    while 2 * splits * tiles <= PROGRAMS and inner % (2 * splits * depth) == 0:
        splits *= 2
    stages = LOADED[splits == 1] // (depth * (COLUMNS + padded))
    return FewRowsShape(padded, COLUMNS, depth, splits, 4, max(2, min(6, stages)))
