"""Sending spans by OTLP/HTTP with OpenTelemetry's exporter. The only module that imports OpenTelemetry.

OpenTelemetry's environment variables apply: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, ...
"""

import asyncio
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from penstock.configs.settings import traces_url
from penstock.log_tools.traces.spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import export as sdk

INSTALL = "pip install 'penstock[otel]'"
SEND_S = 5.0  # including the exporter's own retries; stopping waits for it


class NoExporter(Exception):
    """OpenTelemetry is not installed."""


class Sink(Protocol):
    """Where spans are sent."""

    @property
    def why(self) -> str:
        """Why the latest batch did not arrive."""

    async def send(self, spans: Sequence[Span]) -> bool:
        """Send one batch; False: it did not arrive."""

    def close(self) -> None:
        """Abort the batch that is being sent."""


class FirstWarning(logging.Handler):
    """The first warning that a library logs about a batch: the only place where its exporter reports a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()[:500]


class Exporter:
    """A ``Sink`` for OpenTelemetry's exporters.

    Args:
        exporter: called in a thread, one batch at a time.
        warning: what it logs about its failures.
    """

    def __init__(
        self, exporter: "sdk.SpanExporter", namespace: str = "ps", warning: "FirstWarning | None" = None
    ) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = exporter
        self._warning = warning or FirstWarning()
        self._namespace = namespace
        self._scope = InstrumentationScope("penstock", version("penstock"))
        self._resources: dict[tuple[str, str], Resource] = {}

    @property
    def why(self) -> str:
        return self._warning.text

    async def send(self, spans: Sequence[Span]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._warning.text = ""
        readable = [self._readable(span) for span in spans]
        return await asyncio.to_thread(self._exporter.export, readable) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _readable(self, span: Span) -> "ReadableSpan":
        """The span as OpenTelemetry's data. Its tracers are not used: they would choose the ids."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        trace_id, state = int(span.trace_id, 16), TraceState.from_header([span.state]) if span.state else None

        def context(span_id: str) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED), state)

        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent_id) if span.parent_id else None,
            resource=self._of(span.service, span.instance),
            attributes=span.attributes,
            events=[Event(each.name, dict(each.attributes), each.at_ns) for each in span.events],
            links=[Link(context(each.span_id), {"penstock.link": each.why}) for each in span.links],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _of(self, service: str, instance: str) -> "Resource":
        from opentelemetry.sdk.resources import Resource

        resource = self._resources.get((service, instance))
        if resource is None:
            if len(self._resources) >= 4096:  # workers come and go under new names
                self._resources.clear()
            resource = self._resources[service, instance] = Resource.create(  # also reads OTEL_RESOURCE_ATTRIBUTES
                {
                    "service.name": f"penstock-{service}",
                    "service.namespace": self._namespace,
                    "service.instance.id": instance or service,
                    "service.version": version("penstock"),
                }
            )
        return resource


def otlp(endpoint: str, namespace: str = "ps") -> Exporter:
    """To an OTLP/HTTP endpoint, such as ``http://127.0.0.1:4318``.

    Raises:
        NoExporter: OpenTelemetry is not installed; the text says how to install it.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise NoExporter(f"spans cannot be sent without OpenTelemetry ({error}); {INSTALL}") from error
    logger, warning = logging.getLogger("opentelemetry.exporter"), FirstWarning()
    logger.handlers, logger.propagate = [warning], False  # our log has one line now and then, not one per try
    return Exporter(OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=SEND_S), namespace, warning)
