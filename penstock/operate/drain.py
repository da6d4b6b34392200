"""``penstock drain``: take workers out of service without failing a request."""

import argparse
import asyncio
import time
from collections.abc import Sequence

from nats.errors import Error as NatsError
from rich.console import Console

from penstock.cli.figures import duration_ns
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.schemas import control, wire
from penstock.schemas.fleet import Registration, WorkerState

POLL_S = 0.25
ANSWER_S = 5.0
REPORT_S = 5.0  # between two lines about what is still running


class DrainFailed(ValueError):
    """A worker did not answer, or did not end in time; the text names it."""


def run(argv: Sequence[str]) -> int:
    """Drain workers; the exit status."""
    parser = Parser(
        prog="penstock drain",
        description="take workers out of service: each takes no new request, finishes its requests (for at most its "
        "--drain-s), returns the rest to the router and ends. `penstock up` does not start it again until `penstock "
        "restart NAME`.",
    )
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="name or id, as `penstock top` shows them")
    parser.add_argument("--force", action="store_true", help="also if no other worker can serve its model")
    parser.add_argument("--timeout", default="10m", metavar="TIME", help="how long to wait (default: %(default)s)")
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("drain", lambda: _run(args, stdout()))


async def _run(args: argparse.Namespace, console: Console) -> None:
    timeout_s = duration_ns(args.timeout) / 1e9
    source = LogSource.of(args)
    # Who types it has the data folder, so the audit log does not name the planner; a URL says itself who asks.
    role = "planner" if source.nats_url else "operator"
    async with open_cells(source, name="drain", role=role, streams=()) as logs:
        if all(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: no worker runs")
        cells = [(log, await registrations(log.bus)) for log in logs if not log.stopped]
        bus_of = {each.worker: log.bus for log, registered in cells for each in registered}
        everybody = [each for _, registered in cells for each in registered]
        leaving = [chosen(everybody, name) for name in dict.fromkeys(args.workers)]
        for log, registered in cells:
            last = alone(registered, [each for each in leaving if each in registered])
            if last is not None and not args.force:
                where = f" in cell {log.cell}" if len(cells) > 1 else ""
                raise ValueError(
                    f"{_shown(last)} is the last ready {last.role} worker of model {last.model!r}{where}: its requests "
                    "would wait for another one; start one first, or use --force"
                )
        for each in leaving:
            bus = bus_of[each.worker]
            async with recorded(bus.nc, bus.subjects, "drain", _shown(each), change_of(each)):
                await ask(bus, each, control.Drain(stay_down=True))
        waits = (gone(bus_of[each.worker], each, timeout_s, console) for each in leaving)
        failures = [each for each in await asyncio.gather(*waits, return_exceptions=True) if each is not None]
        if failures:  # of each that is late a line
            raise DrainFailed("; ".join(map(str, failures)))


def change_of(worker: Registration) -> str:
    """What a drain changes, for the audit log."""
    return f"{worker.state.value} → {WorkerState.draining.value}, id {worker.worker}"


async def ask(bus: Bus, worker: Registration, order: control.Drain) -> None:
    """Have a worker drain; it answers at once.

    Raises:
        DrainFailed: it does not answer.
    """
    try:
        await bus.nc.request(bus.subjects.drain(worker.worker), wire.encode(order), timeout=ANSWER_S)
    except (NatsError, TimeoutError) as error:
        raise DrainFailed(f"{_shown(worker)} does not answer within {ANSWER_S:g} s ({error!r})") from error


async def gone(bus: Bus, worker: Registration, timeout_s: float, console: Console) -> None:
    """Wait until a worker is no longer registered.

    Raises:
        DrainFailed: it still is after ``timeout_s`` seconds.
    """
    began = reported = time.monotonic()
    while True:
        now = next((each for each in await registrations(bus) if each.worker == worker.worker), None)
        waited_s = time.monotonic() - began
        if now is None:
            console.print(f"{_shown(worker)}: drained after {waited_s:.1f} s", highlight=False)
            return
        if waited_s > timeout_s:
            raise DrainFailed(
                f"{_shown(worker)} still runs {_work(now)} after {timeout_s:g} s (--timeout); it continues"
            )
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            state = "" if now.state is WorkerState.draining else ", not yet draining"
            console.print(f"{_shown(worker)}: waiting for {_work(now)}{state}", highlight=False)
        await asyncio.sleep(POLL_S)


def _shown(worker: Registration) -> str:
    """As users may call it: its name, or its id if it has none."""
    return worker.name or worker.worker


def _work(worker: Registration) -> str:
    count = worker.load.running + worker.load.waiting
    return f"{count} request{'' if count == 1 else 's'}"


def chosen(registered: Sequence[Registration], name: str) -> Registration:
    """The worker with this name or id, or whose id begins so.

    Raises:
        ValueError: none or several.
    """
    matching = [each for each in registered if name in (each.name, each.worker)]
    matching = matching or [each for each in registered if each.worker.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{name!r} names {len(matching)} workers: {', '.join(each.worker for each in matching)}")
    names = ", ".join(each.name or each.worker for each in registered)
    raise ValueError(f"no worker {name!r} is registered; there are {names}" if names else "no worker is registered")


def alone(registered: Sequence[Registration], leaving: Sequence[Registration]) -> Registration | None:
    """One of ``leaving`` after which no worker is left that is ready for its role and model; None: there is none."""
    ids = {each.worker for each in leaving}
    for one in leaving:
        candidates = (each for each in registered if each.worker not in ids and each.state is WorkerState.ready)
        if not any((each.model, each.role) == (one.model, one.role) for each in candidates):
            return one
    return None
