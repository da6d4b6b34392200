"""``DisaggregatedParams`` as data: how the state of a computed prompt travels from one worker's engine to another's.

The engines move the KV themselves (NIXL or UCX under their cache transceiver); what they need for it is a few fields,
one of them opaque bytes. ``encode`` and ``decode`` know no engine types beyond "a dataclass with these fields".
"""

import base64
import binascii
import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

from workers.engines.external import handoff_state

CONTEXT, GENERATION = "context_only", "generation_only"

Wire = dict[str, Any]


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
    return handoff_state.pack(wire, layout, context, params.first_gen_tokens or ())


def unpack(opaque: bytes, kind: type[Any], layout: str, tokens: Seq[int], prompt: int) -> tuple[Any, int]:
    """Parameters for the engine that goes on, and how many of the last ``tokens`` are its first ones.

    Args:
        tokens: all that is known of the sequence, the prefill engine's own included.
        prompt: how many of them are the client's.

    Raises:
        ValueError: the state is damaged, from another release, of another prompt or attempt, or from an engine whose
            KV has another shape.
    """
    state = handoff_state.unpack(opaque, layout)
    params = decode(state.params, kind)
    own = handoff_state.count_prefilled(state, tokens, prompt)
    params.request_type = GENERATION
    return params, own
