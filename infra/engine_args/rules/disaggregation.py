"""Can prefill hand off its KV cache to decode without a deadlock?"""

from penstock.infra.engine_args.rules.base import Context, Details, longest_prompt, rule, up
from penstock.infra.engine_args.schema import EngineArgs


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


RULES = (_buffer, _transceiver)
