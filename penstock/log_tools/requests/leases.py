"""``penstock leases``: the blocks that workers now hold for each other, read from the handoff ledger alone."""

import time
from collections.abc import Sequence

from rich.console import Console

from penstock.cli.figures import counted
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import Readable, format_time, get_last, read
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.log_tools.timeline.request_timeline import RequestTimeline, TicketLease
from penstock.schemas import transfer

LOOK_BACK_S = 3600.0  # as long as the ledger is kept


async def leases(bus: Readable, now_ns: int) -> dict[str, TicketLease]:
    """All leases of the last hour, by ticket.

    Raises:
        ServingError: the ledger cannot be read.
    """
    timelines: dict[str, RequestTimeline] = {}
    stream, subject = bus.subjects.stream("HANDOFF"), bus.subjects.all("handoff")
    async for entry in read(bus, stream, subject, since_ns=now_ns - int(LOOK_BACK_S * 1e9)):
        for line in transfer.decode_ledger(entry.data).events:
            request_id = line.ticket.partition(":")[0]
            if request_id not in timelines:
                timelines[request_id] = RequestTimeline(request_id, compact=True)
            timelines[request_id].add_handoff(line)
    return {ticket: lease for timeline in timelines.values() for ticket, lease in timeline.leases().items()}


def show(leases_by_ticket: dict[str, TicketLease], now_ns: int, console: Console, *, everything: bool = False) -> int:
    """Print open leases, or all tickets; returns how many are open."""
    opened = 0
    for ticket, lease in leases_by_ticket.items():
        holds = lease.is_open(now_ns)
        opened += holds
        if not holds and not everything:
            continue
        offer, last = lease.offer, lease.last
        state = f"quarantined, {counted(lease.quarantined, 'block')}" if lease.quarantined else last.state
        left = f", lease ends in {(offer.lease_ns - now_ns) / 1e9:.1f} s" if holds and not lease.ended else ""
        console.print(f"[bold]{ticket}[/]  {offer.source} → {offer.target}", highlight=False, soft_wrap=True)
        console.print(
            f"  {offer.pool} {counted(offer.blocks, 'block')}, {offer.bytes / 1e6:.1f} MB: {state}"
            f"{f' ({last.cause})' if last.cause else ''}, {(now_ns - offer.at_ns) / 1e9:.1f} s ago{left}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"{opened} open leases; {len(leases_by_ticket)} handoffs in the last hour")
    return opened


def run(argv: Sequence[str]) -> int:
    """List open leases; the exit status is 0 if the ledger could be read."""
    parser = Parser(
        prog="penstock leases",
        description="list KV blocks that workers hold for each other, now or when the deployment stopped",
    )
    parser.add_argument("--all", action="store_true", help="list leases that have ended too")
    add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    return run_command("leases", lambda: _run(LogSource.of(args), console, args.all))


async def _run(source: LogSource, console: Console, everything: bool) -> None:
    async with open_cells(source, name="leases", streams=["HANDOFF"], files=True) as logs:
        stopped = all(log.stopped for log in logs)
        now_ns = max([await stopped_ns(log.reader) for log in logs]) if stopped else time.time_ns()
        if stopped:
            console.print(f"the deployment is stopped; leases as of {format_time(now_ns)}")
        by_ticket: dict[str, TicketLease] = {}
        for log in logs:
            by_ticket |= await leases(log.reader, now_ns)
        show(by_ticket, now_ns, console, everything=everything)


async def stopped_ns(bus: Readable) -> int:
    """When the last line of a stopped deployment's ledger was stored; now, if it has none."""
    last = await get_last(bus, bus.subjects.stream("HANDOFF"), bus.subjects.all("handoff"))
    return last.time_ns if last is not None else time.time_ns()
