"""Metrics of an engine's other processes, through prometheus_client's multiprocess mode.

If ``PROMETHEUS_MULTIPROC_DIR`` is set at start, prometheus_client writes each process's values to a file in the
directory that the variable names when the value is created. Each worker uses a directory of its own, so that neither
other workers nor ended ones are included.

An engine over several machines has its worker on the first one. On the others, ``penstock rank-metrics`` serves the
values that the ranks of its machine write.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated

import structlog
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from penstock.configs.settings import about
from penstock.infra.process.sockets import of_this_machine

__all__ = ["VARIABLE", "Merged", "is_alive", "own_directory", "remove_dead_files"]

log = structlog.get_logger("worker")

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LAUNCHED = (
    "TLLM_SPAWN_PROXY_PROCESS"  # set by TensorRT-LLM's launcher, which has passed the variable to the other ranks
)
FOLDER = "worker-"
ELSEWHERE = ("penstock_", "trtllm", "vllm:", "sglang:")  # penstock's own, and those that an engine's adapter registers


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def own_directory(
    environ: MutableMapping[str, str] = os.environ, alive: Callable[[int], bool] = is_alive
) -> Iterator[Path | None]:
    """Point the variable to a new directory, removed when the block ends; None: the variable is not set.

    Enter it before the first value is created and the first process is started. Removes the files of ended workers.

    Raises:
        ValueError: the directory cannot be made.
    """
    directory = environ.get(VARIABLE)
    if not directory:
        yield None
        return
    base = Path(directory)
    try:
        base.mkdir(parents=True, exist_ok=True)
        if environ.get(LAUNCHED):
            remove_dead_files(base, alive)
            yield base
            return
        for folder in base.glob(f"{FOLDER}*-*"):
            pid = folder.name.removeprefix(FOLDER).partition("-")[0]
            if pid.isdigit() and not alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        own = base / f"{FOLDER}{os.getpid()}-{secrets.token_hex(4)}"
        own.mkdir(mode=0o700)
    except OSError as error:
        raise ValueError(
            f"{VARIABLE}={directory}: {error}; name a local directory that this process may write"
        ) from error
    environ[VARIABLE] = str(own)
    try:
        yield own
    finally:
        environ[VARIABLE] = directory
        shutil.rmtree(own, ignore_errors=True)


def remove_dead_files(path: Path, alive: Callable[[int], bool] = is_alive) -> None:
    """Remove the values of processes that have ended."""
    for file in path.glob("*.db"):
        if not _runs(file, alive):
            file.unlink(missing_ok=True)


def _runs(file: Path, alive: Callable[[int], bool]) -> bool:
    pid = file.stem.rpartition("_")[2]
    return not pid.isdigit() or alive(int(pid))


class Merged(Collector):
    """The values of all processes in ``path``, aggregated by each metric's multiprocess mode.

    Counts of ended processes are kept; their gauges of the modes "live..." are dropped.
    """

    def __init__(self, path: Path, alive: Callable[[int], bool] = is_alive) -> None:
        self._path = path
        self._alive = alive

    def collect(self) -> Iterator[Metric]:
        for file in self._path.glob("gauge_live*.db"):
            if not _runs(file, self._alive):
                mark_process_dead(file.stem.rpartition("_")[2], str(self._path))  # type: ignore[no-untyped-call]
        merged = MultiProcessCollector(CollectorRegistry(), str(self._path))  # type: ignore[no-untyped-call]
        for metric in merged.collect():  # type: ignore[no-untyped-call]
            if not metric.name.startswith(ELSEWHERE):
                yield metric

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only when there are values."""
        return iter(())


class RankMetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock rank-metrics``."""

    metrics_port: Annotated[int, Meta(ge=1, le=65535, description="port of Prometheus metrics")] = 9090
    metrics_host: Annotated[str, about("address of Prometheus metrics; ::: all addresses")] = "127.0.0.1"


def run(settings: RankMetricsSettings) -> int:
    """Serve until SIGTERM or SIGINT, then delete the files. Returns 2 without a directory, 1 if it cannot be used."""
    stop = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: stop.set())
    try:
        with served(settings, os.environ):
            stop.wait()
    except KeyError:
        print(f"penstock rank-metrics: {VARIABLE} is not set: name the directory of the ranks' files", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"penstock rank-metrics: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def served(settings: RankMetricsSettings, environ: Mapping[str, str]) -> Iterator[None]:
    """Serve the page of the directory that the variable names.

    Raises:
        KeyError: the variable is not set.
        OSError: the directory or the port cannot be used.
    """
    directory = Path(environ[VARIABLE])
    directory.mkdir(parents=True, exist_ok=True)
    remove_dead_files(directory)
    registry = CollectorRegistry()
    registry.register(Merged(directory))
    server, thread = start_http_server(settings.metrics_port, of_this_machine(settings.metrics_host), registry=registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        shutil.rmtree(directory, ignore_errors=True)
