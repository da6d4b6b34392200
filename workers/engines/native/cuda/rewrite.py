"""Makes the modelling code of transformers faster by rules over its modules, and compares each with the original.

Norms and gated MLPs become one kernel each. Linear layers that share an input become one product, and a single row is
multiplied by a kernel of its own. A layer's residuals are added within its last products. Routers and experts of a
mixture get kernels of their own. Rotation is deferred to the attention, which writes the keys anyway. Modules that no
rule fits, or whose results a rule would change, are kept.
"""

import contextlib
import inspect
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from penstock.workers.engines.native.cuda import experts, few_rows, fp8, modules, peers, rows
from penstock.workers.engines.native.cuda.fusions import FUSIONS
from penstock.workers.engines.native.cuda.latent import make_scratch, paged_attention
from penstock.workers.engines.native.cuda.paged import PagedBatch, tile_rows
from penstock.workers.engines.native.model.attention import Paged
from penstock.workers.engines.native.model.model import Model, OutputLayer, UnsupportedModel
from penstock.workers.engines.native.model.parallel import RankGroup, RowParallel, SplitExperts
from penstock.workers.engines.native.model.pool import KvPool
from penstock.workers.engines.native.model.quantize import Fp8Linear
from penstock.workers.engines.native.model.verify import ROUNDING, ROUNDING_FP8, reference, verify

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative, of a module's output
LINEAR = (nn.Linear, Fp8Linear)
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("q_proj", "kv_a_proj_with_mqa"), ("q_a_proj", "kv_a_proj_with_mqa"))
ROTATIONS = {"apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def rewrite(model: Any) -> tuple[modules.Rotation, Counter[str]]:
    """Apply all rules to a loaded model; returns how often each applied. ``undo_layers`` reverts residuals."""
    counts: Counter[str] = Counter()
    generator = torch.Generator(device=model.device).manual_seed(1)
    for path in [
        name for name, _ in model.named_modules() if name
    ]:  # paths, because a list of modules would keep replaced weights alive
        parent, name, child = _find(model, path)
        if type(child).__name__.endswith("RMSNorm"):
            _replace(parent, name, _rms_norm_for(child, model.dtype, generator), counts, "norms")
        elif type(child).__name__.endswith("MLP") and not hasattr(child, "experts"):
            _replace(parent, name, _gated_mlp_for(child, model.dtype, generator), counts, "gated MLPs")
        elif name == "experts" and child is not None and not isinstance(parent, SplitExperts):
            _replace_experts(parent, child, model.dtype, generator, counts)
        else:
            counts["merged linear layers"] += _merge_qkv(child)
    for path in [name for name, _ in model.named_modules() if name]:
        parent, name, child = _find(model, path)
        whole, group = _unwrapped(child)
        if type(whole) in LINEAR:
            new = modules.Linear(whole.weight.data, whole.bias, getattr(whole, "scale", None))
            new.group = group
            setattr(parent, name, new)
        elif type(child) is OutputLayer:
            setattr(parent, name, modules.Linear(child.weight.data, child.bias, None, torch.float32))
    fused = [layer for layer in model.modules() if _fuse_residuals(layer, model.dtype, generator)]
    counts["residuals within products"] = len(fused)
    counts["norms within sums"] = _chain_norms(model, fused)
    rotation = modules.Rotation()
    counts["rotations within attention"] = sum(
        _defer_rotation(module, rotation, generator) for module in model.modules()
    )
    return rotation, counts


def make_invariant(model: Any) -> str:
    """Compute all products with kernels whose rows do not depend on the number of rows.

    Returns: the name of a module that has no such kernel; empty: all have one.
    """
    for name, module in model.named_modules():
        if isinstance(module, modules.Linear) and module.scale is None:
            module.invariant = True
        elif isinstance(module, (experts.GatedExperts, experts.ExpertRouter)):
            continue  # they always are
        elif not isinstance(module, nn.Embedding) and any(each.dim() > 1 for each in module.parameters(recurse=False)):
            return str(name)
    return ""


def undo_layers(model: Any) -> None:
    """Revert the rule that adds residuals within products."""
    for module in model.modules():
        if module.__dict__.pop("_penstock_layer", False):
            del module.forward


def _unwrapped(module: Any) -> tuple[Any, RankGroup | None]:
    """What a module that is split over ranks computes of it here, and these ranks."""
    if isinstance(module, RowParallel):
        return module.linear, module.group
    if isinstance(module, SplitExperts):
        return module.experts, module.group
    return module, None


def _chain_norms(model: Any, fused: list[Any]) -> int:
    """Tell the sums over ranks which norm follows in these layers; returns how many."""
    layers = next((each for each in model.modules() if isinstance(each, nn.ModuleList) and list(each) == fused), None)
    if layers is None or not fused or fused[0].self_attn.o_proj.group is None:
        return 0
    last = next((getattr(each, "norm", None) for each in model.modules() if getattr(each, "layers", None) is layers), 0)
    count = 0
    for layer, after in zip(fused, [*(layer.input_layernorm for layer in fused[1:]), last], strict=True):
        mixture = getattr(layer.mlp, "experts", None)
        product = layer.mlp.down_proj if mixture is None else mixture
        if mixture is not None and not set(dict(layer.mlp.named_children())) <= {"gate", "router", "experts"}:
            product = None  # the sum of what they choose is not the whole output
        for each, norm in ((layer.self_attn.o_proj, layer.post_attention_layernorm), (product, after)):
            if each is not None and type(norm) is modules.RmsNorm and getattr(each, "scale", None) is None:
                each.__dict__["following"] = norm
                count += 1
    return count


def _replace(parent: nn.Module, name: str, new: nn.Module | None, counts: Counter[str], rule: str) -> None:
    if new is not None:
        setattr(parent, name, new)
        counts[rule] += 1


def _matches(new: Callable[[Tensor], Tensor], old: Callable[[Tensor], Tensor], x: Tensor, bound: float = 0.0) -> bool:
    """``bound``: maximum relative difference; 0: that of the data type."""
    with torch.inference_mode():
        expected = old(x.clone())
        result = new(x.clone())
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    bound = bound or TOLERANCE[x.dtype]
    return bool((result.float() - expected.float()).norm() <= bound * expected.float().norm())


def _rms_norm_for(norm: Any, dtype: torch.dtype, generator: torch.Generator) -> modules.RmsNorm | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or dtype not in TOLERANCE:
        return None
    x = torch.randn((1, 3, len(weight)), generator=generator, device=weight.device).to(dtype)
    # A weight of ones or zeros would not show how the module uses it.
    random_weight = torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)
    original = weight.data
    try:
        norm.weight.data = random_weight
        kinds = [kind for kind in (0, 1, 2) if _matches(modules.RmsNorm(random_weight, eps, kind), norm, x)]
    finally:
        norm.weight.data = original
    return modules.RmsNorm(original, eps, kinds[0]) if kinds else None


def _gated_mlp_for(mlp: Any, dtype: torch.dtype, generator: torch.Generator) -> modules.GatedMlp | None:
    children = dict(mlp.named_children())
    linears: list[Any] = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    linears[2], group = _unwrapped(linears[2])
    if not set(children) <= {"gate_proj", "up_proj", "down_proj", "act_fn"} or dtype not in TOLERANCE:
        return None
    if len({type(linear) for linear in linears}) != 1 or type(linears[0]) not in LINEAR:
        return None
    gate_proj, up_proj, down_proj = linears
    assert gate_proj is not None
    gate_up, down = _join([gate_proj, up_proj]), _join([down_proj])
    down.group = group
    bound = ROUNDING if down.scale is not None else 0.0
    x = torch.randn((1, 3, gate_proj.in_features), generator=generator, device=gate_proj.weight.device).to(dtype)
    for act in (rows.SILU, rows.GELU_TANH):
        new = modules.GatedMlp(gate_up, down, act)
        if _matches(new, mlp, x, bound) and _matches(new, mlp, x[:, :1], bound):  # one row has kernels of its own
            return new
    return None


def _replace_experts(
    block: nn.Module, module: Any, dtype: torch.dtype, generator: torch.Generator, counts: Counter[str]
) -> None:
    """Replace the experts of a block, and then its router."""
    whole, group = _unwrapped(module)
    new = experts.experts_for(whole, dtype, generator)
    if new is not None:
        new.group = group
    _replace(block, "experts", new, counts, "mixtures of experts")
    for name in ("gate", "router"):
        router = getattr(block, name, None)
        if new is not None and isinstance(router, nn.Module):
            chosen = experts.router_for(router, new.num_experts, new.inputs, dtype, generator)
            _replace(block, name, chosen, counts, "routers")


def _join(linears: list[Any]) -> modules.Linear:
    """One layer that computes several, all of the same type of ``LINEAR``."""
    weight = _concatenate([linear.weight.data for linear in linears])
    scale = torch.cat([linear.scale for linear in linears]) if isinstance(linears[0], Fp8Linear) else None
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return modules.Linear(weight, None, scale)
    example = next(bias.data for bias in biases if bias is not None)
    all_biases = [
        example.new_zeros(linear.out_features) if linear.bias is None else linear.bias.data for linear in linears
    ]
    return modules.Linear(weight, torch.cat(all_biases), scale)


def _concatenate(weights: list[Tensor]) -> Tensor:
    """8-bit floats are concatenated as bytes, because not every torch can concatenate them."""
    if weights[0].itemsize > 1:
        return torch.cat(weights)
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)


def _find(model: nn.Module, path: str) -> tuple[nn.Module, str, Any]:
    """Parent, name and module of a path; the module is None if a rewrite has removed it."""
    above, _, name = path.rpartition(".")
    try:
        parent = model.get_submodule(above)
    except AttributeError:
        return model, name, None
    return parent, name, getattr(parent, name, None)


def _merge_qkv(parent: nn.Module | None) -> int:
    """Merge the first projections of an attention into one product. Returns 1 if it did."""
    for names in PROJECTIONS:
        projections: list[Any] = [getattr(parent, name, None) for name in names]
        kinds = {type(linear) for linear in projections}
        if len(kinds) == 1 and kinds <= {*LINEAR}:
            break
    else:
        return 0
    if parent is None or len({(linear.in_features, linear.weight.dtype) for linear in projections}) != 1:
        return 0
    merged = modules.MergedLinear(_join(projections), [linear.out_features for linear in projections], names)
    setattr(parent, names[0], merged)
    for number, name in enumerate(names[1:], 1):
        setattr(parent, name, modules.MergedLinearPart(merged, number))
    return 1


def _fuse_residuals(layer: Any, dtype: torch.dtype, generator: torch.Generator) -> int:
    """Add residuals within products if the layer is attention and MLP, each after a norm. Returns 1 if it did."""
    children = dict(layer.named_children())
    if set(children) != LAYER or not isinstance(getattr(layer.self_attn, "o_proj", None), modules.Linear):
        return 0
    mixture = getattr(layer.mlp, "experts", None)
    if isinstance(mixture, experts.GatedExperts):
        x = torch.randn((1, 3, mixture.inputs), generator=generator, device=generator.device).to(dtype)
        if not experts.same_with_residual(layer.mlp, mixture, x):
            return 0
    elif not isinstance(layer.mlp, modules.GatedMlp):
        return 0

    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    fused = isinstance(getattr(layer.self_attn, "q_proj", None), modules.MergedLinear) and all(
        type(norm) is modules.RmsNorm for norm in norms
    )

    scales = (
        None if mixture is not None else layer.mlp.gate_up.scale,
        layer.self_attn.q_proj.linear.scale if fused else None,
    )
    narrow = all(scale is not None for scale in scales)
    split = layer.self_attn.o_proj.group  # whose sums have the norm after them

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attn, mlp = self.self_attn, self.mlp
        if fused and FUSIONS.products and split is None and attn.q_proj.linear.takes_gemv(hidden_states):
            attn.q_proj.linear.__dict__["norm"] = self.input_layernorm
            if mixture is None:
                mlp.__dict__["norm"] = self.post_attention_layernorm
            normal = hidden_states
        elif narrow and fp8.suits(hidden_states) and hidden_states.is_contiguous():
            return _narrow_layer(self, hidden_states, args, kwargs)
        else:
            normal = self.input_layernorm(hidden_states)
        attn.o_proj.residual = hidden_states
        hidden_states, _ = attn(normal, *args, **kwargs)
        if mixture is not None:
            normal = self.post_attention_layernorm(hidden_states)
            mlp.experts.residual = hidden_states
            return experts.first(mlp(normal))
        normal = hidden_states if mlp.__dict__["norm"] is not None else self.post_attention_layernorm(hidden_states)
        mlp.down_proj.residual = hidden_states
        return mlp(normal)  # type: ignore[no-any-return]

    layer.forward = types.MethodType(forward, layer)
    layer._penstock_layer = True
    return 1


def _narrow_layer(layer: Any, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A layer whose norms return 8-bit floats, the inputs of its products."""
    attn, mlp = layer.self_attn, layer.mlp
    normal = fp8.normalised(hidden_states, layer.input_layernorm)
    attn.q_proj.linear.row_scales = normal.scales
    added, out = None, attn.o_proj
    if few_rows.shape_for(len(normal.scales), out.out_features, out.in_features) is not None:
        attn.o_proj.residual = hidden_states
        hidden_states = attn(normal.values, *args, **kwargs)[0]
    else:
        added = attn(normal.values, *args, **kwargs)[0]
    normal = fp8.normalised(hidden_states, layer.post_attention_layernorm, added)
    mlp.gate_up.row_scales = normal.scales
    mlp.down_proj.residual = hidden_states
    return mlp(normal.values)  # type: ignore[no-any-return]


def _defer_rotation(module: Any, rotation: modules.Rotation, generator: torch.Generator) -> int:
    """Defer to the attention what a module rotates in a known way. Returns 1 if it did."""
    forward: Any = getattr(type(module), "forward", None)
    forward = inspect.unwrap(forward) if callable(forward) else None  # renamed arguments are a wrapper's
    module_globals = getattr(forward, "__globals__", {})
    if not isinstance(forward, types.FunctionType):
        return 0
    latents = "_penstock_latents" in module.__dict__
    dim = getattr(module, "qk_rope_head_dim" if latents else "head_dim", 0)
    if not isinstance(dim, int) or dim < 4 or dim % 2:
        return 0
    replaced = {}
    for name in ROTATIONS & {*forward.__code__.co_names} & {*module_globals}:
        form = _rotation_form(module_globals[name], dim, generator)
        if form is not None and (latents or (form == (form.width, False, False) and form.width)):
            replaced[name] = rotation.replacement(module_globals[name], form)
    if not replaced:
        return 0
    rebound = types.FunctionType(
        forward.__code__, {**module_globals, **replaced}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(rebound, module)
    return 1


def _rotation_form(
    function: Callable[..., tuple[Tensor, Tensor]], dim: int, generator: torch.Generator
) -> modules.RotationForm | None:
    """How ``function`` rotates heads of a size; None: in no known way."""
    device = generator.device
    q, k = (torch.randn((1, heads, 3, dim), generator=generator, device=device) for heads in (4, 2))
    angles = torch.randn((1, 3, dim // 2), generator=generator, device=device)
    cos, sin = angles.cos(), angles.sin()
    for copies in (2, 1, 0):  # as wide as a head, or as half of one; 0: complex numbers
        factors = [torch.cat([each] * copies, -1) for each in (cos, sin)] if copies else [torch.complex(cos, sin)]
        try:
            rotated_pair = function(q, k, *factors)
        except (RuntimeError, TypeError):
            continue
        for in_pairs, out_pairs in ((False, False), (True, False), (True, True)):
            matches = (
                _is_rotation(x, rotated, cos[:, None], sin[:, None], in_pairs, out_pairs)
                for x, rotated in zip((q, k), rotated_pair, strict=True)
            )
            if all(matches):
                return modules.RotationForm(copies * dim // 2, in_pairs, out_pairs)
        return None
    return None


def _is_rotation(x: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool, out_pairs: bool) -> bool:
    low, high = (x[..., ::2], x[..., 1::2]) if in_pairs else x.chunk(2, dim=-1)
    parts = [low * cos - high * sin, high * cos + low * sin]
    expected = torch.stack(parts, -1).flatten(-2) if out_pairs else torch.cat(parts, -1)
    return rotated.shape == x.shape and torch.allclose(rotated, expected, atol=1e-4)


log = structlog.get_logger("engine")


def prepare(model: Model, *, invariant: bool = False) -> modules.Rotation:
    """Rewrite a model in place; returns the rotation that its attention applies.

    Args:
        invariant: make a row's results independent of the number of rows.

    Raises:
        UnsupportedModel: the rewritten model computes something else. It must be loaded again.
    """
    if invariant and model.shape.latent:
        raise UnsupportedModel(
            "kernels over latents depend on the number of rows; leave out batch_invariant, or choose another model"
        )
    narrow = any(isinstance(module, Fp8Linear) for module in model.forward.modules())
    rounding = ROUNDING_FP8 if narrow else ROUNDING
    expected, group = reference(model), model.group
    if group is not None and model.device.type == "cuda":
        text = model.forward.config.get_text_config()
        group.peers = peers.connect(group, text.hidden_size, model.dtype, model.device)
    with group.alone() if group is not None else contextlib.nullcontext():
        rotation, counts = rewrite(model.forward)
    if invariant and (name := make_invariant(model.forward)):
        raise UnsupportedModel(f"batch_invariant: {name} has no kernel whose results do not depend on the batch")
    scratch = make_scratch(model.shape, model.heads, 1, model.device, invariant)

    def paged(pool: KvPool, start: int, stop: int) -> Paged:
        tables, device = torch.tensor([[1, 0]], dtype=torch.int32, device=model.device), model.device
        places = torch.arange(start, stop, dtype=torch.int32, device=device)
        tiles = None
        if stop - start > 1:
            assert stop - start <= tile_rows(model.dtype)
            tiles = torch.tensor([[0, start, stop - start, 0]], dtype=torch.int32, device=device)
        batch = PagedBatch(tables, torch.zeros_like(places), places, 0 if tiles is not None else 1, tiles)
        return paged_attention(pool, scratch, rotation, batch)

    try:
        verify(model, expected, paged, rounding)
        if not _same_single(model, paged, max(rounding, 2 * expected.noise)):
            raise UnsupportedModel("norms within products change the result of a single row")
    except UnsupportedModel:
        undo_layers(model.forward)
        counts["residuals within products"] = 0
        verify(model, expected, paged, rounding)
    log.info(
        "rewritten", model=type(model.forward).__name__, **{name.replace(" ", "_"): n for name, n in counts.items()}
    )
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return rotation


def _same_single(model: Model, paged: Callable[[KvPool, int, int], Paged], rounding: float) -> bool:
    """Whether a decode step of one row is the same with and without norms within its products."""
    token_ids = torch.arange(12, device=model.device) % model.vocab_size
    outputs, products = [], FUSIONS.products
    try:
        for FUSIONS.products in (False, True):
            pool = KvPool(model.shape, 2, 8, model.dtype, model.device)
            with torch.inference_mode():
                for start, stop in ((0, 11), (11, 12)):
                    logits = model.logits(token_ids[start:stop], token_ids[start:stop], None, paged(pool, start, stop))
            outputs.append(logits[-1].float())
    finally:
        FUSIONS.products = products
    return bool((outputs[0] - outputs[1]).norm() < rounding * outputs[0].norm())
