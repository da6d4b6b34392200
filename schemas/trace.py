"""What a request and its stages record for an OpenTelemetry trace.

Only traced requests carry it; the messages of others are no larger. Ids are derived from the request alone, so every
export of a trace has the same ids.
"""

import re
from typing import NamedTuple

import msgspec
from blake3 import blake3

MAX_STATE = 512  # characters of a tracestate that W3C requires to be propagated

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
_STATE = re.compile(r"[ -~\t]*")


class Trace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request is traced in detail. Without a parent its trace starts at the gateway."""

    parent: str = ""  # the caller's W3C traceparent, version 00
    state: str = ""  # and tracestate


class Stamps(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of a traced request at one worker, beyond those in every request's messages. Unix ns; 0: unknown.

    ``engine``: what the engine itself measured, by name: "queue_s", "prefill_s", "kv_transfer_bytes", ...
    """

    received_ns: int = 0  # the worker took the message from its queue
    started_ns: int = 0  # the engine admitted it
    first_token_ns: int = 0  # of this worker
    preemptions: int = 0
    engine: dict[str, float] = {}


class Parent(NamedTuple):
    """A W3C traceparent. Ids in lower-case hex."""

    trace_id: str
    span_id: str
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def read_parent(text: str) -> Parent | None:
    """Parse a ``traceparent`` header; None: it is invalid, and a new trace starts (W3C Trace Context, section 3.2)."""
    match = _PARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))


def asked(parent: str, state: str) -> Trace | None:
    """The trace context of a client's headers; None: there is none, or it is invalid."""
    parsed = read_parent(parent.strip())
    if parsed is None:
        return None
    return Trace(str(parsed), state if len(state) <= MAX_STATE and _STATE.fullmatch(state) else "")


def wanted(trace: Trace | None) -> bool:
    """Whether stages record stamps: as the caller's sampled flag says, if there is a caller."""
    if trace is None:
        return False
    parent = read_parent(trace.parent)
    return parent is None or parent.sampled


def trace_id(request_id: str, trace: Trace | None = None) -> str:
    """The caller's trace id, else the request's UUIDv7 as 32 hexadecimal digits; a hash of other ids."""
    parent = read_parent(trace.parent) if trace is not None else None
    if parent is not None:
        return parent.trace_id
    bare = request_id.replace("-", "")
    return bare if _ID.fullmatch(bare) else blake3(request_id.encode()).hexdigest(length=16)


def span_id(request_id: str, name: str) -> str:
    """The id of one of a request's spans: 16 hexadecimal digits.

    ``name``: "" for the gateway's span, ``stage_name`` for a worker's.
    """
    return blake3(f"{request_id} {name}".encode()).hexdigest(length=8)


def stage_name(attempt: int, role: str) -> str:
    """The name of the span of one worker's part in a request."""
    return f"{attempt} {role}"


def headers(request_id: str, trace: Trace, name: str) -> dict[str, str]:
    """W3C headers for an engine that exports its own spans, as children of the span with this name."""
    values = {"traceparent": str(Parent(trace_id(request_id, trace), span_id(request_id, name), wanted(trace)))}
    return values | ({"tracestate": trace.state} if trace.state else {})
