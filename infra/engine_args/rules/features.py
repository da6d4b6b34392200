"""Which features do not work together, or not in this release?

Can prefill hand off its KV cache to decode without a deadlock?
"""

from penstock.infra.engine_args.rules.rule import Context, Details, longest_prompt, rule, up
from penstock.infra.engine_args.schema import Eagle, EngineArgs, Mtp

# Releases with known bugs: of tensorrt_llm, and of NVIDIA's runtime container.
_VERSIONS = {"1.2.0": "chunked prefill with block reuse gives wrong output (#12770)"}
_CONTAINERS = {"0.5.1": "sliding windows regressed in its TensorRT-LLM"}


@rule("A27", "S134")
def _offload(args: EngineArgs, ctx: Context) -> Details:
    """Host offload and chunked prefill deadlock together (open issue 13318)."""
    if args.kv_cache_config.host_cache_size and args.enable_chunked_prefill:
        yield (
            "warning",
            "kv_cache_config.host_cache_size",
            "offload with chunked prefill may deadlock (#13318)",
            ("use one of the two"),
        )


@rule("A33", "S134")
def _untested(args: EngineArgs, ctx: Context) -> Details:
    """Combinations that the engine's own feature matrix calls untested."""
    if args.enable_chunked_prefill and args.pipeline_parallel_size > 1:
        yield (
            "warning",
            "enable_chunked_prefill",
            "untested with pipeline parallelism in 1.2.1",
            "compare outputs first",
        )
    if args.enable_lora and (args.enable_attention_dp or ctx.hands_off or args.guided_decoding_backend):
        yield (
            "warning",
            "enable_lora",
            "untested with attention DP, disaggregation and guided decoding",
            ("compare outputs first"),
        )


@rule("A35", "S84")
def _beams(args: EngineArgs, ctx: Context) -> Details:
    """Beam search works neither with disaggregation nor with speculation."""
    if args.beam_width == 1:
        return
    if ctx.hands_off:
        yield "error", "max_beam_width", "disaggregation carries one beam", "set it to 1"
    if args.speculative_config is not None:
        yield "error", "max_beam_width", "speculation follows one beam", "set it to 1, or remove speculative_config"


@rule("A52", "S122")
def _excluded(args: EngineArgs, ctx: Context) -> Details:
    """What the feature matrix excludes with speculation, LoRA and logits processors."""
    speculation = args.speculative_config
    learned = isinstance(speculation, Eagle | Mtp)
    if learned and args.pipeline_parallel_size > 1:
        yield "error", "pipeline_parallel_size", "MTP and EAGLE do not work with pipeline parallelism", "use TP or EP"
    if learned and args.sampler_type == "TRTLLMSampler":
        yield "error", "sampler_type", "the C++ sampler does not work with MTP and EAGLE", "use auto"
    if ctx.logits_processors and (learned or ctx.hands_off):
        yield (
            "error",
            "speculative_config" if learned else "cache_transceiver_config",
            (f"logits processors do not work with {'MTP and EAGLE' if learned else 'disaggregation'}"),
            "serve requests that need them from an aggregated worker without speculation",
        )
    if args.enable_lora and args.cuda_graph_config is not None:
        yield "error", "enable_lora", "LoRA does not work with CUDA graphs", "set cuda_graph_config: null"


@rule("A62", "S84")
def _recomputed(args: EngineArgs, ctx: Context) -> Details:
    """Constraints hold: no request is computed again, which starts its grammar from the beginning (#18891)."""
    if args.guided_decoding_backend and args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        yield (
            "error",
            "scheduler_config.capacity_scheduler_policy",
            "MAX_UTILIZATION computes evicted requests again, which starts the grammar of each anew (#18891)",
            "use GUARANTEED_NO_EVICT, or remove guided_decoding_backend",
        )


@rule("A61", "S112")
def _version(args: EngineArgs, ctx: Context) -> Details:
    """The release has no known bug in a feature that is used."""
    kv = args.kv_cache_config
    if ctx.version in _VERSIONS and args.enable_chunked_prefill and kv.enable_block_reuse:
        yield "error", "enable_chunked_prefill", f"TensorRT-LLM {ctx.version}: {_VERSIONS[ctx.version]}", "use 1.2.1"
    if ctx.container in _CONTAINERS and len(set(kv.max_attention_window or ())) > 1:
        yield (
            "warning",
            "kv_cache_config.max_attention_window",
            (f"runtime container {ctx.container}: {_CONTAINERS[ctx.container]}"),
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
        yield (
            "error",
            where,
            "1.2.1 does not size it by the longest prompt",
            (f"set it to {up(longest, block)}" if longest else "set it to the longest prompt, in whole blocks"),
        )
        return
    if longest and size < longest:
        yield (
            "error",
            where,
            f"prompts of up to {longest} tokens deadlock decode with {size}",
            (f"set it to at least {up(longest, block)}"),
        )
    if size % block:
        yield "error", where, f"{size} is not a multiple of {block} tokens per block", f"use {up(size, block)}"


@rule("A24", "S125", "S124")
def _transceiver(args: EngineArgs, ctx: Context) -> Details:
    """Workers that hand off KV have an explicit transport with a timeout; others have none."""
    transceiver = args.cache_transceiver_config
    where = "cache_transceiver_config.backend"
    if not ctx.hands_off:
        if transceiver is not None and transceiver.backend is not None:
            yield "warning", where, f"a worker of role {ctx.role} moves no KV but pays for the buffer", "remove it"
        return
    if transceiver is None or transceiver.backend is None:
        yield "error", where, f"role {ctx.role} hands off KV and needs a transport", "use UCX or NIXL"
        return
    if transceiver.backend == "DEFAULT":
        yield "warning", where, "DEFAULT differs between releases", "set NIXL or UCX, on both sides"
    if transceiver.kv_transfer_timeout_ms is None:
        yield (
            "warning",
            "cache_transceiver_config.kv_transfer_timeout_ms",
            ("after a failed transfer, prefill holds its blocks forever"),
            "set 60000",
        )


DISAGGREGATION_RULES = (_buffer, _transceiver)
