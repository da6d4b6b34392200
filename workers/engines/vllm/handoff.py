"""``kv_transfer_params`` as bytes: the state of a prefilled prompt that passes from one worker's vLLM to another's.

vLLM's NIXL connector moves the KV; the params locate it. Pure.
"""

from collections.abc import Sequence as Seq
from typing import Any

from penstock.workers.engines.external import handoff_state

# Have a prefill engine compute, keep the blocks and return their location.
PRODUCE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The engine would report these as its own cache hits.
_OMITTED = frozenset(["remote_prefill_cached_tokens"])


def pack(params: dict[str, Any], layout: str, context: Seq[int], token: int) -> bytes:
    """The state for ``Held.opaque``.

    Args:
        context: the tokens that were computed.
        token: the one that was drawn after them.
    """
    kept = {name: value for name, value in params.items() if name not in _OMITTED}
    return handoff_state.pack(kept, layout, context, [token])


def unpack(opaque: bytes, layout: str, tokens: Seq[int]) -> dict[str, Any]:
    """The params for an engine that continues ``tokens``, the last of which the prefill engine drew.

    Raises:
        ValueError: the state is damaged, or from another prompt, attempt or KV layout.
    """
    state = handoff_state.unpack(opaque, layout)
    if not state.params.get("do_remote_prefill"):
        raise ValueError("it offers no KV")
    handoff_state.count_prefilled(state, tokens, len(tokens) - 1)
    return state.params
