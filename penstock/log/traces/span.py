"""One span, as plain data with the field names of OpenTelemetry; ids in lower-case hex, times in Unix ns."""

from collections.abc import Mapping, Sequence

import msgspec

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]


class Link(msgspec.Struct, frozen=True):
    """To another span of the same trace; ``why``: "retry" or "handoff"."""

    span_id: str
    why: str


class Event(msgspec.Struct, frozen=True):
    name: str
    at_ns: int
    attributes: Attributes = {}


class Span(msgspec.Struct):
    """One span. ``error``: what went wrong, as text; None: nothing."""

    name: str
    service: str  # "gateway", "router", "worker"
    instance: str  # which one
    trace_id: str
    span_id: str
    parent_id: str  # "": the trace starts here
    start_ns: int
    end_ns: int
    kind: str = "internal"  # "server", "internal", "consumer", "client"
    attributes: dict[str, Value] = {}
    links: list[Link] = []
    events: list[Event] = []
    error: str | None = None
    state: str = ""  # W3C tracestate


def covered(spans: Sequence[Span]) -> list[Span]:
    """The same spans, root first, where no span ends before it starts and each lies within its parent.

    Clocks of several hosts differ, and what a worker does for others outlasts its own part. A parent grows to contain
    its children, so that no time is cut off or invented.
    """
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        span.end_ns = max(span.start_ns, span.end_ns)
    for span in reversed(_parents_first(spans, by_id)):
        parent = by_id.get(span.parent_id)
        if parent is not None:
            parent.start_ns = min(parent.start_ns, span.start_ns)
            parent.end_ns = max(parent.end_ns, span.end_ns)
    return list(spans)


def in_order(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Spans with their depths: root first, each before its children, children by their start."""
    below: dict[str, list[Span]] = {}
    for span in spans[1:]:
        below.setdefault(span.parent_id, []).append(span)

    def walk(span: Span, depth: int) -> list[tuple[int, Span]]:
        spans = [(depth, span)]
        for child in sorted(below.get(span.span_id, []), key=lambda each: (each.start_ns, -each.end_ns)):
            spans += walk(child, depth + 1)
        return spans

    return walk(spans[0], 0)


def _parents_first(spans: Sequence[Span], by_id: Mapping[str, Span]) -> list[Span]:
    def depth(span: Span) -> int:
        above = by_id.get(span.parent_id)
        return 0 if above is None else 1 + depth(above)

    return sorted(spans, key=depth)
