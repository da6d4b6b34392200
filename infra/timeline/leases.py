"""``penstock leases``: blocks that one worker holds for another right now, from the hand-off ledger alone."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from infra.bus.connection import Bus, connect
from infra.bus.direct_get import read
from infra.launch.state import read_state
from infra.terminal import stdout
from infra.timeline.request_timeline import RequestTimeline
from infra.timeline.ticket_lease import TicketLease
from schemas import transfer
from schemas.errors import ServingError

LOOK_BACK_S = 3600.0  # as long as the ledger is kept
CONNECT_S = 3.0


async def leases(bus: Bus, now_ns: int) -> dict[str, TicketLease]:
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
            timelines[request_id].add_hand_off(line)
    return {ticket: lease for timeline in timelines.values() for ticket, lease in timeline.leases().items()}


def show(found: dict[str, TicketLease], now_ns: int, console: Console, *, everything: bool = False) -> int:
    """Print open leases, or all tickets; returns how many are open."""
    opened = 0
    for ticket, lease in found.items():
        holds = lease.is_open(now_ns)
        opened += holds
        if not holds and not everything:
            continue
        offer, last = lease.offer, lease.last
        state = f"quarantined, {lease.quarantined} blocks" if lease.quarantined else last.state
        left = f", lease ends in {(offer.lease_ns - now_ns) / 1e9:.1f} s" if holds and not lease.ended else ""
        console.print(f"[bold]{ticket}[/]  {offer.source} → {offer.target}", highlight=False, soft_wrap=True)
        console.print(
            f"  {offer.pool} {offer.blocks} blocks, {offer.bytes / 1e6:.1f} MB: {state}"
            f"{f' ({last.cause})' if last.cause else ''}, {(now_ns - offer.at_ns) / 1e9:.1f} s ago{left}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"{opened} open leases; {len(found)} hand-offs in the last hour")
    return opened


def run(argv: Sequence[str]) -> int:
    """List open leases; the exit status is 0 if the ledger could be read."""
    parser = argparse.ArgumentParser(prog="penstock leases", description="blocks held for other workers right now")
    parser.add_argument("--all", action="store_true", help="also those that have ended")
    parser.add_argument("--nats-url", default="", help="default: from state.json in the data directory")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--data-dir", default=".penstock")
    args = parser.parse_args(argv)
    console = stdout()
    state = None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        state = read_state(Path(args.data_dir) / "state.json")
    url = args.nats_url or (state.nats_url if state else "nats://127.0.0.1:4222")
    namespace = args.namespace or (state.namespace if state else "ps")
    try:
        return asyncio.run(_run(url, namespace, console, args.all))
    except ServingError as error:
        console.print(f"[red]{error}[/]")
        return 1


async def _run(url: str, namespace: str, console: Console, everything: bool) -> int:
    bus = await connect(url, role="client", name="leases", namespace=namespace, timeout=CONNECT_S)
    try:
        now_ns = time.time_ns()
        show(await leases(bus, now_ns), now_ns, console, everything=everything)
    finally:
        await bus.close()
    return 0
