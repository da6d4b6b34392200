"""The side that owns blocks: offers them under a lease, pushes them on request, and frees them.

``Pins`` are the blocks pinned for other workers, each until its lease ends. Pure: time is an argument.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from penstock.infra.bus.clock import BrokerClock
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import block_hashes, wire
from penstock.schemas.control import Ok, PinPrefix, PrefixPinned, Push, Pushed, Release
from penstock.schemas.transfer import WINDOWS, Endpoint, Ticket
from penstock.workers.disagg.ledger import TransferLedger
from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import NO_ROWS, Engine, HeldRows, KvTransfer, kv_transfer_of
from penstock.workers.kv_transfer.transport_protocol import TransferError, Transport, joined
from penstock.workers.metrics.worker_metrics import WorkerMetrics


class Pin(msgspec.Struct, eq=False):
    """The blocks of one ticket. ``free`` frees them, in the engine thread."""

    ticket: str
    pool: str
    target: str
    blocks: list[int]
    expires: float
    free: Callable[[Engine], object]
    windows: Sequence[int] = ()  # rows of sliding-window layers
    pushing: int = 0  # own transfers that read the blocks now


class Pins:
    """Open leases by ticket. A lease ends once: by ``release``, by ``expired`` or by ``clear``."""

    def __init__(self) -> None:
        self._open: dict[str, Pin] = {}
        self._ended: dict[str, Pin] = {}  # ended while they are pushed: freed after the push

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @property
    def blocks(self) -> int:
        return sum(len(pin.blocks) for pins in (self._open, self._ended) for pin in pins.values())

    def add(self, pin: Pin) -> None:
        assert pin.ticket not in self._open, f"ticket {pin.ticket} was issued twice"
        self._open[pin.ticket] = pin

    def get(self, ticket: str) -> Pin | None:
        """An open lease."""
        return self._open.get(ticket)

    def release(self, ticket: str) -> Pin | None:
        """End a lease; returns its pin if it was open and its blocks may be freed now."""
        pin = self._open.pop(ticket, None)
        return None if pin is None else self._unless_pushing(pin)

    def expired(self, now: float) -> list[tuple[Pin, bool]]:
        """End leases whose time has passed; each with whether its blocks may be freed now."""
        late = [pin for pin in self._open.values() if pin.expires <= now]
        for pin in late:
            del self._open[pin.ticket]
        return [(pin, self._unless_pushing(pin) is not None) for pin in late]

    def pushed(self, pin: Pin) -> Pin | None:
        """A push has ended; returns the pin if its lease has ended and nothing else reads the blocks."""
        pin.pushing -= 1
        if pin.pushing or pin.ticket not in self._ended:
            return None
        return self._ended.pop(pin.ticket)

    def clear(self) -> list[Pin]:
        """End all leases, whatever is in flight."""
        pins = [*self._open.values(), *self._ended.values()]
        self._open.clear()
        self._ended.clear()
        return pins

    def _unless_pushing(self, pin: Pin) -> Pin | None:
        if not pin.pushing:
            return pin
        self._ended[pin.ticket] = pin
        return None


log = structlog.get_logger("handoff")

MOST_PINS = 256  # open tickets, beyond which no prefix is pinned for others


class Owner:
    """Used from the event loop. Every lease expires, whatever other workers do."""

    def __init__(
        self,
        engine: EngineLoop,
        transport: Transport | None,
        ledger: TransferLedger,
        worker: str,
        lease_s: float,
        metrics: WorkerMetrics,
        tasks: Tasks,
        clock: BrokerClock,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._ledger = ledger
        self._worker = worker
        self._lease_s = lease_s
        self._clock = clock
        self._pins = Pins()
        self._tickets: dict[str, Ticket] = {}
        self._tasks = tasks.group("owner")
        metrics.handoff.leases.set_function(lambda: len(self._pins))
        metrics.handoff.pinned.set_function(lambda: self._pins.blocks)
        if transport is not None:
            metrics.handoff.transfers.set_function(lambda: transport.stats().live)
            metrics.handoff.registered.set_function(lambda: transport.stats().registered_bytes)

    def offer(
        self,
        ticket_id: str,
        target: str,
        pool: str,
        blocks: Sequence[int],
        generations: Sequence[int],
        free: Callable[[Engine], object],
        lease_s: float = 0.0,
        windows: HeldRows = NO_ROWS,
    ) -> Ticket:
        """Issue a ticket for blocks that the engine holds; ``free`` frees them, in the engine thread.

        Without blocks it is a lease on what an engine keeps for another engine, which fetches it by itself.

        Args:
            lease_s: 0: that of handoffs.
            windows: of the last of the blocks.
        """
        lease_s = lease_s or self._lease_s
        ticket = self.ticket(ticket_id, pool, blocks, generations, lease_s, windows)
        endpoint = ticket.endpoint
        size = sum(
            len(held) * each.pools[name].block_bytes
            for each in (endpoint, *endpoint.ranks)
            for name, held in ((pool, blocks), (WINDOWS, windows.rows))
            if held
        )
        self._pins.add(Pin(ticket_id, pool, target, list(blocks), time.monotonic() + lease_s, free, windows.rows))
        self._tickets[ticket_id] = ticket
        self._ledger.record(ticket, "offered", target, blocks=len(blocks), bytes=size)
        return ticket

    def ticket(
        self,
        ticket_id: str,
        pool: str,
        blocks: Sequence[int],
        generations: Sequence[int],
        lease_s: float = 0.0,
        windows: HeldRows = NO_ROWS,
    ) -> Ticket:
        """A ticket without a lease: it is void as soon as the engine changes the content of a block."""
        return Ticket(
            ticket_id,
            self._worker,
            self._transport.endpoint if self._transport is not None else Endpoint(self._worker, "engine"),
            pool,
            wire.pack_tokens(list(blocks)),
            wire.pack_tokens(list(generations)),
            self._clock.now_ns() + int((lease_s or self._lease_s) * 1e9),
            wire.pack_tokens(list(windows.rows)),
            wire.pack_tokens(list(windows.generations)),
        )

    def pin_prefix(self, order: PinPrefix, cache: KvTransfer) -> PrefixPinned:
        """Offer blocks of the prefix cache to a reader.

        They are found at once, in the middle of a step as well, and pinned before the next one is planned. Should a
        step that is being planned take one of them, the reader sees it by the generation.
        """
        if self._transport is None:
            return PrefixPinned(cause="this worker has no transfer backend")
        if self._pins.get(order.ticket) is not None or len(self._pins) >= MOST_PINS:
            return PrefixPinned(cause=f"{len(self._pins)} tickets are open here, {MOST_PINS} at most")
        found = cache.find(block_hashes.split(order.digests))
        if not found.blocks:
            return PrefixPinned(cause="the blocks are not cached here")
        key = order.ticket
        self._engine.call(lambda engine: kv_transfer_of(engine).pin(key, found))
        return PrefixPinned(
            self.offer(
                key,
                order.reader,
                "kv",
                found.blocks,
                found.generations,
                lambda engine: engine.release_pinned(key),
                min(order.lease_s, self._lease_s),
                found.windows,
            )
        )

    def release_ticket(self, ticket_id: str, cause: str) -> None:
        """The ticket will not be used."""
        self._end(ticket_id, cause)

    def release(self, order: Release) -> Ok:
        """A reader no longer needs its ticket."""
        return (
            Ok() if self._end(order.ticket, "") else Ok(error="no such ticket: it was released, or its lease expired")
        )

    def _end(self, ticket_id: str, cause: str) -> bool:
        pin = self._pins.get(ticket_id)
        if pin is None:
            return False
        self._ledger.record(self._tickets.pop(ticket_id), "released", pin.target, cause=cause)
        freed = self._pins.release(ticket_id)
        if freed is not None:
            self._free(freed)
        return True

    async def push(self, order: Push) -> Pushed:
        """Write blocks of a ticket into the reader's blocks."""
        pin = self._pins.get(order.ticket)
        if pin is None or self._transport is None:
            return Pushed("stale", "no such ticket: it was released, or its lease expired")
        moves = []
        for pool, held, numbers, targets in (
            (pin.pool, pin.blocks, order.take, order.blocks),
            (WINDOWS, pin.windows, order.window_take, order.window_blocks),
        ):
            take, into = wire.unpack_tokens(numbers), wire.unpack_tokens(targets)
            if len(take) != len(into) or any(number >= len(held) for number in take):
                return Pushed("refused", f"{len(take)} positions of {len(held)} blocks for {len(into)} targets")
            if take:
                moves.append((pool, [held[number] for number in take], list(into)))
        pin.pushing += 1
        settled = False
        try:
            writes = [
                self._transport.write(order.endpoint, pool, local, into, timeout=order.timeout_s)
                for pool, local, into in moves
            ]
            moved = await asyncio.wrap_future(joined(writes))
            settled = True
            return Pushed(bytes=moved.bytes, seconds=moved.seconds)
        except TransferError as error:
            settled = error.settled.done()
            if not settled:
                self._tasks.spawn(self._settle(pin, error), name="settle", on_failure=_settle_failed)
            return Pushed(error.cause, error.message, settled=settled)
        finally:
            if settled:
                self._pushed(pin)

    async def _settle(self, pin: Pin, error: TransferError) -> None:
        """Free the blocks only when the transfer has really ended: until then they are read."""
        await asyncio.wait([asyncio.wrap_future(error.settled)])
        self._pushed(pin)

    def _pushed(self, pin: Pin) -> None:
        freed = self._pins.pushed(pin)
        if freed is not None:
            self._free(freed)

    def _free(self, pin: Pin) -> None:
        self._engine.call(pin.free)

    def sweep(self, now: float) -> None:
        """End expired leases; called several times a second."""
        for pin, free in self._pins.expired(now):
            ticket = self._tickets.pop(pin.ticket)
            self._ledger.record(ticket, "expired", pin.target, blocks=len(pin.blocks))
            log.warning("lease_expired", ticket=pin.ticket, target=pin.target, blocks=len(pin.blocks))
            if free:
                self._free(pin)

    def lost(self, worker: str) -> None:
        """A reader has left: no other worker can use its tickets."""
        for ticket_id in [t for t in self._tickets if (pin := self._pins.get(t)) is not None and pin.target == worker]:
            self._end(ticket_id, "peer_lost")

    @property
    def open(self) -> int:
        return len(self._pins)

    @property
    def pinned_blocks(self) -> int:
        return self._pins.blocks

    async def close(self) -> None:
        """End every lease: the worker stops, or registers under another id."""
        for pin in self._pins.clear():
            ticket = self._tickets.pop(pin.ticket, None)
            if ticket is not None:
                self._ledger.record(ticket, "released", pin.target, cause="closed")
            self._free(pin)
        await self._tasks.aclose()


def _settle_failed(error: BaseException) -> None:
    """The pin stays in the metrics until the worker stops; its lease has ended."""
    log.error("settle_failed", error=repr(error))
