"""Can a step take the expected requests, and as many as suit its role?"""

from penstock.infra.engine_args.rules.base import Context, Details, longest_prompt, rule, up
from penstock.infra.engine_args.schema import EngineArgs

PREFILL_BATCH, PREFILL_TOKENS, DECODE_BATCH = 64, 2048, 64


@rule("A30", "S127")
def _length(args: EngineArgs, ctx: Context) -> Details:
    """max_seq_len covers what clients may request, and the model supports it."""
    if ctx.model_len and args.max_seq_len and args.max_seq_len < ctx.model_len:
        yield (
            "error",
            "max_seq_len",
            f"{args.max_seq_len} tokens, requests may have {ctx.model_len}",
            (f"raise it to {ctx.model_len}, or lower --max-model-len"),
        )
    if ctx.shape and ctx.shape.max_len and args.max_seq_len and args.max_seq_len > ctx.shape.max_len:
        yield (
            "error",
            "max_seq_len",
            f"{args.max_seq_len} tokens, the model supports {ctx.shape.max_len} positions",
            (f"lower it to {ctx.shape.max_len}"),
        )


@rule("A31", "S127", "S134")
def _step(args: EngineArgs, ctx: Context) -> Details:
    """A step takes the longest prompt, or prompts are cut into chunks of whole blocks."""
    tokens, block = args.max_num_tokens or 8192, args.kv_cache_config.tokens_per_block
    longest = longest_prompt(args, ctx)
    if ctx.role in ("aggregated", "prefill") and not args.enable_chunked_prefill and longest and tokens < longest:
        yield (
            "error",
            "max_num_tokens",
            f"a prompt of {longest} tokens is refused by a step of {tokens}",
            (f"set enable_chunked_prefill: true, or max_num_tokens: {up(longest, block)}"),
        )
    if tokens % block and ctx.role != "encode":
        strict = ctx.hands_off or args.enable_chunked_prefill
        yield (
            ("error" if strict else "warning"),
            "max_num_tokens",
            (f"{tokens} is not a multiple of {block} tokens per block, which the engine asserts"),
            f"use {up(tokens, block)}",
        )


@rule("A40", "S192")
def _prefill_batch(args: EngineArgs, ctx: Context) -> Details:
    """A prefill worker takes few sequences and many tokens per step."""
    if ctx.role != "prefill":
        return
    if args.batch_size > PREFILL_BATCH:
        yield (
            "warning",
            "max_batch_size",
            (f"{args.batch_size} prompts in one step all wait for the last; the GPU is full with a few"),
            f"use {PREFILL_BATCH} or fewer",
        )
    if (args.max_num_tokens or 8192) < PREFILL_TOKENS:
        yield (
            "warning",
            "max_num_tokens",
            f"steps of {args.max_num_tokens} tokens leave the GPU idle",
            (f"use {PREFILL_TOKENS} or more"),
        )


@rule("A41", "S192")
def _decode_batch(args: EngineArgs, ctx: Context) -> Details:
    """A decode worker takes many sequences, each with few tokens per step."""
    if ctx.role != "decode":
        return
    if args.batch_size < DECODE_BATCH:
        yield (
            "warning",
            "max_batch_size",
            (f"every step reads all weights for only {args.batch_size} sequences"),
            f"use {DECODE_BATCH} or more",
        )
    needed = args.batch_size * (1 + args.draft_tokens)
    if (args.max_num_tokens or 8192) < needed:
        yield (
            "warning",
            "max_num_tokens",
            (f"a step of {args.max_num_tokens} tokens cannot hold {args.batch_size} sequences"),
            f"use {up(needed, args.kv_cache_config.tokens_per_block)}",
        )


RULES = (_length, _step, _prefill_batch, _decode_batch)
