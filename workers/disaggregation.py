"""A request on its way through several workers: what this one takes over from the stage before, and hands on.

    encode     fetch and encode the media, hand the embeddings on (``Encoded``)
    prefill    compute the prompt, sample the first token, hand the KV on (``Prefilled``)
    decode     bring the KV here, go on

Whatever a hand-over lacks is computed here again; a request never fails because a transfer did.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from configs.settings import WorkerSettings
from infra.bus.connection import Bus
from infra.bus.publisher import Publisher
from infra.bus.puller import ACK
from schemas import jobs, wire
from schemas.control import Ok, Push, Pushed, Release
from schemas.errors import Code, ServingError
from schemas.jobs import Stage
from schemas.subjects import HEADER_LOAD
from schemas.transfer import Encoded, Prefilled, Ticket
from workers.block_waits import BlockWait
from workers.engine_thread import EngineThread
from workers.engines.base import Engine, EngineInfo, MediaReservation, RequestError, Reservation, VisionEngine
from workers.kv_transfer.base import TransferError, Transport
from workers.kv_transfer.handoff.ledger import Ledger
from workers.kv_transfer.handoff.owner import Owner
from workers.kv_transfer.handoff.peer_watcher import PeerWatcher
from workers.kv_transfer.handoff.reader import Reader
from workers.media import MediaLoader
from workers.metrics import Metrics
from workers.outbox import Outbox
from workers.requests import RunningRequest, next_job, prompt_digests, stamps

log = structlog.get_logger("worker")

T = TypeVar("T")

ROOM_S = 5.0  # how long a hand-over waits for free blocks before the prompt is queued like any other
LEASE_MARGIN_NS = 1_000_000_000
TRUST_AGAIN_S = 0.02
STAGE_S = 30.0  # how long the message to the next stage is tried


class Host(Protocol):
    """The session, as far as a stage needs it."""

    id: str

    def current(self, active: RunningRequest) -> bool:
        """It is still this worker's to run."""

    def owns(self, active: RunningRequest) -> bool:
        """It is still this worker's, to run or to end."""

    def trusted(self) -> bool:
        """This worker may speak."""

    def compute(self, active: RunningRequest, reservation: Reservation | None = None, opaque: bytes = b"") -> None:
        """Give it to the engine."""

    async def end(self, active: RunningRequest, code: Code, message: str) -> None: ...

    async def requeue(self, active: RunningRequest, reason: str) -> None: ...

    def on_handed_off(self, active: RunningRequest) -> None:
        """The next stage has it."""


class DisaggCoordinator:
    """Of one session. Everything here is bounded: by the request's deadline, the lease, or the transfer's time."""

    def __init__(
        self,
        host: Host,
        bus: Bus,
        publisher: Publisher,
        outbox: Outbox,
        engine: EngineThread,
        info: EngineInfo,
        transport: Transport | None,
        vision: VisionEngine | None,
        model: str,
        revision: str,
        settings: WorkerSettings,
        metrics: Metrics,
    ) -> None:
        self._host = host
        self._bus = bus
        self._publisher = publisher
        self._engine = engine
        self._info = info
        self._vision = vision
        self._revision = revision
        self._transport = transport
        self._quarantine_s = settings.transfer_timeout_s + settings.quarantine_s
        self._loader = MediaLoader(bus, vision) if vision is not None else None
        self._ledger = Ledger(bus, outbox, host.id, metrics)
        self._owner: Owner | None = None
        self._reader: Reader | None = None
        self._peers: PeerWatcher | None = None
        self._waits: dict[int, BlockWait[Any]] = {}  # for blocks or slots, by the identity of an RunningRequest
        if transport is not None or info.handover:
            self._owner = Owner(engine, transport, self._ledger, host.id, settings.handoff_lease_s, metrics)
            self._reader = Reader(
                bus, transport, self._ledger, host.id, settings.transfer_timeout_s, settings.quarantine_s
            )
        if transport is not None:
            self._peers = PeerWatcher(bus, transport, host.id, model, settings.role, self._peer_lost)

    # --- life ---

    async def open(self) -> None:
        """
        Raises:
            ServingError: the workers bucket cannot be read.
        """
        if self._reader is not None:
            await self._reader.open()
        if self._peers is not None:
            await self._peers.start()

    def sweep(self, now: float) -> None:
        """A few times a second: leases and peers whose time is over."""
        if self._owner is not None:
            self._owner.sweep(now)
        if self._peers is not None:
            self._peers.sweep()

    @property
    def open_leases(self) -> int:
        return self._owner.open if self._owner is not None else 0

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.stop()
        if self._owner is not None:
            self._owner.close()
        if self._reader is not None:
            await self._reader.close()
        if self._loader is not None:
            self._loader.close()
        await self._ledger.close()

    def _peer_lost(self, worker: str) -> None:
        if self._owner is not None and self._reader is not None:
            self._owner.lost(worker)
            self._reader.lost(worker)

    # --- control ---

    def release(self, order: Release) -> Ok:
        return self._owner.release(order) if self._owner is not None else Ok(error="this worker pins no blocks")

    async def push(self, order: Push) -> Pushed:
        if self._owner is None:
            return Pushed("refused", "this worker pins no blocks")
        return await self._owner.push(order)

    # --- prefill ---

    async def send_prefilled(self, active: RunningRequest) -> None:
        """All choices have their first token: the prompt's KV goes to the decode worker."""
        stage, held = active.route[0], active.held
        assert self._owner is not None
        if held is None:  # the engine could not hold them
            await self._host.requeue(active, "no blocks to hand over")
            return
        holder = held.key

        def drop(engine: Engine) -> object:
            return engine.release_held(holder)

        ticket = self._owner.offer(_ticket_id(active, stage), stage.worker, "kv", held.blocks, held.generations, drop)
        message = Prefilled(
            active.request.id,
            active.attempt,
            msgspec.Raw(wire.encode(next_job(active))),
            ticket,
            active.cached,
            active.started_ns,
            active.first_token_ns,
            held.opaque,
            stamps(active),
        )
        await self._pass_on(active, stage, message, ticket)

    async def _pass_on(
        self, active: RunningRequest, stage: Stage, message: Prefilled | Encoded, ticket: Ticket
    ) -> None:
        """Store the message for the next stage, then acknowledge this one's."""
        assert self._owner is not None
        request = active.request
        load = jobs.load_header(
            len(request.prompt) // 4,
            active.cached if isinstance(message, Prefilled) else _expected_cached(active),
            request.gateway,
            request.deadline_ns,
            request.priority.value,
            request.n,
            active.route,
        )
        try:
            if not await self._trusted(active, min(ticket.lease_ns, request.deadline_ns)):
                self._owner.release_ticket(ticket.id, "not_published")
                await self._host.requeue(active, "the hand-over could not be published: the lease is in doubt")
                return
            await self._publisher.publish(
                self._bus.subjects.work(stage.role, stage.worker),
                wire.encode(message),
                f"{request.id}:{active.attempt}:{stage.role}",
                headers={HEADER_LOAD: load},
                timeout=STAGE_S,
            )
        except ServingError as error:
            self._owner.release_ticket(ticket.id, "not_published")
            if error.code is Code.body_too_large:
                await self._host.end(active, error.code, error.message)
            else:
                await self._host.requeue(active, f"the hand-over could not be published: {error.message}")
            return
        except Exception:
            self._owner.release_ticket(ticket.id, "not_published")
            raise
        await self._bus.nc.publish(active.delivery.reply, ACK)
        self._host.on_handed_off(active)

    async def _trusted(self, active: RunningRequest, until_ns: int) -> bool:
        """BlockWait until this worker may speak: somebody else may have the request by now."""
        while not self._host.trusted():
            if time.time_ns() >= until_ns or not self._host.owns(active):
                return False
            await asyncio.sleep(TRUST_AGAIN_S)
        return self._host.owns(active)

    # --- decode ---

    async def on_prefilled(self, active: RunningRequest, prefilled: Prefilled) -> None:
        """Bring the prompt's KV here, or compute it here after all."""
        active.cached = prefilled.cached
        active.started_ns = prefilled.started_ns
        active.first_token_ns = prefilled.first_token_ns
        if prefilled.opaque and self._reader is not None and time.time_ns() < prefilled.ticket.lease_ns:
            active.fetching = prefilled.ticket
            for choice in active.choices:
                choice.adopted = prefilled.cached
            self._host.compute(active, opaque=prefilled.opaque)
            return
        reservation: Reservation | None = None
        try:
            reservation = await self._fetch_kv(active, prefilled.ticket)
        finally:
            if self._reader is not None:
                self._reader.release(prefilled.ticket)
        if not self._host.current(active):
            if reservation is not None:
                self._free(reservation)
        elif reservation is not None or not active.request.media:
            for choice in active.choices if reservation is not None else ():
                choice.adopted = prefilled.cached
            self._host.compute(active, reservation)
        else:
            await self.load_embeddings(active, None)

    def unwanted(self, arrived: Prefilled | Encoded) -> None:
        """It came for a request that this worker does not run (any more)."""
        if self._reader is not None:
            self._reader.release(arrived.ticket)

    def on_fetched(self, active: RunningRequest) -> None:
        """The engine has taken over what the one before kept for it."""
        ticket, active.fetching = active.fetching, None
        if ticket is not None and self._reader is not None:
            self._reader.record_fetched(ticket, 0.0)
            self._reader.release(ticket)

    async def _fetch_kv(self, active: RunningRequest, ticket: Ticket) -> Reservation | None:
        """None: there is no room, or the transfer failed."""
        request, size = active.request, self._info.block_size
        tokens = len(request.prompt) // 4
        full, rest = divmod(tokens, size)
        count = len(ticket.blocks) // 4
        if self._reader is None or count != full + bool(rest):
            log.warning("ticket_mismatch", ticket=ticket.id, blocks=count, tokens=tokens, block_size=size)
            return None
        digests = prompt_digests(request, self._revision, size)
        users = sum(outcome is None for outcome in active.outcomes)
        tails = users if rest else 0
        until_ns = min(ticket.lease_ns - LEASE_MARGIN_NS, request.deadline_ns, time.time_ns() + int(ROOM_S * 1e9))
        if full + tails > self._info.total_blocks:
            return None  # the engine's answer to the sequences names the limit, or finds a way
        reservation = await self._room(
            active,
            until_ns,
            "kv",
            lambda engine: engine.reserve(digests, tails, users),
            lambda engine, found: engine.release(found),
        )
        if reservation is None:
            return None
        # The prompt's last block once per choice: each goes on in its own.
        positions = [*range(reservation.have, full), *[full] * tails]
        local = reservation.blocks[reservation.have :] + reservation.tails
        try:
            if positions:
                await self._reader.fetch(ticket, positions, local)
        except TransferError as error:
            self._free_when_settled(error.settled, lambda engine: engine.release(reservation))
            return None
        except BaseException:
            self._free_after_quarantine(lambda engine: engine.release(reservation))
            raise
        return reservation

    async def _room(
        self,
        active: RunningRequest,
        until_ns: int,
        pool: str,
        take: Callable[[Engine], T | None],
        undo: Callable[[Engine, T], object],
    ) -> T | None:
        """What ``take`` gives once there is room, in turn; None: the time is up, or nobody wants it any more."""
        wait = self._engine.wait(pool, take)
        self._waits[id(active)] = wait
        left_s = max(0.0, (until_ns - time.time_ns()) / 1e9)
        timer = asyncio.get_running_loop().call_later(left_s, self._engine.cancel_wait, wait)

        def back(answer: "Future[T | None]") -> None:
            found = None if answer.exception() else answer.result()
            if found is not None:
                self._engine.call(lambda engine: undo(engine, found))

        try:
            found = await asyncio.shield(asyncio.wrap_future(wait.answer))
        except asyncio.CancelledError:
            self._engine.cancel_wait(wait)
            wait.answer.add_done_callback(back)
            raise
        finally:
            timer.cancel()
            del self._waits[id(active)]
        if found is not None and not self._host.current(active):
            back(wait.answer)
            return None
        return found

    def cancel_wait(self, active: RunningRequest) -> None:
        """This worker has no more to do with a request: it waits for nothing."""
        wait = self._waits.get(id(active))
        if wait is not None:
            self._engine.cancel_wait(wait)

    def _free(self, reservation: Reservation) -> None:
        self._engine.call(lambda engine: engine.release(reservation))

    def _free_when_settled(self, settled: "Future[None]", let_go: Callable[[Engine], object]) -> None:
        """Blocks that something may still write into come back when that has ended."""
        settled.add_done_callback(lambda _: self._engine.call(let_go))

    def _free_after_quarantine(self, let_go: Callable[[Engine], object]) -> None:
        """Nobody knows whether something still writes into them: a transfer's longest time is waited for."""
        asyncio.get_running_loop().call_later(self._quarantine_s, self._engine.call, let_go)

    # --- media ---

    async def encode(self, active: RunningRequest) -> None:
        """The encode stage: embeddings into slots, a ticket for them to the next stage."""
        assert self._owner is not None
        active.started_ns = time.time_ns()
        reservation = await self._slots(active)
        if reservation is None or not await self._encode_missing(active, reservation):
            return
        generations = await asyncio.wrap_future(
            self._engine.call(lambda engine: _vision(engine).media_generations(reservation))
        )
        active.media = None  # from here on it is the lease that holds them
        slots = [slot for of in reservation.slots for slot in of]
        stage = active.route[0]

        def drop(engine: Engine) -> None:
            _vision(engine).media_release(reservation)

        ticket = self._owner.offer(_ticket_id(active, stage), stage.worker, "embeds", slots, generations, drop)
        message = Encoded(
            active.request.id,
            active.attempt,
            msgspec.Raw(wire.encode(next_job(active))),
            ticket,
            active.started_ns,
            stamps(active),
        )
        await self._pass_on(active, stage, message, ticket)

    async def load_embeddings(self, active: RunningRequest, encoded: Encoded | None) -> None:
        """A language model's worker gets the embeddings of a request's media: from here, from there, or makes them."""
        if self._vision is None:
            await self._host.end(active, Code.unsupported, "this worker's model takes no images")
            return
        try:
            reservation = await self._slots(active)
            if reservation is not None and encoded is not None and not all(reservation.have):
                reservation = await self._fetch_embeddings(active, encoded.ticket, reservation)
        finally:
            if encoded is not None and self._reader is not None:
                self._reader.release(encoded.ticket)
        if reservation is not None and await self._encode_missing(active, reservation) and self._host.current(active):
            self._host.compute(active)

    async def _slots(self, active: RunningRequest) -> MediaReservation | None:
        """Slots for all media, kept in ``active.media``; None: the request was ended."""
        media = [(medium.digest, medium.tokens) for medium in active.request.media]
        try:
            reservation = await self._room(
                active,
                active.request.deadline_ns,
                "embeds",
                lambda engine: _vision(engine).media_reserve(media),
                lambda engine, found: _vision(engine).media_release(found),
            )
        except RequestError as error:
            await self._host.end(active, Code(error.code), error.message)
            return None
        if reservation is None:
            return None  # its deadline, a cancellation: whoever ended it has said so
        active.media = reservation
        return reservation

    async def _fetch_embeddings(
        self, active: RunningRequest, ticket: Ticket, reservation: MediaReservation
    ) -> MediaReservation | None:
        positions: list[int] = []
        local: list[int] = []
        at = 0
        for slots, have in zip(reservation.slots, reservation.have, strict=True):
            if not have:
                positions += range(at, at + len(slots))
                local += slots
            at += len(slots)
        try:
            if self._reader is None or at * 4 != len(ticket.blocks):
                raise TransferError("refused", f"the ticket names {len(ticket.blocks) // 4} slots, {at} are needed")
            active.media = None  # nobody frees slots that are being written
            await self._reader.fetch(ticket, positions, local)
        except TransferError as error:
            self._free_when_settled(error.settled, lambda engine: _vision(engine).media_release(reservation))
            return await self._slots(active) if self._host.current(active) else None
        except BaseException:
            self._free_after_quarantine(lambda engine: _vision(engine).media_release(reservation))
            raise
        if not self._host.current(active):
            self._engine.call(lambda engine: _vision(engine).media_release(reservation))
            return None
        active.media = reservation
        reservation.have = [True] * len(reservation.have)
        self._engine.call(lambda engine: _vision(engine).media_adopt(reservation))
        return reservation

    async def _encode_missing(self, active: RunningRequest, reservation: MediaReservation) -> bool:
        """Fetch, decode and encode what is not in the slots yet; False: the request was ended."""
        media = active.request.media
        missing = {number: media[number] for number, have in enumerate(reservation.have) if not have}
        if not missing:
            return True
        assert self._loader is not None
        try:
            prepared = await self._loader.load(missing)
            if not self._host.current(active):
                return False
            await asyncio.wrap_future(self._engine.call(lambda engine: _vision(engine).encode(reservation, prepared)))
        except RequestError as error:
            await self._host.end(active, Code(error.code), error.message)
            return False
        except ServingError as error:
            await self._host.end(active, error.code, f"an image of the request cannot be read: {error.message}")
            return False
        reservation.have = [True] * len(reservation.have)
        return self._host.current(active)


def _expected_cached(active: RunningRequest) -> int:
    """Prompt tokens that the router expects the next stage to have cached; it said so when it placed the request."""
    try:
        return jobs.read_load_header(active.delivery.headers[HEADER_LOAD]).cached_tokens
    except (KeyError, TypeError, ValueError):
        return 0


def _ticket_id(active: RunningRequest, stage: Stage) -> str:
    return f"{active.request.id}:{active.attempt}:{stage.role}"


def _vision(engine: Engine) -> VisionEngine:
    return engine  # type: ignore[return-value]  # asked only where the session was given one
