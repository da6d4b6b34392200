"""Experts of GPT-OSS with weights of 4 bits, as checkpoints store them: a fourth of the memory of bfloat16.

32 values of a row share a power of two (OCP Microscaling Formats, MXFP4). Without this, transformers widens all of them
when it loads a checkpoint, unless it can download kernels.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.workers.engines.native.model.quantize import by_expert

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
