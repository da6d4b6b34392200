"""How the state of a computed prompt travels from one worker's engine to another's, as ``Held.opaque``. Pure.

The engines move the KV by themselves; what they need for it (``params``) is theirs. Ours is what guards it: of which
tokens it is, which engines can take it over, and that nobody takes it twice.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from blake3 import blake3

VERSION = 2


class Handed(msgspec.Struct, frozen=True):
    """
    Attributes:
        layout: fingerprint of engines that can take it over: see ``EngineInfo.handover``.
        context: digest of the tokens whose KV it is.
        first: the tokens that were drawn behind them.
    """

    layout: str
    context: bytes
    first: list[int]
    params: dict[str, Any]
    version: int = VERSION


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handed).decode


def pack(params: dict[str, Any], layout: str, context: Seq[int], first: Seq[int]) -> bytes:
    """
    Args:
        context: the tokens that were computed.
        first: those that were drawn.
    """
    return _encode(Handed(layout, digest(context), list(first), params))


def unpack(opaque: bytes, layout: str) -> Handed:
    """
    Raises:
        ValueError: the state is damaged, or of engines whose KV has another shape.
    """
    try:
        handed = _decode(opaque)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if handed.version != VERSION:
        raise ValueError(f"it is of version {handed.version}, not {VERSION}")
    if handed.layout != layout:
        raise ValueError(
            f"the prefill engine's KV is {handed.layout!r}, this one's {layout!r}; start both with the same "
            "release and the same KV cache (data type, block size, attention windows)"
        )
    return handed


def own(handed: Handed, tokens: Seq[int], prompt: int) -> int:
    """How many of the last ``tokens`` the prefill engine drew; its KV is of all before them.

    Args:
        tokens: all that is known of the sequence.
        prompt: how many of them are the client's.

    Raises:
        ValueError: the state is of another prompt or attempt.
    """
    for count in range(min(len(handed.first), len(tokens) - prompt), 0, -1):
        before = len(tokens) - count
        if list(tokens[before:]) == handed.first[:count] and digest(tokens[:before]) == handed.context:
            return count
    raise ValueError("it is of other tokens than these")


def digest(tokens: Seq[int]) -> bytes:
    return blake3(array("I", tokens).tobytes()).digest(length=16)


class Used:
    """States that were taken over. A second fetch is never safe: the blocks are let go of with the first."""

    def __init__(self, remembered: int = 4096) -> None:
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._remembered = remembered

    def take(self, *state: object) -> bool:
        """False: it was before."""
        if state in self._seen:
            return False
        self._seen[state] = None
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return True
