"""Features that do not work together, or not in this release; the KV cache, its memory and its handoff.

Do blocks, attention windows and events of the KV cache match the model and the router, does all of it fit into the
GPU's memory, and can prefill hand off its KV cache to decode without a deadlock?
"""

from penstock.infra.engine_args.memory_estimate import GIB, estimate
from penstock.infra.engine_args.rules.rule import Context, Details, error, longest_prompt, rule, up, warning
from penstock.infra.engine_args.schema import Eagle, EngineArgs, Mtp

# Releases with known bugs: of tensorrt_llm, and of NVIDIA's runtime container.
_VERSIONS = {"1.2.0": "chunked prefill with block reuse gives wrong output (#12770)"}
_CONTAINERS = {"0.5.1": "sliding windows regressed in its TensorRT-LLM"}


@rule("A27", "S134")
def _offload(args: EngineArgs, ctx: Context) -> Details:
    """Host offload and chunked prefill deadlock together (open issue 13318)."""
    if args.kv_cache_config.host_cache_size and args.enable_chunked_prefill:
        yield warning(
            "kv_cache_config.host_cache_size",
            "offload with chunked prefill may deadlock (#13318)",
            "use one of the two",
        )


@rule("A33", "S134")
def _untested(args: EngineArgs, ctx: Context) -> Details:
    """Combinations that the engine's own feature matrix calls untested."""
    if args.enable_chunked_prefill and args.pipeline_parallel_size > 1:
        yield warning("enable_chunked_prefill", "untested with pipeline parallelism in 1.2.1", "compare outputs first")
    if args.enable_lora and (args.enable_attention_dp or ctx.hands_off or args.guided_decoding_backend):
        yield warning(
            "enable_lora", "untested with attention DP, disaggregation and guided decoding", "compare outputs first"
        )


@rule("A35", "S84")
def _beams(args: EngineArgs, ctx: Context) -> Details:
    """Beam search works neither with disaggregation nor with speculation."""
    if args.beam_width == 1:
        return
    if ctx.hands_off:
        yield error("max_beam_width", "disaggregation carries one beam", "set it to 1")
    if args.speculative_config is not None:
        yield error("max_beam_width", "speculation follows one beam", "set it to 1, or remove speculative_config")


@rule("A52", "S122")
def _excluded(args: EngineArgs, ctx: Context) -> Details:
    """What the feature matrix excludes with speculation, LoRA and logits processors."""
    speculation = args.speculative_config
    learned = isinstance(speculation, Eagle | Mtp)
    if learned and args.pipeline_parallel_size > 1:
        yield error("pipeline_parallel_size", "MTP and EAGLE do not work with pipeline parallelism", "use TP or EP")
    if learned and args.sampler_type == "TRTLLMSampler":
        yield error("sampler_type", "the C++ sampler does not work with MTP and EAGLE", "use auto")
    if ctx.logits_processors and (learned or ctx.hands_off):
        yield error(
            "speculative_config" if learned else "cache_transceiver_config",
            f"logits processors do not work with {'MTP and EAGLE' if learned else 'disaggregation'}",
            "serve requests that need them from an aggregated worker without speculation",
        )
    if args.enable_lora and args.cuda_graph_config is not None:
        yield error("enable_lora", "LoRA does not work with CUDA graphs", "set cuda_graph_config: null")


@rule("A62", "S84")
def _recomputed(args: EngineArgs, ctx: Context) -> Details:
    """Constraints hold: no request is computed again, which starts its grammar from the beginning (#18891)."""
    if args.guided_decoding_backend and args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        yield error(
            "scheduler_config.capacity_scheduler_policy",
            "MAX_UTILIZATION computes evicted requests again, which restarts the grammar of each (#18891)",
            "use GUARANTEED_NO_EVICT, or remove guided_decoding_backend",
        )


@rule("A61", "S112")
def _version(args: EngineArgs, ctx: Context) -> Details:
    """The release has no known bug in a feature that is used."""
    kv = args.kv_cache_config
    if ctx.version in _VERSIONS and args.enable_chunked_prefill and kv.enable_block_reuse:
        yield error("enable_chunked_prefill", f"TensorRT-LLM {ctx.version}: {_VERSIONS[ctx.version]}", "use 1.2.1")
    if ctx.container in _CONTAINERS and len(set(kv.max_attention_window or ())) > 1:
        yield warning(
            "kv_cache_config.max_attention_window",
            f"runtime container {ctx.container}: {_CONTAINERS[ctx.container]}",
            "use 0.5.0, or a release from 0.6 on",
        )


FEATURE_RULES = (_offload, _untested, _beams, _excluded, _recomputed, _version)


@rule("A23", "S84")
def _buffer(args: EngineArgs, ctx: Context) -> Details:
    """The transfer buffer holds the longest prompt, in whole blocks; otherwise decode waits forever."""
    transceiver, block = args.cache_transceiver_config, args.kv_cache_config.tokens_per_block
    if not ctx.hands_off or transceiver is None or transceiver.backend is None:
        return
    where, longest = "cache_transceiver_config.max_tokens_in_buffer", longest_prompt(args, ctx)
    size = transceiver.max_tokens_in_buffer
    if size is None:
        yield error(
            where,
            "1.2.1 does not size it by the longest prompt",
            f"set it to {up(longest, block)}" if longest else "set it to the longest prompt, in whole blocks",
        )
        return
    if longest and size < longest:
        yield error(
            where,
            f"prompts of up to {longest} tokens deadlock decode with {size}",
            f"set it to at least {up(longest, block)}",
        )
    if size % block:
        yield error(where, f"{size} is not a multiple of {block} tokens per block", f"use {up(size, block)}")


@rule("A24", "S125", "S124")
def _transceiver(args: EngineArgs, ctx: Context) -> Details:
    """Workers that hand off KV have an explicit transport with a timeout; others have none."""
    transceiver = args.cache_transceiver_config
    where = "cache_transceiver_config.backend"
    if not ctx.hands_off:
        if transceiver is not None and transceiver.backend is not None:
            yield warning(where, f"a worker of role {ctx.role} moves no KV but pays for the buffer", "remove it")
        return
    if transceiver is None or transceiver.backend is None:
        yield error(where, f"role {ctx.role} hands off KV and needs a transport", "use UCX or NIXL")
        return
    if transceiver.backend == "DEFAULT":
        yield warning(where, "DEFAULT differs between releases", "set NIXL or UCX, on both sides")
    if transceiver.kv_transfer_timeout_ms is None:
        yield warning(
            "cache_transceiver_config.kv_transfer_timeout_ms",
            "after a failed transfer, prefill holds its blocks forever",
            "set 60000",
        )


DISAGGREGATION_RULES = (_buffer, _transceiver)


SMALL_BLOCK, LARGE_BLOCK = 16, 128
EVENT_BUFFER = 8192  # 1024 overflowed under load


@rule("A21", "S128")
def _events(args: EngineArgs, ctx: Context) -> Details:
    """KV events need block reuse, and a buffer that does not overflow under load."""
    kv = args.kv_cache_config
    if kv.event_buffer_max_size and not kv.enable_block_reuse:
        yield error(
            "kv_cache_config.event_buffer_max_size",
            "without block reuse there are no events",
            "set enable_block_reuse: true, or event_buffer_max_size: 0",
        )
    elif 0 < kv.event_buffer_max_size < EVENT_BUFFER:
        yield warning(
            "kv_cache_config.event_buffer_max_size",
            f"{kv.event_buffer_max_size} events overflow under load, and lost ones void the router's index",
            "use 100000",
        )


@rule("A22", "S192")
def _blocks(args: EngineArgs, ctx: Context) -> Details:
    """Blocks have the router's size; small ones slow down handoffs, large ones reduce reuse."""
    size = args.kv_cache_config.tokens_per_block
    where = "kv_cache_config.tokens_per_block"
    if ctx.router_block_size is not None and size != ctx.router_block_size:
        yield error(
            where,
            f"{size} tokens, the router has {ctx.router_block_size}",
            f"set it, and --block-size, to {ctx.router_block_size}",
        )
    if size & (size - 1):
        yield warning(where, f"{size} is not a power of two, as the kernels expect", "use 32 or 64")
    if size < SMALL_BLOCK:
        yield warning(where, f"{size} tokens make many small transfers and a large index", "use 32 to 128")
    elif size > LARGE_BLOCK:
        yield warning(
            where,
            f"only whole blocks are reused: a prefix loses up to {size - 1} tokens, a context {size // 2} on average",
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
        yield error(
            where,
            f"no layer keeps more than {max(windows)} tokens of contexts up to {limit}",
            f"raise the global layers' window to {limit}, or lower max_seq_len",
        )
    if ctx.shape is None:
        return
    layers = ctx.shape.layers
    if len(windows) > layers:
        yield error(where, f"{len(windows)} windows for {layers} layers", "give one per layer, or the pattern once")
        return
    wrong = [
        layer for layer in range(layers)
        if (own := ctx.shape.windows[layer]) != windows[layer % len(windows)]
        and (own or windows[layer % len(windows)] < max(windows))
    ]  # fmt: skip
    if wrong:
        own = ctx.shape.windows[wrong[0]]
        yield error(
            where,
            f"repeated over {layers} layers it differs from the model's in {len(wrong)}; "
            f"layer {wrong[0]} sees {own or 'everything'}, the list says {windows[wrong[0] % len(windows)]}",
            "give the model's own pattern",
        )


@rule("A26", "S129")
def _kv_dtype(args: EngineArgs, ctx: Context) -> Details:
    """The engine supports the cache's dtype."""
    dtype = args.kv_cache_config.dtype
    if dtype.lower() not in ("auto", "fp8", "nvfp4", "float16", "bfloat16", "float32"):
        yield error("kv_cache_config.dtype", f"{dtype!r} is not supported", "use auto, fp8, nvfp4, bfloat16 or float16")


KV_CACHE_RULES = (_events, _blocks, _windows, _kv_dtype)


FULL_FRACTION, ATTENTION_DP_FRACTION = 0.95, 0.85


@rule("A20", "S128")
def _fraction(args: EngineArgs, ctx: Context) -> Details:
    """The cache leaves room for activations."""
    kv = args.kv_cache_config
    fraction = kv.free_gpu_memory_fraction or 0.9
    limit = ATTENTION_DP_FRACTION if args.enable_attention_dp else FULL_FRACTION
    if fraction > limit:
        yield warning(
            "kv_cache_config.free_gpu_memory_fraction",
            f"{fraction} leaves little for activations{' of uneven ranks' if args.enable_attention_dp else ''}",
            f"use at most {limit}",
        )
    if ctx.role == "encode" and args.mm_encoder_only is False and fraction > 0.5:
        yield warning("kv_cache_config.free_gpu_memory_fraction", "an encoder has no KV cache", "use 0.3 or less")


@rule("A60", "S113", "S128")
def _memory(args: EngineArgs, ctx: Context) -> Details:
    """Weights fit the GPU, and one whole context fits beside them (an estimate)."""
    if ctx.shape is None or ctx.gpu_bytes is None:
        return
    length = ctx.model_len or args.max_seq_len or ctx.shape.max_len
    memory = estimate(args, ctx.shape, ctx.gpu_bytes, length=length, draft_bytes=ctx.draft_bytes)
    if memory.weights + memory.reserve >= memory.gpu:
        yield error(
            "tensor_parallel_size",
            f"weights of {memory.weights / GIB:.1f} GiB and {memory.reserve / GIB:.1f} GiB of activations "
            f"do not fit {memory.gpu / GIB:.0f} GiB",
            "use more GPUs, a smaller format, or a smaller max_num_tokens",
        )
    elif ctx.role != "encode" and not memory.fits:
        yield error(
            "kv_cache_config.free_gpu_memory_fraction",
            f"a context of {length} tokens needs {memory.per_sequence / GIB:.1f} GiB, the cache has "
            f"{memory.pool / GIB:.1f} GiB: such a request would wait forever",
            "raise the fraction, lower max_seq_len, or use more GPUs",
        )


MEMORY_RULES = (_fraction, _memory)
