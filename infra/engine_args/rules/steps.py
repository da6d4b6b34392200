"""Does something delay steps or tokens: eviction, the scheduler, kernel launches, output, the length of drafts?

The best draft length follows from the share of draft tokens that is accepted. Source: Leviathan et al., "Fast inference
from transformers via speculative decoding", arXiv:2211.17192: if each token is accepted with probability a, a draft of
k tokens yields (1 - a^(k+1)) / (1 - a) tokens per step, and a step costs 1 + k c, c being the cost of one draft token
relative to one step of the target.
"""

from penstock.infra.engine_args.rules.rule import Context, Details, error, longest_prompt, rule, up, warning
from penstock.infra.engine_args.schema import DraftTarget, Eagle, EngineArgs, Lookahead, Medusa, Mtp, NGram, Speculation


@rule("A32", "S126")
def _policy(args: EngineArgs, ctx: Context) -> Details:
    """Running requests are not evicted to admit others."""
    policy = args.scheduler_config.capacity_scheduler_policy
    where = "scheduler_config.capacity_scheduler_policy"
    if policy == "MAX_UTILIZATION":
        message = "evicts running requests and computes them again"
        if ctx.role == "decode":
            yield error(where, f"{message}; their KV came from elsewhere", "use GUARANTEED_NO_EVICT")
        else:
            yield warning(where, message, "use GUARANTEED_NO_EVICT")
    elif policy == "STATIC_BATCH":
        yield warning(where, "a batch waits for its slowest request", "use GUARANTEED_NO_EVICT")


@rule("A34", "S84")
def _overlap(args: EngineArgs, ctx: Context) -> Details:
    """Prefill workers run without the overlap scheduler, others with it."""
    speculation = args.speculative_config
    two_models = (isinstance(speculation, Eagle) and not speculation.eagle3_one_model) or isinstance(
        speculation, DraftTarget
    )
    if ctx.role == "prefill" and not args.disable_overlap_scheduler:
        yield error(
            "disable_overlap_scheduler", "a context server must run without the overlap scheduler", "set it to true"
        )
    elif (
        ctx.role in ("decode", "aggregated")
        and args.disable_overlap_scheduler
        and not two_models
        and not ctx.logits_processors  # they need it off
    ):
        yield warning("disable_overlap_scheduler", "the GPU waits for the scheduler between steps", "set it to false")
    elif ctx.role in ("decode", "aggregated") and two_models:
        yield warning(
            "speculative_config",
            "a separate draft model switches the overlap scheduler off",
            "use eagle3_one_model: true",
        )


@rule("A36", "S133", "S119", "S122")
def _graphs(args: EngineArgs, ctx: Context) -> Details:
    """CUDA graphs cover the batches that occur, and no others."""
    graphs, where = args.cuda_graph_config, "cuda_graph_config.batch_sizes"
    if graphs is None:
        if ctx.role in ("decode", "aggregated"):
            yield warning("cuda_graph_config", "every step pays for its kernel launches", "set batch_sizes")
        return
    if graphs.batch_sizes and graphs.max_batch_size and graphs.max_batch_size != max(graphs.batch_sizes):
        yield error(
            "cuda_graph_config.max_batch_size",
            f"{graphs.max_batch_size} is not the largest of batch_sizes, {max(graphs.batch_sizes)}",
            "give one of the two",
        )
    explicit = bool(graphs.batch_sizes or graphs.max_batch_size)
    largest = args.graph_sizes[-1]
    if explicit and largest > args.batch_size:
        yield warning(
            where, f"a graph for {largest} sequences, but batches have at most {args.batch_size}", "remove it"
        )
    if args.draft_tokens and explicit:
        needed = largest * (1 + args.draft_tokens)
        if (args.max_num_tokens or 8192) < needed:
            yield error(
                "max_num_tokens",
                f"{largest} sequences of {1 + args.draft_tokens} tokens per step need {needed}",
                f"use at least {up(needed, args.kv_cache_config.tokens_per_block)}",
            )
    if ctx.role != "decode":
        return
    if explicit and largest < args.batch_size:
        yield warning(
            where, f"batches above {largest} of {args.batch_size} run without a graph", f"add {args.batch_size}"
        )
    if graphs.batch_sizes and not graphs.enable_padding and set(graphs.batch_sizes) != {*range(1, largest + 1)}:
        yield warning(
            "cuda_graph_config.enable_padding",
            "batch sizes between the listed ones run without a graph",
            "set it to true",
        )


@rule("A37", "S127")
def _output(args: EngineArgs, ctx: Context) -> Details:
    """The worker gets each token as soon as it is generated."""
    if args.num_postprocess_workers:
        yield warning("num_postprocess_workers", "the gateway detokenizes, so these processes are idle", "remove it")
    if args.stream_interval > 1:
        yield warning("stream_interval", f"clients see bursts of {args.stream_interval} tokens", "set it to 1")
    if args.enable_iter_req_stats and not args.enable_iter_perf_stats:
        yield error("enable_iter_req_stats", "needs enable_iter_perf_stats", "set that to true")


SCHEDULING_RULES = (_policy, _overlap, _graphs, _output)


PREFILL_BATCH, PREFILL_TOKENS, DECODE_BATCH = 64, 2048, 64


@rule("A30", "S127")
def _length(args: EngineArgs, ctx: Context) -> Details:
    """max_seq_len covers what clients may request, and the model supports it."""
    if ctx.model_len and args.max_seq_len and args.max_seq_len < ctx.model_len:
        yield error(
            "max_seq_len",
            f"{args.max_seq_len} tokens, requests may have {ctx.model_len}",
            f"raise it to {ctx.model_len}, or lower --max-model-len",
        )
    if ctx.shape and ctx.shape.max_len and args.max_seq_len and args.max_seq_len > ctx.shape.max_len:
        yield error(
            "max_seq_len",
            f"{args.max_seq_len} tokens, the model supports {ctx.shape.max_len} positions",
            f"lower it to {ctx.shape.max_len}",
        )


@rule("A31", "S127", "S134")
def _step(args: EngineArgs, ctx: Context) -> Details:
    """A step takes the longest prompt, or prompts are cut into chunks of whole blocks."""
    tokens, block = args.max_num_tokens or 8192, args.kv_cache_config.tokens_per_block
    longest = longest_prompt(args, ctx)
    if ctx.role in ("aggregated", "prefill") and not args.enable_chunked_prefill and longest and tokens < longest:
        yield error(
            "max_num_tokens",
            f"a prompt of {longest} tokens is refused by a step of {tokens}",
            f"set enable_chunked_prefill: true, or max_num_tokens: {up(longest, block)}",
        )
    if tokens % block and ctx.role != "encode":
        asserted = error if ctx.hands_off or args.enable_chunked_prefill else warning
        yield asserted(
            "max_num_tokens",
            f"{tokens} is not a multiple of {block} tokens per block, which the engine asserts",
            f"use {up(tokens, block)}",
        )


@rule("A40", "S192")
def _prefill_batch(args: EngineArgs, ctx: Context) -> Details:
    """A prefill worker takes few sequences and many tokens per step."""
    if ctx.role != "prefill":
        return
    if args.batch_size > PREFILL_BATCH:
        yield warning(
            "max_batch_size",
            f"{args.batch_size} prompts in one step all wait for the last; the GPU is full with a few",
            f"use {PREFILL_BATCH} or fewer",
        )
    if (args.max_num_tokens or 8192) < PREFILL_TOKENS:
        yield warning(
            "max_num_tokens",
            f"steps of {args.max_num_tokens} tokens leave the GPU idle",
            f"use {PREFILL_TOKENS} or more",
        )


@rule("A41", "S192")
def _decode_batch(args: EngineArgs, ctx: Context) -> Details:
    """A decode worker takes many sequences, each with few tokens per step."""
    if ctx.role != "decode":
        return
    if args.batch_size < DECODE_BATCH:
        yield warning(
            "max_batch_size",
            f"every step reads all weights for only {args.batch_size} sequences",
            f"use {DECODE_BATCH} or more",
        )
    needed = args.batch_size * (1 + args.draft_tokens)
    if (args.max_num_tokens or 8192) < needed:
        yield warning(
            "max_num_tokens",
            f"a step of {args.max_num_tokens} tokens cannot hold {args.batch_size} sequences",
            f"use {up(needed, args.kv_cache_config.tokens_per_block)}",
        )


BATCHING_RULES = (_length, _step, _prefill_batch, _decode_batch)


MIN_TOKENS = 1000  # proposed; with fewer, the ratio is not reliable
MAX_LENGTH = 16
_COSTS: dict[type[Speculation], float] = {NGram: 0.01}  # plus what verifying one more token costs
DRAFT_COST, MTP_COST = 0.06, 0.04


def acceptance(ratio: float, length: int) -> float:
    """Probability a that one token is accepted, from the accepted share of drafts of ``length`` tokens.

    The share is (a + a^2 + ... + a^k) / k, which grows with a; solved by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(1, length + 1)) / length < ratio:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def speed_up(rate: float, length: int, cost: float) -> float:
    """Tokens per unit of time, relative to decoding without a draft."""
    return sum(rate**place for place in range(length + 1)) / (1 + length * cost)


def best_length(rate: float, cost: float) -> int:
    """The draft length with the highest speed-up; 0: speculation does not pay."""
    return max(range(MAX_LENGTH + 1), key=lambda length: speed_up(rate, length, cost))


def cost_of(speculation: Speculation) -> float:
    """Cost of one draft token relative to a step of the target: an estimate per kind of speculation."""
    if isinstance(speculation, Mtp):
        return MTP_COST
    return _COSTS.get(type(speculation), DRAFT_COST)


@rule("A50", "S114", "S122")
def _speculation(args: EngineArgs, ctx: Context) -> Details:
    """Each kind of speculation has what it needs."""
    speculation, where = args.speculative_config, "speculative_config"
    if speculation is None:
        return
    if isinstance(speculation, Medusa | Lookahead):
        yield error(f"{where}.decoding_type", "works on TensorRT engines only", "use Eagle, MTP or NGram")
        return
    if isinstance(speculation, Eagle | DraftTarget | NGram) and not speculation.max_draft_len:
        yield error(f"{where}.max_draft_len", "must be above 0", "start with 3")
    if isinstance(speculation, Eagle | DraftTarget) and not speculation.draft_model:
        yield error(f"{where}.speculative_model", "a draft model must be named", "name its directory or id")
    if speculation.speculative_model and speculation.speculative_model_dir:
        yield error(f"{where}.speculative_model_dir", "is speculative_model under its older name", "give one")
    if isinstance(speculation, NGram) and not speculation.max_matching_ngram_size:
        yield error(f"{where}.max_matching_ngram_size", "must be above 0", "start with 2")
    if isinstance(speculation, Mtp) and speculation.max_draft_len not in (None, speculation.num_nextn_predict_layers):
        yield error(f"{where}.max_draft_len", "differs from num_nextn_predict_layers", "remove it")
    if isinstance(speculation, Mtp) and ctx.shape and not ctx.shape.mtp_layers:
        yield error(f"{where}.decoding_type", "the model has no MTP layers", "use Eagle or NGram")
    schedule = speculation.draft_len_schedule
    if schedule is not None and schedule.get(1) != speculation.max_draft_len:
        yield error(
            f"{where}.draft_len_schedule",
            "must give batch size 1 the full max_draft_len",
            f"add 1: {speculation.max_draft_len}",
        )
    if isinstance(speculation, Eagle) and (speculation.eagle_choices or speculation.use_dynamic_tree):
        yield error(where, "draft trees are not supported on PyTorch", "remove eagle_choices and use_dynamic_tree")


@rule("A51", "S114", "S116")
def _draft(args: EngineArgs, ctx: Context) -> Details:
    """The draft model exists and shares the target's vocabulary."""
    speculation, where = args.speculative_config, "speculative_config.speculative_model"
    if speculation is None or not speculation.draft_model:
        return
    if speculation.draft_model in ctx.missing:
        yield error(where, f"no directory {speculation.draft_model}", "download the draft model, or correct the path")
    if ctx.draft is None or ctx.shape is None:
        return
    if ctx.draft.vocab != ctx.shape.vocab:
        yield error(
            where,
            f"its vocabulary has {ctx.draft.vocab} tokens, the target's {ctx.shape.vocab}: its token ids mean others",
            "use a draft model made for this target",
        )
    if isinstance(speculation, Eagle) and ctx.draft.hidden != ctx.shape.hidden:
        yield warning(
            where,
            f"its hidden size {ctx.draft.hidden} is not the target's {ctx.shape.hidden}, whose states it reads",
            "use a draft model made for this target",
        )


@rule("A53", "S118")
def _acceptance(args: EngineArgs, ctx: Context) -> Details:
    """The draft is not longer than the recorded acceptance justifies."""
    if ctx.accepted is None or args.speculative_config is None or not args.draft_tokens:
        return
    proposed, accepted = ctx.accepted
    if proposed < MIN_TOKENS:
        return
    length = args.draft_tokens
    rate = acceptance(accepted / proposed, length)
    best = best_length(rate, cost_of(args.speculative_config))
    where = "speculative_config.max_draft_len"
    if isinstance(args.speculative_config, Mtp):
        where = "speculative_config.num_nextn_predict_layers"
    ratio = f"{accepted / proposed:.0%} of proposed tokens are accepted"
    if best < length:
        fix = f"lower it to {best}" if best else "remove speculative_config: it costs more than it saves"
        yield warning(where, f"{ratio}: a draft of {length} is too long", fix)


SPECULATION_RULES = (_speculation, _draft, _acceptance)
