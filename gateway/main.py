"""A gateway process: connect, open both doors, serve until SIGTERM, drain."""

import asyncio
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from configs import logs, modeldir
from configs.bus.connection import connect
from configs.bus.publish import Publisher
from configs.settings import GatewaySettings
from gateway.http import application
from gateway.metrics import Metrics
from gateway.service import Gateway
from gateway.submit import SubmitDoor
from schemas.errors import ServingError

log = structlog.get_logger("gateway")

STOP_S = 1.0  # for each step of stopping, beyond drain_s

EXIT_OK = 0
EXIT_CONFIG = 2  # starting again would not help
EXIT_START = 69  # EX_UNAVAILABLE: the broker or the port is not there (yet)


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM; returns the exit code."""
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    import uvloop

    try:
        path = modeldir.resolve(settings.model)
        model = modeldir.load(path, name=settings.served_model_name.split(",")[0], chat_template=settings.chat_template)
    except modeldir.ModelError as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    folder = settings.allowed_local_media_path
    if folder and not Path(folder).is_dir():
        log.error("start_failed", error=f"--allowed-local-media-path {folder}: not a folder")
        return EXIT_CONFIG
    try:
        status: int = uvloop.run(_serve(settings, model))
        return status
    except (ServingError, OSError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_START


async def _serve(settings: GatewaySettings, model: modeldir.ModelDir) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    listener = listen(settings.http_host, settings.http_port)
    bus = await connect(
        settings.nats_url,
        role="gateway",
        name=f"gateway:{settings.name}",
        namespace=settings.namespace,
        skip_subject_validation=True,
    )
    publisher = Publisher(bus)
    await publisher.open()
    metrics = Metrics(CollectorRegistry())
    loop = asyncio.get_running_loop()
    metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    gateway = Gateway(bus, publisher, model, settings, metrics)
    door = SubmitDoor(gateway)
    try:
        await gateway.open()
        await door.open()
        server = _Server(
            uvicorn.Config(
                application(gateway),
                http="httptools",
                ws="none",
                proxy_headers=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        log.info("gateway_listening", port=listener.getsockname()[1], gateway=gateway.id, models=gateway.names)
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        gateway.draining = True
        server.should_exit = True
        await asyncio.gather(
            _bounded("http", asyncio.wait([serving]), settings.drain_s + STOP_S),
            _bounded("submissions", door.close(settings.drain_s), settings.drain_s + STOP_S),
        )
        stopping.cancel()
        if serving.done():
            serving.result()
    finally:
        await _bounded("gateway", gateway.close(), STOP_S)
        await _bounded("publisher", publisher.close(), STOP_S)
        await bus.close()
    return EXIT_OK


async def _bounded(step: str, work: Coroutine[Any, Any, Any], seconds: float) -> None:
    """One step of stopping. A cancellation can get lost (``asyncio.wait_for`` before Python 3.12), the end must not."""
    task = asyncio.create_task(work, name=f"stop-{step}")
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        waiting = {other.get_name(): repr(other.get_coro()) for other in asyncio.all_tasks()}
        log.error("stop_incomplete", step=step, seconds=seconds, tasks=waiting)
    elif task.exception() is not None:
        log.warning("stop_step_failed", step=step, error=repr(task.exception()))


def listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: the port is taken; the text says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted connections
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --http-port") from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Signals are ours: a gateway drains both doors."""

    def capture_signals(self):  # type: ignore[no-untyped-def]
        import contextlib

        return contextlib.nullcontext()
