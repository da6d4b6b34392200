"""State of a prefilled prompt on its way from one worker's engine to another's (``PinnedPrompt.opaque``). Pure.

The engines move the KV themselves; ``params`` is what they need for it. The other fields guard against mistakes: they
name the tokens of the KV and the engines that can use it; ``ConsumedStates`` ensures that it is fetched once.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from blake3 import blake3

VERSION = 2


class HandoffState(msgspec.Struct, frozen=True):
    """
    Attributes:
        layout: fingerprint of the KV cache (``EngineInfo.handoff_layout``); only engines with the same one can use it.
        context: digest of the tokens whose KV it is.
        first: the tokens that the prefill engine sampled after them.
    """

    layout: str
    context: bytes
    first: list[int]
    params: dict[str, Any]
    version: int = VERSION


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HandoffState).decode


def pack(params: dict[str, Any], layout: str, context: Seq[int], first: Seq[int]) -> bytes:
    """
    Args:
        context: the tokens that were computed.
        first: those that were drawn.
    """
    return _encode(HandoffState(layout, digest(context), list(first), params))


def unpack(opaque: bytes, layout: str) -> HandoffState:
    """
    Raises:
        ValueError: the state is damaged, or from an engine with another KV layout.
    """
    try:
        state = _decode(opaque)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if state.version != VERSION:
        raise ValueError(f"it has version {state.version}, this engine reads {VERSION}")
    if state.layout != layout:
        raise ValueError(
            f"the prefill engine's KV is {state.layout!r}, this one's {layout!r}; start both with the same "
            "release and the same KV cache (data type, block size, attention windows)"
        )
    return state


def count_prefilled(state: HandoffState, tokens: Seq[int], prompt: int) -> int:
    """Count the trailing ``tokens`` that the prefill engine sampled; its KV covers all tokens before them.

    Args:
        tokens: prompt and output so far.
        prompt: number of prompt tokens.

    Raises:
        ValueError: the state belongs to another prompt or attempt.
    """
    for count in range(min(len(state.first), len(tokens) - prompt), 0, -1):
        before = len(tokens) - count
        if list(tokens[before:]) == state.first[:count] and digest(tokens[:before]) == state.context:
            return count
    raise ValueError("it belongs to other tokens than these")


def digest(tokens: Seq[int]) -> bytes:
    return blake3(array("I", tokens).tobytes()).digest(length=16)


class ConsumedStates:
    """States whose KV was fetched. A second fetch is never safe: the first one frees the blocks."""

    def __init__(self, remembered: int = 4096) -> None:
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._remembered = remembered

    def claim(self, *state: object) -> bool:
        """Mark a state as fetched; False: it already was."""
        state = tuple(blake3(part).digest() if isinstance(part, bytes) else part for part in state)  # ids stay small
        if state in self._seen:
            return False
        self._seen[state] = None
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return True
