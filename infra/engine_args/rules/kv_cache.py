"""Do blocks, attention windows and events of the KV cache match the model and the router?

Do weights, activations and KV cache fit into the GPU's memory?
"""

from penstock.infra.engine_args.memory_estimate import GIB, estimate
from penstock.infra.engine_args.rules.rule import Context, Details, rule
from penstock.infra.engine_args.schema import EngineArgs

SMALL_BLOCK, LARGE_BLOCK = 16, 128
EVENT_BUFFER = 8192  # 1024 overflowed under load


@rule("A21", "S128")
def _events(args: EngineArgs, ctx: Context) -> Details:
    """KV events need block reuse, and a buffer that does not overflow under load."""
    kv = args.kv_cache_config
    if kv.event_buffer_max_size and not kv.enable_block_reuse:
        yield (
            "error",
            "kv_cache_config.event_buffer_max_size",
            "without block reuse there are no events",
            ("set enable_block_reuse: true, or event_buffer_max_size: 0"),
        )
    elif 0 < kv.event_buffer_max_size < EVENT_BUFFER:
        yield (
            "warning",
            "kv_cache_config.event_buffer_max_size",
            (f"{kv.event_buffer_max_size} events overflow under load, and lost ones void the router's index"),
            "use 100000",
        )


@rule("A22", "S192")
def _blocks(args: EngineArgs, ctx: Context) -> Details:
    """Blocks have the router's size; small ones slow down handoffs, large ones reduce reuse."""
    size = args.kv_cache_config.tokens_per_block
    where = "kv_cache_config.tokens_per_block"
    if ctx.router_block_size is not None and size != ctx.router_block_size:
        yield (
            "error",
            where,
            f"{size} tokens, the router has {ctx.router_block_size}",
            (f"set it, and --block-size, to {ctx.router_block_size}"),
        )
    if size & (size - 1):
        yield "warning", where, f"{size} is not a power of two, as the kernels expect", "use 32 or 64"
    if size < SMALL_BLOCK:
        yield "warning", where, f"{size} tokens make many small transfers and a large index", "use 32 to 128"
    elif size > LARGE_BLOCK:
        yield (
            "warning",
            where,
            (f"only whole blocks are reused: a prefix loses up to {size - 1} tokens, a context {size // 2} on average"),
            "use 32 to 128",
        )


@rule("A25", "S107", "S110")
def _windows(args: EngineArgs, ctx: Context) -> Details:
    """Attention windows are the model's own, layer by layer, and whole contexts fit the global layers."""
    windows = args.kv_cache_config.max_attention_window
    where = "kv_cache_config.max_attention_window"
    if windows is None:
        return
    limit = ctx.model_len or args.max_seq_len
    if limit and max(windows) < limit:
        yield (
            "error",
            where,
            (f"no layer keeps more than {max(windows)} tokens of contexts up to {limit}"),
            f"raise the global layers' window to {limit}, or lower max_seq_len",
        )
    if ctx.shape is None:
        return
    layers = ctx.shape.layers
    if len(windows) > layers:
        yield "error", where, f"{len(windows)} windows for {layers} layers", "give one per layer, or the pattern once"
        return
    wrong = [
        layer for layer in range(layers)
        if (own := ctx.shape.windows[layer]) != windows[layer % len(windows)]
        and (own or windows[layer % len(windows)] < max(windows))
    ]  # fmt: skip
    if wrong:
        own = ctx.shape.windows[wrong[0]]
        yield (
            "error",
            where,
            (
                f"repeated over {layers} layers it differs from the model's in {len(wrong)}; "
                f"layer {wrong[0]} sees {own or 'everything'}, the list says {windows[wrong[0] % len(windows)]}"
            ),
            "give the model's own pattern",
        )


@rule("A26", "S129")
def _kv_dtype(args: EngineArgs, ctx: Context) -> Details:
    """The engine supports the cache's dtype."""
    dtype = args.kv_cache_config.dtype
    if dtype.lower() not in ("auto", "fp8", "nvfp4", "float16", "bfloat16", "float32"):
        yield (
            "error",
            "kv_cache_config.dtype",
            f"{dtype!r} is not supported",
            "use auto, fp8, nvfp4, bfloat16 or float16",
        )


KV_CACHE_RULES = (_events, _blocks, _windows, _kv_dtype)


FULL_FRACTION, ATTENTION_DP_FRACTION = 0.95, 0.85


@rule("A20", "S128")
def _fraction(args: EngineArgs, ctx: Context) -> Details:
    """The cache leaves room for activations."""
    kv = args.kv_cache_config
    fraction = kv.free_gpu_memory_fraction or 0.9
    limit = ATTENTION_DP_FRACTION if args.enable_attention_dp else FULL_FRACTION
    if fraction > limit:
        yield (
            "warning",
            "kv_cache_config.free_gpu_memory_fraction",
            (f"{fraction} leaves little for activations{' of uneven ranks' if args.enable_attention_dp else ''}"),
            f"use at most {limit}",
        )
    if ctx.role == "encode" and args.mm_encoder_only is False and fraction > 0.5:
        yield "warning", "kv_cache_config.free_gpu_memory_fraction", "an encoder has no KV cache", "use 0.3 or less"


@rule("A60", "S113", "S128")
def _memory(args: EngineArgs, ctx: Context) -> Details:
    """Weights fit the GPU, and one whole context fits beside them (an estimate)."""
    if ctx.shape is None or ctx.gpu_bytes is None:
        return
    length = ctx.model_len or args.max_seq_len or ctx.shape.max_len
    memory = estimate(args, ctx.shape, ctx.gpu_bytes, length=length, draft_bytes=ctx.draft_bytes)
    if memory.weights + memory.reserve >= memory.gpu:
        yield (
            "error",
            "tensor_parallel_size",
            (
                f"weights of {memory.weights / GIB:.1f} GiB and {memory.reserve / GIB:.1f} GiB of activations "
                f"do not fit {memory.gpu / GIB:.0f} GiB"
            ),
            "use more GPUs, a smaller format, or a smaller max_num_tokens",
        )
    elif ctx.role != "encode" and not memory.fits:
        yield (
            "error",
            "kv_cache_config.free_gpu_memory_fraction",
            (
                f"a context of {length} tokens needs {memory.per_sequence / GIB:.1f} GiB, the cache has "
                f"{memory.pool / GIB:.1f} GiB: such a request would wait forever"
            ),
            "raise the fraction, lower max_seq_len, or use more GPUs",
        )


MEMORY_RULES = (_fraction, _memory)
