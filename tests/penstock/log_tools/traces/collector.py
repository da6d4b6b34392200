"""A collector: OTLP over HTTP on a port of its own, that may go away and come back."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Got(NamedTuple):
    """One span as it came, ids in hex. ``attributes``: of text, numbers and lists of text."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    failed: bool
    state: str


class Collector:
    """``spans`` holds everything that came, in its order, repetitions included."""

    def __init__(self) -> None:
        self.spans: list[Got] = []
        self.refused = 0
        self._status = 200
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1/traces"

    def start(self) -> None:
        """On the port that it had before."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector._status if self.path == "/v1/traces" else 404
                if status == 200:
                    collector.spans += decoded(body)
                else:
                    collector.refused += 1
                answer = ExportTraceServiceResponse().SerializeToString() if status == 200 else b""
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens on its port any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()

    @contextlib.contextmanager
    def answering(self, status: int) -> Iterator[None]:
        self._status = status
        yield
        self._status = 200

    def of(self, request_id: str) -> list[Got]:
        """The spans of one request, each once, the gateway's first; empty until that has come."""
        roots = [span for span in self.spans if span.attributes.get("penstock.request.id") == request_id]
        if not roots:
            return []
        by_id = {span.span_id: span for span in self.spans if span.trace_id == roots[0].trace_id}
        return [roots[0], *(span for span in by_id.values() if span.span_id != roots[0].span_id)]


def decoded(body: bytes) -> list[Got]:
    """The spans of one export."""
    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        of = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            found += [
                Got(
                    span.name,
                    of["service.name"],
                    of["service.instance.id"],
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    tuple(link.span_id.hex() for link in span.links),
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    span.trace_state,
                )
                for span in scope.spans
            ]
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
