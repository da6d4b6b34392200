"""What a request carries, and its stages leave behind, to be told as one OpenTelemetry trace.

Only requests that are traced have either: of the others no message is larger. Ids follow from the request alone, so
that whoever tells a trace, and however often, tells the same one.
"""

import re
from typing import NamedTuple

import msgspec
from blake3 import blake3

MAX_STATE = 512  # characters of a tracestate, the least that W3C asks everybody to hand on

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
_STATE = re.compile(r"[ -~\t]*")


class Trace(msgspec.Struct, frozen=True, omit_defaults=True):
    """This request is traced in detail. Without a parent its trace begins at the gateway."""

    parent: str = ""  # the caller's W3C traceparent, version 00
    state: str = ""  # and tracestate


class Stamps(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker did for a traced request, besides what every request's messages tell. Unix ns; 0: not known.

    ``engine``: what the engine itself measured, by name: "queue_s", "prefill_s", "kv_transfer_bytes", ...
    """

    received_ns: int = 0  # its message was taken from the worker's queue
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
    """A ``traceparent`` header; None: it is none, and a new trace begins (W3C Trace Context, section 3.2)."""
    found = _PARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1))


def asked(parent: str, state: str) -> Trace | None:
    """What a client's headers ask for; None: nothing that can be understood."""
    found = read_parent(parent.strip())
    if found is None:
        return None
    return Trace(str(found), state if len(state) <= MAX_STATE and _STATE.fullmatch(state) else "")


def wanted(trace: Trace | None) -> bool:
    """Whether its stages are to leave stamps behind: the caller's word, if there is a caller."""
    if trace is None:
        return False
    parent = read_parent(trace.parent)
    return parent is None or parent.sampled


def trace_id(request_id: str, trace: Trace | None = None) -> str:
    """The caller's, else the request's id, a UUIDv7, as 32 hexadecimal digits; of other ids, a hash."""
    parent = read_parent(trace.parent) if trace is not None else None
    if parent is not None:
        return parent.trace_id
    bare = request_id.replace("-", "")
    return bare if _ID.fullmatch(bare) else blake3(request_id.encode()).hexdigest(length=16)


def span_id(request_id: str, name: str) -> str:
    """Of the span that ``name`` tells from the request's others; 16 hexadecimal digits.

    ``name``: "" is the gateway's, and ``stage_name`` a worker's.
    """
    return blake3(f"{request_id} {name}".encode()).hexdigest(length=8)


def stage_name(attempt: int, role: str) -> str:
    """Of the span of one worker's part in a request."""
    return f"{attempt} {role}"


def headers(request_id: str, trace: Trace, name: str) -> dict[str, str]:
    """W3C headers for an engine that exports spans of its own, below the span of this name."""
    found = {"traceparent": str(Parent(trace_id(request_id, trace), span_id(request_id, name), wanted(trace)))}
    return found | ({"tracestate": trace.state} if trace.state else {})
