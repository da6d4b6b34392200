"""Does something delay steps or tokens: eviction, the scheduler, kernel launches, output?"""

from penstock.infra.engine_args.rules.base import Context, Details, Level, rule, up
from penstock.infra.engine_args.schema import DraftTarget, Eagle, EngineArgs


@rule("A32", "S126")
def _policy(args: EngineArgs, ctx: Context) -> Details:
    """Running requests are not evicted to admit others."""
    policy = args.scheduler_config.capacity_scheduler_policy
    where = "scheduler_config.capacity_scheduler_policy"
    if policy == "MAX_UTILIZATION":
        level: Level = "error" if ctx.role == "decode" else "warning"
        yield (
            level,
            where,
            (
                "evicts running requests and computes them again"
                + ("; their KV came from elsewhere" if ctx.role == "decode" else "")
            ),
            "use GUARANTEED_NO_EVICT",
        )
    elif policy == "STATIC_BATCH":
        yield "warning", where, "a batch waits for its slowest request", "use GUARANTEED_NO_EVICT"


@rule("A34", "S84")
def _overlap(args: EngineArgs, ctx: Context) -> Details:
    """Prefill workers run without the overlap scheduler, others with it."""
    speculation = args.speculative_config
    two_models = (isinstance(speculation, Eagle) and not speculation.eagle3_one_model) or isinstance(
        speculation, DraftTarget
    )
    if ctx.role == "prefill" and not args.disable_overlap_scheduler:
        yield (
            "error",
            "disable_overlap_scheduler",
            "a context server must run without the overlap scheduler",
            ("set it to true"),
        )
    elif (
        ctx.role in ("decode", "aggregated")
        and args.disable_overlap_scheduler
        and not two_models
        and not ctx.logits_processors  # they need it off
    ):
        yield "warning", "disable_overlap_scheduler", "the GPU waits for the scheduler between steps", "set it to false"
    elif ctx.role in ("decode", "aggregated") and two_models:
        yield (
            "warning",
            "speculative_config",
            "a separate draft model switches the overlap scheduler off",
            ("use eagle3_one_model: true"),
        )


@rule("A36", "S133", "S119", "S122")
def _graphs(args: EngineArgs, ctx: Context) -> Details:
    """CUDA graphs cover the batches that occur, and no others."""
    graphs, where = args.cuda_graph_config, "cuda_graph_config.batch_sizes"
    if graphs is None:
        if ctx.role in ("decode", "aggregated"):
            yield "warning", "cuda_graph_config", "every step pays for its kernel launches", "set batch_sizes"
        return
    if graphs.batch_sizes and graphs.max_batch_size and graphs.max_batch_size != max(graphs.batch_sizes):
        yield (
            "error",
            "cuda_graph_config.max_batch_size",
            (f"{graphs.max_batch_size} is not the largest of batch_sizes, {max(graphs.batch_sizes)}"),
            "give one of the two",
        )
    explicit = bool(graphs.batch_sizes or graphs.max_batch_size)
    largest = args.graph_sizes[-1]
    if explicit and largest > args.batch_size:
        yield (
            "warning",
            where,
            f"a graph for {largest} sequences, but batches have at most {args.batch_size}",
            "remove it",
        )
    if args.draft_tokens and explicit:
        needed = largest * (1 + args.draft_tokens)
        if (args.max_num_tokens or 8192) < needed:
            yield (
                "error",
                "max_num_tokens",
                (f"{largest} sequences of {1 + args.draft_tokens} tokens per step need {needed}"),
                f"use at least {up(needed, args.kv_cache_config.tokens_per_block)}",
            )
    if ctx.role != "decode":
        return
    if explicit and largest < args.batch_size:
        yield (
            "warning",
            where,
            f"batches above {largest} of {args.batch_size} run without a graph",
            (f"add {args.batch_size}"),
        )
    if graphs.batch_sizes and not graphs.enable_padding and set(graphs.batch_sizes) != {*range(1, largest + 1)}:
        yield (
            "warning",
            "cuda_graph_config.enable_padding",
            "batch sizes between the listed ones run without a graph",
            ("set it to true"),
        )


@rule("A37", "S127")
def _output(args: EngineArgs, ctx: Context) -> Details:
    """The worker gets each token as soon as it is generated."""
    if args.num_postprocess_workers:
        yield (
            "warning",
            "num_postprocess_workers",
            "the gateway detokenizes, so these processes are idle",
            "remove it",
        )
    if args.stream_interval > 1:
        yield "warning", "stream_interval", f"clients see bursts of {args.stream_interval} tokens", "set it to 1"
    if args.enable_iter_req_stats and not args.enable_iter_perf_stats:
        yield "error", "enable_iter_req_stats", "needs enable_iter_perf_stats", "set that to true"


RULES = (_policy, _overlap, _graphs, _output)
