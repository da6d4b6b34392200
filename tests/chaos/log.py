"""What the log of a deployment says, for the auditor: requests, terminal events, and whatever is still held."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.launch.readiness import get_url
from penstock.log_tools.requests.leases import leases
from penstock.schemas import done, fleet, requests, tokens, usage
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import cell_in
from penstock.schemas.summary import RequestSummary, of_encoded_done
from penstock.schemas.tokens import PROMPT, WHOLE_REQUEST, TokenItem
from penstock.schemas.usage import UsagePart, UsageRow
from tests.chaos.audit import End, Log, Streamed
from tests.pipeline.support import samples

POLL_S = 0.5
COUNTED_S = 30.0  # for the ledger of usage to count all records
GHOST_S = 10.0  # a registration that was not renewed for so long is of nobody; a lease is 3 s


async def whole(buses: Sequence[Bus], since_ns: int, urls: Sequence[str], *, within_s: float, gone: int) -> Log:
    """Everything since then; what is held is looked at until nothing is, for ``within_s`` at most.

    Args:
        buses: of the cells, by their numbers.
        gone: workers that ended so lately that the server keeps their consumers.
    """
    stored, ends = await until_ended(buses, since_ns, within_s)
    accepted = [accepted_of(cell) for cell in stored]
    streamed: dict[str, Streamed] = {}
    for bus in buses:
        streamed |= await streamed_since(bus, since_ns)
    return Log(
        accepted=[(request, tag) for cell in accepted for request, (tag, _) in cell.items()],
        times={request: at for cell in accepted for request, (_, at) in cell.items()},
        carried={request: each.origin for cell in stored for request, each in cell.items() if each.origin},
        ends=[end for cell in ends for end in cell],
        streamed=streamed,
        astray=[
            f"cell {cell} has {what} of {request}, whose cell is {cell_in(request)}"
            for cell, found in enumerate(zip(stored, ends, strict=True))
            for what, requests in (
                ("the request", [*found[0]]),
                ("a terminal event", [end.request for end in found[1]]),
            )
            for request in requests
            if len(buses) > 1 and cell_in(request) != cell
        ],
        leases=await until_none(lambda: _of_all(open_leases, buses), within_s),
        held=await until_none(lambda: _of_all(held, buses), within_s),
        residue=await until_none(lambda: _of_all(lambda bus: residue(bus, urls, gone), buses), within_s),
    )


async def _of_all(look: Callable[[Bus], Awaitable[list[str]]], buses: Sequence[Bus]) -> list[str]:
    return [line for bus in buses for line in await look(bus)]


async def records_left(bus: Bus, requests: Sequence[str]) -> list[str]:
    """Those of some requests whose record is still there: it is what a router deletes last."""
    stream = bus.subjects.stream("DONE")
    return [each for each in requests if await get_last(bus, stream, bus.subjects.done_of(each)) is not None]


class Stored(NamedTuple):
    """A request in a cell's log.

    Attributes:
        at: Unix time at which it was first stored. Routers publish one again that waits for long.
        origin: the request of another cell that runs here under this one's id; "": it is a client's.
    """

    tag: str
    at: float
    origin: str


async def stored_since(bus: Bus, since_ns: int) -> dict[str, Stored]:
    """The requests in a cell's log, by id."""
    stream, subject = bus.subjects.stream("REQUESTS"), bus.subjects.all("request")
    found: dict[str, Stored] = {}
    async for entry in read(bus, stream, subject, since_ns=since_ns):
        if entry.data:
            request = requests.decode(entry.data)
            found.setdefault(request.id, Stored(request.user, entry.time_ns / 1e9, request.origin))
    return found


def accepted_of(stored: Mapping[str, Stored]) -> dict[str, tuple[str, float]]:
    """Those that clients made: tag, and when each was stored, by id."""
    return {request: (each.tag, each.at) for request, each in stored.items() if not each.origin}


async def streamed_since(bus: Bus, since_ns: int) -> dict[str, Streamed]:
    """The token stream by request, as every reader folds it: an item of an attempt before the highest seen is void."""
    folds: dict[str, Fold] = {}
    async for entry in read(bus, bus.subjects.stream("TOKENS"), bus.subjects.all("tokens"), since_ns=since_ns):
        for item in tokens.decode(entry.data).items:
            folds.setdefault(item.request, Fold()).take(item, entry.time_ns / 1e9)
    return {request: Streamed(fold.counts, fold.at) for request, fold in folds.items()}


class Fold:
    """Tokens of one request, by choice without gaps; ``at``: when the last one came."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.at = 0.0
        self._attempt = 0
        self._ahead: dict[int, list[tuple[int, int]]] = {}  # (first, behind the last) of items behind a gap

    def take(self, item: TokenItem, at: float) -> None:
        if item.choice in (PROMPT, WHOLE_REQUEST) or item.attempt < self._attempt:
            self._attempt = max(self._attempt, item.attempt)
            return
        self._attempt = item.attempt
        have = before = self.counts.get(item.choice, 0)
        ranges = [*self._ahead.get(item.choice, ()), (item.first, item.first + len(item.tokens) // 4)]
        for first, behind in sorted(ranges):
            have = max(have, behind) if first <= have else have
        self.counts[item.choice] = have
        self._ahead[item.choice] = [each for each in ranges if each[0] > have]
        if have > before:
            self.at = at


async def ends_since(bus: Bus, since_ns: int) -> list[End]:
    """All terminal events, also several of one request."""
    found = []
    async for entry in read(bus, bus.subjects.stream("DONE"), bus.subjects.all("done"), since_ns=since_ns):
        event = done.decode(entry.data)
        if isinstance(event, done.Done):
            found.append(
                End(
                    event.request,
                    event.code,
                    tuple(choice.tokens for choice in event.choices),
                    event.message,
                    event.attempt,
                    entry.time_ns / 1e9,
                    event.worker,
                    event.left_out,
                    (event.usage.prompt, event.usage.completion),
                )
            )
    return found


async def until_ended(
    buses: Sequence[Bus], since_ns: int, within_s: float
) -> tuple[list[dict[str, Stored]], list[list[End]]]:
    """Requests and terminal events by cell, once every request has one, or in the end.

    A request whose acceptance was not confirmed, because the broker's disk was full, say, is stored and runs after its
    client has given up.
    """
    deadline = time.monotonic() + within_s
    while True:
        stored = [await stored_since(bus, since_ns) for bus in buses]
        ends = [await ends_since(bus, since_ns) for bus in buses]
        ended = {end.request for cell in ends for end in cell}
        if all(ended.issuperset(accepted_of(cell)) for cell in stored) or time.monotonic() > deadline:
            return stored, ends
        await asyncio.sleep(POLL_S)


async def surplus(buses: Sequence[Bus]) -> dict[str, int]:
    """By what is counted, how much more the ledgers of usage have than the records, once they count all of those."""
    more = dict.fromkeys(("requests", "prompt", "completion"), 0)
    for bus in buses:
        subjects, rows, last = bus.subjects, list[UsageRow](), 0
        stream, subject = subjects.stream("DONE"), subjects.all("done")
        async for entry in read(bus, stream, subject):
            last = entry.seq
            row = usage.count(entry.seq, entry.time_ns, {}, of_encoded_done(entry.data, RequestSummary)).row
            rows += [row] if row is not None else []
        parts = await until_counted(bus, last)
        for sign, counted in ((-1, rows), (1, [row for part in parts for row in part.rows])):
            for name in more:
                more[name] += sign * sum(getattr(row, name) for row in counted)
    return more


async def until_counted(bus: Bus, seq: int) -> list[UsagePart]:
    """A cell's ledger, once it counts up to this sequence, or in the end."""
    deadline = time.monotonic() + COUNTED_S
    while True:
        stream, subject = bus.subjects.stream("USAGE"), bus.subjects.all("usage")
        parts = [usage.decode(entry.data) async for entry in read(bus, stream, subject)]
        if (parts and parts[-1].last >= seq) or not seq or time.monotonic() > deadline:
            return parts
        await asyncio.sleep(POLL_S)


async def until_none(look: Callable[[], Awaitable[list[str]]], within_s: float) -> list[str]:
    """What ``look`` finds, once that is nothing, or in the end."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            found = await look()
        except (NatsError, ServingError, TimeoutError) as error:  # the broker restarts, as its disk was full
            found = [f"the broker does not answer: {error!r}"]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(POLL_S)


async def open_leases(bus: Bus) -> list[str]:
    now_ns = time.time_ns()
    return [
        f"{ticket}: {lease.offer.blocks} blocks of {lease.offer.source}, {lease.last.state} {lease.last.cause}"
        for ticket, lease in (await leases(bus, now_ns)).items()
        if lease.is_open(now_ns)
    ]


async def held(bus: Bus) -> list[str]:
    """Workers that say they still compute or keep blocks."""
    return [
        f"{worker}: {member.load.running} running, {member.load.waiting} waiting, {member.load.used_blocks} blocks used"
        for worker, (member, age_s) in (await registered(bus)).items()
        if age_s < GHOST_S and (member.load.running or member.load.waiting or member.load.used_blocks)
    ]


async def registered(bus: Bus) -> dict[str, tuple[fleet.Registration, float]]:
    """Workers by id, and how many seconds ago each renewed its registration."""
    bucket = bus.subjects.bucket("workers")
    now_ns = time.time_ns()
    found: dict[str, tuple[fleet.Registration, float]] = {}
    async for entry in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        worker = entry.subject.rpartition(".")[2]
        found.pop(worker, None)
        if entry.data and "KV-Operation" not in entry.headers:
            found[worker] = fleet.decode(entry.data), (now_ns - entry.time_ns) / 1e9
    return found


async def residue(bus: Bus, urls: Sequence[str], gone: int = 0) -> list[str]:
    """Queues with something in them, more than ``gone`` consumers of nobody, ghosts, gateways that still answer."""
    found, orphans = [], []
    members = await registered(bus)
    for worker, (_, age_s) in members.items():
        if age_s > GHOST_S:
            found.append(f"{worker} was registered {age_s:.0f} s ago, and still is")
    for kind in ("SUBMIT", "REQUESTS", "WORK"):
        for consumer in await consumers(bus, bus.subjects.stream(kind)):
            name, left = consumer["name"], consumer["num_pending"] + consumer["num_ack_pending"]
            if kind == "WORK" and name not in members and name != "gateway":  # of what runs in other cells
                orphans.append(name)
            elif left:
                found.append(f"consumer {name} of {kind}: {left} messages pending or unacknowledged")
    if len(orphans) > gone:
        found.append(f"{len(orphans)} consumers of workers that are gone, {gone} of them lately: {' '.join(orphans)}")
    for url in urls:
        status, page = await get_url(url, "/metrics")
        if status != 200:
            found.append(f"gateway {url} shows no metrics")
            continue
        for gauge in ("open_requests", "queued_requests"):
            if value := samples(page.decode()).get(f"penstock_gateway_{gauge}", 0):
                found.append(f"gateway {url}: {value:g} {gauge.replace('_', ' ')}")
    return found


async def inventory(bus: Bus) -> list[str]:
    """Streams and consumers, other than those of workers, which come and go."""
    reply = await bus.nc.request("$JS.API.STREAM.NAMES", b"{}", timeout=10)
    found = sorted(json.loads(reply.data)["streams"])
    kept = [name for name in found if name != bus.subjects.stream("WORK")]
    return found + [f"{name}.{each['name']}" for name in kept for each in await consumers(bus, name)]


async def consumers(bus: Bus, stream: str) -> list[dict]:
    """State of all consumers of a stream."""
    found: list[dict] = []
    while True:
        reply = await bus.nc.request(
            f"$JS.API.CONSUMER.LIST.{stream}", json.dumps({"offset": len(found)}).encode(), timeout=10
        )
        page = json.loads(reply.data)
        found += page["consumers"]
        if not page["consumers"] or len(found) >= page["total"]:
            return found
