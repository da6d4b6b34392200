"""A gateway process: connect, open the HTTP and NATS APIs, serve until SIGTERM, drain."""

import asyncio
import contextlib
import ipaddress
import resource
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.configs import logs
from penstock.configs.settings import GatewaySettings, fallbacks_of, named, served_names
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.batches.driver import Batches
from penstock.gateway.http.app import application
from penstock.gateway.http.middleware import TrustedProxies, check_origins, with_access_log, with_cors, with_proxies
from penstock.gateway.http.server import ConnectionLimits, HttpServer
from penstock.gateway.http.shared_socket import ConnectionCounts
from penstock.gateway.http.tls import BadCertificate, Certificate
from penstock.gateway.nats.services import NatsApi
from penstock.gateway.service.gateway import CellLink, Gateway, named_models
from penstock.gateway.service.model_store import report_ignored
from penstock.infra.bus.connection import START_S, Bus, connect, connect_while_running
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import ProcessStop, StoppedEarly, count_tasks, end
from penstock.infra.metrics.scope import loop_lag, process_scope
from penstock.infra.model import modeldir
from penstock.infra.process.gc_policy import freeze_loaded
from penstock.infra.process.sockets import CannotListen, check_unclaimed, listening
from penstock.infra.text.parsers import families
from penstock.schemas.control import LEAVE, LEAVE_S
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import cell_namespace

log = structlog.get_logger("gateway")

CELL_S = 3.0  # to wait for the broker of a cell after the first
STOP_S = 1.0  # for each step of stopping, beyond drain_s
CLOSE_S = 3.0  # for connections to end
END_S = 4.5  # beyond drain_s: then the process exits, whatever it waits for
LEAVE_LINGER_S = 5.0  # for idle connections of a gateway that leaves
FAILED_DRAIN_S = 5.0  # after a task of this process failed
OTHER_FILES = 128  # open files besides clients' connections
SPARE_FILES = 48  # of these, for connections that are refused: without a file left, the kernel's are reset unseen

EXIT_OK = 0
EXIT_CONFIG = 2  # a restart would not help
EXIT_START = 69  # EX_UNAVAILABLE: the broker or the port is not there (yet)


class Exposed(Exception):
    """The gateway would answer everyone who reaches its port."""


class Front(NamedTuple):
    """``certificate``: None: plain HTTP."""

    certificate: Certificate | None
    proxies: TrustedProxies


def front_of(settings: GatewaySettings) -> Front:
    """What connections need, checked before anything is opened.

    Raises:
        BadCertificate, ValueError: a flag is wrong.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ValueError("--tls-cert and --tls-key are needed together")
    if (urls := len(settings.cell_nats_urls)) and urls != settings.cells - 1:
        raise ValueError(
            f"--cell-nats-urls names {urls} brokers and --cells is {settings.cells}: name one for each cell but the "
            "first, or none"
        )
    if settings.active_cells > settings.cells:
        raise ValueError(
            f"--active-cells {settings.active_cells} is more than --cells {settings.cells}: name at most as many"
        )
    check_origins(settings.cors_origins)
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    return Front(certificate, TrustedProxies(settings.trusted_proxies))


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM; returns the exit code."""
    sys.setswitchinterval(0.001)  # the event loop must get its turn beside threads that compute in Python
    settings = named(settings, "gateway", settings.http_port)
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    import uvloop

    try:
        families.prepare(settings.parser_families)
        models = load_models(settings)
        for model in models:
            report_ignored(model)
        if (folder := settings.allowed_local_media_path) and not Path(folder).is_dir():
            raise ValueError(f"--allowed-local-media-path {folder}: not a folder")
        front = front_of(settings)
        check_fallbacks(settings, models)
    except (modeldir.ModelError, BadCertificate, ValueError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    try:
        status: int = uvloop.run(_serve(settings, models, front))
        return status
    except Exposed as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    except (ServingError, CannotListen, OSError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_START


def load_models(settings: GatewaySettings) -> list[modeldir.ModelDir]:
    """The models that the operator named.

    Raises:
        ModelError, ValueError: one cannot be read, or flags do not go together.
    """
    several = len(settings.model) > 1
    if len(settings.model) > settings.max_models:
        raise ValueError(f"--model names {len(settings.model)} models; --max-models is {settings.max_models}")
    if several and settings.served_model_name:
        raise ValueError("--served-model-name is for one --model: name each with --model NAME=FOLDER")
    if settings.chat_template and len(settings.model) != 1:
        raise ValueError(
            "--chat-template is for one --model: " + ("put each model's into its folder" if several else "name it, too")
        )
    models = []
    for each in settings.model:
        name, folder = modeldir.split_name(each)
        if name and settings.served_model_name:
            raise ValueError(f"--model {each} names the model already; leave --served-model-name out")
        name = "".join(served_names(name or settings.served_model_name)[:1])
        models.append(modeldir.load(modeldir.resolve(folder), name=name, chat_template=settings.chat_template))
    names = [model.name for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models would be called {twice[0]!r}; name them with --model NAME=FOLDER")
    return models


def check_fallbacks(settings: GatewaySettings, models: Sequence[modeldir.ModelDir]) -> None:
    """
    Raises:
        ValueError: --fallback cannot be followed.
    """
    fallbacks = fallbacks_of(settings.fallback)
    if not models or settings.learn_models:
        return
    names = {name for own, _ in named_models(models, settings) for name in own}
    for name in (*fallbacks, *(each for others in fallbacks.values() for each in others)):
        if name not in names:
            served = ", ".join(sorted(names))
            raise ValueError(f"--fallback names {name!r}, and --model has {served}: add it there, or --learn-models")


async def _serve(settings: GatewaySettings, models: Sequence[modeldir.ModelDir], front: Front) -> int:
    stop = ProcessStop(bound_s=settings.drain_s + END_S)
    stop.on_signals()
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(LEAVE, leave.set)
    listeners = listening_sockets(settings)
    try:
        links = await stop.unless_asked(_links(settings, stop))
    except StoppedEarly:
        log.info("stopped_during_startup")
        return stop.status
    bus = links[0].bus
    labels = {"namespace": settings.namespace, "process": settings.name}
    metrics = GatewayMetrics(process_scope("gateway", labels).child("gateway"))
    loop = asyncio.get_running_loop()
    metrics.tasks.set_function(lambda: count_tasks(loop))
    lag = loop_lag(metrics.scope)
    gateway = Gateway(links, models, settings, metrics)
    nats_api = NatsApi(gateway, bus.tasks.group("nats-api"))
    batches = Batches(gateway)
    app = application(gateway, batches)
    if settings.cors_origins:
        app = with_cors(app, settings.cors_origins)
    if front.proxies:
        app = with_proxies(app, front.proxies)
    app = with_access_log(app) if settings.access_log else app
    tls, proxies = front
    server = HttpServer(
        app,
        listeners,
        limits_of(settings, metrics),
        bus.tasks,
        tls=tls,
        proxies=proxies,
        turns=gateway.turns,
        counts=ConnectionCounts(settings.counts_fd) if settings.counts_fd >= 0 else None,
    )
    metrics.connections.set_function(lambda: len(server.state.connections))
    metrics.connections_refused.set_function(lambda: server.refused)
    metrics.connections_moved.set_function(lambda: server.moved)
    metrics.gateways.set_function(lambda: server.gateways)
    try:
        await stop.unless_asked(gateway.open())
        await nats_api.open()
        batches.open()
        if not gateway.guard.closed and not settings.insecure:
            check_loopback(listeners, settings.trusted_proxies)
        freeze_loaded()
        bus.tasks.spawn(lag.watch(), name="loop-lag")
        await server.start()
        names = tuple(gateway.fleet.names)
        log.info("gateway_listening", port=listeners[0].getsockname()[1], gateway=gateway.id, models=names)
        await _asked(stop, leave)
        if leave.is_set() and not stop.is_asked:
            log.info("gateway_leaving", open_requests=gateway.open_requests, within_s=LEAVE_S)
            gateway.draining = True
            await _until_left(server, stop)
        log.info("gateway_stopping", open_requests=gateway.open_requests, drain_s=settings.drain_s)
        gateway.draining = True
        await _bounded("batches", batches.close(), STOP_S)  # other gateways continue them
        drain_s = settings.drain_s if stop.error is None else min(FAILED_DRAIN_S, settings.drain_s)
        await asyncio.gather(
            _bounded("http", server.drain(drain_s), drain_s + STOP_S),
            _bounded("submissions", nats_api.close(drain_s), drain_s + STOP_S),
        )
        gateway.stop()
        await _bounded("connections", server.close(), CLOSE_S)
    except StoppedEarly:
        log.info("stopped_during_startup")
    finally:
        await _bounded("gateway", gateway.close(), STOP_S)
        await asyncio.gather(*(_close(link) for link in links))
    return stop.status


async def _asked(stop: ProcessStop, leave: asyncio.Event) -> None:
    """Wait until the gateway is to end, or to leave."""
    waiting = [asyncio.create_task(each, name="asked") for each in (stop.wait(), leave.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(waiting, within_s=STOP_S)


async def _until_left(server: HttpServer, stop: ProcessStop) -> None:
    """Accept nothing more, and return when the last connection has closed, or the gateway is to end meanwhile.

    Clients may keep an idle connection for longer than after SIGTERM. Their next request is answered with
    ``Connection: close``.
    """
    waiting = [
        asyncio.create_task(stop.wait(), name="asked"),
        asyncio.create_task(server.drain(LEAVE_S, LEAVE_LINGER_S), name="leave"),
    ]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(waiting, within_s=STOP_S)
    stop.ask()


async def _links(settings: GatewaySettings, stop: ProcessStop) -> list[CellLink]:
    """To the brokers of all cells. Raises what ``_link`` raises."""
    return [await _link(settings, number, stop) for number in range(settings.cells)]


async def _link(settings: GatewaySettings, cell: int, stop: ProcessStop) -> CellLink:
    """
    Raises:
        ServingError: the home broker does not answer, or refuses the credentials. Other cells are used when they are
            there, with their streams.
    """
    urls = settings.cell_nats_urls
    url = urls[cell - 1].replace(";", ",") if cell and urls else settings.nats_url
    options: dict[str, Any] = {
        "role": "gateway",
        "name": f"gateway:{settings.name}",
        "namespace": cell_namespace(settings.namespace, cell),
        "on_fatal": stop.failed,
        "skip_subject_validation": True,
    }
    if not cell:
        bus = await connect(url, wait_s=START_S, **options)
        publisher = Publisher(bus)
        await _use(bus, publisher)
        return CellLink(bus, publisher)
    bus, connecting = await connect_while_running(url, timeout=CELL_S, **options)
    publisher = Publisher(bus)

    async def opened() -> None:
        await connecting
        await _use(bus, publisher)

    opening = bus.tasks.spawn(opened(), name="open-cell")
    if connecting.done():
        await asyncio.wait([opening], timeout=CELL_S)  # its streams may come later
        if opening.done():
            opening.result()
    return CellLink(bus, publisher, opening)


async def _use(bus: Bus, publisher: Publisher) -> None:
    await bus.await_streams(START_S)
    await bus.follow_clock()
    await publisher.open()


async def _close(link: CellLink) -> None:
    await _bounded("publisher", link.publisher.close(), STOP_S)
    await link.bus.close()


def limits_of(settings: GatewaySettings, metrics: GatewayMetrics) -> ConnectionLimits:
    """Limits of connections; no more connections than the process may have open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections, spare = settings.max_connections, ConnectionLimits().spare
    if files != resource.RLIM_INFINITY and connections > files - OTHER_FILES:
        connections = max(1, files - OTHER_FILES)
        log.warning("connections_limited", max_connections=connections, files=files, action="raise ulimit -n")
        metrics.files_limit.set(files)
        spare = SPARE_FILES
    metrics.max_connections.set(connections)
    metrics.trusted_proxies.set(len(settings.trusted_proxies))
    return ConnectionLimits(
        header_bytes=settings.max_header_bytes,
        header_s=settings.header_timeout_s,
        body_s=settings.body_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        write_s=settings.write_timeout_s,
        connections=connections,
        spare=spare,
        per_address=settings.max_connections_per_address,
    )


async def _bounded(step: str, work: Coroutine[Any, Any, Any], seconds: float) -> None:
    """One bounded step of stopping: a cancellation can get lost (``asyncio.wait_for`` before Python 3.12)."""
    task = asyncio.create_task(work, name=f"stop-{step}")
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        waiting = {other.get_name(): repr(other.get_coro()) for other in asyncio.all_tasks()}
        log.error("stop_incomplete", step=step, seconds=seconds, tasks=waiting)
    elif task.exception() is not None:
        log.warning("stop_step_failed", step=step, error=repr(task.exception()))


def check_loopback(listeners: Sequence[socket.socket], proxies: Sequence[str] = ()) -> None:
    """
    Raises:
        Exposed: other machines can reach one of these sockets, or proxies bring their requests.
    """
    if proxies:
        raise Exposed(
            f"--trusted-proxies {','.join(proxies)} bring requests from other machines, and there are no API keys: "
            "make one with 'penstock keys create' (start with --require-keys to make the first one afterwards), or "
            "serve everyone with --insecure"
        )
    for listener in reversed(listeners):  # the shared one first: its port is the one that was asked for
        host, port = listener.getsockname()[:2]
        if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise Exposed(
                f"{place} is reachable from other machines, and there are no API keys: make one with 'penstock "
                "keys create' (start with --require-keys to make the first one afterwards), listen on 127.0.0.1, or "
                "serve everyone with --insecure"
            )


def listening_sockets(settings: GatewaySettings) -> list[socket.socket]:
    """The gateway's own port, and a socket that it shares with others if it has inherited one. The first is its own.

    Raises:
        CannotListen: the port is taken; the text says what to do.
        OSError: no socket was inherited.
    """
    if settings.listen_fd < 0:
        listener = listening(settings.http_host, settings.http_port)
        try:
            check_unclaimed(*listener.getsockname()[:2])
        except CannotListen:
            listener.close()
            raise
        return [listener]
    try:
        shared = socket.socket(fileno=settings.listen_fd)
        port = shared.getsockname()[1]
    except OSError as error:
        raise OSError(f"--listen-fd {settings.listen_fd} is not an inherited socket: {error.strerror}") from None
    shared.set_inheritable(False)
    shared.setblocking(False)
    if port == settings.http_port:
        return [shared]
    return [listening(settings.http_host, settings.http_port), shared]
