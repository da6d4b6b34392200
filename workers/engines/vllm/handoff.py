"""How the state of a computed prompt travels from one worker's vLLM to another's: ``kv_transfer_params`` as bytes.

vLLM's NIXL connector moves the KV; the params say where it lies. Pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from blake3 import blake3

VERSION = 1

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


class Handed(msgspec.Struct, frozen=True):
    """What ``Held.opaque`` holds.

    Attributes:
        layout: fingerprint of the engine; one of another cannot take the KV over.
        context: digest of the tokens whose KV it is.
        token: the one that was drawn behind them.
    """

    layout: str
    context: bytes
    token: int
    params: dict[str, Any]
    version: int = VERSION


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handed).decode


def pack(params: dict[str, Any], layout: str, context: Seq[int], token: int) -> bytes:
    """For ``Held.opaque``.

    Args:
        context: the tokens that were computed.
    """
    kept = {name: value for name, value in params.items() if name not in _OMITTED}
    return _encode(Handed(layout, _digest(context), token, kept))


def unpack(opaque: bytes, layout: str, tokens: Seq[int]) -> dict[str, Any]:
    """The params, for an engine that goes on with ``tokens``, the last of which the prefill engine drew.

    Raises:
        ValueError: the state is damaged, of another prompt or attempt, or of an engine whose KV has another shape.
    """
    try:
        handed = _decode(opaque)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if handed.version != VERSION:
        raise ValueError(f"it is of version {handed.version}, not {VERSION}")
    if handed.layout != layout:
        raise ValueError(f"the prefill engine is {handed.layout!r}, this one {layout!r}; start both with the same")
    if not handed.params.get("do_remote_prefill"):
        raise ValueError("it offers no KV")
    if not tokens or tokens[-1] != handed.token or _digest(tokens[:-1]) != handed.context:
        raise ValueError("it is of other tokens than these")
    return handed.params


def _digest(tokens: Seq[int]) -> bytes:
    return blake3(array("I", tokens).tobytes()).digest(length=16)


class Used:
    """Offers that were taken here. A second fetch is never safe: the blocks are let go of with the first."""

    def __init__(self, remembered: int = 4096) -> None:
        self._seen: OrderedDict[tuple[object, object], None] = OrderedDict()
        self._remembered = remembered

    def take(self, params: dict[str, Any]) -> bool:
        """False: it was before."""
        offer = (params.get("remote_engine_id"), params.get("remote_request_id"))
        if offer in self._seen:
            return False
        self._seen[offer] = None
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return True
