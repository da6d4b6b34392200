"""Memory of an engine on one GPU, and the context that fits: an estimate from the model's shape, not a measurement.

The shape is read from config.json, never from weights. Parameter counts are exact except for norms and biases; tests
compare them with published ones. The formulas, per GPU:

- weights: attention, shared experts and embeddings / attention ranks, dense layers / TP, experts / (MoE TP x MoE EP),
  all / PP, and vision on every GPU, each times its bits. With attention DP, every rank has all attention weights.
- KV per token and layer: 2 x ceil(kv_heads / attention ranks) x head_dim values; MLA: latent + rotary part, which
  is not split over ranks (arXiv:2405.04434, section 2.1.3). A layer with a window keeps min(length, window) tokens.
- pool: free_gpu_memory_fraction x (GPU - weights - reserve), less the transfer buffer of ``max_tokens_in_buffer``.
"""

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.infra.engine_args.schema import Eagle, EngineArgs, Mtp

BF16_BITS = 16.0
FP8_BITS = 8.0
NVFP4_BITS = 4.5  # 4 bits, and an 8-bit scale per 16 values
MXFP4_BITS = 4.25  # 4 bits, and an 8-bit scale per 32 values


class UnknownShape(ValueError):
    """A size is missing in config.json; the message names the key."""


class Experts(Struct, frozen=True, kw_only=True):
    """Layers whose feed-forward part is a mixture of experts."""

    count: int
    layers: int
    parameters: int  # of one expert in one layer
    shared: int  # parameters of the shared expert of one layer; 0: none
    per_token: int = 0  # that compute one token; 0: config.json does not say


class Shape(Struct, frozen=True, kw_only=True):
    """Sizes of one model. Parameters are counts, not bytes; ``kv_*`` are values per token and layer."""

    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # 0: a latent is cached instead (MLA)
    head_dim: int
    latent: int  # values of the MLA latent, its rotary part included; 0: none
    intermediate: int
    vocab: int
    max_len: int
    attention: int  # parameters of one layer
    dense: int  # feed-forward parameters of all layers without experts
    experts: Experts | None
    embeddings: int
    vision: int  # parameters of tower and projector
    mtp_layers: int
    windows: tuple[int, ...]  # attention window per layer; 0: full attention
    expert_bits: float
    linear_bits: float
    mtp_bits: float
    kv_bits: float = 0.0  # of a cached value, where the checkpoint says so; 0: it does not

    @property
    def mtp(self) -> int:
        """Parameters of the multi-token-prediction layers (DeepSeek-V3 report, arXiv:2412.19437, section 2.2)."""
        if self.experts is None:
            return 0
        block = self.attention + self.experts.count * self.experts.parameters + self.experts.shared
        return self.mtp_layers * (block + 2 * self.hidden * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters except those of the MTP layers, as published for models."""
        routed = self.experts.layers * self.experts.count * self.experts.parameters if self.experts else 0
        shared = self.experts.layers * self.experts.shared if self.experts else 0
        return self.layers * self.attention + self.dense + routed + shared + self.embeddings + self.vision


def shape_of(config: Mapping[str, Any], *, model: str = "") -> Shape:
    """The sizes in the config.json of a Llama, Gemma, DeepSeek-V3, GPT-OSS or LLaVA model.

    Raises:
        UnknownShape: a required key is missing.
    """
    text = {**config, **(config.get("text_config") or {})}
    layers, hidden, heads = (
        _int(text, "num_hidden_layers"),
        _int(text, "hidden_size"),
        _int(text, "num_attention_heads"),
    )
    head_dim = int(text.get("head_dim") or hidden // heads)
    mla = int(text.get("kv_lora_rank") or 0)
    kv_heads = 0 if mla else int(text.get("num_key_value_heads") or heads)
    vocab = _int(text, "vocab_size")
    experts, dense = _feed_forward(text, layers, hidden)
    attention = _latent_attention(text, hidden, heads) if mla else 2 * hidden * head_dim * (heads + kv_heads)
    expert_bits, linear_bits, mtp_bits = _bits(config, text)
    return Shape(
        model=model or str(config.get("_name_or_path") or ""),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=mla + int(text.get("qk_rope_head_dim") or 0) if mla else 0,
        intermediate=int(text.get("intermediate_size") or 0),
        vocab=vocab,
        max_len=int(text.get("max_position_embeddings") or 0),
        attention=attention,
        dense=dense,
        experts=experts,
        embeddings=vocab * hidden * (1 if text.get("tie_word_embeddings") else 2),
        vision=_vision(config, hidden),
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
        windows=_windows(text, layers),
        expert_bits=expert_bits,
        linear_bits=linear_bits,
        mtp_bits=mtp_bits,
        kv_bits=_kv_bits(config),
    )


def _int(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnknownShape(f"config.json has {key} = {value!r}; memory cannot be estimated")
    return value


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Parameters of one layer of multi-head latent attention (arXiv:2405.04434, section 2.1)."""
    latent, rope = _int(text, "kv_lora_rank"), _int(text, "qk_rope_head_dim")
    nope, value = _int(text, "qk_nope_head_dim"), _int(text, "v_head_dim")
    queries = int(text.get("q_lora_rank") or 0)
    q = queries * (hidden + heads * (nope + rope)) if queries else hidden * heads * (nope + rope)
    return q + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _feed_forward(text: Mapping[str, Any], layers: int, hidden: int) -> tuple[Experts | None, int]:
    """The experts, and the feed-forward parameters of the layers without experts."""
    intermediate = _int(text, "intermediate_size")
    count = next((int(text[k]) for k in ("n_routed_experts", "num_local_experts", "num_experts") if text.get(k)), 0)
    if count < 2:
        return None, layers * 3 * hidden * intermediate
    size = int(text.get("moe_intermediate_size") or intermediate)
    step = int(text.get("interleave_moe_layer_step") or text.get("moe_layer_freq") or 1)
    first = int(text.get("first_k_dense_replace") or 0)
    mixed = (layers - first) // step
    dense_size = int(text.get("intermediate_size_mlp") or intermediate)
    shared = int(text.get("n_shared_experts") or (1 if text.get("model_type") == "llama4_text" else 0))
    per_token = next((int(text[k]) for k in ("num_experts_per_tok", "experts_per_token") if text.get(k)), 0)
    experts = Experts(
        count=count,
        layers=mixed,
        parameters=3 * hidden * size,
        shared=shared * 3 * hidden * size + count * hidden,
        per_token=per_token,
    )
    return experts, (layers - mixed) * 3 * hidden * dense_size


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Attention window of each layer; 0: full. Llama 4's chunked layers count as full: the engine keeps all tokens."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or text.get("use_sliding_window") is False:
        return (0,) * layers
    if types := text.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    pattern = text.get("sliding_window_pattern") or (6 if "gemma3" in str(text.get("model_type")) else 0)
    if pattern:
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    return (window,) * layers


def _vision(config: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a ViT encoder and LLaVA's two-layer projector; 0: not a vision model."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping) or not isinstance(width := tower.get("hidden_size"), int):
        return 0
    depth, wide = int(tower.get("num_hidden_layers") or 0), int(tower.get("intermediate_size") or 4 * width)
    return depth * (4 * width * width + 2 * width * wide) + width * hidden + hidden * hidden


def _kv_bits(config: Mapping[str, Any]) -> float:
    """Of checkpoints with scales of the KV cache, as ModelOpt writes them."""
    stored = config.get("quantization_config") or {}
    algorithm = str(stored.get("kv_cache_quant_algo") or "").lower()
    scheme = stored.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and isinstance(bits := scheme.get("num_bits"), int):
        return float(bits)
    return {"fp8": FP8_BITS, "int8": 8.0, "nvfp4": NVFP4_BITS}.get(algorithm, 0.0)


def _bits(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[float, float, float]:
    """Bits per parameter of experts, of other linear layers, and of MTP layers, as the checkpoint stores them."""
    stored = config.get("quantization_config") or text.get("quantization_config") or {}
    method = str(stored.get("quant_algo") or stored.get("quant_method") or "").lower()
    bits = {"float32": 32.0}.get(str(text.get("torch_dtype") or text.get("dtype")), BF16_BITS)
    if method.startswith("mxfp4"):
        return MXFP4_BITS, bits, bits
    if method in ("nvfp4", "fp4", "modelopt_fp4"):
        exclude_attention = stored.get("exclude_attention", False)
        return NVFP4_BITS, bits if exclude_attention else NVFP4_BITS, bits
    if method.startswith(("fp8", "modelopt")):
        return FP8_BITS, bits if stored.get("exclude_attention") else FP8_BITS, FP8_BITS
    return bits, bits, bits


GIB = 1 << 30
RESERVE_BYTES = 3 * GIB  # CUDA context, NCCL, graphs, workspaces: a rough value
ACTIVATION_BYTES = 2


class GpuMemory(Struct, frozen=True, kw_only=True):
    """Memory of one GPU, bytes. ``sequences``: how many of ``length`` tokens fit at once."""

    gpu: int
    weights: int
    reserve: int
    buffer: int
    pool: int
    kv_per_token: int  # before tokens leave an attention window
    per_sequence: int
    length: int
    block_size: int
    sequences: int

    @property
    def fits(self) -> bool:
        return self.sequences >= 1

    @property
    def blocks(self) -> int:
        """KV blocks of complete contexts of ``length`` tokens; the remainder is not counted."""
        return self.sequences * math.ceil(self.length / self.block_size)


def kv_values(shape: Shape, ranks: int) -> int:
    """Values that one rank caches per token and layer. Fewer KV heads than ranks: each rank has a copy of one."""
    return shape.latent or 2 * math.ceil(shape.kv_heads / ranks) * shape.head_dim


def kv_bytes(args: EngineArgs, shape: Shape) -> float:
    """Bytes per cached value."""
    dtype = args.kv_cache_config.dtype.lower()
    sizes = {"fp8": 1.0, "int8": 1.0, "nvfp4": 4.5 / 8, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
    if dtype == "auto" and shape.kv_bits:  # the engine follows the checkpoint
        return shape.kv_bits / 8
    return sizes.get(dtype, 2.0)


def layer_windows(args: EngineArgs, shape: Shape) -> tuple[int, ...]:
    """Tokens that the engine keeps per layer; 0: all, as for all layers without max_attention_window."""
    windows = args.kv_cache_config.max_attention_window
    speculation = args.speculative_config
    extra = (
        shape.mtp_layers if isinstance(speculation, Mtp) else int(isinstance(speculation, Eagle))
    )  # draft layers have a cache, too
    layers = shape.layers + extra
    return tuple(windows[layer % len(windows)] for layer in range(layers)) if windows else (0,) * layers


def weight_bytes(args: EngineArgs, shape: Shape) -> int:
    """Bytes of weights on one GPU."""
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    moe_tp, moe_ep = args.moe_parallel
    bits = (shape.layers * shape.attention * shape.linear_bits) / args.attention_ranks
    bits += shape.dense * shape.linear_bits / tp
    if shape.experts is not None:
        slots = shape.experts.count
        balancer = args.moe_config.load_balancer
        if balancer is not None and not isinstance(balancer, str):
            slots = max(slots, balancer.num_slots)
        bits += shape.experts.layers * slots * shape.experts.parameters * shape.expert_bits / (moe_tp * moe_ep)
        bits += shape.experts.layers * shape.experts.shared * shape.linear_bits / args.attention_ranks
    bits += shape.embeddings * 16.0 / args.attention_ranks
    if isinstance(args.speculative_config, Mtp):
        bits += shape.mtp * shape.mtp_bits / (moe_tp * moe_ep)
    return int((bits / pp + shape.vision * 16.0) / 8)


def activation_bytes(args: EngineArgs, shape: Shape) -> int:
    """Bytes for the largest step: residuals, projections and feed-forward of max_num_tokens, and all logits."""
    tokens = args.max_num_tokens or 8192
    wide = 3 * max(shape.intermediate // args.attention_ranks, shape.hidden)
    logits = min(args.batch_size, tokens) * (1 + args.draft_tokens) * shape.vocab * 4 // args.attention_ranks
    return tokens * (6 * shape.hidden + wide) * ACTIVATION_BYTES + logits


def estimate(args: EngineArgs, shape: Shape, gpu_bytes: int, *, length: int, draft_bytes: int = 0) -> GpuMemory:
    """
    Args:
        length: tokens of one context, prompt and output.
        draft_bytes: weights of a separate draft model on this GPU.
    """
    pp = args.pipeline_parallel_size
    value = kv_bytes(args, shape)
    per_layer = kv_values(shape, args.attention_ranks) * value
    block = args.kv_cache_config.tokens_per_block
    windows = layer_windows(args, shape)
    # A window slides within blocks, so it needs one more than it covers.
    kept = sum(
        min(_up(length, block), _up(window, block) + block) if window else _up(length, block) for window in windows
    )
    weights = weight_bytes(args, shape) + draft_bytes
    reserve = RESERVE_BYTES + activation_bytes(args, shape)
    transceiver = args.cache_transceiver_config
    buffered = (transceiver.max_tokens_in_buffer or 0) if transceiver and transceiver.backend else 0
    buffer = int(buffered * per_layer * len(windows) / pp)
    kv = args.kv_cache_config
    free = max(0, gpu_bytes - weights - reserve)
    pool = int((kv.free_gpu_memory_fraction or 0.9) * free)
    pool = max(0, min(pool, free - buffer))
    per_token = per_layer * len(windows) / pp
    if kv.max_tokens is not None:
        pool = min(pool, int(kv.max_tokens * per_token))
    if kv.max_gpu_total_bytes:
        pool = min(pool, kv.max_gpu_total_bytes)
    per_sequence = math.ceil(kept * per_layer / pp)
    return GpuMemory(
        gpu=gpu_bytes,
        weights=weights,
        reserve=reserve,
        buffer=buffer,
        pool=pool,
        kv_per_token=math.ceil(per_token),
        per_sequence=per_sequence,
        length=length,
        block_size=block,
        sequences=pool // per_sequence,
    )


def _up(tokens: int, block: int) -> int:
    return math.ceil(tokens / block) * block
