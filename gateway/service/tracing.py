"""Whether a request is traced: by its W3C trace context and the ``--tracing`` setting."""

from collections.abc import Iterable, Mapping

import msgspec

from penstock.gateway.apis.chat.prepare import PreparedRequest
from penstock.schemas.trace import Trace, asked

PARENT, STATE = "traceparent", "tracestate"
_PARENT, _STATE = PARENT.encode(), STATE.encode()

NEW_TRACE = Trace()


def from_http_headers(headers: Iterable[tuple[bytes, bytes]], tracing: str) -> Trace | None:
    """ASGI headers: names are lower case."""
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
    return NEW_TRACE if tracing == "all" else None


def from_nats_headers(headers: Mapping[str, str], tracing: str) -> Trace | None:
    """NATS headers: names keep the case that the client wrote."""
    if tracing == "off":
        return None
    fields = {name.lower(): value for name, value in headers.items() if name.lower() in (PARENT, STATE)}
    if PARENT in fields and (trace := asked(fields[PARENT], fields.get(STATE, ""))) is not None:
        return trace
    return NEW_TRACE if tracing == "all" else None


def with_trace(prepared: PreparedRequest, trace: Trace | None) -> PreparedRequest:
    """The request with its trace; unchanged without one."""
    if trace is None:
        return prepared
    return prepared._replace(request=msgspec.structs.replace(prepared.request, trace=trace))
