"""Whether a request is traced: what its client's W3C trace context asks for, and the ``--tracing`` setting."""

from collections.abc import Iterable, Mapping

import msgspec

from gateway.openai.prepare import PreparedRequest
from schemas.trace import Trace, asked

PARENT, STATE = "traceparent", "tracestate"
_PARENT, _STATE = PARENT.encode(), STATE.encode()

OWN = Trace()


def from_http_headers(headers: Iterable[tuple[bytes, bytes]], tracing: str) -> Trace | None:
    """From ASGI headers, whose names are lower case."""
    if tracing == "off":
        return None
    parent, states = b"", b""
    for name, value in headers:
        if name == _PARENT:
            parent = value
        elif name == _STATE:
            states = states + b"," + value if states else value
    if parent and (trace := asked(parent.decode("latin-1"), states.decode("latin-1"))) is not None:
        return trace
    return OWN if tracing == "all" else None


def from_nats_headers(headers: Mapping[str, str], tracing: str) -> Trace | None:
    """From a NATS message's headers, whose names keep the case that the client wrote."""
    if tracing == "off":
        return None
    found = {name.lower(): value for name, value in headers.items() if name.lower() in (PARENT, STATE)}
    if PARENT in found and (trace := asked(found[PARENT], found.get(STATE, ""))) is not None:
        return trace
    return OWN if tracing == "all" else None


def with_trace(prepared: PreparedRequest, trace: Trace | None) -> PreparedRequest:
    """The same, to be traced if there is a trace."""
    if trace is None:
        return prepared
    return prepared._replace(request=msgspec.structs.replace(prepared.request, trace=trace))
