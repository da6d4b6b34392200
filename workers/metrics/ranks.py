"""``penstock rank-metrics``: the metrics page of an engine's ranks on a machine that has no worker.

An engine over several machines has its worker on the first one. The other ranks serve nothing of their own: they write
their values to files (``multiprocess``), and this process shows those of its machine.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, start_http_server

from penstock.configs.settings import about
from penstock.workers.metrics.multiprocess import VARIABLE, Merged, remove_dead_files


class RankMetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock rank-metrics``."""

    metrics_port: Annotated[int, Meta(ge=1, le=65535, description="port of Prometheus metrics")] = 9090
    metrics_host: Annotated[str, about("address of Prometheus metrics")] = "127.0.0.1"


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
    server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry=registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        shutil.rmtree(directory, ignore_errors=True)
