"""Weights as 8-bit floats: half the memory of bfloat16, and twice the rate of products where the device has them.

Each output row of a weight has a scale of its own. On a GPU with fp8 products, activations are scaled per token while
the model runs (``torch._scaled_mm``); elsewhere the weight is widened for each product, which saves memory only.
"""

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


def narrowed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8, and (rows, 1) float32 scales: the largest value of each row becomes the largest float8."""
    scale = (rows.abs().amax(dim=-1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    return (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def quantize(model: nn.Module) -> int:
    """Replace the linear layers of a language model, except those of ``KEPT`` and of odd sizes; returns how many."""
    count = 0
    for path, module in list(model.named_modules()):
        above, _, name = path.rpartition(".")
        if type(module) is not nn.Linear or name in KEPT:
            continue
        if module.in_features % ALIGN or module.out_features % ALIGN:
            continue
        setattr(model.get_submodule(above), name, Fp8Linear(module))
        count += 1
    return count
