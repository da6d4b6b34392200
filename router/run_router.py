"""The router process: starts, serves until SIGTERM, and stops within a bound."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

import structlog
from faststream import FastStream

from penstock.configs import logs
from penstock.configs.settings import RouterSettings, named
from penstock.infra.bus.audit import Auditor, Watch
from penstock.infra.bus.connection import START_S, Bus, connect
from penstock.infra.bus.faststream_app import BusBroker
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.stream_fill import StreamMetrics
from penstock.infra.bus.tasks import ProcessStop, StoppedEarly, count_tasks
from penstock.infra.metrics.scope import PortTaken, check_port, loop_lag, process_scope, serve_page
from penstock.infra.nats_server.datadir import users_of
from penstock.infra.process.gc_policy import freeze_loaded
from penstock.router.service.router import Router
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import control
from penstock.schemas.errors import ServingError

log = structlog.get_logger("router")

EXIT_USAGE = 2
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not available (yet)
END_S = 6.0  # after SIGTERM the process ends, whatever it waits for; terminal events have 3 s of it


def run(settings: RouterSettings) -> int:
    """Route until SIGTERM; returns the exit code."""
    sys.setswitchinterval(0.001)  # the event loop must get its turn beside the thread that serves metrics
    settings = named(settings, "router", settings.metrics_port)
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    import uvloop

    try:
        users = users_of(Path(settings.nkeys)) if settings.nkeys else {}
    except ValueError as error:
        log.error("start_failed", error=str(error))
        return EXIT_USAGE
    try:
        status: int = uvloop.run(_serve(settings, users))
        return status
    except (ServingError, PortTaken) as error:
        log.error("start_failed", error=str(error))
        return EXIT_START


async def _serve(settings: RouterSettings, users: Mapping[str, str]) -> int:
    check_port(settings.metrics_host, settings.metrics_port)
    stop = ProcessStop(bound_s=END_S)
    stop.on_signals()
    connecting = connect(
        settings.nats_url,
        role="router",
        name=f"router:{settings.name}",
        namespace=settings.namespace,
        wait_s=START_S,
        skip_subject_validation=True,
        on_fatal=stop.failed,
    )
    try:
        async with await stop.unless_asked(connecting) as bus, Publisher(bus) as publisher:
            await stop.unless_asked(bus.await_streams(START_S))
            await bus.follow_clock()
            await _run_router(settings, bus, publisher, stop, users)
    except StoppedEarly:
        log.info("stopped_during_startup")
    return stop.status


async def _run_router(
    settings: RouterSettings, bus: Bus, publisher: Publisher, stop: ProcessStop, users: Mapping[str, str]
) -> None:
    scope = process_scope("router", {"namespace": settings.namespace, "process": settings.name})
    metrics = Metrics(scope.child("router"))
    loop = asyncio.get_running_loop()
    metrics.tasks.set_function(lambda: count_tasks(loop))
    lag = loop_lag(metrics.scope)
    bus.tasks.spawn(StreamMetrics(bus, scope.child("broker")).run(), name="stream-metrics")
    router = Router(bus, publisher, settings, metrics)
    broker = BusBroker(bus)
    cancels = broker.orders(bus.subjects.cancel, control.decode_cancel, payload=control.Cancel, title="Cancel")

    @cancels
    async def cancel(order: control.Cancel) -> None:
        await router.on_cancel(order.request, order.reason)

    app = FastStream(broker, logger=None)
    await app.start()
    await router.open()
    bus.tasks.spawn(Watch(bus, Auditor(bus, bus.tasks), users).run(), name="audit")
    freeze_loaded()
    bus.tasks.spawn(lag.watch(), name="loop-lag")
    serve_page(settings.metrics_host, settings.metrics_port, scope.registry)
    await stop.wait()
    await router.close()
    bus.closing = True  # stopping FastStream closes the connection
    with contextlib.suppress(Exception):
        await asyncio.wait_for(app.stop(), 5)
