"""Memory of an engine on one GPU, and the context that fits: an estimate from the model's shape, not a measurement.

The formulas, per GPU:

- weights: attention, shared experts and embeddings / attention ranks, dense layers / TP, experts / (MoE TP x MoE EP),
  all / PP, and vision on every GPU, each times its bits. With attention DP, every rank has all attention weights.
- KV per token and layer: 2 x ceil(kv_heads / attention ranks) x head_dim values; MLA: latent + rotary part, which
  is not split over ranks (arXiv:2405.04434, section 2.1.3). A layer with a window keeps min(length, window) tokens.
- pool: free_gpu_memory_fraction x (GPU - weights - reserve), less the transfer buffer of ``max_tokens_in_buffer``.
"""

import math

from msgspec import Struct

from penstock.infra.engine_args.model_shape import Shape
from penstock.infra.engine_args.schema import Eagle, EngineArgs, Mtp

GIB = 1 << 30
RESERVE_BYTES = 3 * GIB  # CUDA context, NCCL, graphs, workspaces: a rough value
ACTIVATION_BYTES = 2


class Memory(Struct, frozen=True, kw_only=True):
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


def estimate(args: EngineArgs, shape: Shape, gpu_bytes: int, *, length: int, draft_bytes: int = 0) -> Memory:
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
    return Memory(
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
