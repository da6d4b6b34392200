"""Faster replacements for the modules of a model. ``rewrite`` installs them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.workers.engines.native.cuda import fp8, rows
from penstock.workers.engines.native.cuda.fusions import FUSIONS, dependent
from penstock.workers.engines.native.cuda.rows import invariant_product
from penstock.workers.engines.native.model.model import float32_product
from penstock.workers.engines.native.model.parallel import RankGroup


class RotationForm(NamedTuple):
    """How a function rotates queries and keys.

    Attributes:
        width: of its cosines and sines; 0: it takes complex numbers, ``cos + i sin``, half as many as a head's values.
        in_pairs, out_pairs: whether values that are rotated together are neighbours, before and after; otherwise they
            are a half of the head apart.
    """

    width: int
    in_pairs: bool = False
    out_pairs: bool = False

    def takes(self, factors: Tensor) -> bool:
        """Whether these can be the cosines, or complex numbers, of one packed batch."""
        packed = factors.dim() == 3 and factors.shape[0] == 1
        return packed and (factors.shape[-1] == self.width if self.width else factors.is_complex())


class Rotation:
    """Passes cosines and sines from the place where a layer would rotate to its attention, which rotates instead.

    Attributes:
        form: of what was deferred last.
    """

    def __init__(self) -> None:
        self._deferred: tuple[Tensor, Tensor] | None = None
        self.form = RotationForm(0)

    def replacement(self, function: Callable[..., tuple[Tensor, Tensor]], form: RotationForm) -> Callable[..., Any]:
        """A replacement for a function of this form that defers rotation, if it gets what the form says."""

        def defer(q: Tensor, k: Tensor, *factors: Any, **more: Any) -> tuple[Tensor, Tensor]:
            if more or len(factors) != (2 if form.width else 1) or not form.takes(factors[0]):
                return function(q, k, *factors, **more)
            cos, sin = factors if form.width else torch.view_as_real(factors[0]).unbind(-1)
            self._deferred, self.form = (cos, sin), form
            return q, k

        return defer

    def take(self) -> tuple[Tensor, Tensor] | None:
        deferred, self._deferred = self._deferred, None
        return deferred


class RmsNorm(nn.Module):
    """RMS norm in one kernel.

    Attributes:
        given: an input whose result is known, and that result. Cleared by the next call.
    """

    def __init__(self, weight: Tensor, eps: float, kind: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.kind = eps, kind
        self.given: tuple[Tensor, Tensor] | None = None

    def out_dtype(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, self.weight.dtype) if self.kind == rows.ROUNDED else x.dtype

    def forward(self, x: Tensor) -> Tensor:
        given, self.given = self.given, None
        if given is not None and given[0].data_ptr() == x.data_ptr() and given[0].numel() == x.numel():
            return given[1].view(x.shape)
        size = x.shape[-1]
        if x.stride(-1) != 1 or x.dim() < 2:
            x = x.contiguous()
        if x.dim() > 3 and x.shape[0] == 1:
            inner, outer_stride, inner_stride = x.shape[-2], x.stride(-3), x.stride(-2)
        else:
            x = x if x.dim() == 2 or x.shape[0] == 1 else x.contiguous()
            inner, outer_stride, inner_stride = 1, x.stride(-2), 0
        out = torch.empty(x.shape, dtype=self.out_dtype(x), device=x.device)
        padded = 1 << (size - 1).bit_length()
        count = x.numel() // size
        pdl = dependent(x.device, count)
        rows.rms_norm[(count,)](
            x, self.weight, out, self.eps, inner, outer_stride, inner_stride, N=size, N_P=padded, KIND=self.kind,
            PDL=pdl, num_warps=max(1, min(8, padded // 512)),
            **launch_options(pdl),
        )  # fmt: skip
        return out


def next_power_of_2(value: int) -> int:
    """The value or the next power of two above it."""
    return 1 << max(0, value - 1).bit_length()


def launch_options(pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel. Empty unless dependent: Triton's interpreter has no such option."""
    return {"launch_pdl": True} if pdl else {}


class Linear(nn.Module):
    """A linear layer. Its weight is an 8-bit float if there is a ``scale``, (out, 1) float32.

    ``residual``, ``norm`` and ``row_scales`` are set before a call and cleared by it.

    Attributes:
        residual: add the product to it, in place.
        row_scales: those of an input of 8-bit floats; see ``fp8.Narrow``.
        norm: normalise the input by it first; only for inputs that ``takes_gemv`` accepts.
        invariant: a row's result must not depend on the number of rows. Stays set.
        adapters: LoRA adapters, which a hook adds to what ``forward`` returns; None: there are none.
        group: ranks that have a part of the product each; None: it is whole here.
        following: see ``summed``.
        out_dtype: float32: as of an ``OutputLayer``; None: that of the input.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.residual: Tensor | None = None
        self.row_scales: Tensor | None = None
        self._counters = None if scale is None else fp8.counters(self.out_features, weight.device)
        self.invariant, self.out_dtype = False, out_dtype
        self.__dict__["norm"] = None  # a module, but not a child: it belongs to the layer
        self.__dict__["adapters"] = self.__dict__["following"] = None
        self.group: RankGroup | None = None

    def slice_outputs(self, start: int, stop: int) -> "Linear":
        """A layer with the outputs from ``start`` to ``stop`` only."""
        values = (self.weight, self.bias, self.scale)
        weight, bias, scale = (None if each is None else each.data[start:stop] for each in values)
        assert weight is not None
        sliced = Linear(weight, bias, scale)
        sliced.invariant = self.invariant
        return sliced

    def takes_gemv(self, x: Tensor) -> bool:
        """Whether the kernel for a single row computes this input."""
        compute_dtype = x.dtype if self.scale is not None else self.weight.dtype
        adapters = self.__dict__["adapters"]
        if self.invariant or x.itemsize == 1 or (adapters is not None and adapters.active):
            return False
        return x.numel() == self.in_features and x.is_contiguous() and x.dtype == compute_dtype != torch.float32

    def forward(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        norm, self.__dict__["norm"] = self.__dict__["norm"], None
        if self.group is not None and not self.group.apart:
            count = x.numel() // self.in_features
            return summed(self.group, lambda into: self.product(x, into), count, residual, self.__dict__["following"])
        return self.product(x, residual, norm)

    def product(self, x: Tensor, residual: Tensor | None, norm: "RmsNorm | None" = None) -> Tensor:
        """``forward`` of this rank's part."""
        if norm is not None or self.takes_gemv(x):
            return self.gemv(x, residual, norm)
        if self.invariant:
            return invariant_product(x, self.weight, self.bias, residual, self.out_dtype)
        if self.out_dtype is not None:
            return float32_product(x, self.weight, self.bias)
        if self.scale is not None:
            return self.fp8_forward(x, self.scale, residual)
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None:
            return residual.add_(F.linear(x, self.weight, self.bias))
        flat = residual.view(-1, self.out_features)
        torch.addmm(flat, x.view(-1, self.in_features), self.weight.t(), out=flat)
        return residual

    def fp8_forward(self, x: Tensor, scale: Tensor, residual: Tensor | None) -> Tensor:
        """``forward`` with 8-bit floats, as ``quantize.Fp8Linear`` computes it."""
        row_scales, self.row_scales = self.row_scales, None
        if row_scales is None and not fp8.suits(x):
            out = F.linear(x, (self.weight.float() * scale).to(x.dtype), self.bias)
            return out if residual is None else residual.add_(out)
        assert self._counters is not None
        narrow = fp8.narrowed(x) if row_scales is None else fp8.Narrow(x, row_scales)
        return fp8.product(narrow, self.weight, scale, self.bias, residual, self._counters)

    def gemv(self, x: Tensor, residual: Tensor | None, norm: "RmsNorm | None" = None, act: int | None = None) -> Tensor:
        """``forward`` for a single row.

        Args:
            act: the layer is gate and up of an MLP; return ``act(gate) * up``.
        """
        columns = self.out_features if act is None else self.out_features // 2
        out = residual
        if out is None:
            out = torch.empty((*x.shape[:-1], columns), dtype=self.out_dtype or x.dtype, device=x.device)
        block_n, block_k, stages, warps = gemv_shape(self.out_features, self.in_features, self.weight.itemsize)
        if act is not None:
            block_n //= 2
        rows.gemv[(-(-columns // block_n),)](
            x, self.weight, x if self.scale is None else self.scale, x if norm is None else norm.weight,
            x if self.bias is None else self.bias, x if residual is None else residual, out, columns,
            0.0 if norm is None else norm.eps, K=self.in_features, BLOCK_N=block_n, BLOCK_K=block_k,
            BIAS=self.bias is not None, ADDED=residual is not None, NORM=norm is not None,
            SHIFT=float(norm is not None and norm.kind == rows.SHIFTED), GATED=act is not None, ACT=act or 0,
            SCALED=self.scale is not None, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return out


def summed(
    group: RankGroup,
    product: Callable[[Tensor | None], Tensor],
    rows: int,
    residual: Tensor | None,
    following: RmsNorm | None = None,
) -> Tensor:
    """The sum of what ``product`` returns on all ranks.

    Args:
        product: called with what it adds its result to, in place; with None it adds to nothing.
        rows: of the result.
        residual: of the sum. It may be overwritten, or stay as it is.
        following: a norm that is called with the sum of all three, if there is a residual.
    """
    if group.peers is not None and rows <= group.peers.rows:
        return group.peers.add_up(product(None), residual, following if residual is not None else None)
    part = product(residual if group.rank == 0 else None)
    return group.add_up(part)


def gemv_shape(out_features: int, in_features: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows and columns of the weight per program and iteration; pipeline stages; warps."""
    if out_features <= in_features:
        return 4, 1024 // itemsize, 3, 2
    return 4, min(4096 // itemsize, 1 << (in_features - 1).bit_length()), 2, 4


class MergedLinear(nn.Module):
    """Replaces the first of several linear layers that share an input, and computes all of them in one product.

    Args:
        names: of the layers, which are beside each other.
    """

    def __init__(self, linear: Linear, sizes: list[int], names: Sequence[str] = ()) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = sizes
        self._names = names
        self._parts: list[Tensor | None] = []
        self._source: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.linear(x).split(self._sizes, dim=-1)
        self._parts, self._source = [None, *others], x
        return first  # type: ignore[no-any-return]

    def parts(self, path: str) -> list[tuple[str, Linear, int, int]]:
        """Each layer that this module at ``path`` computes: its own path, the product, and where its outputs are."""
        above, starts = path.rpartition(".")[0], [sum(self._sizes[:number]) for number in range(len(self._sizes))]
        return [
            (f"{above}.{name}", self.linear, start, size)
            for name, start, size in zip(self._names, starts, self._sizes, strict=True)
        ]

    def output(self, number: int, x: Tensor) -> Tensor:
        """The output of layer ``number`` for the input of the last call. Each is returned once, then freed."""
        if self._source is not x or (part_output := self._parts[number]) is None:
            start = sum(self._sizes[:number])
            if self.linear.__dict__["adapters"] is not None:  # whose hook is on the whole product
                return self.linear(x)[..., start : start + self._sizes[number]]  # type: ignore[no-any-return]
            return self.linear.slice_outputs(start, start + self._sizes[number])(x)  # type: ignore[no-any-return]
        self._parts[number] = None
        if not any(part is not None for part in self._parts):
            self._source = None
        return part_output


class MergedLinearPart(nn.Module):
    """Replaces one of the other layers; takes its output from ``merged``."""

    def __init__(self, merged: MergedLinear, number: int) -> None:
        super().__init__()
        self._output = merged.output
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._output(self._number, x)


class GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``. ``norm``: see ``Linear``."""

    def __init__(self, gate_up: Linear, down_proj: Linear, act: int) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down_proj
        self._act = act
        self.__dict__["norm"] = None

    def parts(self, path: str) -> list[tuple[str, Linear, int, int]]:
        """As ``MergedLinear.parts``."""
        half = self.gate_up.out_features // 2
        return [
            (f"{path}.gate_proj", self.gate_up, 0, half),
            (f"{path}.up_proj", self.gate_up, half, half),
            (f"{path}.down_proj", self.down_proj, 0, self.down_proj.out_features),
        ]

    def forward(self, x: Tensor) -> Tensor:
        norm, self.__dict__["norm"] = self.__dict__["norm"], None
        if norm is not None or (FUSIONS.products and self.gate_up.takes_gemv(x)):
            return self.down_proj(self.gate_up.gemv(x, None, norm, self._act))  # type: ignore[no-any-return]
        gate_up = self.gate_up(x)
        if self.down_proj.scale is not None and fp8.suits(gate_up):
            narrow = fp8.gated(gate_up, self._act)
            self.down_proj.row_scales = narrow.scales
            return self.down_proj(narrow.values)  # type: ignore[no-any-return]
        width = gate_up.shape[-1] // 2
        out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
        block = min(2048, 1 << (width - 1).bit_length())
        count = out.numel() // width
        pdl = dependent(x.device, count)
        rows.gate[(count, -(-width // block))](
            gate_up, out, WIDTH=width, ACT=self._act, BLOCK=block, PDL=pdl,
            num_warps=8 if block == 2048 else 1, **launch_options(pdl),
        )  # fmt: skip
        return self.down_proj(out)  # type: ignore[no-any-return]
