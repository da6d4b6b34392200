"""Do weights, activations and KV cache fit into the GPU's memory?"""

from penstock.infra.engine_args.memory_estimate import GIB, estimate
from penstock.infra.engine_args.rules.base import Context, Details, rule
from penstock.infra.engine_args.schema import EngineArgs

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


RULES = (_fraction, _memory)
