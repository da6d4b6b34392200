"""``penstock restart``: processes of `penstock up` on this machine, one after the other, without a failed request."""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from penstock.cli.figures import duration_ns
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.datadir import holder
from penstock.infra.process.signals import RESUME
from penstock.launch.readiness import get_url
from penstock.launch.state import DeploymentState, Running, read_state, start_of, write_resume
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.operate.workers import registrations
from penstock.schemas.fleet import WorkerState

POLL_S = 0.1
ORDER = ("worker", "router", "gateway", "trace", "dashboard")  # each role finds the others ready


class RestartFailed(ValueError):
    """A process did not come back in time; the text names it. Those after it were left as they are."""


def run(argv: Sequence[str]) -> int:
    """Restart processes; the exit status."""
    parser = Parser(
        prog="penstock restart",
        description="restart processes of the `penstock up` on this machine, each after the one before is ready again. "
        "Each finishes what it runs for at most its --drain-s; no request fails. Drained workers start again. The "
        "broker is left as it is.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="processes, such as worker-0 or router-0")
    parser.add_argument("--rolling", action="store_true", help="all workers, then all routers, then all gateways")
    parser.add_argument(
        "--timeout", default="15m", metavar="TIME", help="how long one process may take (default: %(default)s)"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    if bool(args.names) == args.rolling:
        parser.error("give names of processes, or --rolling for all of them")
    data_dir = Path(args.data_dir).resolve()
    return run_command("restart", lambda: _run(args, data_dir, stdout()))


async def _run(args: argparse.Namespace, data_dir: Path, console: Console) -> None:
    state = _state(data_dir)
    if holder(data_dir / "up.lock") is None:  # it was killed: others may have its processes' ids by now
        raise ValueError(f"no `penstock up` runs on {data_dir}; the one that wrote its state.json was killed")
    processes = _ordered(state, args.names)
    timeout_s = duration_ns(args.timeout) / 1e9
    async with open_cells(LogSource.of(args), name="restart", role="viewer", streams=()) as logs:
        buses = {log.cell: log.bus for log in logs}
        several = len(state.all_cells) > 1
        away = [each for each in processes if several and each.role == "worker" and each.cell not in buses]
        if away:
            raise ValueError(f"{away[0].name} cannot register while the broker of cell {away[0].cell} is away")
        for process in processes:
            began = time.monotonic()
            await _restart(buses.get(process.cell, logs[0].bus), data_dir, process, timeout_s)
            console.print(f"{process.name}: ready again after {time.monotonic() - began:.1f} s", highlight=False)


def _state(data_dir: Path) -> DeploymentState:
    try:
        return read_state(data_dir / "state.json")
    except (OSError, msgspec.DecodeError):
        raise ValueError(
            f"no `penstock up` runs on {data_dir}: name its folder with --data-dir; processes that were started "
            "otherwise are restarted by what started them"
        ) from None


def _ordered(state: DeploymentState, names: Sequence[str]) -> list[Running]:
    """The processes to restart, in their order."""
    by_name = {process.name: process for process in state.processes}
    for name in names:
        if name not in by_name:
            raise ValueError(f"no process {name!r}; there are {', '.join(by_name)}")
        if by_name[name].role not in ORDER:
            raise ValueError(
                f"{name} is restarted with the whole deployment only: stop `penstock up` and start it again"
            )
    chosen = [process for process in state.processes if process.role in ORDER and (not names or process.name in names)]
    return sorted(chosen, key=lambda process: ORDER.index(process.role))


async def _restart(bus: Bus, data_dir: Path, process: Running, timeout_s: float) -> None:
    old = process.pid
    if old is not None and process.began and start_of(old) not in (process.began, 0):
        raise RestartFailed(f"pid {old} is no longer {process.name}'s; try again when `penstock up` has restarted it")
    if old is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.SIGTERM)
    resumed = False
    deadline = time.monotonic() + timeout_s
    while not await _ready(bus, data_dir, process.name, old):
        # One that has just ended is known to be drained a moment later, when what it ran was returned.
        if old is None and not resumed and _is_drained(data_dir, process.name):
            _resume(data_dir, process.name)
            resumed = True
        if time.monotonic() > deadline:
            raise RestartFailed(
                f"{process.name} is not ready {timeout_s:g} s after its restart began; see "
                f"{data_dir / 'logs' / process.name}.log. The processes after it were not restarted."
            )
        await asyncio.sleep(POLL_S)


def _is_drained(data_dir: Path, name: str) -> bool:
    return any(each.name == name and each.drained and each.pid is None for each in _state(data_dir).processes)


def _resume(data_dir: Path, name: str) -> None:
    up = holder(data_dir / "up.lock")
    if up is None:
        raise RestartFailed(f"no `penstock up` runs on {data_dir}")
    write_resume(data_dir, [name])
    os.kill(up, RESUME)


async def _ready(bus: Bus, data_dir: Path, name: str, old: int | None) -> bool:
    """Whether the process runs under another pid than before and serves."""
    try:
        state = read_state(data_dir / "state.json")
    except (OSError, msgspec.DecodeError):
        raise RestartFailed(f"`penstock up` on {data_dir} has stopped") from None
    now = next((process for process in state.processes if process.name == name), None)
    if now is None or now.pid is None or now.pid == old:
        return False
    if now.role == "worker":
        return any(
            each.name == name and each.pid == now.pid and each.state is WorkerState.ready
            for each in await registrations(bus)
        )
    if now.role in ("trace", "dashboard"):  # nothing waits for them
        return True
    if now.role == "gateway":
        gateways = [process.name for process in state.processes if process.role == "gateway"]
        return await _answers(state.http_urls[gateways.index(name)] + "/health/ready")
    return not now.metrics_url or await _answers(now.metrics_url)  # served from the moment a router has caught up


async def _answers(url: str) -> bool:
    return (await get_url(url))[0] == 200
