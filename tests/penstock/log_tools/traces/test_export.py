"""Spans as OpenTelemetry's exporters get them, and as OTLP JSON."""

import contextlib
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.configs.settings import TraceSettings
from penstock.log_tools.traces import export
from penstock.log_tools.traces.export import Exporter
from penstock.log_tools.traces.spans import Span
from penstock.log_tools.traces.spans import spans as spans_of
from penstock.log_tools.traces.trace_command import BadUse, check
from penstock.schemas.trace import Trace
from tests.penstock.log_tools.traces.collector import Collector
from tests.penstock.log_tools.traces.samples import PARENT, at, split


async def exported(spans: list[Span]) -> list[Any]:
    memory = InMemorySpanExporter()
    exporter = Exporter(memory, "ps")
    assert await exporter.send(spans)
    found = list(memory.get_finished_spans())
    exporter.close()
    assert not await exporter.send(spans)  # it is closed
    return found


async def test_ids_times_links_and_parents_arrive_as_they_are() -> None:
    spans = spans_of(split(Trace(PARENT, "vendor=1")))
    spans[1].error = "why"
    found = await exported(spans)
    assert [f"{span.context.trace_id:032x}" for span in found] == [PARENT[3:35]] * len(spans)
    assert [f"{span.context.span_id:016x}" for span in found] == [span.span_id for span in spans]
    assert [f"{span.parent.span_id:016x}" for span in found] == [span.parent_id for span in spans]
    assert [(span.start_time, span.end_time) for span in found] == [(s.start_ns, s.end_ns) for s in spans]
    assert [dict(span.attributes) for span in found] == [s.attributes for s in spans]
    assert found[0].kind is SpanKind.SERVER
    assert (found[1].status.status_code, found[1].status.description) == (StatusCode.ERROR, "why")
    assert found[0].status.status_code is StatusCode.UNSET
    assert found[0].context.trace_state.to_header() == "vendor=1"
    assert [(event.name, event.timestamp) for event in found[0].events] == [("first token", at(20))]
    links = {f"{link.context.span_id:016x}" for span in found for link in span.links}
    assert links == {link.span_id for span in spans for link in span.links} != set()


async def test_each_process_is_a_resource_of_its_service() -> None:
    found = await exported(spans_of(split()))
    resources = [span.resource.attributes for span in found]
    services = {(each["service.name"], each["service.instance.id"]) for each in resources}
    assert services == {
        ("penstock-gateway", "gw-1"),
        ("penstock-router", "r-1"),
        ("penstock-worker", "p-1"),
        ("penstock-worker", "d-1"),
    }
    assert found[0].parent is None


@pytest.mark.parametrize(
    ("status", "path", "says"), [(200, "/v1/trace", "404"), (401, "/v1/traces", "401"), (None, "/v1/traces", "refused")]
)
async def test_why_spans_were_refused_is_logged(
    status: int | None, path: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SEND_S", 2.0)  # for one try more than the first, before which the reason is said
    collector = Collector()
    collector.start()
    exporter = export.otlp(collector.url.replace("/v1/traces", path))
    with contextlib.ExitStack() as states:
        states.enter_context(collector.away() if status is None else collector.answering(status))
        assert not await exporter.send(spans_of(split()))
        assert says in exporter.why
    exporter.close()
    collector.stop()


@pytest.mark.parametrize("path", ["", "/"])
async def test_the_url_of_a_collector_without_a_path_is_that_of_its_traces(path: str) -> None:
    """As pages of collectors and OTEL_EXPORTER_OTLP_ENDPOINT have it. A collector answers 404 to any other path."""
    collector = Collector()
    collector.start()
    exporter = export.otlp(collector.url.replace("/v1/traces", path))
    assert await exporter.send(spans_of(split()))
    exporter.close()
    collector.stop()
    assert collector.spans


@pytest.mark.parametrize(
    "endpoint", ["http://", "http://[::bad/v1", "http://127.0.0.1:99999/", "ftp://h/", "localhost:4318"]
)
def test_an_endpoint_that_cannot_be_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(BadUse, match="an HTTP URL, such as"):
        check(TraceSettings(otlp_endpoint=endpoint))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"otlp_endpoint": "localhost:4317"},
        {"otlp_endpoint": "http://b", "since": "yesterday"},
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(BadUse):
        check(TraceSettings(**flags))
