"""Does speculation have what it needs, and is it worth its cost?"""

from penstock.infra.engine_args.rules import draft_length
from penstock.infra.engine_args.rules.base import Context, Details, rule
from penstock.infra.engine_args.schema import DraftTarget, Eagle, EngineArgs, Lookahead, Medusa, Mtp, NGram


@rule("A50", "S114", "S122")
def _speculation(args: EngineArgs, ctx: Context) -> Details:
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
            "must give batch size 1 the full max_draft_len",
            (f"add 1: {speculation.max_draft_len}"),
        )
    if isinstance(speculation, Eagle) and (speculation.eagle_choices or speculation.use_dynamic_tree):
        yield "error", where, "draft trees are not supported on PyTorch", "remove eagle_choices and use_dynamic_tree"


@rule("A51", "S114", "S116")
def _draft(args: EngineArgs, ctx: Context) -> Details:
    """The draft model exists and shares the target's vocabulary."""
    speculation, where = args.speculative_config, "speculative_config.speculative_model"
    if speculation is None or not speculation.draft_model:
        return
    if speculation.draft_model in ctx.missing:
        yield "error", where, f"no directory {speculation.draft_model}", "download the draft model, or correct the path"
    if ctx.draft is None or ctx.shape is None:
        return
    if ctx.draft.vocab != ctx.shape.vocab:
        yield (
            "error",
            where,
            (f"its vocabulary has {ctx.draft.vocab} tokens, the target's {ctx.shape.vocab}: its token ids mean others"),
            "use a draft model made for this target",
        )
    if isinstance(speculation, Eagle) and ctx.draft.hidden != ctx.shape.hidden:
        yield (
            "warning",
            where,
            (f"its hidden size {ctx.draft.hidden} is not the target's {ctx.shape.hidden}, whose states it reads"),
            "use a draft model made for this target",
        )


@rule("A53", "S118")
def _acceptance(args: EngineArgs, ctx: Context) -> Details:
    """The draft is not longer than the recorded acceptance justifies."""
    if ctx.accepted is None or args.speculative_config is None or not args.draft_tokens:
        return
    proposed, accepted = ctx.accepted
    if proposed < draft_length.MIN_TOKENS:
        return
    length = args.draft_tokens
    rate = draft_length.acceptance(accepted / proposed, length)
    best = draft_length.best_length(rate, draft_length.cost_of(args.speculative_config))
    where = "speculative_config.max_draft_len"
    if isinstance(args.speculative_config, Mtp):
        where = "speculative_config.num_nextn_predict_layers"
    ratio = f"{accepted / proposed:.0%} of proposed tokens are accepted"
    if best < length:
        fix = f"lower it to {best}" if best else "remove speculative_config: it costs more than it saves"
        yield "warning", where, f"{ratio}: a draft of {length} is too long", fix


RULES = (_speculation, _draft, _acceptance)
