"""Metrics of an engine's other processes, through prometheus_client's multiprocess mode.

If ``PROMETHEUS_MULTIPROC_DIR`` is set at start, prometheus_client writes each process's values to a file in the
directory that the variable names when the value is created. Each worker uses a directory of its own, so that neither
other workers nor ended ones are included.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

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


__all__ = ["VARIABLE", "Merged", "is_alive", "own_directory", "remove_dead_files"]
