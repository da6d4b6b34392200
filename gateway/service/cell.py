"""One cell as a gateway uses it: requests into its log, their answers out of it, until they have ended.

A cell has its own streams, routers and workers. A deployment has one or several, and the id of a request says which
is its cell (``penstock.schemas.requests.cell_in``).
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import GatewaySettings
from penstock.gateway.access.authentication import ALL, Sight
from penstock.gateway.admission.charges import Charges
from penstock.gateway.admission.poison_requests import Verdicts
from penstock.gateway.admission.queues import QUIET_S, QueueMonitor, StoreCheck, unstored
from penstock.gateway.admission.storage import MemoryCheck, Retention
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.request_log.completion import Completion
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.listing import ProgressReader, RequestListing, progress_of
from penstock.gateway.request_log.lookup import Records, RequestFinder, RequestLookup, StoredRequest, is_whole
from penstock.gateway.request_log.subscriptions import TokenSubscription, TokenSubscriptions
from penstock.gateway.request_log.unstored import UnstoredRequests, portions
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import find_lost
from penstock.infra.bus.forget import check_stores
from penstock.infra.bus.publisher import Ack, Publisher, Refused
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TimeSlice, TurnBudget
from penstock.schemas import control, done, requests, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenBatch, TokenItem

log = structlog.get_logger("gateway")

SWEEP_S = 0.25
LIMITS_S = 9.0  # of ACCEPT_S, what may have been spent before a request is sent
ACCEPT_S = 14.0  # longer than an election in a cluster (4 to 9 s) and what follows it; a refusal comes within 15 s
CANCEL_AGAIN_S = 1.0
LOST_AGAIN_S = 2.0
ERASE_S = 20.0  # a router reads the jobs of the time in which the request ran
CANCEL_TRIES = 30  # of a request with other readers; by then its router and worker have been restarted
MAX_CANCELLING = 1000  # such requests at a time; those beyond are cancelled once
NEVER_STORED_S = 10.0  # after the gateway gave up to have a request stored, as long as an election may take
CANCEL_FOR_NS = 60_000_000_000  # beyond the deadline; by then the request has been ended
DEADLINE_GRACE_NS = 500_000_000  # the worker's own error for a missed deadline comes first
ABORT_NS = 5_000_000_000  # beyond the deadline, for a client that still has not read what there is
JOB_BYTES = 65_536  # what a job adds to its request: the decision and its score table


class Cell:
    """``open`` it, use it from one event loop, ``close`` it.

    Args:
        number: of the cell within the deployment, from 0 on.
        gateway: id of the gateway.
        charges: what the requests of API keys with limits have cost.
        name_in: canonical name of a body's model.
        counted: called when the numbers of queued requests are new.
        retention_known: called when it is known how long records are kept.

    Attributes:
        active: it takes new requests; otherwise those that it has are found and followed here, and that is all.
        opened: ``open`` has returned.
        open_of: open requests by model, at the last sweep.
        stopped: open requests were left to other gateways.
    """

    def __init__(
        self,
        number: int,
        bus: Bus,
        publisher: Publisher,
        gateway: str,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        turns: TurnBudget,
        charges: Charges,
        name_in: Callable[[bytes], str],
        counted: Callable[[], None],
        retention_known: Callable[[], None],
    ) -> None:
        self.number = number
        self.active = not settings.active_cells or number < settings.active_cells
        self.bus = bus
        self.publisher = publisher
        self.metrics = metrics
        self.opened = False
        self.stopped = False
        self.tasks: Tasks = bus.tasks.group(f"cell-{number}")
        self.records = Records(bus)
        self.verdicts = Verdicts(bus)
        self.finder = RequestFinder(bus)
        self._gateway = gateway
        self._turns = turns
        self._charges = charges
        self._subscriptions = TokenSubscriptions(bus, gateway, self.tasks)
        self._cancelling = 0
        self._unconfirmed: dict[InflightRequest, float] = {}  # cancelled, and perhaps never stored; since when
        self._looking: asyncio.Task[None] | None = None
        self._storing: asyncio.Task[None] | None = None
        self.unstored = UnstoredRequests(
            bus,
            publisher,
            gateway,
            settings.no_store_grace_s,
            subscriptions=self._subscriptions,
            records=self.records,
            tasks=self.tasks,
        )
        self._completion = Completion(self.records, self.read_again, self.tasks)
        self._lookup = RequestLookup(bus, self.records, self.finder, settings.no_store_grace_s, self.unstored.streams)
        self.progress = ProgressReader(bus, gateway, self._subscriptions.readers_of)
        self.listing = RequestListing(bus, self.records, self.progress, self._progress_in_log)
        self.retention = Retention(bus, retention_known)
        self.store_check = StoreCheck(bus, gateway, self.tasks)
        self._quiet = False  # at the last sweep, some open request had had no item for a while
        self._memory = MemoryCheck(bus, self.unstored.streams, lambda: self.unstored.open)
        own = lambda: self._subscriptions.own_readers  # noqa: E731
        self.queues = QueueMonitor(bus, metrics, settings.max_queue, own, name_in, counted, cell=number)
        self.open_of = Counter[str]()
        self._left_to_open: list[Callable[[], Awaitable[None]]] = [
            self.unstored.start,  # before what publishes to its streams after a reconnect
            partial(self._own.start, new=True),
            self.progress.open,
            partial(self.verdicts.open, self.tasks),
            partial(self._lookup.deleted.start, self.tasks),
        ]

    async def open(self) -> None:
        """If it fails, it can be called again, and continues where it failed.

        Raises:
            ServingError: a stream or a bucket cannot be read.
        """
        while self._left_to_open:
            await self._left_to_open[0]()
            del self._left_to_open[0]
        if self.opened:
            return
        with contextlib.suppress(NatsError, TimeoutError):
            await self.queues.poll()
        self.tasks.spawn(self.queues.run(), name="poll")
        self.tasks.spawn(self.retention.run(), name="retention")
        self.tasks.spawn(self._sweep_often(), name="sweep")
        self.bus.on_reconnect.append(self._look_for_lost)
        self.opened = True

    async def close(self) -> None:
        await self.tasks.aclose()
        if not self.opened:
            return
        self.bus.on_reconnect.remove(self._look_for_lost)
        await self.unstored.close()
        await self.verdicts.close()
        await self._lookup.deleted.stop()
        await self._subscriptions.close()

    @property
    def _own(self) -> TokenSubscription:
        return self._subscriptions.own

    @property
    def open_requests(self) -> int:
        return len(self._subscriptions)

    @property
    def readers(self) -> Iterable[InflightRequest]:
        """All open answers."""
        return self._subscriptions.readers

    def not_ready(self) -> list[str]:
        """Why a request could not be placed in this cell now, its workers aside; empty: it could."""
        if not (self.opened and self.bus.connected):  # nothing is known then of routers and workers
            return ["the broker is not connected"]
        reasons = []
        if self.store_check.failing:
            reasons.append("the broker stores nothing; is its disk full?")
        if stream := self.queues.lacks_consumer:
            reasons.append(f"a consumer of {stream} is missing on the broker; run 'penstock streams apply'")
        elif not self.queues.has_routers:
            reasons.append("no router takes requests; start one with 'penstock router'")
        return reasons

    @property
    def answers(self) -> bool:
        """Whether its broker is there, as far as this gateway knows: one that hangs is noticed after 2.5 s."""
        return self.opened and self.bus.connected and self.queues.answered

    @property
    def serves(self) -> bool:
        """Whether it takes new requests, its broker stores, and its routers take requests."""
        return self.active and self.answers and not self.store_check.failing and self.queues.has_routers

    def accepts(self, request: GenerateRequest) -> bool:
        """Whether a new request would be accepted now; where no router is there, it waits for one."""
        able = self.active and self.answers and not self.store_check.failing
        return able and self.queues.has_room_for(request)

    # --- accepting ---

    async def submit(
        self, request: GenerateRequest, *, owner: bool = True, streamed: Sequence[TokenItem] = ()
    ) -> InflightRequest:
        """Put a request into the log; returns when it is durable.

        Args:
            owner: the request has no other reader: it is cancelled if its acceptance is not confirmed.
            streamed: the tokens that it already has, if it comes from another cell.
        Raises:
            ServingError: it could not be stored, or too much of its tenant or class waits; it will not run.
        """
        self.queues.check_log(request.tenant)
        packed = self.queues.packs and not request.no_store
        payload = wire.encode(requests.packed(request) if packed else request)
        limit = self.bus.max_message - JOB_BYTES
        if len(payload) > limit and request.fallbacks:  # they are no reason to refuse it
            request = msgspec.structs.replace(request, fallbacks=())
            payload = wire.encode(requests.packed(request) if packed else request)
        if len(payload) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the prompt takes {len(payload)} bytes as a message; the broker carries {limit} (max_payload)",
            )
        # Content that may have to be stored again must stay readable.
        inflight, subscription, content = InflightRequest(request, bounded=not request.no_store), self._own, b""
        if request.no_store:
            await self._memory.check(request, len(payload))
            subscription = await self.unstored.subscription()
            content, payload = payload, wire.encode(self.unstored.without_content(request))
        self.queues.accept(inflight)
        inflight.turns = self._turns
        self.verdicts.follow(inflight)
        subscription.subscribe(inflight)  # before publishing: the first token may overtake the acknowledgement
        if self._charges.reserved:
            self._charges.began(inflight)
        now_ns = self.bus.clock.now_ns()
        waited_s = min(LIMITS_S, max(0.0, (now_ns - request.created_ns) / 1e9))  # for the limits of its key, say
        timeout = min(ACCEPT_S - waited_s, max(0.1, (request.deadline_ns - now_ns) / 1e9))
        kept: asyncio.Future[Ack] | None = None
        try:
            if content:  # in the same write as the request, and before it
                kept = await self.unstored.put(inflight, content, timeout)
                if self.bus.clustered:  # its stream may have no leader when that of requests has one
                    await kept
            if streamed:
                await self._put_streamed(request, streamed, timeout)
            ack = await self.publisher.publish(
                self.bus.subjects.request(request.model, request.priority.value, request.id),
                payload,
                request.id,
                headers=requests.headers_of(payload),
                timeout=timeout,
                insist=False,  # clients can retry; otherwise requests would pile up behind a full disk
            )
            if kept is not None:
                self.unstored.stored(request.id, await kept)
            await self._turns.resume()  # hundreds may be acknowledged together
        except BaseException:
            # It may be stored nevertheless: the acknowledgement may have been lost, and then a repeat reads its answer.
            # It cannot run without its content.
            if owner or (kept is not None and _was_refused(kept)):
                self.cancel_unfinished(inflight, "the acceptance was not confirmed")
                if inflight.cancelling:
                    self._unconfirmed[inflight] = time.monotonic()
            else:
                self.release(inflight)
            raise
        if ack.duplicate:  # a resend, a repeat, or a submission that another gateway had accepted before it crashed
            return await self._attach_repeated(inflight)
        inflight.stored_seq, inflight.stored_link = ack.seq, self.bus.reconnects
        return inflight

    async def _look_for_lost(self) -> None:
        if self._storing is None or self._storing.done():  # a running task checks again itself
            self._storing = self.tasks.spawn(self._store_lost_until_stored(), name="store-lost")

    async def _store_lost_until_stored(self) -> None:
        links = -1
        while links != self.bus.reconnects:
            links = self.bus.reconnects
            try:
                await self.store_lost_again()
            except (ServingError, NatsError, OSError, TimeoutError) as error:  # the disk may be full
                log.warning("requests_not_stored_again", error=repr(error))
                links = -1
                await asyncio.sleep(LOST_AGAIN_S)

    async def store_lost_again(self) -> None:
        """Store open requests again if the broker has lost them.

        A restarting broker drops a message that is damaged on disk and the rest of its block. After a power failure, it
        may drop the end of the stream. A router that knows such a request drops the repeat, and reads it if the request
        has lost its job, too. A router that does not know it continues it after its tokens.

        Raises:
            ServingError: the broker does not answer, or a request could not be stored.
        """
        links: dict[int, dict[int, InflightRequest]] = {}
        for each in self._subscriptions.own_readers:
            if each.stored_seq and not (each.ended or each.request.id in self._lookup.deleted):
                links.setdefault(each.stored_link, {})[each.stored_seq] = each
        lost = []
        for waiting in links.values():  # the broker may have lost messages between two links
            stored = {(seq, each.request.id) for seq, each in waiting.items()}
            found = await find_lost(self.bus, self.bus.subjects.stream("REQUESTS"), stored)
            lost += [waiting[seq] for seq, _ in sorted(found)]
        for inflight in lost:
            attempt = max(1, inflight.fold.attempt)  # a worker may be about to stream the first one
            request = msgspec.structs.replace(inflight.request, interrupted_attempt=attempt)
            if request.no_store:
                payload = wire.encode(self.unstored.without_content(request))
            else:
                payload = wire.encode(requests.packed(request) if self.queues.packs else request)
            subject = self.bus.subjects.request(request.model, request.priority.value, request.id)
            headers = requests.headers_of(payload)
            ack = await self.publisher.publish(subject, payload, request.id, headers=headers, timeout=ACCEPT_S)
            inflight.stored_seq, inflight.stored_link = ack.seq, self.bus.reconnects
        if lost:
            log.warning("requests_stored_again", stream="REQUESTS", requests=len(lost))

    async def _put_streamed(self, request: GenerateRequest, items: Sequence[TokenItem], timeout: float) -> None:
        """Publish the tokens that a request already has, as those of attempt 0."""
        for number, part in enumerate(portions(items, self.bus.max_message // 2)):
            await self.publisher.publish(
                self.bus.subjects.tokens(request.token_address),
                wire.encode(TokenBatch(self._gateway, 0, number, tuple(part))),
                f"{request.id}:{self._gateway}:{number}:streamed",  # each gateway stores them at its own address
                timeout=timeout,
            )

    async def _attach_repeated(self, inflight: InflightRequest) -> InflightRequest:
        """The log had the request already."""
        self._charges.repeated(inflight)
        self.unstored.drop(inflight)
        try:
            stored, record = await self.look_up(inflight.request.id)
        finally:
            self.release(inflight)
        return await self.attach(stored, record)

    def cancel_unfinished(self, inflight: InflightRequest, reason: str = "the client disconnected") -> None:
        """The client has disconnected or has everything. An unfinished request is cancelled, repeatedly until it ends.

        A gateway that is stopping cancels nothing: clients continue at other gateways. Nor does one that could not read
        or store the rest: its client was asked to read it later.
        """
        if inflight.ended or inflight.cut_off or self.stopped:
            self.release(inflight)
            return
        inflight.cancelling = reason
        self.metrics.of(inflight.request.model).cancelled.inc()
        self._spawn_cancel(inflight)

    def release(self, inflight: InflightRequest) -> None:
        """Stop reading, without cancelling."""
        self._unconfirmed.pop(inflight, None)
        if inflight.request.no_store and not self.unstored.release(inflight):  # its content may be stored again
            inflight.cancelling = "released"  # never sent
            inflight.cancel_sent = math.inf
        else:
            self._subscriptions.unsubscribe(inflight)
        self.verdicts.released(inflight)
        if inflight.paid is not None:
            self._charges.ended(inflight)

    def _spawn_cancel(self, inflight: InflightRequest) -> None:
        inflight.cancel_sent = time.monotonic()
        self.tasks.spawn(
            self.cancel(inflight.request.id, inflight.cancelling), name="cancel", on_failure=_not_cancelled
        )

    async def cancel_surely(self, request_id: str, reason: str) -> None:
        """Cancel a request with other readers: now, and repeatedly in the background until it has ended.

        The message is not stored: a router or worker that is being restarted does not receive it.
        """
        await self.cancel(request_id, reason)
        if self._cancelling < MAX_CANCELLING:
            self.tasks.spawn(self._cancel_again(request_id, reason), name="cancel", on_failure=_not_cancelled)

    async def _cancel_again(self, request_id: str, reason: str) -> None:
        self._cancelling += 1
        try:
            for _ in range(CANCEL_TRIES):
                await asyncio.sleep(CANCEL_AGAIN_S)
                if await self.records.find(request_id) is not None:
                    return
                await self.cancel(request_id, reason)
        finally:
            self._cancelling -= 1

    async def cancel(self, request_id: str, reason: str) -> None:
        if self.bus.connected:
            await self.bus.nc.publish(self.bus.subjects.cancel, wire.encode(control.Cancel(request_id, reason)))

    async def erase(self, request_id: str) -> None:
        """Have a router delete everything that the log holds of a request that has ended.

        Raises:
            ServingError: broker_unavailable: no router did it, or not all of it, or the broker's disk is full. To ask
                again is safe. Once it was noted, the request is not found any more, and routers delete the rest.
        """
        await check_stores(self.bus, self._gateway)
        try:
            reply = await self.bus.nc.request(self.bus.subjects.erase, request_id.encode(), timeout=ERASE_S)
            problem = control.decode_ok(reply.data).error
        except (NatsError, OSError, TimeoutError) as error:
            problem = f"no router answers ({error!r})"
        if problem:
            raise ServingError(
                Code.broker_unavailable, f"{request_id} is not deleted yet: {problem}; ask again", retry_after=1.0
            )

    # --- finding requests again ---

    async def look_up(self, request_id: str, sight: Sight = ALL, *, deleted: bool = False) -> StoredRequest:
        """An accepted request, by any gateway, and its record if it is over; see ``RequestLookup.find``."""
        return await self._lookup.find(request_id, sight, deleted=deleted)

    async def attach(
        self,
        request: GenerateRequest,
        record: done.Done | None = None,
        *,
        whole: bool = False,
        ordered: bool = True,
        last_attempt: int | None = None,
    ) -> InflightRequest:
        """Follow an accepted request from its first token on. It fails if the log cannot be read.

        Args:
            record: of one that is over: it is read instead of the token stream, if it has everything.
            whole: keep all items, and return when everything in the log has been read.
            ordered: the reader wants the tokens of several choices in the order in which they were computed, which a
                record does not have.
            last_attempt: as for ``TokenReassembler``.
        Raises:
            ServingError: the log cannot be read.
        """
        inflight = InflightRequest(request, bounded=not whole, last_attempt=last_attempt)
        inflight.turns = self._turns
        if record is not None and is_whole(record) and (request.n == 1 or not ordered):
            inflight.complete(done.items(record), ended_ns=record.timings.ended_ns)
            return inflight
        if record is None:
            self.verdicts.follow(inflight)
        subscription = await self._subscriptions.open(request.token_address)
        subscription.subscribe_from_start(inflight)
        if whole:
            try:
                await inflight.caught_up()
            except BaseException:
                self.release(inflight)
                raise
        return inflight

    async def _progress_in_log(self, request: GenerateRequest) -> control.Progress:
        inflight = await self.attach(request, whole=True)
        try:
            return progress_of(inflight)
        finally:
            self.release(inflight)

    async def answered(self, request: GenerateRequest) -> bool:
        """Whether the token stream has the whole answer of a request.

        Raises:
            ServingError: it cannot be read.
        """
        return (await self.read_again(request)).answered

    async def read_again(self, request: GenerateRequest, last_attempt: int | None = None) -> InflightRequest:
        """Everything that the token stream has of a request.

        Args:
            last_attempt: as for ``TokenReassembler``.
        Raises:
            ServingError: it cannot be read.
        """
        again = await self.attach(request, whole=True, last_attempt=last_attempt)
        self.release(again)
        return again

    # --- upkeep ---

    async def _sweep_often(self) -> None:
        """Each cell by itself: where a broker hangs, a sweep waits for it."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep(self.bus.clock.now_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed", cell=self.number)

    async def sweep(self, now_ns: int, now: float) -> None:
        """End what is overdue or whose record is there.

        Args:
            now_ns, now: Unix and monotonic time.
        """
        with contextlib.suppress(ServingError):  # the broker is away; the next sweep asks again
            await self._completion.complete_idle(self._subscriptions.readers, now)
        self.store_check.look(now, quiet=self._quiet, position=self._own.tail.position)
        quiet, open_ = False, Counter[str]()
        time_slice = TimeSlice()
        for inflight in self._subscriptions.readers:
            await time_slice.yield_if_spent()
            open_[inflight.request.model] += 1
            if inflight.quiet_s(now) >= QUIET_S and not inflight.cancelling:
                quiet = True
                if self.store_check.failing:
                    inflight.fail(unstored(inflight.request.id))
            late_ns = now_ns - inflight.request.deadline_ns
            if inflight.cancelling:
                if late_ns > CANCEL_FOR_NS:
                    self.unstored.drop(inflight)
                if inflight.ended or late_ns > CANCEL_FOR_NS:
                    self.release(inflight)
                elif now - inflight.cancel_sent > CANCEL_AGAIN_S:
                    self._spawn_cancel(inflight)
            elif late_ns > DEADLINE_GRACE_NS:
                _end_overdue(inflight, late_ns)
        self._quiet, self.open_of = quiet, open_
        due = [inflight for inflight, since in self._unconfirmed.items() if now - since > NEVER_STORED_S]
        if due and (self._looking is None or self._looking.done()):
            self._looking = self.tasks.spawn(self._release_never_stored(due), name="never-stored", on_failure=_not_read)
        await self._subscriptions.close_unused()

    async def _release_never_stored(self, due: Sequence[InflightRequest]) -> None:
        """Of requests that are cancelled as their acceptance was not confirmed, those that the log does not have.

        Nothing would ever end them.
        """
        for inflight in due:
            stored = await self.finder.is_stored(inflight.request.id, self.bus.clock.now_ns())
            if self._unconfirmed.pop(inflight, None) is not None and not stored:
                self.unstored.drop(inflight)
                self.release(inflight)


def _was_refused(done: "asyncio.Future[Ack]") -> bool:
    return done.done() and not done.cancelled() and isinstance(done.exception(), Refused)


def _end_overdue(inflight: InflightRequest, late_ns: int) -> None:
    if inflight.paused:
        if late_ns > ABORT_NS and inflight.abort is not None:
            inflight.abort()  # its client does not read: no message would reach it
    elif not inflight.ended and not inflight.behind:
        inflight.fail(ServingError(Code.deadline_exceeded, "the request did not finish before its deadline"))


def _not_read(error: BaseException) -> None:
    log.debug("unconfirmed_not_looked_up", error=repr(error))  # the next sweep tries again


def _not_cancelled(error: BaseException) -> None:
    log.debug("cancel_failed", error=repr(error))  # sent again by the sweep until the request ends
