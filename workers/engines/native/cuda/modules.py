"""Faster forms of the modules that models are made of; ``rewrite`` puts them in."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.engines.native.cuda import rows
from workers.engines.native.cuda.fusions import FUSIONS, dependent
from workers.engines.native.cuda.products import invariant_product


class Rotation:
    """Cosines and sines on their way from a layer's rotation to its attention."""

    def __init__(self) -> None:
        self._left: tuple[Tensor, Tensor] | None = None

    def instead_of(self, function: Callable[..., tuple[Tensor, Tensor]], width: int) -> Callable[..., Any]:
        """In place of ``apply_rotary_pos_emb``, for cosines of this width; others are left to the function."""

        def leave(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if args or kwargs or cos.shape[-1] != width or cos.dim() != 3 or cos.shape[0] != 1:
                return function(q, k, cos, sin, *args, **kwargs)
            self._left = (cos, sin)
            return q, k

        return leave

    def take(self) -> tuple[Tensor, Tensor] | None:
        left, self._left = self._left, None
        return left


class Norm(nn.Module):
    """RMS norm in one kernel."""

    def __init__(self, weight: Tensor, eps: float, kind: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.kind = eps, kind

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if x.stride(-1) != 1 or x.dim() < 2:
            x = x.contiguous()
        if x.dim() > 3 and x.shape[0] == 1:
            inner, outer_stride, inner_stride = x.shape[-2], x.stride(-3), x.stride(-2)
        else:
            x = x if x.dim() == 2 or x.shape[0] == 1 else x.contiguous()
            inner, outer_stride, inner_stride = 1, x.stride(-2), 0
        dtype = torch.promote_types(x.dtype, self.weight.dtype) if self.kind == rows.ROUNDED else x.dtype
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        wide = 1 << (size - 1).bit_length()
        count = x.numel() // size
        pdl = dependent(x.device, count)
        rows.rms_norm[(count,)](
            x, self.weight, out, self.eps, inner, outer_stride, inner_stride, N=size, N_P=wide, KIND=self.kind,
            PDL=pdl, num_warps=max(1, min(8, wide // 512)), **launch(pdl),
        )  # fmt: skip
        return out


def launch(pdl: bool) -> dict[str, Any]:
    """Options of a kernel's launch; no option at all where it does not apply, since interpreters know none."""
    return {"launch_pdl": True} if pdl else {}


class Linear(nn.Module):
    """A linear layer; with ``scale``, (out, 1) float32, of 8-bit floats. Attributes set before a call and taken by it:

    Attributes:
        residual: the product is added to it, in place.
        norm: the input still has to be normalised by it; only for a single row, see ``thin``.
        invariant: a row's result does not depend on the number of rows. Stays set.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.residual: Tensor | None = None
        self.invariant = False
        self.__dict__["norm"] = None  # a module, but no child: it stays where it is

    def part(self, start: int, stop: int) -> "Linear":
        """The layer of some of the outputs."""
        values = (self.weight, self.bias, self.scale)
        weight, bias, scale = (None if each is None else each.data[start:stop] for each in values)
        assert weight is not None
        made = Linear(weight, bias, scale)
        made.invariant = self.invariant
        return made

    def thin(self, x: Tensor) -> bool:
        """Whether the kernel for one row serves it."""
        wide = x.dtype if self.scale is not None else self.weight.dtype
        if self.invariant:
            return False
        return x.numel() == self.in_features and x.is_contiguous() and x.dtype == wide != torch.float32

    def forward(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        norm, self.__dict__["norm"] = self.__dict__["norm"], None
        if norm is not None or self.thin(x):
            return self.single(x, residual, norm)
        if self.invariant:
            return invariant_product(x, self.weight, self.bias, residual)
        if self.scale is not None:
            out = self.narrow(x, self.scale)
            return out if residual is None else residual.add_(out)
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None:
            return residual.add_(F.linear(x, self.weight, self.bias))
        flat = residual.view(-1, self.out_features)
        torch.addmm(flat, x.view(-1, self.in_features), self.weight.t(), out=flat)
        return residual

    def narrow(self, x: Tensor, scale: Tensor) -> Tensor:
        """Of 8-bit floats, as ``workers.engines.native.quantize.Fp8Linear`` does it."""
        if not x.is_cuda or x.dtype != torch.bfloat16:
            return F.linear(x, (self.weight.float() * scale).to(x.dtype), self.bias)
        flat = x.reshape(-1, self.in_features)
        count = len(flat)
        small = torch.empty(flat.shape, dtype=self.weight.dtype, device=x.device)
        scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
        pdl, wide = dependent(x.device, count), 1 << (self.in_features - 1).bit_length()
        rows.narrow[(count,)](
            flat, small, scales, flat.stride(0), N=self.in_features, N_P=wide,
            LARGEST=torch.finfo(self.weight.dtype).max, PDL=pdl, num_warps=max(1, min(8, wide // 512)), **launch(pdl),
        )  # fmt: skip
        out = torch._scaled_mm(small, self.weight.t(), scales, scale.t(), out_dtype=x.dtype, use_fast_accum=True)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def single(self, x: Tensor, residual: Tensor | None, norm: "Norm | None" = None, act: int | None = None) -> Tensor:
        """Of one row. ``act``: the layer is gate and up of an MLP, and its activation is wanted."""
        wide = self.out_features if act is None else self.out_features // 2
        out = residual
        if out is None:
            out = torch.empty((*x.shape[:-1], wide), dtype=x.dtype, device=x.device)
        block_n, block_k, stages, warps = thin_shape(self.out_features, self.in_features, self.weight.itemsize)
        if act is not None:
            block_n //= 2
        rows.thin[(-(-wide // block_n),)](
            x, self.weight, x if self.scale is None else self.scale, x if norm is None else norm.weight,
            x if self.bias is None else self.bias, x if residual is None else residual, out, wide,
            0.0 if norm is None else norm.eps, K=self.in_features, BLOCK_N=block_n, BLOCK_K=block_k,
            BIAS=self.bias is not None, ADDED=residual is not None, NORM=norm is not None,
            SHIFT=float(norm is not None and norm.kind == rows.SHIFTED), GATED=act is not None, ACT=act or 0,
            SCALED=self.scale is not None, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return out


def thin_shape(out_features: int, in_features: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows and columns of weight per program and iteration, stages, warps."""
    if out_features <= in_features:
        return 4, 1024 // itemsize, 3, 2
    return 4, min(4096 // itemsize, 1 << (in_features - 1).bit_length()), 2, 4


class Leader(nn.Module):
    """The first of several linear layers with one input: computes all of them."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = sizes
        self._parts: list[Tensor | None] = []
        self._source: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.linear(x).split(self._sizes, dim=-1)
        self._parts, self._source = [None, *others], x
        return first  # type: ignore[no-any-return]

    def part(self, number: int, x: Tensor) -> Tensor:
        """Of this input, once; nothing is kept longer than that."""
        if self._source is not x or (found := self._parts[number]) is None:
            start = sum(self._sizes[:number])
            return self.linear.part(start, start + self._sizes[number])(x)  # type: ignore[no-any-return]
        self._parts[number] = None
        if not any(part is not None for part in self._parts):
            self._source = None
        return found


class Follower(nn.Module):
    def __init__(self, leader: Leader, number: int) -> None:
        super().__init__()
        self._ask = leader.part
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._ask(self._number, x)


class GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``. ``norm``: as of ``Linear``."""

    def __init__(self, gate_up: Linear, down_proj: Linear, act: int) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down_proj
        self._act = act
        self.__dict__["norm"] = None

    def forward(self, x: Tensor) -> Tensor:
        norm, self.__dict__["norm"] = self.__dict__["norm"], None
        if norm is not None or (FUSIONS.products and self.gate_up.thin(x)):
            return self.down_proj(self.gate_up.single(x, None, norm, self._act))  # type: ignore[no-any-return]
        both = self.gate_up(x)
        width = both.shape[-1] // 2
        out = torch.empty((*both.shape[:-1], width), dtype=both.dtype, device=both.device)
        block = min(2048, 1 << (width - 1).bit_length())
        count = out.numel() // width
        pdl = dependent(x.device, count)
        rows.gate[(count, -(-width // block))](
            both, out, WIDTH=width, ACT=self._act, BLOCK=block, PDL=pdl,
            num_warps=8 if block == 2048 else 1, **launch(pdl),
        )  # fmt: skip
        return self.down_proj(out)  # type: ignore[no-any-return]
