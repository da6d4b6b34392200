"""Quantised weights: 8-bit floats, which are made here, and the 4 bits of GPT-OSS's experts, which checkpoints store.

8-bit floats take half the memory of bfloat16, with twice the rate of products where the device has them. Each output
row of a weight has a scale of its own. On a GPU with fp8 products, activations are scaled per token while the model
runs (``torch._scaled_mm``); elsewhere the weight is widened for each product, which saves memory only. Experts' weights
are widened for each product everywhere: few rows share an expert, so reading them takes the time.

4 bits take a quarter: 32 values of a row share a power of two (OCP Microscaling Formats, MXFP4). Without this,
transformers widens all of them when it loads a checkpoint, unless it can download kernels.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
ALIGN = 16  # of both sides of a weight, for fp8 products
# Output embeddings, which experts are chosen, and what latents are expanded by, of which parts are used.
KEPT = frozenset({"lm_head", "gate", "router", "kv_b_proj"})


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


GROUP = 32  # values that share a scale
STEP = 64  # values of a row, and rows, that a kernel takes together; see ``packed``
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of exponent and fraction; the highest bit is the sign
SHIFT = 63  # exponents of ``packed`` scales are so much larger


class Mxfp4Experts(nn.Module):
    """Replaces the experts of ``transformers.models.gpt_oss``.

    Attributes:
        gate_up_proj_blocks: (experts, 2 * inner, hidden / 32, 16) uint8, two values a byte, the first one in the low
            bits; rows of gate and up in turns. ``down_proj_blocks``: (experts, hidden, inner / 32, 16).
        gate_up_proj_scales, down_proj_scales: as the blocks without their last dimension, uint8 exponents plus 127.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = experts = config.num_local_experts
        hidden, inner = config.hidden_size, config.intermediate_size
        # Before 5.24 configurations of transformers have no names for what is fixed in its code.
        self.alpha, self.limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        self.gate_up_proj_blocks: nn.Parameter
        self.gate_up_proj_scales: nn.Parameter
        self.down_proj_blocks: nn.Parameter
        self.down_proj_scales: nn.Parameter
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            shape = (experts, rows, columns // GROUP)
            blocks, scales = torch.empty((*shape, GROUP // 2), dtype=torch.uint8), torch.empty(shape, dtype=torch.uint8)
            setattr(self, f"{name}_blocks", nn.Parameter(blocks, requires_grad=False))
            setattr(self, f"{name}_scales", nn.Parameter(scales, requires_grad=False))
            setattr(self, f"{name}_bias", nn.Parameter(torch.empty((experts, rows))))

    def forward(self, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """
        Args:
            x: (rows, hidden).
            ids, factors: (rows, top), of the chosen experts.
        """

        def compute(expert: int, x: Tensor) -> Tensor:
            gate_up = self._product("gate_up_proj", expert, x)
            gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
            return self._product("down_proj", expert, (up + 1) * (gate * torch.sigmoid(gate * self.alpha)))

        return by_expert(x, ids, factors, compute)

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        blocks, scales, bias = (getattr(self, f"{name}_{part}")[expert] for part in ("blocks", "scales", "bias"))
        return F.linear(x, widened(blocks, scales, x.dtype), bias.to(x.dtype))


def is_stored(config: Any) -> bool:
    """Whether a checkpoint's experts are stored so."""
    kind = getattr(config, "quantization_config", None)
    method = kind.get("quant_method") if isinstance(kind, dict) else getattr(kind, "quant_method", None)
    return config.model_type == "gpt_oss" and str(method).rpartition(".")[2].lower() == "mxfp4"


@contextmanager
def as_stored(config: Any) -> Iterator[Any]:
    """A configuration with which transformers loads such a checkpoint into ``Mxfp4Experts``; any other as it is."""
    if not is_stored(config):
        yield config
        return
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    plain = copy.deepcopy(config)
    del plain.quantization_config
    before = GptOssMLP.__init__

    def make(self: Any, config: Any) -> None:
        before(self, config)
        self.experts = Mxfp4Experts(config)

    GptOssMLP.__init__ = make
    try:
        yield plain
    finally:
        GptOssMLP.__init__ = before


def widened(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks (…, groups, 16) and their scales as values (…, 32 * groups)."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float32, device=blocks.device)
    values = table[torch.stack([blocks & 15, blocks >> 4], -1).to(torch.int32)].flatten(-2)
    return torch.ldexp(values, scales.to(torch.int32)[..., None] - 127).flatten(-2).to(dtype)


def packed(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales in the order in which ``cuda.expert_kernels.product`` reads them.

    Args:
        blocks: (experts, rows, groups, 16), rows: a multiple of ``STEP``, groups: even.
        scales: (experts, rows, groups).
    Returns: (experts, rows, 16 * groups) uint8 and (experts, rows, groups / 2) int32. In memory there are, for each
        ``STEP`` rows and step of ``STEP`` values, 32 bytes a row and an integer a row: of the scales of the step's
        first and of its second half, as bfloat16.
    """
    experts, rows, groups, _ = blocks.shape
    bits = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # one value each
    halves = bits.view(experts, rows, groups // 2, 2, GROUP)
    joined = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    exponents = (scales.to(torch.int32) + SHIFT).clamp(1, 254) << 7
    words = exponents[..., ::2] | exponents[..., 1::2] << 16
    together = joined.view(experts, rows // STEP, STEP, groups // 2, GROUP).transpose(2, 3).contiguous()
    several = words.view(experts, rows // STEP, STEP, groups // 2).transpose(2, 3).contiguous()
    return together.view(experts, rows, 16 * groups), several.view(experts, rows, groups // 2)
