"""Weights as 8-bit floats: half the memory of bfloat16, and twice the rate of products where the device has them.

Each output row of a weight has a scale of its own. On a GPU with fp8 products, activations are scaled per token while
the model runs (``torch._scaled_mm``); elsewhere the weight is widened for each product, which saves memory only.
Experts' weights are widened for each product everywhere: few rows share an expert, so reading them takes the time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
ALIGN = 16  # of both sides of a weight, for fp8 products
KEPT = frozenset({"lm_head", "gate", "router"})  # output embeddings, and which experts are chosen


class Fp8Linear(nn.Module):
    """Replaces a linear layer.

    Attributes:
        weight: (out, in) float8_e4m3fn; times ``scale`` (out, 1) float32 it is the layer's.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = narrowed(linear.weight.data)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda and x.dtype == torch.bfloat16):
            return F.linear(x, (self.weight.to(torch.float32) * self.scale).to(x.dtype), self.bias)
        rows, scale = narrowed(x.reshape(-1, self.in_features))
        out = torch._scaled_mm(rows, self.weight.t(), scale, self.scale.t(), out_dtype=x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)


class Fp8Experts(nn.Module):
    """Replaces the experts of a mixture.

    Attributes:
        gate_up: (experts, 2 * inner, in) float8_e4m3fn; times ``gate_up_scale``, (experts, 2 * inner, 1) float32, they
            are the experts'. ``down``: (experts, out, inner).
        is_concatenated: all rows of gate come before those of up; otherwise they come in turns.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.is_concatenated = bool(getattr(experts, "is_concatenated", True))
        self.alpha, self.limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
        for name in ("gate_up", "down"):
            weight = getattr(experts, f"{name}_proj").data
            bias = getattr(experts, f"{name}_proj_bias", None)
            delattr(experts, f"{name}_proj")
            rows = weight.transpose(1, 2) if getattr(experts, "is_transposed", False) else weight
            values = torch.empty(rows.shape, dtype=FP8, device=rows.device)
            scales = torch.empty((*rows.shape[:2], 1), dtype=torch.float32, device=rows.device)
            for expert, each in enumerate(rows):
                values[expert], scales[expert] = narrowed(each)
            self.register_buffer(name, values)
            self.register_buffer(f"{name}_scale", scales)
            self.register_buffer(f"{name}_proj_bias", None if bias is None else bias.data)
        self._gate: Callable[[Tensor], Tensor] = experts._apply_gate

    def forward(self, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """
        Args:
            x: (rows, in).
            ids, factors: (rows, top), of the chosen experts.
        """

        def compute(expert: int, x: Tensor) -> Tensor:
            return self._product("down", expert, self._gate(self._product("gate_up", expert, x)))

        return by_expert(x, ids, factors, compute)

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        values, scale = getattr(self, name)[expert], getattr(self, f"{name}_scale")[expert]
        bias = getattr(self, f"{name}_proj_bias")
        return F.linear(x, (values.float() * scale).to(x.dtype), None if bias is None else bias[expert])


def by_expert(x: Tensor, ids: Tensor, factors: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sums of what ``compute`` returns for the rows of each expert.

    Args:
        ids, factors: (rows, top), of the chosen experts.
    """
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        which, place = torch.where(ids == expert)
        part = compute(expert, x[which]) * factors[which, place, None]
        out.index_add_(0, which, part.to(out.dtype))
    return out


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8, and (rows, 1) float32 scales: the largest value of each row becomes the largest float8."""
    scale = (rows.abs().amax(dim=-1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    return (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def quantize(model: nn.Module) -> int:
    """Replace the linear layers and experts of a language model; returns how many.

    Linear layers of ``KEPT`` and of odd sizes stay, and experts of another form than a gated MLP's.
    """
    count = 0
    for path, module in list(model.named_modules()):
        above, _, name = path.rpartition(".")
        if name == "experts" and _has_gate(module):
            setattr(model.get_submodule(above), name, Fp8Experts(module))
        elif (
            type(module) is nn.Linear
            and name not in KEPT
            and not (module.in_features % ALIGN or module.out_features % ALIGN)
        ):
            setattr(model.get_submodule(above), name, Fp8Linear(module))
        else:
            continue
        count += 1
    return count


def _has_gate(module: Any) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 and weight.is_floating_point() for weight in weights):
        return False
    return hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False)
