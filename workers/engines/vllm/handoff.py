"""How the state of a computed prompt travels from one worker's vLLM to another's: ``kv_transfer_params`` as bytes.

vLLM's NIXL connector moves the KV; the params say where it lies. Pure.
"""

from collections.abc import Sequence as Seq
from typing import Any

from workers.engines.external import handoff_state

# What a prefill engine is asked for: compute, keep the blocks, say where they are.
PRODUCE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Would be told as this engine's own hits; the worker knows better.
_OMITTED = frozenset(["remote_prefill_cached_tokens"])


def pack(params: dict[str, Any], layout: str, context: Seq[int], token: int) -> bytes:
    """For ``Held.opaque``.

    Args:
        context: the tokens that were computed.
        token: the one that was drawn behind them.
    """
    kept = {name: value for name, value in params.items() if name not in _OMITTED}
    return handoff_state.pack(kept, layout, context, [token])


def unpack(opaque: bytes, layout: str, tokens: Seq[int]) -> dict[str, Any]:
    """The params, for an engine that goes on with ``tokens``, the last of which the prefill engine drew.

    Raises:
        ValueError: the state is damaged, of another prompt or attempt, or of an engine whose KV has another shape.
    """
    state = handoff_state.unpack(opaque, layout)
    if not state.params.get("do_remote_prefill"):
        raise ValueError("it offers no KV")
    handoff_state.count_prefilled(state, tokens, len(tokens) - 1)
    return state.params
