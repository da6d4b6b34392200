"""``DisaggregatedParams`` as data: the state of a prefilled prompt that passes from one worker's engine to another's.

The engines move the KV themselves (NIXL or UCX under their cache transceiver); for that they need a few fields, one of
them opaque bytes. ``encode`` and ``decode`` use no engine types, only "a dataclass with these fields".
"""

import base64
import binascii
import dataclasses
import enum
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from penstock.workers.engines.external import handoff_state

CONTEXT, GENERATION = "context_only", "generation_only"

LOGPROBS, LOGITS = "first_gen_log_probs", "first_gen_logits"  # of the tokens that prefill drew, from 1.3 on
VALUE, RANK = "logprob", "rank"

Wire = dict[str, Any]


def encode(params: Any) -> Wire | None:
    """Fields by name, ready for JSON: ``opaque_state`` as base64, log-probabilities as lists. None stays None.

    Logits are left out: they are tensors that were not requested.
    """
    if params is None:
        return None
    fields = {field.name: _plain(getattr(params, field.name)) for field in dataclasses.fields(params)}
    if fields.get(LOGITS) is not None:
        fields[LOGITS] = None
    if fields.get("opaque_state") is not None:
        fields["opaque_state"] = base64.b64encode(fields["opaque_state"]).decode("ascii")
    return fields


def decode(wire: Wire | None, kind: type[Any], logprob: type[Any] | None = None) -> Any:
    """The inverse of ``encode``, as this engine's own class. None stays None.

    Empty fields that this engine does not know are left out.

    Args:
        logprob: the engine's class of a token's log-probability.

    Raises:
        ValueError: ``opaque_state`` is not base64, or this engine does not know a field that has a value.
    """
    if wire is None:
        return None
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in wire.items() if name in names or value is not None}
    unknown = sorted(set(fields) - names)
    if unknown:
        raise ValueError(
            f"this engine does not know {', '.join(unknown)}; prefill and decode need the same TensorRT-LLM release"
        )
    state = fields.get("opaque_state")
    if state is not None:
        try:
            fields["opaque_state"] = base64.b64decode(state, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"opaque_state is not base64: {error}") from error
    if fields.get(LOGPROBS) is not None:
        fields[LOGPROBS] = None if logprob is None else _logprobs(fields[LOGPROBS], logprob)
    return kind(**fields)


def _plain(value: Any) -> Any:
    """A value without the engine's own classes: enumerations as numbers, log-probabilities as (value, rank)."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "logprob"):
        return {VALUE: float(value.logprob), RANK: value.rank}
    return value


def _logprobs(value: Any, kind: type[Any]) -> Any:
    """Inverse of ``_plain`` for log-probabilities, with ids of tokens as numbers."""
    if isinstance(value, list):
        return [_logprobs(each, kind) for each in value]
    if isinstance(value, Mapping) and set(value) == {VALUE, RANK}:
        return kind(logprob=value[VALUE], rank=value[RANK])
    if isinstance(value, Mapping):
        return {int(token): _logprobs(each, kind) for token, each in value.items()}
    return value


def pack(params: Any, layout: str, context: Seq[int]) -> bytes:
    """The state for ``PinnedPrompt.opaque``.

    Args:
        context: the tokens that were computed.
    """
    wire = encode(params)
    assert wire is not None
    return handoff_state.pack(wire, layout, context, params.first_gen_tokens or ())


def unpack(
    opaque: bytes, kind: type[Any], layout: str, tokens: Seq[int], prompt: int, logprob: type[Any] | None = None
) -> tuple[Any, int]:
    """Parameters for the engine that continues, and how many of the last ``tokens`` the prefill engine drew.

    Args:
        tokens: all known tokens of the sequence, including those that the prefill engine drew.
        prompt: how many of them are the client's prompt.
        logprob: the engine's class of a token's log-probability.

    Raises:
        ValueError: the state is damaged, or from another release, prompt, attempt or KV layout.
    """
    state = handoff_state.unpack(opaque, layout)
    params = decode(state.params, kind, logprob)
    drawn = handoff_state.count_prefilled(state, tokens, prompt)
    params.request_type = GENERATION
    return params, drawn
