"""``penstock restart``: restarts processes of `penstock up` on this machine one by one, without a failed request."""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from penstock.cli.figures import duration_ns
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser, whole_number
from penstock.configs.up_settings import UpSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.infra.nats_server.datadir import holder
from penstock.infra.process.supervisor import RESUME
from penstock.launch.readiness import get_url
from penstock.launch.state import DeploymentState, Running, ask_for_cells, read_state, start_of, write_resume
from penstock.log_tools.sources.open_log import LogSource, open_cells, run_command
from penstock.operate.observe import queued
from penstock.schemas.fleet import WorkerState

POLL_S = 0.1
UP_S = 0.5  # between checks whether `penstock up` still runs
ORDER = ("worker", "router", "gateway", "trace", "dashboard")  # each role finds the others ready


class RestartFailed(ValueError):
    """A process was not ready in time; the text names it. The processes after it were not restarted."""


def run(argv: Sequence[str]) -> int:
    """Restart processes and return the exit status."""
    parser = Parser(
        prog="penstock restart",
        description="restart processes of the `penstock up` on this machine, each when the one before is ready again. "
        "Each finishes its requests within its --drain-s; no request fails. Drained workers start again. The broker "
        "is not restarted. With --cells, the deployment gets another number of cells, and only affected processes are "
        "restarted.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="processes, such as worker-0 or router-0")
    parser.add_argument("--rolling", action="store_true", help="all workers, then all routers, then all gateways")
    parser.add_argument(
        "--cells", type=whole_number(), default=0, metavar="N",
        help="with --rolling: number of cells that take new requests; the others keep their records",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", default="15m", metavar="TIME", help="how long one process may take (default: %(default)s)"
    )
    parser.add_argument(
        "--data-dir", default=UpSettings().data_dir, metavar="FOLDER",
        help="data folder of the deployment (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if bool(args.names) == args.rolling:
        parser.error("give names of processes, or --rolling for all of them")
    if args.cells and not args.rolling:
        parser.error("--cells is for --rolling: processes of all roles are restarted")
    data_dir = Path(args.data_dir).resolve()
    return run_command("restart", lambda: _run(args, data_dir, stdout()))


async def _run(args: argparse.Namespace, data_dir: Path, console: Console) -> None:
    state = _state(data_dir)
    if holder(data_dir / "up.lock") is None:  # it was killed, and other programs may have reused its processes' ids
        raise ValueError(f"no `penstock up` runs on {data_dir}; the one that wrote its state.json was killed")
    timeout_s = duration_ns(args.timeout) / 1e9
    if args.cells:
        if not state.active_cells:
            raise ValueError(
                f"the `penstock up` on {data_dir} is of an earlier release, which cannot change its cells: stop it, "
                "and start this one"
            )
        state = await _with_cells(data_dir, args.cells, timeout_s)
        console.print(f"cells that take new requests: {args.cells}", highlight=False)
    processes = _ordered(state, args.names)
    if args.rolling:
        first = outdated(state)
        processes = first if args.cells else first + [each for each in processes if each not in first]
    report = partial(console.print, highlight=False)
    work = _restart_all(data_dir, state, processes, timeout_s, new_cells=bool(args.cells), report=report)
    await _while_up_runs(data_dir, work)


async def _while_up_runs(data_dir: Path, work: Coroutine[None, None, None]) -> None:
    working = asyncio.create_task(work)
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=UP_S)
            if not working.done() and holder(data_dir / "up.lock") is None:
                raise RestartFailed(f"`penstock up` on {data_dir} has ended; start it, and then run this command again")
    finally:
        working.cancel()
        await asyncio.wait({working})
    working.result()


async def _restart_all(
    data_dir: Path,
    state: DeploymentState,
    processes: Sequence[Running],
    timeout_s: float,
    *,
    new_cells: bool,
    report: Callable[[str], None],
) -> None:
    async with open_cells(LogSource(data_dir), name="restart", role="viewer", streams=()) as logs:
        buses = {log.cell: log.bus for log in logs}
        several = len(state.all_cells) > 1
        away = [each for each in processes if several and each.role == "worker" and each.cell not in buses]
        if away:
            raise ValueError(f"{away[0].name} cannot register while the broker of cell {away[0].cell} is away")
        if new_cells:  # the routers of further cells have been started already
            for each in [each for each in state.processes if each.role == "router" and each not in processes]:
                await _until_ready(buses, data_dir, each.name, None, time.monotonic() + timeout_s)
        emptied = set[int]()
        for process in processes:
            began = time.monotonic()
            if process.outdated and process.role == "worker" and process in _last_of_cells(state):
                if process.cell not in emptied:
                    await _until_empty(buses[process.cell], process.cell, timeout_s)
                emptied.add(process.cell)
            await _restart(buses, data_dir, process, timeout_s)
            report(f"{process.name}: ready again after {time.monotonic() - began:.1f} s")


async def _with_cells(data_dir: Path, number: int, timeout_s: float) -> DeploymentState:
    """The state of the deployment, planned for another number of active cells."""
    up = holder(data_dir / "up.lock")
    try:
        asked = ask_for_cells(data_dir, number)
    except OSError as error:
        raise ValueError(f"nothing was changed: cannot write to {data_dir}: {error.strerror}") from None
    if up is not None:
        os.kill(up, RESUME)
    deadline = time.monotonic() + timeout_s
    while asked.exists():
        if holder(data_dir / "up.lock") is None:
            asked.unlink(missing_ok=True)
            raise RestartFailed(f"`penstock up` on {data_dir} has stopped")
        if time.monotonic() > deadline:
            asked.unlink(missing_ok=True)
            raise RestartFailed(
                f"`penstock up` on {data_dir} has not changed its cells after {timeout_s:g} s (--timeout); see its "
                "output"
            )
        await asyncio.sleep(POLL_S)
    state = _state(data_dir)
    if state.cells_refused or state.active_cells != number:
        raise ValueError(state.cells_refused or f"another command has set {state.active_cells} cells meanwhile")
    return state


def outdated(state: DeploymentState) -> list[Running]:
    """The processes to restart for another number of cells, in an order in which every request has workers. Pure.

    A new cell gets workers once every gateway reads it. A closed cell keeps one worker of each role until the end,
    because gateways may still send requests there.
    """
    last = _last_of_cells(state)

    def place(each: Running) -> int:
        if each.role != "worker":
            return ("router", "", "gateway", "", "", "trace", "dashboard").index(each.role)
        return 4 if each in last else 3 if state.is_active(each.cell) else 1

    return sorted((each for each in state.processes if each.outdated and each.role in ORDER), key=place)


def _last_of_cells(state: DeploymentState) -> list[Running]:
    """The first worker of each role in each cell that takes no new requests."""
    found: dict[tuple[int, str], Running] = {}
    for each in state.processes:
        if each.role == "worker" and each.pid is not None and not state.is_active(each.cell):
            found.setdefault((each.cell, each.name.rpartition("-")[0]), each)
    return list(found.values())


async def _until_empty(bus: Bus, cell: int, timeout_s: float) -> None:
    """Wait until no request is queued in the closed cells; requests for images, for example, cannot leave them."""
    deadline = time.monotonic() + timeout_s
    while True:
        waiting = sum(sum(counts.values()) for counts in await queued(bus))
        waiting += sum(each.load.waiting for each in await registrations(bus))
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise RestartFailed(
                f"cell {cell} still has {waiting} waiting requests after {timeout_s:g} s (--timeout); its last workers "
                "continue. Run the command again when the requests have ended"
            )
        await asyncio.sleep(POLL_S)


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
    there = [each for each in state.processes if each.role in ORDER and not each.leaving]
    chosen = [process for process in there if not names or process.name in names]
    return sorted(chosen, key=lambda process: ORDER.index(process.role))


def _has_left(state: DeploymentState, name: str) -> bool:
    """Whether `penstock up` has removed this gateway, which may still answer its last requests."""
    return bool(state.gateways.fewest) and name.startswith("gateway-") and name not in state.gateway_urls


async def _restart(buses: Mapping[int, Bus], data_dir: Path, process: Running, timeout_s: float) -> None:
    old = process.pid
    if _has_left(_state(data_dir), process.name):
        return
    if old is not None and process.began and start_of(old) not in (process.began, 0):
        raise RestartFailed(f"pid {old} is no longer {process.name}'s; try again when `penstock up` has restarted it")
    if old is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.SIGTERM)
    await _until_ready(buses, data_dir, process.name, old, time.monotonic() + timeout_s)


async def _until_ready(buses: Mapping[int, Bus], data_dir: Path, name: str, old: int | None, deadline: float) -> None:
    resumed, began = False, time.monotonic()
    while not await _ready(buses, data_dir, name, old):
        # A drained worker counts as drained only once its requests are returned and it has ended: it may have ended
        # already, or end while it gets the signal to.
        if not resumed and _is_drained(data_dir, name):
            _resume(data_dir, name)
            resumed = True
        if time.monotonic() > deadline:
            raise RestartFailed(
                f"{name} is not ready {deadline - began:g} s after its restart began; see "
                f"{data_dir / 'logs' / name}.log. The processes after it were not restarted."
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


async def _ready(buses: Mapping[int, Bus], data_dir: Path, name: str, old: int | None) -> bool:
    """Whether the process has a new pid and is ready."""
    try:
        state = read_state(data_dir / "state.json")
    except (OSError, msgspec.DecodeError):
        raise RestartFailed(f"`penstock up` on {data_dir} has stopped") from None
    now = next((process for process in state.processes if process.name == name), None)
    if _has_left(state, name):
        return True
    if now is None or now.pid is None or now.pid == old:
        return False
    if now.role == "worker":
        bus = buses.get(now.cell)
        return bus is not None and any(
            each.name == name and each.pid == now.pid and each.state is WorkerState.ready
            for each in await registrations(bus)
        )
    if now.role in ("trace", "dashboard"):  # no other process depends on them
        return True
    if now.role == "gateway":
        return await _answers(state.gateway_urls[name] + "/health/ready")
    return not now.metrics_url or await _answers(now.metrics_url)  # served from the moment a router has caught up


async def _answers(url: str) -> bool:
    return (await get_url(url))[0] == 200
