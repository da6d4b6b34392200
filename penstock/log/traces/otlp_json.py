"""Spans as OTLP's JSON (ids in hex, 64-bit numbers as text), for files and other tools. Needs no OpenTelemetry."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.log.traces.span import Span, Value

_KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}


def document(spans: Sequence[Span], namespace: str = "ps") -> dict[str, Any]:
    """An ``ExportTraceServiceRequest``."""
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.service, span.instance), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": _attributes(
                        {
                            "service.name": f"penstock-{service}",
                            "service.namespace": namespace,
                            "service.instance.id": instance or service,
                        }
                    )
                },
                "scopeSpans": [{"scope": {"name": "penstock"}, "spans": list(map(_span, group))}],
            }
            for (service, instance), group in groups.items()
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "events": [
            {"name": each.name, "timeUnixNano": str(each.at_ns), "attributes": _attributes(each.attributes)}
            for each in span.events
        ],
        "links": [
            {"traceId": span.trace_id, "spanId": each.span_id, "attributes": _attributes({"penstock.link": each.why})}
            for each in span.links
        ],
        "status": {} if span.error is None else {"code": 2, "message": span.error},
    }
    if span.parent_id:
        fields["parentSpanId"] = span.parent_id
    if span.state:
        fields["traceState"] = span.state
    return fields


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": list(map(_value, _each(value)))}}


def _each(values: Iterable[Value]) -> Iterable[Value]:
    return values
