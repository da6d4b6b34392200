"""``DisaggregatedParams`` as data: how the state of a computed prompt travels from one worker's engine to another's.

The engines move the KV themselves (NIXL or UCX under their cache transceiver); what they need for it is a few fields,
one of them opaque bytes. ``encode`` and ``decode`` know no engine types beyond "a dataclass with these fields".
"""

import base64
import binascii
import dataclasses
from array import array
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from blake3 import blake3

VERSION = 1
CONTEXT, GENERATION = "context_only", "generation_only"

Wire = dict[str, Any]


class Handed(msgspec.Struct, frozen=True):
    """What ``Held.opaque`` holds, as JSON.

    Attributes:
        layout: fingerprint of the KV cache's shape; engines of another cannot take it over.
        context: digest of the tokens whose KV it is.
        params: ``encode`` of the prefill engine's DisaggregatedParams.
    """

    layout: str
    context: str
    params: Wire
    version: int = VERSION


def encode(params: Any) -> Wire | None:
    """Fields by name, JSON-safe: ``opaque_state`` as base64, the others as they are; None passes through."""
    if params is None:
        return None
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    if fields.get("opaque_state") is not None:
        fields["opaque_state"] = base64.b64encode(fields["opaque_state"]).decode("ascii")
    return fields


def decode(wire: Wire | None, kind: type[Any]) -> Any:
    """The opposite, into this engine's own class; None passes through.

    Fields of another release are left out when they are empty.

    Raises:
        ValueError: the bytes are no base64, or a field with content is unknown to this engine.
    """
    if wire is None:
        return None
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in wire.items() if name in known or value is not None}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"this engine does not know {', '.join(unknown)}; prefill and decode need the same TensorRT-LLM release"
        )
    state = fields.get("opaque_state")
    if state is not None:
        try:
            fields["opaque_state"] = base64.b64decode(state, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"opaque_state is no base64: {error}") from error
    return kind(**fields)


def pack(params: Any, layout: str, context: Seq[int]) -> bytes:
    """For ``Held.opaque``.

    Args:
        context: the tokens that were computed.
    """
    wire = encode(params)
    assert wire is not None
    return msgspec.json.encode(Handed(layout, _digest(context), wire))


def unpack(opaque: bytes, kind: type[Any], layout: str, tokens: Seq[int], prompt: int) -> tuple[Any, int]:
    """Parameters for the engine that goes on, and how many of the last ``tokens`` are its first ones.

    Args:
        tokens: all that is known of the sequence, the prefill engine's own included.
        prompt: how many of them are the client's.

    Raises:
        ValueError: the state is damaged, from another release, of another prompt or attempt, or from an engine whose
            KV has another shape.
    """
    try:
        handed = msgspec.json.decode(opaque, type=Handed)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if handed.version != VERSION:
        raise ValueError(f"it is of version {handed.version}, not {VERSION}")
    if handed.layout != layout:
        raise ValueError(
            f"the prefill engine's KV cache is {handed.layout!r}, this one's {layout!r}; give both the same "
            "kv_cache_config (dtype, tokens_per_block, max_attention_window)"
        )
    params = decode(handed.params, kind)
    first = params.first_gen_tokens or ()
    for own in range(min(len(first), len(tokens) - prompt), 0, -1):
        before = len(tokens) - own
        if list(tokens[before:]) == list(first[:own]) and _digest(tokens[:before]) == handed.context:
            params.request_type = GENERATION
            return params, own
    raise ValueError("it is of other tokens than these")


def _digest(tokens: Seq[int]) -> str:
    return blake3(array("I", tokens).tobytes()).hexdigest(length=16)
