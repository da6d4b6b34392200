"""Layers whose weights are 8-bit floats, with inputs of 8-bit floats: each row of an input has a scale of its own."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.engines.native.cuda import fp8_kernels
from penstock.workers.engines.native.cuda.few_rows import COLUMNS, FewRowsShape, shape_for
from penstock.workers.engines.native.cuda.fusions import dependent
from penstock.workers.engines.native.model.quantize import FP8, LARGEST


class Narrow(NamedTuple):
    """Rows of 8-bit floats.

    Attributes:
        values: (..., n) float8_e4m3fn.
        scales: (rows, 1) float32; times these, the values are the rows.
    """

    values: Tensor
    scales: Tensor


def suits(x: Tensor) -> bool:
    """Whether rows like these can be narrowed on this device."""
    return x.is_cuda and x.dtype == torch.bfloat16


def narrowed(x: Tensor) -> Narrow:
    rows = x.reshape(-1, x.shape[-1])
    narrow, options = _empty(x, x.shape[-1])
    fp8_kernels.narrow[(len(rows),)](rows, narrow.values, narrow.scales, rows.stride(0), **options)
    return narrow


def normalised(x: Tensor, norm: Any, added: Tensor | None = None) -> Narrow:
    """Rows after an RMS norm (``modules.RmsNorm``).

    Args:
        x: contiguous.
        added: contiguous; is added to ``x`` first, in place.
    """
    narrow, options = _empty(x, x.shape[-1])
    fp8_kernels.norm_narrow[(len(narrow.scales),)](
        x, x if added is None else added, norm.weight, narrow.values, narrow.scales, norm.eps,
        KIND=norm.kind, ADDED=added is not None, **options,
    )  # fmt: skip
    return narrow


def gated(gate_up: Tensor, act: int) -> Narrow:
    """``act(gate) * up`` of rows (..., gate and up beside each other)."""
    width = gate_up.shape[-1] // 2
    narrow, options = _empty(gate_up, width)
    options["WIDTH"], options["WIDTH_P"] = options.pop("N"), options.pop("N_P")
    fp8_kernels.gate_narrow[(len(narrow.scales),)](gate_up, narrow.values, narrow.scales, ACT=act, **options)
    return narrow


def _empty(x: Tensor, width: int) -> tuple[Narrow, dict[str, Any]]:
    """Room for the rows of ``x``, and common arguments of the kernel that fills it."""
    count, padded = x.numel() // x.shape[-1], 1 << (width - 1).bit_length()
    values = torch.empty((*x.shape[:-1], width), dtype=FP8, device=x.device)
    pdl = dependent(x.device, count)
    options = {"N": width, "N_P": padded, "LARGEST": LARGEST, "PDL": pdl, "num_warps": max(1, min(16, padded // 512))}
    if pdl:
        options["launch_pdl"] = True
    return Narrow(values, torch.empty((count, 1), dtype=torch.float32, device=x.device)), options


def counters(columns: int, device: torch.device) -> Tensor:
    """What ``product`` needs for each layer; 0 between products."""
    return torch.zeros(-(-columns // COLUMNS), dtype=torch.int32, device=device)


def product(
    x: Narrow, weight: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None, counts: Tensor
) -> Tensor:
    """A linear layer over the rows of ``x``, in bfloat16.

    Args:
        weight: (out, in) float8_e4m3fn; times ``scales``, (out, 1) float32, it is the layer's.
        residual: (..., out), contiguous: the product is added to it, in place.
        counts: ``counters`` of the layer.
    """
    count, (columns, inner) = len(x.scales), weight.shape
    shape = shape_for(count, columns, inner)
    if shape is None:
        rows = x.values.view(-1, inner)
        large = torch._scaled_mm(
            rows, weight.t(), x.scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        ).view(*x.values.shape[:-1], columns)
        if bias is not None:
            large += bias
        return large if residual is None else residual.add_(large)
    out = residual
    if out is None:
        out = torch.empty((*x.values.shape[:-1], columns), dtype=torch.bfloat16, device=weight.device)
    launch(shape, x, weight, scales, bias, residual, out, counts)
    return out


def launch(
    shape: FewRowsShape, x: Narrow, weight: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None,
    out: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Compute a product of few rows with a given shape."""
    columns, inner = weight.shape
    tiles = -(-columns // shape.columns)
    parts = x.scales
    if shape.splits > 1:
        parts = torch.empty(
            tiles * shape.splits * shape.columns * shape.rows, dtype=torch.float32, device=weight.device
        )
    fp8_kernels.few_rows[(tiles, shape.splits)](
        x.values, x.scales, weight, scales, out if bias is None else bias, out if residual is None else residual, out,
        parts, counts, len(x.scales), columns,
        K=inner, ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=shape.depth, SPLITS=shape.splits,
        BIAS=bias is not None, ADDED=residual is not None, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
