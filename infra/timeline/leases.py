"""``penstock leases``: blocks that one worker holds for another right now, from the hand-off ledger alone."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from infra.bus.connection import Bus, connect
from infra.bus.direct_get import read
from infra.launch.state import read_state
from infra.terminal import stdout
from schemas import transfer
from schemas.errors import ServingError
from schemas.transfer import HandOff

LOOK_BACK_S = 3600.0  # as long as the ledger is kept
CONNECT_S = 3.0

ENDS = frozenset({"released", "expired"})  # of a lease, said by its owner


class Lease(msgspec.Struct):
    """One ticket and the last thing that was said of it. ``ended``: its owner holds the blocks no more."""

    offer: HandOff
    last: HandOff
    ended: bool = False
    quarantined: int = 0  # blocks that its reader cannot use yet


def fold(lines: Iterable[HandOff]) -> dict[str, Lease]:
    """Tickets by id, from ledger lines in stream order. Lines of two workers about one ticket may cross."""
    found: dict[str, Lease] = {}
    early: dict[str, list[HandOff]] = {}
    for line in lines:
        lease = found.get(line.ticket)
        if line.state == "offered":
            found[line.ticket] = lease = Lease(line, line)
            for earlier in early.pop(line.ticket, ()):
                _apply(lease, earlier)
        elif lease is None:
            early.setdefault(line.ticket, []).append(line)
        else:
            _apply(lease, line)
    return found


def _apply(lease: Lease, line: HandOff) -> None:
    if line.state in ENDS:
        lease.ended = True
    if line.state == "quarantined":
        lease.quarantined = line.blocks
    elif line.state == "settled":
        lease.quarantined = 0
    if line.at_ns >= lease.last.at_ns:
        lease.last = line


def is_open(lease: Lease, now_ns: int) -> bool:
    """Blocks are held somewhere. An owner that died said nothing more: its lease is over when its time is."""
    return bool(lease.quarantined) or (not lease.ended and now_ns <= lease.offer.lease_ns)


async def leases(bus: Bus, now_ns: int) -> dict[str, Lease]:
    """All tickets of the last hour.

    Raises:
        ServingError: the ledger cannot be read.
    """
    lines: list[HandOff] = []
    stream, subject = bus.subjects.stream("HANDOFF"), bus.subjects.all("handoff")
    async for entry in read(bus, stream, subject, since_ns=now_ns - int(LOOK_BACK_S * 1e9)):
        lines += transfer.decode_ledger(entry.data).events
    return fold(lines)


def show(found: dict[str, Lease], now_ns: int, console: Console, *, everything: bool = False) -> int:
    """Print open leases, or all tickets; returns how many are open."""
    opened = 0
    for ticket, lease in found.items():
        holds = is_open(lease, now_ns)
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
