"""Which engine arguments go wrong together, and which only go slowly: pure rules over arguments and circumstances.

An *error* is what TensorRT-LLM 1.2.1 refuses, or what would dead-lock, corrupt or starve later; a *warning* is advice.
Each finding carries its rule's number (stable, never reused) and what to do. What is unknown (no model, no GPU given)
is not judged.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from configs.engine_args import drafts
from configs.engine_args.memory import GIB, estimate
from configs.engine_args.schema import AutoDeployArgs, DraftTarget, Eagle, EngineArgs, Lookahead, Medusa, Mtp, NGram
from configs.engine_args.shapes import NVFP4_BITS, Shape

Role = Literal["aggregated", "prefill", "decode", "encode"]
Level = Literal["error", "warning"]

WIDE_EP_RANKS = 16  # from here on experts span nodes
SMALL_BLOCK, LARGE_BLOCK = 16, 128
PREFILL_BATCH, PREFILL_TOKENS, DECODE_BATCH = 64, 2048, 64
EVENT_BUFFER = 8192  # 1024 overflowed under load
FULL_FRACTION, ATTENTION_DP_FRACTION = 0.95, 0.85


class Context(Struct, frozen=True, kw_only=True):
    """The circumstances of an engine. None: not known.

    Attributes:
        model_len: longest prompt + output to serve, in tokens.
        longest_prompt: in tokens; by default ``model_len``.
        gpus: of this engine, on all nodes.
        router_block_size: tokens per block that the router counts in.
        missing: paths named in the arguments that do not exist.
        accepted: (proposed, accepted) draft tokens, as counted by a running worker.
        version: of tensorrt_llm.
        container: release of NVIDIA's runtime container.
        logits_processors: requests may ask for them.
    """

    role: Role = "aggregated"
    model_len: int | None = None
    longest_prompt: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpu_bytes: int | None = None
    blackwell: bool | None = None
    router_block_size: int | None = None
    shape: Shape | None = None
    draft: Shape | None = None
    draft_bytes: int = 0
    missing: frozenset[str] = frozenset()
    accepted: tuple[int, int] | None = None
    version: str | None = None
    container: str | None = None
    logits_processors: bool = False

    @property
    def hands_over(self) -> bool:
        """KV cache leaves or enters this worker."""
        return self.role in ("prefill", "decode")


class Finding(NamedTuple):
    rule: str
    level: Level
    where: str  # dotted name of the argument
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level} {self.rule} {self.where}: {self.message}; {self.fix}"


class Rule(NamedTuple):
    number: str
    rows: tuple[str, ...]  # of the requirements that it answers
    about: str
    find: Callable[[EngineArgs, Context], Iterator[Finding]]


RULES: list[Rule] = []
_Body = Callable[[EngineArgs, Context], Iterator[tuple[Level, str, str, str]]]


def check(args: EngineArgs, context: Context, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """What is wrong, errors first, then in the order of the rules."""
    found = [finding for rule in rules for finding in rule.find(args, context)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _rule(number: str, *rows: str) -> Callable[[_Body], _Body]:
    def add(body: _Body) -> _Body:
        def find(args: EngineArgs, context: Context) -> Iterator[Finding]:
            for level, where, message, fix in body(args, context):
                yield Finding(number, level, where, message, fix)

        RULES.append(Rule(number, rows, (body.__doc__ or "").strip(), find))
        return body

    return add


def up(tokens: int, block: int) -> int:
    """The next multiple of a block."""
    return math.ceil(tokens / block) * block


def longest_prompt(args: EngineArgs, context: Context) -> int | None:
    """Tokens of the longest prompt that may come; None: nothing says so."""
    return context.longest_prompt or context.model_len or args.max_seq_len


def moe_backend(*, ranks: int, attention_dp: bool, blackwell: bool, bits: float) -> str:
    """The back end for a mixture of experts on ``ranks`` GPUs.

    WIDEEP where experts span nodes and each rank has its own sequences; TRTLLM for low latency on Blackwell's block
    formats; else CUTLASS, which takes everything.
    """
    if attention_dp and ranks >= WIDE_EP_RANKS:
        return "WIDEEP"
    if blackwell and not attention_dp and bits <= 8:
        return "TRTLLM"
    return "CUTLASS"


# Parallel mapping ---------------------------------------------------------------------------------------------------


@_rule("A01", "S132")
def _gpus(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """TP x PP x CP is the number of GPUs."""
    if ctx.gpus is not None and args.gpus != ctx.gpus:
        where = "world_size" if isinstance(args, AutoDeployArgs) else "tensor_parallel_size"
        yield (
            "error",
            where,
            f"the sizes ask for {args.gpus} GPUs, there are {ctx.gpus}",
            (f"make tensor x pipeline x context parallel size {ctx.gpus}"),
        )


@_rule("A02", "S132")
def _experts_mapping(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """MoE tensor x expert x cluster parallel sizes are the tensor ranks; experts divide evenly."""
    tensor, expert = args.moe_parallel
    cluster = max(1, args.moe_cluster_parallel_size or 1)
    tp = args.tensor_parallel_size
    if tensor * expert * cluster != tp:
        yield (
            "error",
            "moe_expert_parallel_size",
            (f"{tensor} tensor x {expert} expert x {cluster} cluster ranks are not the {tp} tensor ranks"),
            f"make their product {tp}, for instance moe_expert_parallel_size: {tp}",
        )
    balancer = args.moe_config.load_balancer
    plain = balancer is None
    if ctx.shape and ctx.shape.experts and plain and ctx.shape.experts.count % expert:
        yield (
            "error",
            "moe_expert_parallel_size",
            (f"{ctx.shape.experts.count} experts do not divide by {expert}"),
            "use a divisor, or moe_config.load_balancer with slots that divide",
        )


@_rule("A03", "S132", "S120")
def _nodes(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Several nodes: GPUs per node are named, and enough."""
    if ctx.nodes is None:
        return
    if ctx.nodes > 1 and args.gpus_per_node is None:
        yield (
            "error",
            "gpus_per_node",
            "rank 0 counts only its own node's GPUs",
            (f"set gpus_per_node: {math.ceil(args.gpus / ctx.nodes)}"),
        )
    if args.gpus_per_node is not None and args.gpus > args.gpus_per_node * ctx.nodes:
        yield (
            "error",
            "gpus_per_node",
            (f"{args.gpus} GPUs are more than {ctx.nodes} nodes of {args.gpus_per_node}"),
            f"use {math.ceil(args.gpus / args.gpus_per_node)} nodes",
        )


@_rule("A04", "S132")
def _heads(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Attention heads divide by the ranks that share them."""
    shape, ranks = ctx.shape, args.attention_ranks
    if shape is None or isinstance(args, AutoDeployArgs):
        return
    if shape.heads % ranks:
        yield "error", "tensor_parallel_size", f"{shape.heads} heads do not divide by {ranks} ranks", "use a divisor"
    elif shape.kv_heads and shape.kv_heads % ranks and ranks % shape.kv_heads:
        yield (
            "error",
            "tensor_parallel_size",
            (f"{shape.kv_heads} KV heads and {ranks} ranks: neither divides the other"),
            "use a divisor or a multiple",
        )
    elif shape.kv_heads and ranks > shape.kv_heads:
        yield (
            "warning",
            "tensor_parallel_size",
            (f"{ranks} ranks hold {ranks // shape.kv_heads} copies of each of {shape.kv_heads} KV heads"),
            "enable_attention_dp, or fewer ranks and more workers, keep more context",
        )


@_rule("A05", "S132")
def _attention_dp(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Attention DP has ranks to spread over, and its settings are not idle."""
    if args.enable_attention_dp and args.tensor_parallel_size == 1:
        yield "error", "enable_attention_dp", "one tensor rank has nothing to spread over", "remove it or raise TP"
    if not args.enable_attention_dp:
        for where, given in (
            ("attention_dp_config", args.attention_dp_config is not None),
            ("enable_lm_head_tp_in_adp", args.enable_lm_head_tp_in_adp),
        ):
            if given:
                yield "warning", where, "has no effect without attention DP", "set enable_attention_dp: true"


@_rule("A06", "S132")
def _autodeploy(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """AutoDeploy refuses the parallel sizes and beams of the PyTorch back end."""
    if not isinstance(args, AutoDeployArgs):
        return
    plain = AutoDeployArgs()
    names = (
        *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "moe_cluster_parallel_size"),
        *("moe_tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp", "cp_config", "gpus_per_node"),
    )
    for name in names:
        if getattr(args, name) != getattr(plain, name):
            yield "error", name, "AutoDeploy refuses it", "use world_size"
    if args.beam_width > 1:
        yield "error", "max_beam_width", "AutoDeploy has no beam search", "remove it"


# Mixture of experts -------------------------------------------------------------------------------------------------


@_rule("A10", "S130", "S123")
def _wide_ep(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """WIDEEP needs attention DP and all ranks as expert ranks, and pays off across nodes."""
    if args.moe_config.backend != "WIDEEP":
        return
    if not args.enable_attention_dp:
        yield (
            "error",
            "moe_config.backend",
            "WIDEEP exchanges tokens between attention-DP ranks",
            ("set enable_attention_dp: true, or use TRTLLM or CUTLASS"),
        )
    if args.moe_parallel[1] != args.tensor_parallel_size:
        yield (
            "error",
            "moe_expert_parallel_size",
            "WIDEEP spreads the experts over all ranks",
            (f"set it to {args.tensor_parallel_size}"),
        )
    elif args.tensor_parallel_size < WIDE_EP_RANKS:
        yield (
            "warning",
            "moe_config.backend",
            (f"WIDEEP over {args.tensor_parallel_size} ranks pays for an exchange that it does not need"),
            f"use CUTLASS or TRTLLM below {WIDE_EP_RANKS} ranks",
        )


@_rule("A11", "S130")
def _moe_choice(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The MoE back end fits GPU, format and mapping."""
    shape, chosen = ctx.shape, args.moe_config.backend
    if shape is None or chosen == "AUTO":
        return
    if shape.experts is None:
        yield "warning", "moe_config.backend", "the model has no experts", "remove it"
    elif ctx.blackwell is not None and chosen in ("TRTLLM", "CUTLASS", "WIDEEP"):
        best = moe_backend(
            ranks=args.tensor_parallel_size,
            attention_dp=args.enable_attention_dp,
            blackwell=ctx.blackwell,
            bits=shape.expert_bits,
        )
        if chosen == "TRTLLM" and not ctx.blackwell:
            yield "error", "moe_config.backend", "TRTLLM's kernels are Blackwell's", f"use {best}"
        elif chosen != best:
            yield "warning", "moe_config.backend", f"{best} suits this mapping better than {chosen}", f"try {best}"


@_rule("A12", "S131")
def _slots(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Load-balancer slots hold every expert and divide over the ranks."""
    balancer = args.moe_config.load_balancer
    if balancer is None:
        return
    if args.moe_config.backend != "WIDEEP":
        yield "warning", "moe_config.load_balancer", f"{args.moe_config.backend} may ignore it", "use backend: WIDEEP"
    if isinstance(balancer, str):
        if balancer in ctx.missing:
            yield "error", "moe_config.load_balancer", f"no file {balancer}", "name a YAML file with num_slots"
        return
    expert = args.moe_parallel[1]
    if balancer.num_slots % expert:
        yield (
            "error",
            "moe_config.load_balancer.num_slots",
            (f"{balancer.num_slots} slots do not divide by {expert} expert ranks"),
            f"use {up(balancer.num_slots, expert)}",
        )
    if ctx.shape and ctx.shape.experts and balancer.num_slots < ctx.shape.experts.count:
        yield (
            "error",
            "moe_config.load_balancer.num_slots",
            (f"{balancer.num_slots} slots for {ctx.shape.experts.count} experts"),
            f"use at least {up(ctx.shape.experts.count, expert)}",
        )
    for layer, slots in (balancer.initial_global_assignments or {}).items():
        if len(slots) != balancer.num_slots:
            yield (
                "error",
                "moe_config.load_balancer.initial_global_assignments",
                (f"layer {layer} assigns {len(slots)} of {balancer.num_slots} slots"),
                "name one expert per slot",
            )


@_rule("A13", "S129")
def _combine(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Low-precision combine is for NVFP4."""
    if args.moe_config.use_low_precision_moe_combine and ctx.shape and ctx.shape.expert_bits != NVFP4_BITS:
        yield "warning", "moe_config.use_low_precision_moe_combine", "acts on NVFP4 experts only", "remove it"


# KV cache -----------------------------------------------------------------------------------------------------------


@_rule("A20", "S128")
def _fraction(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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
        yield "warning", "kv_cache_config.free_gpu_memory_fraction", "an encoder caches no KV", "use 0.3 or less"


@_rule("A21", "S128")
def _events(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """KV events need block reuse and a buffer that load does not overflow."""
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


@_rule("A22", "S192")
def _blocks(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Blocks are as the router counts them; small ones cost hand-overs, large ones cost reuse."""
    size = args.kv_cache_config.tokens_per_block
    where = "kv_cache_config.tokens_per_block"
    if ctx.router_block_size is not None and size != ctx.router_block_size:
        yield (
            "error",
            where,
            f"{size} tokens, the router counts in {ctx.router_block_size}",
            (f"set it, and --block-size, to {ctx.router_block_size}"),
        )
    if size & (size - 1):
        yield "warning", where, f"{size} is no power of two, which the kernels are built for", "use 32 or 64"
    if size < SMALL_BLOCK:
        yield "warning", where, f"{size} tokens make many small transfers and a large index", "use 32 to 128"
    elif size > LARGE_BLOCK:
        yield (
            "warning",
            where,
            (f"only whole blocks are reused: a prefix loses up to {size - 1} tokens, a context {size // 2} on average"),
            "use 32 to 128",
        )


@_rule("A23", "S84")
def _buffer(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The transfer buffer holds the longest prompt, in whole blocks; else decode waits for ever."""
    transceiver, block = args.cache_transceiver_config, args.kv_cache_config.tokens_per_block
    if not ctx.hands_over or transceiver is None or transceiver.backend is None:
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
            f"prompts of up to {longest} tokens dead-lock decode with {size}",
            (f"set it to at least {up(longest, block)}"),
        )
    if size % block:
        yield "error", where, f"{size} is not a multiple of {block} tokens per block", f"use {up(size, block)}"


@_rule("A24", "S125", "S124")
def _transceiver(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Workers that hand KV over have a named transport with a time limit; others have none."""
    transceiver = args.cache_transceiver_config
    where = "cache_transceiver_config.backend"
    if not ctx.hands_over:
        if transceiver is not None and transceiver.backend is not None:
            yield "warning", where, f"a worker of role {ctx.role} moves no KV but pays for the buffer", "remove it"
        return
    if transceiver is None or transceiver.backend is None:
        yield "error", where, f"role {ctx.role} hands KV over, and nothing is named to do it", "use UCX or NIXL"
        return
    if transceiver.backend == "DEFAULT":
        yield "warning", where, "what DEFAULT means differs between releases", "name NIXL or UCX, on both sides"
    if transceiver.kv_transfer_timeout_ms is None:
        yield (
            "warning",
            "cache_transceiver_config.kv_transfer_timeout_ms",
            ("after a failed transfer, prefill holds its blocks for ever"),
            "set 60000",
        )


@_rule("A25", "S107", "S110")
def _windows(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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


@_rule("A26", "S129")
def _kv_dtype(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The cache's dtype is one the engine knows."""
    dtype = args.kv_cache_config.dtype
    if dtype.lower() not in ("auto", "fp8", "nvfp4", "float16", "bfloat16", "float32"):
        yield "error", "kv_cache_config.dtype", f"{dtype!r} is not known", "use auto, fp8, nvfp4, bfloat16 or float16"


@_rule("A27", "S134")
def _offload(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Host offload and chunked prefill dead-lock together (open issue 13318)."""
    if args.kv_cache_config.host_cache_size and args.enable_chunked_prefill:
        yield (
            "warning",
            "kv_cache_config.host_cache_size",
            "offload with chunked prefill may dead-lock (#13318)",
            ("use one of the two"),
        )


# Limits and scheduling ----------------------------------------------------------------------------------------------


@_rule("A30", "S127")
def _length(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """What clients may ask for fits max_seq_len, and max_seq_len fits the model."""
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
            f"{args.max_seq_len} tokens, the model knows {ctx.shape.max_len} positions",
            (f"lower it to {ctx.shape.max_len}"),
        )


@_rule("A31", "S127", "S134")
def _step(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """A step takes the longest prompt whole, or prompts are cut into whole blocks."""
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
        strict = ctx.hands_over or args.enable_chunked_prefill
        yield (
            ("error" if strict else "warning"),
            "max_num_tokens",
            (f"{tokens} is not a multiple of {block} tokens per block, which the engine asserts"),
            f"use {up(tokens, block)}",
        )


@_rule("A32", "S126")
def _policy(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Running requests are not thrown out to let others in."""
    policy = args.scheduler_config.capacity_scheduler_policy
    where = "scheduler_config.capacity_scheduler_policy"
    if policy == "MAX_UTILIZATION":
        level: Level = "error" if ctx.role == "decode" else "warning"
        yield (
            level,
            where,
            (
                "evicts running requests and computes them anew"
                + ("; their KV came from elsewhere" if ctx.role == "decode" else "")
            ),
            "use GUARANTEED_NO_EVICT",
        )
    elif policy == "STATIC_BATCH":
        yield "warning", where, "a batch waits for its slowest request", "use GUARANTEED_NO_EVICT"


@_rule("A33", "S134")
def _untested(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Combinations that the engine's own feature matrix calls untested."""
    if args.enable_chunked_prefill and args.pipeline_parallel_size > 1:
        yield (
            "warning",
            "enable_chunked_prefill",
            "untested with pipeline parallelism in 1.2.1",
            "compare outputs first",
        )
    if args.enable_lora and (args.enable_attention_dp or ctx.hands_over or args.guided_decoding_backend):
        yield (
            "warning",
            "enable_lora",
            "untested with attention DP, disaggregation and guided decoding",
            ("compare outputs first"),
        )


@_rule("A34", "S84")
def _overlap(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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
    elif ctx.role in ("decode", "aggregated") and args.disable_overlap_scheduler and not two_models:
        yield "warning", "disable_overlap_scheduler", "the GPU waits for the scheduler between steps", "set it to false"
    elif ctx.role in ("decode", "aggregated") and two_models:
        yield (
            "warning",
            "speculative_config",
            "a separate draft model switches the overlap scheduler off",
            ("use eagle3_one_model: true"),
        )


@_rule("A35", "S84")
def _beams(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Beam search goes neither with disaggregation nor with speculation."""
    if args.beam_width == 1:
        return
    if ctx.hands_over:
        yield "error", "max_beam_width", "disaggregation carries one beam", "set it to 1"
    if args.speculative_config is not None:
        yield "error", "max_beam_width", "speculation follows one beam", "set it to 1, or remove speculative_config"


@_rule("A36", "S133", "S119", "S122")
def _graphs(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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
    given = bool(graphs.batch_sizes or graphs.max_batch_size)
    largest = args.graph_sizes[-1]
    if given and largest > args.batch_size:
        yield "warning", where, f"a graph for {largest} sequences, batches have {args.batch_size}", "remove it"
    if args.draft_tokens and given:
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
    if given and largest < args.batch_size:
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


@_rule("A37", "S127")
def _output(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The worker gets tokens, each as it is made."""
    if args.num_postprocess_workers:
        yield (
            "warning",
            "num_postprocess_workers",
            "the gateway makes text of tokens; these processes idle",
            "remove it",
        )
    if args.stream_interval > 1:
        yield "warning", "stream_interval", f"clients see bursts of {args.stream_interval} tokens", "set it to 1"
    if args.enable_iter_req_stats and not args.enable_iter_perf_stats:
        yield "error", "enable_iter_req_stats", "needs enable_iter_perf_stats", "set that to true"


@_rule("A40", "S192")
def _prefill_batch(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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


@_rule("A41", "S192")
def _decode_batch(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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


# Speculation --------------------------------------------------------------------------------------------------------


@_rule("A50", "S114", "S122")
def _speculation(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """Each kind of speculation has what it needs."""
    speculation, where = args.speculative_config, "speculative_config"
    if speculation is None:
        return
    if isinstance(speculation, Medusa | Lookahead):
        yield "error", f"{where}.decoding_type", "works on TensorRT engines only", "use Eagle, MTP or NGram"
        return
    if isinstance(speculation, Eagle | DraftTarget | NGram) and not speculation.max_draft_len:
        yield "error", f"{where}.max_draft_len", "must be above 0", "start with 3"
    if isinstance(speculation, Eagle | DraftTarget) and not speculation.draft_model:
        yield "error", f"{where}.speculative_model", "a draft model must be named", "name its directory or id"
    if speculation.speculative_model and speculation.speculative_model_dir:
        yield "error", f"{where}.speculative_model_dir", "is speculative_model under its older name", "give one"
    if isinstance(speculation, NGram) and not speculation.max_matching_ngram_size:
        yield "error", f"{where}.max_matching_ngram_size", "must be above 0", "start with 2"
    if isinstance(speculation, Mtp) and speculation.max_draft_len not in (None, speculation.num_nextn_predict_layers):
        yield "error", f"{where}.max_draft_len", "differs from num_nextn_predict_layers", "remove it"
    if isinstance(speculation, Mtp) and ctx.shape and not ctx.shape.mtp_layers:
        yield "error", f"{where}.decoding_type", "the model has no MTP layers", "use Eagle or NGram"
    schedule = speculation.draft_len_schedule
    if schedule is not None and schedule.get(1) != speculation.max_draft_len:
        yield (
            "error",
            f"{where}.draft_len_schedule",
            "must give batch size 1 the whole max_draft_len",
            (f"add 1: {speculation.max_draft_len}"),
        )
    if isinstance(speculation, Eagle) and (speculation.eagle_choices or speculation.use_dynamic_tree):
        yield "error", where, "draft trees are not supported on PyTorch", "remove eagle_choices and use_dynamic_tree"


@_rule("A51", "S114", "S116")
def _draft(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The draft model is there and speaks the target's vocabulary."""
    speculation, where = args.speculative_config, "speculative_config.speculative_model"
    if speculation is None or not speculation.draft_model:
        return
    if speculation.draft_model in ctx.missing:
        yield "error", where, f"no directory {speculation.draft_model}", "fetch the draft model, or correct the path"
    if ctx.draft is None or ctx.shape is None:
        return
    if ctx.draft.vocab != ctx.shape.vocab:
        yield (
            "error",
            where,
            (f"its vocabulary has {ctx.draft.vocab} tokens, the target's {ctx.shape.vocab}: its proposals mean others"),
            "use a draft model made for this target",
        )
    if isinstance(speculation, Eagle) and ctx.draft.hidden != ctx.shape.hidden:
        yield (
            "warning",
            where,
            (f"its hidden size {ctx.draft.hidden} is not the target's {ctx.shape.hidden}, whose states it reads"),
            "use a draft model made for this target",
        )


@_rule("A52", "S122")
def _excluded(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """What the feature matrix excludes with speculation, LoRA and logits processors."""
    speculation = args.speculative_config
    learned = isinstance(speculation, Eagle | Mtp)
    if learned and args.pipeline_parallel_size > 1:
        yield "error", "pipeline_parallel_size", "MTP and EAGLE do not work with pipeline parallelism", "use TP or EP"
    if learned and args.sampler_type == "TRTLLMSampler":
        yield "error", "sampler_type", "the C++ sampler does not work with MTP and EAGLE", "use auto"
    if ctx.logits_processors and (learned or ctx.hands_over):
        yield (
            "error",
            "speculative_config" if learned else "cache_transceiver_config",
            (f"logits processors do not work with {'MTP and EAGLE' if learned else 'disaggregation'}"),
            "serve requests that need them from an aggregated worker without speculation",
        )
    if args.enable_lora and args.cuda_graph_config is not None:
        yield "error", "enable_lora", "LoRA does not work with CUDA graphs", "set cuda_graph_config: null"


@_rule("A53", "S118")
def _acceptance(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The draft is as long as the recorded acceptance pays for."""
    if ctx.accepted is None or args.speculative_config is None or not args.draft_tokens:
        return
    proposed, accepted = ctx.accepted
    if proposed < drafts.ENOUGH_TOKENS:
        return
    length = args.draft_tokens
    rate = drafts.acceptance(accepted / proposed, length)
    best = drafts.best_length(rate, drafts.cost_of(args.speculative_config))
    where = "speculative_config.max_draft_len"
    if isinstance(args.speculative_config, Mtp):
        where = "speculative_config.num_nextn_predict_layers"
    ratio = f"{accepted / proposed:.0%} of proposed tokens are accepted"
    if best < length:
        fix = f"lower it to {best}" if best else "remove speculative_config: it costs more than it saves"
        yield "warning", where, f"{ratio}: a draft of {length} is too long", fix


# Memory and versions ------------------------------------------------------------------------------------------------


@_rule("A60", "S113", "S128")
def _memory(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
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
                f"{memory.pool / GIB:.1f} GiB: such a request would wait for ever"
            ),
            "raise the fraction, lower max_seq_len, or use more GPUs",
        )


# Releases known to be wrong: of tensorrt_llm, and of NVIDIA's runtime container.
_VERSIONS = {"1.2.0": "chunked prefill with block reuse gives wrong output (#12770)"}
_CONTAINERS = {"0.5.1": "sliding windows regressed in its TensorRT-LLM"}


@_rule("A61", "S112")
def _version(args: EngineArgs, ctx: Context) -> Iterator[tuple[Level, str, str, str]]:
    """The release has no known fault in what is used."""
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
