"""The side that needs blocks: fetches the blocks of a ticket into its own, or raises the reason why it cannot.

``PeerWatcher`` follows the workers to and from which blocks move: it connects to new ones before use, and removes lost
ones.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import RegisteredWorker, WorkerRegistry
from penstock.schemas import control, wire
from penstock.schemas.control import PinPrefix, Push, Pushed, Release
from penstock.schemas.fleet import Registration
from penstock.schemas.transfer import WINDOWS, Endpoint, Handoff, Ticket
from penstock.workers.disagg.ledger import TransferLedger
from penstock.workers.engines.engine_protocol import RowToFill
from penstock.workers.kv_transfer.transport_protocol import (
    TransferError,
    TransferResult,
    Transport,
    joined,
    path_between,
)

log = structlog.get_logger("handoff")

# A release waits until the request that read the blocks is in the engine. Before, it would keep the engine's thread
# from the interpreter for 0.07 ms (between "received" and "step begun" of ``python -m tests.gpu.disaggregated --engine
# mock``).
RELEASE_LATER_S = 0.002
RELEASE_S = 1.0
RELEASE_ATTEMPTS = 3
PIN_S = 0.05  # for a source to pin a prefix: it only looks at a table
GRACE_S = 0.5  # how much later than the transfer timeout an owner may reply to a push


class _Pushing:
    """A push that was requested from an owner.

    Attributes:
        agent: of this worker, whose blocks are written.
        settled: nothing is written any more.
        timer: limit for the owner's reply after the transfer has failed; None: it has not failed.
    """

    __slots__ = ("agent", "answer", "owner", "settled", "timer", "transport")

    def __init__(self, owner: str, transport: Transport, agent: str) -> None:
        self.owner = owner
        self.transport = transport
        self.agent = agent
        self.answer: asyncio.Future[Pushed] = asyncio.get_running_loop().create_future()
        self.settled: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.timer: asyncio.TimerHandle | None = None

    def reply(self, pushed: Pushed) -> None:
        if not self.answer.done():
            self.answer.set_result(pushed)


class LeadingLayers(NamedTuple):
    """The leading layers of blocks that were read before all were computed. ``seconds``: duration of the transfer."""

    layers: int = 0
    bytes: int = 0
    seconds: float = 0.0


NO_LAYERS = LeadingLayers()


class BlockReader:
    """Used from the event loop. ``open`` before use."""

    def __init__(
        self,
        bus: Bus,
        transport: Transport | None,
        ledger: TransferLedger,
        worker: str,
        timeout_s: float,
        quarantine_s: float,
    ) -> None:
        self._bus = bus
        self._transport = transport
        self._ledger = ledger
        self._worker = worker
        self._timeout_s = timeout_s
        self._quarantine_s = quarantine_s
        self._inbox = bus.nc.new_inbox()
        self._numbers = itertools.count()
        self._pushes: dict[str, _Pushing] = {}  # by reply subject
        self._closed = False
        self._tasks = bus.tasks.group("reader")
        self._sub: Any = None

    async def open(self) -> None:
        self._sub = await self._bus.nc.subscribe(self._inbox + ".*", cb=self._on_pushed)

    async def close(self) -> None:
        """End all writes by owners: the engine and its blocks stay for the next session."""
        self._closed = True
        await self._tasks.aclose()
        for reply, push in list(self._pushes.items()):
            push.answer.cancel()
            if push.timer is not None:
                push.timer.cancel()
                self._end_writes(reply)
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()

    async def pin_prefix(self, source: str, ticket: str, digests: Sequence[bytes], lease_s: float) -> Ticket:
        """Have another worker pin blocks of its prefix cache.

        Args:
            digests: names of the blocks; the ticket has the leading ones that are there.

        Raises:
            TransferError: the worker pins none, or does not answer in time.
        """
        order = PinPrefix(ticket, self._worker, b"".join(digests), lease_s)
        subject = self._bus.subjects.control(source)
        try:
            reply = await self._bus.nc.request(subject, wire.encode(order), timeout=PIN_S)
            pinned = control.decode_pinned(reply.data)
        except (NatsError, TimeoutError) as error:
            with contextlib.suppress(NatsError):  # the source may have pinned them, or may do so later
                await self._bus.nc.publish(subject, wire.encode(Release(ticket, self._worker)))
            raise TransferError("timeout", f"the source did not answer: {error!r}") from None
        except msgspec.MsgspecError as error:
            raise TransferError("refused", f"the source's answer cannot be read: {error}") from None
        if pinned.ticket is None:
            raise TransferError("stale", pinned.cause)
        return pinned.ticket

    async def fetch_leading(
        self, ticket: Ticket, positions: Sequence[int], local: Sequence[int], layers: int
    ) -> LeadingLayers:
        """Copy the leading layers of blocks. ``fetch`` copies the others, and checks that the blocks are the same.

        Copies none if the owner would push, if ranks share blocks, or if the owner has failed.

        Raises:
            TransferError: the transfer has failed, and may still write.
        """
        transport, pool = self._transport, ticket.endpoint.pools.get(ticket.pool)
        if (
            transport is None
            or pool is None
            or not 0 < layers < pool.layers
            or transport.endpoint.ranks
            or ticket.endpoint.ranks
            or path_between(transport.endpoint, ticket.endpoint) != "read"
        ):
            return NO_LAYERS
        try:
            self._check(ticket, positions, {})
            read = _read_blocks(transport, ticket, positions, local, (0, layers), self._timeout_s, check=False)
            moved = await asyncio.wrap_future(read)
        except TransferError as error:
            if error.settled.done():
                log.warning("transfer_failed", ticket=ticket.id, cause=error.cause, error=error.message)
                return NO_LAYERS
            self._failed(ticket, len(local), error)
            raise
        return LeadingLayers(layers, moved.bytes, moved.seconds)

    async def fetch(
        self,
        ticket: Ticket,
        positions: Sequence[int],
        local: Sequence[int],
        fills: Sequence[RowToFill] = (),
        timeout_s: float | None = None,
        computing_s: float = 0.0,
        leading: LeadingLayers = NO_LAYERS,
    ) -> TransferResult:
        """Copy the blocks at ``positions`` of the ticket into the blocks ``local``.

        Args:
            fills: copies of sliding-window layers.
            timeout_s: limit, if it is lower than that for handoffs.
            computing_s: what computing them takes, for the ledger; 0: unknown.
            leading: layers of the blocks that ``fetch_leading`` has copied.

        Raises:
            TransferError: they were not copied; ``settled`` is done when ``local`` may be used for anything else.
        """
        self._ledger.record(ticket, "leased", self._worker, blocks=len(positions))
        transport = self._transport
        within_s = min(self._timeout_s, timeout_s or self._timeout_s)
        pool, count = ticket.endpoint.pools.get(ticket.pool), len(ticket.blocks) // 4
        rows = {fill.row: fill.position - count + len(ticket.windows) // 4 for fill in fills}  # and which in the ticket
        try:
            self._check(ticket, positions, rows)
            if transport is None:
                raise TransferError("unavailable", "this worker has no transfer backend")
            if pool is not None and not pool.block_bytes:  # all layers have sliding windows
                positions = local = ()
            if path_between(transport.endpoint, ticket.endpoint) == "read":
                moved, seconds = await self._read(transport, ticket, positions, local, rows, within_s, leading.layers)
            else:
                moved, seconds = await self._request_push(transport, ticket, positions, local, rows, within_s)
        except TransferError as error:
            self._failed(ticket, len(local), error)
            raise
        moved, seconds = moved + leading.bytes, seconds + leading.seconds
        share = f"{seconds / computing_s:.1%} of computing them" if computing_s else ""
        self._ledger.record(
            ticket, "read", self._worker, blocks=len(positions), bytes=moved, seconds=seconds, message=share
        )
        return TransferResult(moved, seconds)

    def record_fetched(self, ticket: Ticket, seconds: float) -> None:
        """The engine has fetched the KV of a ticket without blocks."""
        self._ledger.record(ticket, "read", self._worker, seconds=seconds)

    def _check(self, ticket: Ticket, positions: Sequence[int], rows: Mapping[int, int]) -> None:
        """
        Raises:
            TransferError: the ticket has expired, or has no such blocks.
        """
        if self._bus.clock.now_ns() > ticket.lease_ns:
            raise TransferError("stale", "the lease had expired before the blocks could be read")
        count = len(ticket.blocks) // 4
        if max(positions, default=-1) >= count or min(rows.values(), default=0) < 0:
            raise TransferError(
                "refused",
                f"the ticket has {count} blocks, the last {len(ticket.windows) // 4} with sliding windows: too few",
            )

    def _failed(self, ticket: Ticket, blocks: int, error: TransferError) -> None:
        self._ledger.record(ticket, "failed", self._worker, blocks=blocks, cause=error.cause, message=error.message)
        log.warning("transfer_failed", ticket=ticket.id, cause=error.cause, error=error.message)
        if not error.settled.done():
            self._quarantined(ticket, blocks, error.settled)

    async def _read(
        self,
        transport: Transport,
        ticket: Ticket,
        positions: Sequence[int],
        local: Sequence[int],
        rows: Mapping[int, int],
        within_s: float,
        leading: int,
    ) -> tuple[int, float]:
        """``leading``: layers of the blocks that have been read."""
        layers = (leading, ticket.endpoint.pools[ticket.pool].layers) if leading else None
        reads = [_read_blocks(transport, ticket, positions, local, layers, within_s)] if positions else []
        if rows:
            there, generations = wire.unpack_tokens(ticket.windows), wire.unpack_tokens(ticket.window_generations)
            reads.append(
                transport.read(
                    ticket.endpoint,
                    WINDOWS,
                    [there[number] for number in rows.values()],
                    list(rows),
                    generations=[generations[number] for number in rows.values()],
                    timeout=within_s,
                )
            )
        moved = await asyncio.wrap_future(joined(reads))
        return moved.bytes, moved.seconds

    async def _request_push(
        self,
        transport: Transport,
        ticket: Ticket,
        positions: Sequence[int],
        local: Sequence[int],
        rows: Mapping[int, int],
        within_s: float,
    ) -> tuple[int, float]:
        order = Push(
            ticket.id,
            self._worker,
            transport.endpoint,
            wire.pack_tokens(list(positions)),
            wire.pack_tokens(list(local)),
            within_s,
            wire.pack_tokens(list(rows.values())),
            wire.pack_tokens(list(rows)),
        )
        began = time.monotonic()
        reply = f"{self._inbox}.{next(self._numbers)}"
        push = self._pushes[reply] = _Pushing(ticket.worker, transport, order.endpoint.agent)
        try:
            await self._bus.nc.publish(self._bus.subjects.control(ticket.worker), wire.encode(order), reply=reply)
            pushed = await asyncio.wait_for(asyncio.shield(push.answer), within_s + GRACE_S)
        except (NatsError, TimeoutError) as error:
            self._quarantine(reply)
            raise TransferError("timeout", f"the owner did not answer: {error!r}", push.settled) from None
        except asyncio.CancelledError:
            self._quarantine(reply)
            raise
        if not pushed.settled:
            self._quarantine(reply)
        else:
            self._settle(reply)
        if pushed.cause:
            cause: Any = pushed.cause
            raise TransferError(cause, pushed.message, push.settled)
        return pushed.bytes, time.monotonic() - began

    def _quarantine(self, reply: str) -> None:
        """The owner may write at any later time, until it replies that it no longer does, or this agent is renewed."""
        within_s = 0.0 if self._closed else self._quarantine_s
        self._pushes[reply].timer = asyncio.get_running_loop().call_later(within_s, self._end_writes, reply)

    def _settle(self, reply: str) -> None:
        push = self._pushes.pop(reply)
        if push.timer is not None:
            push.timer.cancel()
        push.settled.set_result(None)

    def _end_writes(self, reply: str) -> None:
        push = self._pushes.pop(reply, None)
        if push is None:
            return
        if push.transport.endpoint.agent == push.agent:
            push.transport.renew()
        push.transport.drained().add_done_callback(lambda _: push.settled.set_result(None))

    async def _on_pushed(self, message: Any) -> None:
        push = self._pushes.get(message.subject)
        if push is None:
            return
        try:
            pushed = control.decode_pushed(message.data)
        except msgspec.MsgspecError as error:
            pushed = Pushed("refused", f"the owner's answer cannot be read: {error}", settled=False)
        if push.timer is None:
            push.reply(pushed)
        elif pushed.settled:
            self._settle(message.subject)

    def lost(self, worker: str) -> None:
        """Fail the pushes of an owner that has left, which will not reply."""
        for push in self._pushes.values():
            if push.owner == worker:
                push.reply(Pushed("peer_lost", "the owner of the blocks has left", settled=False))

    def _quarantined(self, ticket: Ticket, blocks: int, settled: "concurrent.futures.Future[None]") -> None:
        loop = asyncio.get_running_loop()
        self._ledger.record(ticket, "quarantined", self._worker, blocks=blocks)
        line = Handoff(ticket.id, "settled", ticket.worker, self._worker, 0, blocks, pool=ticket.pool)

        def record_settled(_: Any) -> None:
            loop.call_soon_threadsafe(self._ledger.write, msgspec.structs.replace(line, at_ns=time.time_ns()))

        settled.add_done_callback(record_settled)

    def release(self, ticket: Ticket) -> None:
        """Release the ticket at its owner. If that fails, the lease expires."""
        self._spawn(self._release(ticket))

    async def _release(self, ticket: Ticket) -> None:
        await asyncio.sleep(RELEASE_LATER_S)
        subject, payload = self._bus.subjects.control(ticket.worker), wire.encode(Release(ticket.id, self._worker))
        for _ in range(RELEASE_ATTEMPTS):
            if self._bus.clock.now_ns() > ticket.lease_ns:
                return
            try:
                await self._bus.nc.request(subject, payload, timeout=RELEASE_S)
                return
            except (NatsError, TimeoutError) as error:
                log.debug("release_unanswered", ticket=ticket.id, error=repr(error))
                await asyncio.sleep(0.1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work, name="reader", on_failure=_task_failed)


def _read_blocks(
    transport: Transport,
    ticket: Ticket,
    positions: Sequence[int],
    local: Sequence[int],
    layers: tuple[int, int] | None,
    within_s: float,
    *,
    check: bool = True,
) -> "concurrent.futures.Future[TransferResult]":
    """Begin to read a ticket's blocks. ``check``: verify at the end that they still belong to it."""
    there, generations = wire.unpack_tokens(ticket.blocks), wire.unpack_tokens(ticket.generations)
    return transport.read(
        ticket.endpoint,
        ticket.pool,
        [there[number] for number in positions],
        list(local),
        generations=[generations[number] for number in positions] if check else (),
        layers=layers,
        timeout=within_s,
    )


def _task_failed(error: BaseException) -> None:
    """A ticket that was not released expires with its lease; quarantine has ended by then."""
    log.warning("reader_task_failed", error=repr(error))


PARTNERS = {
    "encode": {"prefill", "decode", "aggregated"},
    "prefill": {"encode", "decode"},
    "decode": {"encode", "prefill"},
    "aggregated": {"encode"},
}


class PeerWatcher:
    """Follows registrations. ``lost`` is called with the id of each worker that leaves."""

    def __init__(
        self,
        bus: Bus,
        transport: Transport,
        worker: str,
        model: str,
        role: str,
        lost: Callable[[str], None],
        *,
        moves_prefixes: bool = False,
    ) -> None:
        self._transport = transport
        self._worker = worker
        self._model = model
        self._role = role
        self._moves_prefixes = moves_prefixes
        self._lost = lost
        self._agents: dict[str, Endpoint] = {}
        self._reserving: dict[str, bool] = {}  # worker -> whether it reads leading layers
        self._watch = WorkerRegistry(bus, joined=self._joined, left=self._left)
        self._following = AsyncExitStack()

    async def start(self) -> None:
        """
        Raises:
            ServingError: the workers bucket cannot be read.
        """
        await self._following.enter_async_context(self._watch)

    async def stop(self) -> None:
        await self._following.aclose()

    def sweep(self) -> None:
        """Expire leases; called several times a second."""
        self._watch.expire()

    def reserves(self, worker: str) -> bool:
        """Whether a worker takes announcements of prompts."""
        return worker in self._reserving

    def reads(self, worker: str, layers: int = 0) -> bool:
        """Whether a worker reads unpinned blocks of this one, and, with ``layers``, their leading layers."""
        endpoint = self._agents.get(worker)
        return (
            endpoint is not None
            and path_between(self._transport.endpoint, endpoint) == "read"
            and (not layers or self._reserving.get(worker, False))
        )

    def _joined(self, member: RegisteredWorker) -> None:
        registration = member.registration
        if registration.reserves:
            self._reserving[registration.worker] = registration.reads_layers
        endpoint = registration.transfer
        agent = self._agents.get(registration.worker)
        if endpoint is None or registration.worker == self._worker or registration.model != self._model:
            return
        if agent is not None and agent.agent == endpoint.agent:
            return  # a renewal
        if endpoint.backend != self._transport.endpoint.backend or not self._is_partner(registration):
            return
        if agent is not None:
            self._transport.forget(agent.agent)
        self._agents[registration.worker] = endpoint
        reads = self._role == "decode"  # others read prefixes at most, and seldom from workers of other widths
        connecting = self._transport.connect(endpoint, reads=reads)
        connected = asyncio.wrap_future(connecting)  # logged in the loop's thread
        connected.add_done_callback(functools.partial(_log_connected, registration.worker))

    def _is_partner(self, registration: Registration) -> bool:
        """Whether blocks move between a worker and this one: handed off, or of prefixes if this takes no pushes."""
        if registration.role in PARTNERS.get(self._role, ()):
            return True
        assert registration.transfer is not None
        moves = self._moves_prefixes and registration.moves_prefixes
        return moves and path_between(registration.transfer, self._transport.endpoint) == "read"

    def _left(self, member: RegisteredWorker, reason: str) -> None:
        worker = member.registration.worker
        self._reserving.pop(worker, None)
        endpoint = self._agents.pop(worker, None)
        if endpoint is not None:
            self._transport.forget(endpoint.agent)
        self._lost(worker)


def _log_connected(worker: str, future: "asyncio.Future[None]") -> None:
    error = None if future.cancelled() else future.exception()
    if error is None:
        log.info("peer_connected", worker=worker)
    else:
        log.warning("peer_connect_failed", worker=worker, error=str(error))
