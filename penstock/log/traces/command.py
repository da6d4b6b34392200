"""``penstock trace``: one request's trace on the terminal, or all traces to a collector.

A trace on a terminal, as a waterfall.

Spans as OTLP's JSON (ids in hex, 64-bit numbers as text), for files and other tools. Needs no OpenTelemetry.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from rich.console import Console
from rich.table import Table

from penstock.cli.figures import moment_ns
from penstock.cli.terminal import bar, escape, stdout
from penstock.configs import logs
from penstock.configs.settings import TraceSettings
from penstock.log.sources.open_log import FAILURES, Log, Source, open_log
from penstock.log.timeline.read import read_timeline
from penstock.log.traces.export import Exporter, NoExporter, otlp
from penstock.log.traces.follow import BEFORE_NS, Following, Position, PositionStore, begin
from penstock.log.traces.span import Span, Value, in_order
from penstock.log.traces.spans import spans
from penstock.schemas.errors import ServingError
from penstock.schemas.ids import request_of_answer

WIDTH = 48  # columns of the waterfall, at most
NARROWEST = 12
TEXT = 84  # columns of the text beside it
_COLOURS = {"gateway": "cyan", "router": "magenta", "worker": "green"}


def show(spans: Sequence[Span], console: Console) -> None:
    """Print spans, root first, each with a bar for its place in the request's time."""
    root = spans[0]
    whole = max(1, root.end_ns - root.start_ns)
    console.print(f"trace [bold]{root.trace_id}[/]" + (f", part of span {root.parent_id}" if root.parent_id else ""))
    width = max(NARROWEST, min(WIDTH, console.width - TEXT))
    table = Table("span", "where", f"0 … {_ms(whole)}", "from", "took", "", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[3].justify = table.columns[4].justify = "right"
    for depth, span in in_order(spans):
        colour = "red" if span.error is not None else _COLOURS[span.service]
        table.add_row(
            f"{'  ' * depth}[bold {colour}]{escape(span.name)}[/]",
            escape(_where(span, short=width < WIDTH)),
            f"[{colour}]{bar(span.start_ns - root.start_ns, span.end_ns - root.start_ns, whole, width)}[/]",
            _ms(span.start_ns - root.start_ns),
            _ms(span.end_ns - span.start_ns),
            escape(_details(span)),
        )
    console.print(table)


def _where(span: Span, short: bool) -> str:
    """The process. ``short``: without the suffix that changes with each of its starts."""
    name = span.instance or span.service
    return name.rpartition("-")[0] or name if short else name


def _details(span: Span) -> str:
    """The few attributes that fit into a line."""
    if span.error is not None:
        return span.error
    got = span.attributes.get
    details = []
    match span.name:
        case "route":
            details += [f"{got('penstock.router.mode')} → {got('penstock.router.worker')}"]
            details += [f"overlap {got('penstock.router.overlap_blocks', 0)}/{got('penstock.router.prompt_blocks')}"]
        case "transfer":
            size = got("penstock.transfer.bytes")
            details += [f"{got('penstock.transfer.blocks')} blocks"]
            details += [f"{size / 2**20:.2f} MiB"] if isinstance(size, int) and size else []
            details += [f"over {got('penstock.transfer.backend')}"]
    for name, unit in (
        ("gen_ai.usage.input_tokens", "in"),
        ("gen_ai.usage.cache_read.input_tokens", "cached"),
        ("gen_ai.usage.output_tokens", "out"),
        ("penstock.worker.preemptions", "preempted"),
    ):
        if got(name):
            details.append(f"{got(name)} {unit}")
    reasons = got("gen_ai.response.finish_reasons")
    details += [",".join(reasons)] if isinstance(reasons, list) else []
    details += [str(got("error.type"))] if got("error.type") else []
    return ", ".join(details)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms" if abs(ns) < 10e9 else f"{ns / 1e9:.2f} s"


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


log = structlog.get_logger("trace")

USAGE = 2
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not there (yet)
EXPORT_CONNECT_S = 10.0
LAST_S = 3.0  # on SIGTERM, to send requests that have just ended


class BadUse(ValueError):
    """The flags contradict each other, or one has an invalid value."""


def run(settings: TraceSettings) -> int:
    """Print one trace, or export until SIGTERM; the exit status."""
    try:
        check(settings)
        if settings.request:
            return asyncio.run(_print(settings))
        logs.setup(settings.log_format, settings.log_level, name=settings.name or "trace")
        return asyncio.run(_export(settings))
    except (BadUse, NoExporter) as error:
        print(f"penstock trace: {error}", file=sys.stderr)
        return USAGE
    except ServingError as error:
        print(f"penstock trace: {error.message}", file=sys.stderr)
        return EXIT_START
    except FAILURES as error:
        print(f"penstock trace: {error}", file=sys.stderr)
        return 1


def check(settings: TraceSettings) -> None:
    """Check the flags.

    Raises:
        BadUse: neither a request nor a collector is named, or both; or --since is invalid.
    """
    if bool(settings.request) == bool(settings.otlp_endpoint):
        raise BadUse("give either --request ID to print one trace, or --otlp-endpoint URL to send all of them")
    if settings.otlp_endpoint and not _is_url(settings.otlp_endpoint):
        raise BadUse(
            f"--otlp-endpoint {settings.otlp_endpoint!r} is not an HTTP URL, such as http://127.0.0.1:4318/v1/traces"
        )
    since_ns(settings, time.time_ns())


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def since_ns(settings: TraceSettings, now_ns: int) -> int:
    """Unix time in ns at which the export begins; ``now_ns`` if ``--since`` is not given.

    Raises:
        BadUse: ``--since`` is not a duration or a time.
    """
    try:
        return moment_ns(settings.since, now_ns) if settings.since else now_ns
    except ValueError as error:
        raise BadUse(f"--since: {error}") from None


def _source(settings: TraceSettings) -> Source:
    return Source(Path(settings.data_dir), settings.nats_url, settings.namespace, settings.file, settings.skip_bad)


# --- one request ---


async def _print(settings: TraceSettings) -> int:
    request_id = request_of_answer(settings.request)
    async with open_log(_source(settings), name="trace", files=True) as opened:
        trace = spans(await read_timeline(opened.reader, request_id))
        namespace = opened.reader.subjects.namespace
    if settings.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document(trace, namespace))).decode() + "\n")
    else:
        show(trace, stdout())
    return 0


# --- all of them ---


async def _export(settings: TraceSettings) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    name = f"trace:{settings.name or 'trace'}"
    async with open_log(_source(settings), name=name, role="reader", timeout_s=EXPORT_CONNECT_S) as opened:
        if opened.stopped and not settings.once:
            raise BadUse(f"the deployment in {settings.data_dir} is stopped: add --once to send what its log holds")
        exporter = otlp(settings.otlp_endpoint, opened.bus.subjects.namespace)
        try:
            return await _follow(settings, opened, exporter, stop)
        finally:
            exporter.close()


async def _follow(settings: TraceSettings, opened: Log, exporter: Exporter, stop: asyncio.Event) -> int:
    bus, kept = opened.bus, PositionStore(opened.bus, settings.name or "trace")
    not_before = 0
    if settings.since:
        not_before = since_ns(settings, time.time_ns())
        start = Position(0, max(1, not_before - BEFORE_NS))
    elif opened.stopped:
        start = Position(0, 1)
    else:
        start = await begin(bus, await kept.load())
    following = Following(
        bus,
        exporter,
        start,
        not_before_ns=not_before,
        sample=settings.sample,
        export_timeout_s=settings.export_timeout_s,
    )
    log.info("trace_open", endpoint=settings.otlp_endpoint, done_seq=start.done_seq, since=settings.since or "kept")
    work = asyncio.create_task(following.once() if settings.once else following.run(kept.save), name="follow")
    signal = asyncio.create_task(stop.wait(), name="signal")
    await asyncio.wait([work, signal], return_when=asyncio.FIRST_COMPLETED)
    signal.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait([work])
        with contextlib.suppress(ServingError, TimeoutError):
            await asyncio.wait_for(following.once(), LAST_S)
    if not opened.stopped:
        await kept.save(following.position)
    log.info("trace_closed", **msgspec.structs.asdict(following.counts))
    if not work.cancelled():
        work.result()
    return 1 if settings.once and following.counts.dropped else 0
