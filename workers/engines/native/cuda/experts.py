"""Faster replacements for the modules of a mixture of experts. ``rewrite`` installs them.

A module is replaced if a candidate computes the same from random inputs, whatever its class is called.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.workers.engines.native.cuda import expert_kernels, rows
from penstock.workers.engines.native.cuda.fusions import dependent
from penstock.workers.engines.native.cuda.modules import launch_options, next_power_of_2, summed
from penstock.workers.engines.native.model import quantize
from penstock.workers.engines.native.model.parallel import RankGroup
from penstock.workers.engines.native.model.quantize import FP8, Fp8Experts

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # relative, of a mixture's output
TRIAL = 48  # rows on which a router is compared
ALIKE = 0.9  # of them choose the same experts: rounding decides near ties
ROUTED = 16  # rows per program of a router
SPLITS = (8, 9, 7, 10, 6, 5, 4, 3, 2)  # of a router's inner dimension
COUNTERS = 256  # tiles of a router's rows that share theirs; graphs read these, so they cannot grow
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
COLLECTED = 4096  # pairs that a program looks through at a time


class ExpertsShape(NamedTuple):
    """How a product of experts is computed.

    Attributes:
        columns, rows, depth: of the tile that a program computes.
        warps, stages: see ``triton.Config``.
        bulk: weights are loaded by bulk tensor copies.
    """

    columns: int
    rows: int
    depth: int
    warps: int
    stages: int
    bulk: bool = False


FLOAT32 = ExpertsShape(64, 16, 32, 4, 2)
UP = {  # of gate and up, by rows per tile; 1: there is one row. Measured by ``tests.gpu.experts``
    1: ExpertsShape(128, 16, 64, 8, 6),
    16: ExpertsShape(64, 16, 64, 4, 5),
    32: ExpertsShape(64, 32, 64, 4, 4),
    64: ExpertsShape(128, 64, 64, 8, 4),
    128: ExpertsShape(128, 128, 64, 8, 4, True),
}
DOWN = {
    1: ExpertsShape(128, 16, 64, 8, 6),
    16: ExpertsShape(128, 16, 64, 4, 4),
    32: ExpertsShape(128, 32, 64, 8, 4),
    64: ExpertsShape(128, 64, 64, 8, 4),
    128: ExpertsShape(256, 128, 64, 8, 3, True),
}


PACKED_UP = {  # with weights of 4 bits
    1: ExpertsShape(64, 16, 64, 4, 4),
    16: ExpertsShape(64, 16, 64, 4, 3),
    32: ExpertsShape(64, 32, 64, 4, 4),
    64: ExpertsShape(128, 64, 64, 4, 3),
    128: ExpertsShape(64, 128, 64, 4, 4),
}
PACKED_DOWN = {
    1: ExpertsShape(64, 16, 64, 4, 6),
    16: ExpertsShape(128, 16, 64, 4, 4),
    32: ExpertsShape(128, 32, 64, 4, 4),
    64: ExpertsShape(128, 64, 64, 4, 3),
    128: ExpertsShape(128, 128, 64, 8, 4),
}
NARROW = {  # of both, with weights of 8 bits
    1: ExpertsShape(64, 16, 128, 4, 4),
    16: ExpertsShape(64, 16, 128, 4, 4),
    32: ExpertsShape(64, 32, 128, 4, 4),
    64: ExpertsShape(128, 64, 64, 8, 4),
    128: ExpertsShape(128, 128, 64, 8, 3),
}


def shapes(kind: int, most: int, dtype: torch.dtype) -> tuple[ExpertsShape, ExpertsShape]:
    """How the products of gate and up, and of down, are computed, with this many rows per tile."""
    if dtype == torch.float32:
        return FLOAT32, FLOAT32
    up, down = {expert_kernels.MXFP4: (PACKED_UP, PACKED_DOWN), expert_kernels.NARROW: (NARROW, NARROW)}.get(
        kind, (UP, DOWN)
    )
    return up[most], down[most]


def tile_rows(rows: int, top: int, experts: int) -> int:
    """Rows per tile, by how many an expert has on average. It changes the speed, not the result."""
    each = rows * top / experts
    if rows == 1:
        return 1
    return 16 if each <= 12 else 32 if each <= 22 else 64 if each <= 48 else 128


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses; see ``expert_kernels.route``."""

    score: int
    normalised: bool = False
    corrected: bool = False
    rounded: bool = False
    groups: int = 1
    kept: int = 1
    best: int = 2
    scale: float = 1.0
    jitter: float = 0.0


class ExpertRouter(nn.Module):
    """Chooses ``top`` experts for each row, by one kernel.

    Args:
        weight: (experts, in); bias, correction: (experts,).
        dtype: of the factors.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, correction: Tensor | None, top: int, routing: Routing,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.correction: Tensor | None
        self.register_buffer("correction", correction)
        self.top, self.routing, self._dtype = top, routing, dtype
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=weight.device)
        inner = weight.shape[1]
        self._depth = next((depth for depth in (128, 64, 32) if inner % depth == 0), 64)
        self._splits = next((n for n in SPLITS if inner % (n * self._depth) == 0), 1)

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        """Returns: nothing in place of the logits; factors and ids of the chosen experts, both (rows, top)."""
        experts, inner = self.weight.shape
        x = x.reshape(-1, inner)
        if not x.is_contiguous():
            x = x.contiguous()
        count, device, how = len(x), x.device, self.routing
        tiles, padded = -(-count // ROUTED), max(16, next_power_of_2(experts))
        counters = self._counters if tiles <= COUNTERS else torch.zeros(tiles, dtype=torch.int32, device=device)
        ids = torch.empty((count, self.top), dtype=torch.int32, device=device)
        factors = torch.empty((count, self.top), dtype=self._dtype, device=device)
        parts = torch.empty(tiles * self._splits * padded * ROUTED, dtype=torch.float32, device=device)
        pdl = dependent(device, count)
        expert_kernels.route[(tiles, self._splits)](
            x, self.weight, x if self.bias is None else self.bias, x if self.correction is None else self.correction,
            parts, counters, ids, factors, count, how.scale, how.jitter,
            K=inner, EXPERTS=experts, EXPERTS_P=padded, TOP=self.top, TOP_P=next_power_of_2(self.top), ROWS=ROUTED,
            DEPTH=self._depth if self.weight.itemsize < 4 else min(32, self._depth), SPLITS=self._splits,
            SCORE=how.score, NORMALISED=how.normalised, BIAS=self.bias is not None, CORRECTED=how.corrected,
            ROUNDED=how.rounded, GROUPS=how.groups, KEPT=how.kept, BEST=how.best,
            PRECISION="ieee" if self.weight.dtype == torch.float32 else "tf32", PDL=pdl,
            num_warps=8 if padded >= 256 else 4, num_stages=3, **launch_options(pdl),
        )  # fmt: skip
        return None, factors, ids


class ExpertWeights(NamedTuple):
    """The weights of a layer of experts.

    Attributes:
        values: (experts, rows, columns), or uint8 in the order of ``mxfp4.packed``.
        bias: (experts, rows).
        scales: (experts, rows) float32, of 8-bit floats; or those of ``mxfp4.packed``.
    """

    values: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def kind(self) -> int:
        if self.values.dtype == torch.uint8:
            return expert_kernels.MXFP4
        return expert_kernels.WIDE if self.scales is None else expert_kernels.NARROW

    @property
    def columns(self) -> int:
        """Of the layer, its inputs."""
        return self.values.shape[2] * (2 if self.kind == expert_kernels.MXFP4 else 1)


class GatedExperts(nn.Module):
    """Experts that are gated MLPs, with their weights beside each other.

    Args:
        gate_up: all rows of gate before those of up.
        act: ``rows.SILU``, ``rows.GELU_TANH`` or ``expert_kernels.CLAMPED``, which has ``alpha`` and ``limit``.

    Attributes:
        residual: add the output to it, in place. Set before a call and cleared by it.
        group: ranks that have some inner values of each expert; None: they are whole here.
        following: see ``modules.summed``.
    """

    def __init__(
        self, gate_up: ExpertWeights, down: ExpertWeights, act: int, alpha: float = 0.0, limit: float = 0.0
    ) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.num_experts, self.inputs = len(gate_up.values), gate_up.columns
        self.residual: Tensor | None = None
        self._act, self._alpha, self._limit = act, alpha, limit
        self.group: RankGroup | None = None
        self.__dict__["following"] = None

    def forward(self, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """
        Args:
            x: (rows, in).
            ids, factors: (rows, top).
        """
        residual, self.residual = self.residual, None
        count, top = ids.shape
        if ids.dtype != torch.int32:
            ids = ids.to(torch.int32)
        if not x.is_contiguous():
            x = x.contiguous()
        pairs = collected(ids, self.num_experts)
        most = tile_rows(count, top, self.num_experts)
        up, down = shapes(self.gate_up.kind, most, x.dtype)
        gate = (self._act, self._alpha, self._limit)
        hidden = torch.empty((count * top, self.down.columns), dtype=x.dtype, device=x.device)
        launch(up, x, self.gate_up, pairs, hidden, gate=gate)
        parts = torch.empty((count * top, self.down.values.shape[1]), dtype=x.dtype, device=x.device)
        launch(down, hidden, self.down, pairs, parts, factors=factors)
        if self.group is None or self.group.apart:
            return combined(parts, count, top, residual)
        following = self.__dict__["following"]
        out = summed(self.group, lambda into: combined(parts, count, top, into), count, residual, following)
        return out.view(count, -1)


class Pairs(NamedTuple):
    """Rows and their chosen experts.

    Attributes:
        ids: (rows, top) int32, the experts.
        members: (experts, rows) int32, the pairs of each expert; unused if there is one row.
        sizes: (experts,) int32, how many these are.
    """

    ids: Tensor
    members: Tensor
    sizes: Tensor


def collected(ids: Tensor, experts: int) -> Pairs:
    """The pairs of each of this many experts."""
    count, device = len(ids), ids.device
    if count == 1:
        return Pairs(ids, ids, ids)
    members = torch.empty((experts, count), dtype=torch.int32, device=device)
    sizes = torch.empty(experts, dtype=torch.int32, device=device)
    pdl = dependent(device, count)
    block = min(COLLECTED, max(128, next_power_of_2(ids.numel())))
    expert_kernels.collect[(experts,)](
        ids, members, sizes, ids.numel(), count, BLOCK=block, PDL=pdl,
        num_warps=8 if block == COLLECTED else 4, **launch_options(pdl),
    )  # fmt: skip
    return Pairs(ids, members, sizes)


def launch(
    shape: ExpertsShape, x: Tensor, layer: ExpertWeights, pairs: Pairs, out: Tensor, *,
    factors: Tensor | None = None, gate: tuple[int, float, float] | None = None,
) -> None:  # fmt: skip
    """Compute ``expert_kernels.product`` with a given shape.

    Args:
        x: (rows, in), or (pairs, in).
        gate: the activation, with ``alpha`` and ``limit``; None: there is no gate.
    """
    (weight, bias, scales), inner = layer, layer.columns
    experts, columns, _ = weight.shape
    act, alpha, limit = gate or (0, 0.0, 0.0)
    columns = columns // 2 if gate else columns
    number, count = pairs.ids.numel(), len(pairs.ids)
    tiles = number if count == 1 else min(number, experts) + number // shape.rows
    bulk = shape.bulk and inner * weight.itemsize % 16 == 0
    given: Any = TensorDescriptor.from_tensor(weight.view(-1, inner), [shape.columns, shape.depth]) if bulk else weight
    expert_kernels.product[(-(-columns // shape.columns), tiles)](
        x, given, x if scales is None else scales, x if bias is None else bias, x if factors is None else factors,
        *pairs, out, count, alpha, limit,
        N=columns, K=inner, EXPERTS=experts, EXPERTS_P=next_power_of_2(experts), TOP=number // len(x),
        COLUMNS=shape.columns, DEPTH=shape.depth, ROWS=shape.rows, SINGLE=count == 1, GATED=gate is not None, ACT=act,
        BIAS=bias is not None, WEIGHTED=factors is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BULK=bulk, KIND=layer.kind, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def combined(parts: Tensor, count: int, top: int, residual: Tensor | None) -> Tensor:
    """The sums of ``top`` rows each; added to ``residual``, in place, if there is one. (count, columns)."""
    columns = parts.shape[1]
    out = parts.new_empty((count, columns)) if residual is None else residual.view(count, columns)
    block, pdl = min(1024, next_power_of_2(columns)), dependent(parts.device, count)
    expert_kernels.combine[(count, -(-columns // block))](
        parts, out, out, N=columns, TOP=top, ADDED=residual is not None, BLOCK=block, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return out


# -- which modules these replace ---------------------------------------------------------------------------------


def experts_for(module: Any, dtype: torch.dtype, generator: torch.Generator) -> GatedExperts | None:
    """What replaces a module of experts for rows of ``dtype``; None: nothing computes the same."""
    layers = _stored(module, dtype)
    if layers is None or dtype not in TOLERANCE or len(layers[0].values) > MOST_EXPERTS:
        return None
    experts, device = len(layers[0].values), layers[0].values.device
    count, top = 5, min(2, experts)
    x = torch.randn((count, layers[0].columns), generator=generator, device=device).to(dtype)
    ids = torch.stack([
        torch.randperm(experts, generator=generator, device=device)[:top] for _ in range(count)
    ])  # fmt: skip
    factors = torch.rand((count, top), generator=generator, device=device).to(dtype)
    with torch.inference_mode():
        expected = module(x, ids, factors)
        alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
        for act in (rows.SILU, rows.GELU_TANH, expert_kernels.CLAMPED):
            if act == expert_kernels.CLAMPED and (alpha is None or limit is None):
                continue
            new = GatedExperts(*layers, act, float(alpha or 0.0), float(limit or 0.0))
            if all(_close(new(x[:n], ids[:n], factors[:n]), expected[:n]) for n in (1, count)):
                return new
    return None


def _stored(module: Any, dtype: torch.dtype) -> tuple[ExpertWeights, ExpertWeights] | None:
    """The weights of a module of experts, in the order of ``GatedExperts``; None: they have another form."""
    biases = [getattr(module, f"{name}_proj_bias", None) for name in ("gate_up", "down")]
    gate_up_bias, down_bias = (None if each is None else each.data for each in biases)
    if isinstance(module, quantize.Mxfp4Experts):
        assert gate_up_bias is not None
        stored = [
            (_separated(module.gate_up_proj_blocks.data), _separated(module.gate_up_proj_scales.data)),
            (module.down_proj_blocks.data, module.down_proj_scales.data),
        ]
        bias = _separated(gate_up_bias)
        if any(rows % quantize.STEP for rows in (stored[0][0].shape[1] // 2, stored[1][0].shape[1])) or any(
            blocks.shape[2] % 2 for blocks, _ in stored
        ):
            wide = [quantize.widened(*each, dtype) for each in stored]
            return ExpertWeights(wide[0], bias), ExpertWeights(wide[1], down_bias)
        (values, scales), (more, other) = (quantize.packed(*each) for each in stored)
        return ExpertWeights(values, bias, scales), ExpertWeights(more, down_bias, other)
    if isinstance(module, Fp8Experts):
        scales = module.gate_up_scale.squeeze(-1)
        values = module.gate_up.view(torch.uint8)  # not every torch can concatenate 8-bit floats
        if not module.is_concatenated:
            values, scales = _separated(values), _separated(scales)
            gate_up_bias = None if gate_up_bias is None else _separated(gate_up_bias)
        return (
            ExpertWeights(values.view(FP8), gate_up_bias, scales),
            ExpertWeights(module.down, down_bias, module.down_scale.squeeze(-1)),
        )
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not all(isinstance(each, Tensor) and each.dim() == 3 and each.dtype == dtype for each in (gate_up, down)):
        return None
    if getattr(module, "has_post_expert_norm", False):
        return None
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    gate_up, down = gate_up.data, down.data
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not getattr(module, "is_concatenated", True):
        gate_up, gate_up_bias = _separated(gate_up), None if gate_up_bias is None else _separated(gate_up_bias)
    if gate_up.shape[1] != 2 * down.shape[2]:
        return None
    return ExpertWeights(gate_up.contiguous(), gate_up_bias), ExpertWeights(down.contiguous(), down_bias)


def _separated(part: Tensor) -> Tensor:
    """The rows of gate, then those of up, of (experts, gate and up in turns, …)."""
    return torch.cat([part[:, ::2], part[:, 1::2]], 1)


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    bound = TOLERANCE[found.dtype] * expected.float().norm()
    return bool((found.float() - expected.float()).norm() <= bound)


def router_for(
    module: Any, experts: int, inner: int, dtype: torch.dtype, generator: torch.Generator
) -> ExpertRouter | None:
    """What replaces the router of this many experts with inputs (rows, inner); None: nothing chooses the same."""
    weights = [each for each in module.parameters() if each.shape == (experts, inner)]
    top = getattr(module, "top_k", 0)
    if len(weights) != 1 or not isinstance(top, int) or not 0 < top <= min(experts, MOST_CHOSEN):
        return None
    if experts > MOST_EXPERTS or weights[0].dtype not in TOLERANCE:
        return None
    vectors = dict(module.named_parameters()) | dict(module.named_buffers())
    bias = next((each for name, each in vectors.items() if name == "bias" and each.shape == (experts,)), None)
    correction = next((each for name, each in vectors.items() if name.endswith("correction_bias")), None)
    if correction is not None and correction.numel() != experts:
        return None
    x = torch.randn((TRIAL, inner), generator=generator, device=weights[0].device).to(dtype)
    kept = None if correction is None else correction.detach().clone()
    try:
        with torch.inference_mode():
            if correction is not None:  # zeros would not show how they are used
                correction.copy_(torch.rand(correction.shape, generator=generator, device=x.device))
            answer = module(x)
            if not _is_routing(answer, top):
                return None
            logits, factors, ids = answer
            # A router that computes in float32 returns logits that the input's dtype cannot hold.
            rounded = bool((logits == logits.to(dtype)).all()) and dtype != torch.float32
            for routing in _candidates(module, experts, correction is not None, rounded):
                given = None if correction is None else correction.detach().reshape(-1).clone()
                new = ExpertRouter(
                    weights[0].data, None if bias is None else bias.data, given, top, routing, factors.dtype
                )
                if _same_choice(new(x), factors, ids):
                    new.correction = None if kept is None else kept.reshape(-1)
                    return new
    except (TypeError, RuntimeError, AttributeError):
        return None  # it takes more than rows
    finally:
        if correction is not None and kept is not None:
            correction.data.copy_(kept)
    return None


def _is_routing(answer: Any, top: int) -> bool:
    if not isinstance(answer, tuple) or len(answer) != 3 or not all(isinstance(each, Tensor) for each in answer):
        return False
    _, factors, ids = answer
    return factors.shape == ids.shape == (TRIAL, top) and not ids.dtype.is_floating_point


def _candidates(module: Any, experts: int, corrected: bool, rounded: bool) -> Iterator[Routing]:
    groups = getattr(module, "num_group", None) or getattr(module, "n_group", None) or 1
    kept = getattr(module, "topk_group", None) or 1
    scale = float(getattr(module, "routed_scaling_factor", None) or 1.0)
    jitter = float(getattr(module, "router_jitter_noise", 0.0) or 0.0)
    grouped = groups > 1 and experts % groups == 0 and experts == max(16, next_power_of_2(experts))
    grouped = grouped and groups == next_power_of_2(groups) and experts >= 2 * groups
    for best in (2, 1) if grouped else ():
        for score in (expert_kernels.SIGMOID, expert_kernels.SOFTMAX):
            for normalised in (False, True):
                yield Routing(score, normalised, corrected, rounded, groups, kept, best, scale)
    for score in (expert_kernels.SOFTMAX, expert_kernels.CHOSEN, expert_kernels.SIGMOID):
        for normalised in (False, True):
            yield Routing(score, normalised, corrected, rounded, scale=scale)
    yield Routing(expert_kernels.SPARSE, False, corrected, rounded, scale=scale, jitter=jitter)


def _same_choice(found: tuple[None, Tensor, Tensor], factors: Tensor, ids: Tensor) -> bool:
    """Whether most rows have the same experts, in any order, and these the same factors."""
    _, our_factors, our_ids = found
    (ours, order), (theirs, other) = our_ids.to(torch.int64).sort(-1), ids.sort(-1)
    alike = (ours == theirs).all(-1)
    if alike.float().mean() < ALIKE:
        return False
    return _close(our_factors.gather(1, order)[alike], factors.gather(1, other)[alike])


def same_with_residual(block: Any, experts: GatedExperts, x: Tensor) -> bool:
    """Whether a block of experts adds its output to its experts' ``residual``."""
    residual = torch.randn_like(x)
    with torch.inference_mode():
        expected = first(block(x.clone())) + residual
        experts.residual = residual.clone()
        found = first(block(x.clone()))
    return found.shape == expected.shape and _close(found, expected)


def first(output: Any) -> Tensor:
    """The output of a block that may return more than that."""
    chosen: Tensor = output[0] if isinstance(output, tuple) else output
    return chosen
