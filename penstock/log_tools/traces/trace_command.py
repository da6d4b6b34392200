"""``penstock trace``: the traces of all requests to a collector."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import structlog

from penstock.cli.figures import moment_ns
from penstock.cli.terminal import fail
from penstock.configs import logs
from penstock.configs.settings import TraceSettings
from penstock.log_tools.sources.open_log import FAILURES, Log, LogSource, open_cells
from penstock.log_tools.traces.export import Exporter, NoExporter, otlp
from penstock.log_tools.traces.follow import BEFORE_NS, Following, PositionStore, TracePosition, begin
from penstock.schemas.errors import ServingError

log = structlog.get_logger("trace")

USAGE = 2
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not there (yet)
EXPORT_CONNECT_S = 10.0
LAST_S = 3.0  # on SIGTERM, to send requests that have just ended


class BadUse(ValueError):
    """The flags contradict each other, or one has an invalid value."""


def run(settings: TraceSettings) -> int:
    """Export until SIGTERM; the exit status."""
    try:
        check(settings)
        logs.setup(settings.log_format, settings.log_level, name=settings.name or "trace")
        return asyncio.run(_export(settings))
    except (BadUse, NoExporter) as error:
        return fail("trace", error, status=USAGE)
    except ServingError as error:
        return fail("trace", error.message, status=EXIT_START)
    except FAILURES as error:
        return fail("trace", error)


def check(settings: TraceSettings) -> None:
    """Check the flags.

    Raises:
        BadUse: no collector is named, or --since is invalid.
    """
    if not settings.otlp_endpoint:
        raise BadUse("name the collector with --otlp-endpoint URL; `penstock inspect ID` shows one request's spans")
    if not _is_url(settings.otlp_endpoint):
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


def _source(settings: TraceSettings) -> LogSource:
    return LogSource(
        Path(settings.data_dir),
        settings.nats_url,
        settings.namespace,
        settings.file,
        settings.skip_bad,
        cells=settings.cells,
        cell_nats_urls=settings.cell_nats_urls,
    )


async def _export(settings: TraceSettings) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    name = f"trace:{settings.name or 'trace'}"
    source = _source(settings)
    async with open_cells(source, name=name, role="reader", timeout_s=EXPORT_CONNECT_S, whole=True) as cells:
        if any(opened.stopped for opened in cells) and not settings.once:
            raise BadUse(f"the deployment in {settings.data_dir} is stopped: add --once to send what its log holds")
        tasks = [asyncio.create_task(_export_cell(settings, opened, stop), name="export") for opened in cells]
        try:
            return max(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _export_cell(settings: TraceSettings, opened: Log, stop: asyncio.Event) -> int:
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
        start = TracePosition(0, max(1, not_before - BEFORE_NS))
    elif opened.stopped:
        start = TracePosition(0, 1)
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
