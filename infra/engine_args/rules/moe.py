"""Does the backend suit the mixture of experts, and are the experts evenly distributed?"""

from penstock.infra.engine_args.memory_estimate import NVFP4_BITS
from penstock.infra.engine_args.rules.base import Context, Details, rule, up
from penstock.infra.engine_args.schema import EngineArgs

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


@rule("A11", "S130")
def _moe_choice(args: EngineArgs, ctx: Context) -> Details:
    """The MoE backend suits GPU, format and mapping."""
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
            yield "error", "moe_config.backend", "TRTLLM's kernels need a Blackwell GPU", f"use {best}"
        elif chosen != best:
            yield "warning", "moe_config.backend", f"{best} suits this mapping better than {chosen}", f"try {best}"


@rule("A12", "S131")
def _slots(args: EngineArgs, ctx: Context) -> Details:
    """Load-balancer slots hold every expert and divide over the ranks."""
    balancer = args.moe_config.load_balancer
    if balancer is None:
        return
    if args.moe_config.backend != "WIDEEP":
        yield "warning", "moe_config.load_balancer", f"{args.moe_config.backend} may ignore it", "use backend: WIDEEP"
    if isinstance(balancer, str):
        if balancer in ctx.missing:
            yield "error", "moe_config.load_balancer", f"no file {balancer}", "give a YAML file with num_slots"
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


@rule("A13", "S129")
def _combine(args: EngineArgs, ctx: Context) -> Details:
    """Low-precision combine is for NVFP4 experts."""
    if args.moe_config.use_low_precision_moe_combine and ctx.shape and ctx.shape.expert_bits != NVFP4_BITS:
        yield "warning", "moe_config.use_low_precision_moe_combine", "affects NVFP4 experts only", "remove it"


RULES = (_wide_ep, _moe_choice, _slots, _combine)
