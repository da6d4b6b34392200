"""Do the parallel sizes fit the GPUs, the nodes and the model's heads and experts?"""

import math

from penstock.infra.engine_args.memory_estimate import NVFP4_BITS
from penstock.infra.engine_args.rules.rule import Context, Details, error, rule, up, warning
from penstock.infra.engine_args.schema import AutoDeployArgs, EngineArgs


@rule("A01", "S132")
def _gpus(args: EngineArgs, ctx: Context) -> Details:
    """TP x PP x CP is the number of GPUs."""
    if ctx.gpus is not None and args.gpus != ctx.gpus:
        where = "world_size" if isinstance(args, AutoDeployArgs) else "tensor_parallel_size"
        yield error(
            where,
            f"the sizes need {args.gpus} GPUs, there are {ctx.gpus}",
            f"make tensor x pipeline x context parallel size {ctx.gpus}",
        )


@rule("A02", "S132")
def _experts_mapping(args: EngineArgs, ctx: Context) -> Details:
    """MoE tensor x expert x cluster parallel sizes are the tensor ranks; experts divide evenly."""
    tensor, expert = args.moe_parallel
    cluster = max(1, args.moe_cluster_parallel_size or 1)
    tp = args.tensor_parallel_size
    if tensor * expert * cluster != tp:
        yield error(
            "moe_expert_parallel_size",
            f"{tensor} tensor x {expert} expert x {cluster} cluster ranks are not the {tp} tensor ranks",
            f"make their product {tp}, for instance moe_expert_parallel_size: {tp}",
        )
    balancer = args.moe_config.load_balancer
    plain = balancer is None
    if ctx.shape and ctx.shape.experts and plain and ctx.shape.experts.count % expert:
        yield error(
            "moe_expert_parallel_size",
            f"{ctx.shape.experts.count} experts do not divide by {expert}",
            "use a divisor, or moe_config.load_balancer with slots that divide",
        )


@rule("A03", "S132", "S120")
def _nodes(args: EngineArgs, ctx: Context) -> Details:
    """With several nodes, gpus_per_node is set, and there are enough GPUs."""
    if ctx.nodes is None:
        return
    if ctx.nodes > 1 and args.gpus_per_node is None:
        yield error(
            "gpus_per_node",
            "rank 0 counts only its own node's GPUs",
            f"set gpus_per_node: {math.ceil(args.gpus / ctx.nodes)}",
        )
    if args.gpus_per_node is not None and args.gpus > args.gpus_per_node * ctx.nodes:
        yield error(
            "gpus_per_node",
            f"{args.gpus} GPUs are more than {ctx.nodes} nodes of {args.gpus_per_node}",
            f"use {math.ceil(args.gpus / args.gpus_per_node)} nodes",
        )


@rule("A04", "S132")
def _heads(args: EngineArgs, ctx: Context) -> Details:
    """Attention heads divide by the ranks that share them."""
    shape, ranks = ctx.shape, args.attention_ranks
    if shape is None or isinstance(args, AutoDeployArgs):
        return
    if shape.heads % ranks:
        yield error("tensor_parallel_size", f"{shape.heads} heads do not divide by {ranks} ranks", "use a divisor")
    elif shape.kv_heads and shape.kv_heads % ranks and ranks % shape.kv_heads:
        yield error(
            "tensor_parallel_size",
            f"{shape.kv_heads} KV heads and {ranks} ranks: neither divides the other",
            "use a divisor or a multiple",
        )
    elif shape.kv_heads and ranks > shape.kv_heads:
        yield warning(
            "tensor_parallel_size",
            f"{ranks} ranks hold {ranks // shape.kv_heads} copies of each of {shape.kv_heads} KV heads",
            "enable_attention_dp, or fewer ranks and more workers, keep more context",
        )


@rule("A05", "S132")
def _attention_dp(args: EngineArgs, ctx: Context) -> Details:
    """Attention DP has several ranks, and its settings have an effect."""
    if args.enable_attention_dp and args.tensor_parallel_size == 1:
        yield error("enable_attention_dp", "one tensor rank leaves nothing to distribute", "remove it or raise TP")
    if not args.enable_attention_dp:
        for where, value in (
            ("attention_dp_config", args.attention_dp_config is not None),
            ("enable_lm_head_tp_in_adp", args.enable_lm_head_tp_in_adp),
        ):
            if value:
                yield warning(where, "has no effect without attention DP", "set enable_attention_dp: true")


@rule("A06", "S132")
def _autodeploy(args: EngineArgs, ctx: Context) -> Details:
    """AutoDeploy refuses the parallel sizes and beams of the PyTorch backend."""
    if not isinstance(args, AutoDeployArgs):
        return
    plain = AutoDeployArgs()
    names = (
        *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "moe_cluster_parallel_size"),
        *("moe_tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp", "cp_config", "gpus_per_node"),
    )
    for name in names:
        if getattr(args, name) != getattr(plain, name):
            yield error(name, "AutoDeploy refuses it", "use world_size")
    if args.beam_width > 1:
        yield error("max_beam_width", "AutoDeploy has no beam search", "remove it")


PARALLELISM_RULES = (_gpus, _experts_mapping, _nodes, _heads, _attention_dp, _autodeploy)


WIDE_EP_RANKS = 16  # from here on experts span nodes


def moe_backend(*, ranks: int, attention_dp: bool, blackwell: bool, bits: float) -> str:
    """The backend for a mixture of experts on ``ranks`` GPUs.

    WIDEEP if experts span nodes and each rank has its own sequences; TRTLLM for low latency with Blackwell's block
    formats; otherwise CUTLASS, which supports everything.
    """
    if attention_dp and ranks >= WIDE_EP_RANKS:
        return "WIDEEP"
    if blackwell and not attention_dp and bits <= 8:
        return "TRTLLM"
    return "CUTLASS"


@rule("A10", "S130", "S123")
def _wide_ep(args: EngineArgs, ctx: Context) -> Details:
    """WIDEEP needs attention DP and all ranks as expert ranks, and is worth its cost across nodes."""
    if args.moe_config.backend != "WIDEEP":
        return
    if not args.enable_attention_dp:
        yield error(
            "moe_config.backend",
            "WIDEEP exchanges tokens between attention-DP ranks",
            "set enable_attention_dp: true, or use TRTLLM or CUTLASS",
        )
    if args.moe_parallel[1] != args.tensor_parallel_size:
        yield error(
            "moe_expert_parallel_size",
            "WIDEEP spreads the experts over all ranks",
            f"set it to {args.tensor_parallel_size}",
        )
    elif args.tensor_parallel_size < WIDE_EP_RANKS:
        yield warning(
            "moe_config.backend",
            f"WIDEEP over {args.tensor_parallel_size} ranks pays for an exchange that it does not need",
            f"use CUTLASS or TRTLLM below {WIDE_EP_RANKS} ranks",
        )


@rule("A11", "S130")
def _moe_choice(args: EngineArgs, ctx: Context) -> Details:
    """The MoE backend suits GPU, format and mapping."""
    shape, chosen = ctx.shape, args.moe_config.backend
    if shape is None or chosen == "AUTO":
        return
    if shape.experts is None:
        yield warning("moe_config.backend", "the model has no experts", "remove it")
    elif ctx.blackwell is not None and chosen in ("TRTLLM", "CUTLASS", "WIDEEP"):
        best = moe_backend(
            ranks=args.tensor_parallel_size,
            attention_dp=args.enable_attention_dp,
            blackwell=ctx.blackwell,
            bits=shape.expert_bits,
        )
        if chosen == "TRTLLM" and not ctx.blackwell:
            yield error("moe_config.backend", "TRTLLM's kernels need a Blackwell GPU", f"use {best}")
        elif chosen != best:
            yield warning("moe_config.backend", f"{best} suits this mapping better than {chosen}", f"try {best}")


@rule("A12", "S131")
def _slots(args: EngineArgs, ctx: Context) -> Details:
    """Load-balancer slots hold every expert and divide over the ranks."""
    balancer = args.moe_config.load_balancer
    if balancer is None:
        return
    if args.moe_config.backend != "WIDEEP":
        yield warning("moe_config.load_balancer", f"{args.moe_config.backend} may ignore it", "use backend: WIDEEP")
    if isinstance(balancer, str):
        if balancer in ctx.missing:
            yield error("moe_config.load_balancer", f"no file {balancer}", "give a YAML file with num_slots")
        return
    expert = args.moe_parallel[1]
    if balancer.num_slots % expert:
        yield error(
            "moe_config.load_balancer.num_slots",
            f"{balancer.num_slots} slots do not divide by {expert} expert ranks",
            f"use {up(balancer.num_slots, expert)}",
        )
    if ctx.shape and ctx.shape.experts and balancer.num_slots < ctx.shape.experts.count:
        yield error(
            "moe_config.load_balancer.num_slots",
            f"{balancer.num_slots} slots for {ctx.shape.experts.count} experts",
            f"use at least {up(ctx.shape.experts.count, expert)}",
        )
    for layer, slots in (balancer.initial_global_assignments or {}).items():
        if len(slots) != balancer.num_slots:
            yield error(
                "moe_config.load_balancer.initial_global_assignments",
                f"layer {layer} assigns {len(slots)} of {balancer.num_slots} slots",
                "name one expert per slot",
            )


@rule("A13", "S129")
def _combine(args: EngineArgs, ctx: Context) -> Details:
    """Low-precision combine is for NVFP4 experts."""
    if args.moe_config.use_low_precision_moe_combine and ctx.shape and ctx.shape.expert_bits != NVFP4_BITS:
        yield warning("moe_config.use_low_precision_moe_combine", "affects NVFP4 experts only", "remove it")


MOE_RULES = (_wide_ep, _moe_choice, _slots, _combine)
