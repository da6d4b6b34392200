"""What a gateway does for both of its APIs: accept requests into the log, follow their answers, find them again."""

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import GatewaySettings, served_names
from penstock.gateway.access.authentication import ALL, ANYONE, Caller, Guard, Sight, noted_in
from penstock.gateway.access.tenants import TenantTable
from penstock.gateway.admission.charges import Charges
from penstock.gateway.admission.idempotency import Claim, reclaim
from penstock.gateway.admission.poison_requests import Verdicts
from penstock.gateway.admission.queues import QUIET_S, QueueMonitor, StoreCheck, unstored
from penstock.gateway.admission.rate_limits.limiter import Limiter
from penstock.gateway.admission.storage import MemoryCheck, Retention
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.images import IMAGE_PATHS
from penstock.gateway.apis.responses.objects import InputTokens
from penstock.gateway.base.chat_objects import stopping
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import BOM, PrepareContext
from penstock.gateway.media.loader import MediaLoader
from penstock.gateway.request_log.completion import Completion
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.listing import ProgressReader, RequestListing, progress_of
from penstock.gateway.request_log.lookup import Records, RequestFinder, RequestLookup, StoredRequest, is_whole
from penstock.gateway.request_log.subscriptions import TokenSubscription, TokenSubscriptions
from penstock.gateway.request_log.unstored import UnstoredRequests
from penstock.gateway.service.conversations import Conversations
from penstock.gateway.service.fleet import FleetView, ServedLately, named_in
from penstock.gateway.service.preparation import RequestPreparer
from penstock.infra.bus.audit import Auditor
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.forget import check_stores
from penstock.infra.bus.publisher import Ack, Publisher, Refused
from penstock.infra.bus.tasks import Tasks
from penstock.infra.model.modeldir import ModelDir, split_name
from penstock.infra.process.turns import TimeSlice, TurnBudget
from penstock.schemas import control, done, wire
from penstock.schemas.audit import KEYS_LOST, AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import EMBEDDING, GenerateRequest, Priority

log = structlog.get_logger("gateway")

T = TypeVar("T")

SWEEP_S = 0.25
LIMITS_S = 9.0  # of ACCEPT_S, what may have been spent before a request is sent
ACCEPT_S = 14.0  # longer than an election in a cluster (4 to 9 s) and what follows it; a refusal comes within 15 s
CANCEL_AGAIN_S = 1.0
ERASE_S = 20.0  # a router reads the jobs of the time in which the request ran
CANCEL_TRIES = 30  # of a request with other readers; by then its router and worker have been restarted
MAX_CANCELLING = 1000  # such requests at a time; those beyond are cancelled once
CANCEL_FOR_NS = 60_000_000_000  # beyond the deadline; by then the request has been ended
DEADLINE_GRACE_NS = 500_000_000  # the worker's own error for a missed deadline comes first
ABORT_NS = 5_000_000_000  # beyond the deadline, for a client that still has not read what there is
JOB_BYTES = 65_536  # what a job adds to its request: the decision and its score table


class Gateway:
    """One replica. ``open`` it, use it from one event loop, ``close`` it.

    Attributes:
        draining: no longer ready; requests that still arrive are served.
        stopped: open requests were left to other gateways.
        answering: open requests whose answers go out over HTTP.
        turns: shares the event loop's turns between new requests and running answers.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        models: Sequence[ModelDir],
        settings: GatewaySettings,
        metrics: GatewayMetrics,
    ) -> None:
        self.id = f"{settings.name or 'gateway'}-{secrets.token_hex(4)}"
        self.bus = bus
        self.settings = settings
        self.metrics = metrics
        self.started_ns = time.time_ns()
        self.draining = False
        self.stopped = False
        self.answering: set[InflightRequest] = set()
        self.turns = TurnBudget()
        bus.nc.expects_more = self.turns.expects_new
        self.tasks: Tasks = bus.tasks.group("gateway")
        self.audit = Auditor(bus, self.tasks)
        self.tenants = TenantTable(bus)
        noted = noted_in(settings.state_dir, settings.namespace)
        self.guard = Guard(
            bus,
            self.tenants.known,
            always=settings.require_keys,
            noted=noted,
            own=settings.api_key,
            on_lost=self._keys_lost,
        )
        self.tenants.on_changed = self.guard.tenants_changed
        named = named_models(models, settings)
        self.fleet = FleetView(bus, named, self.id, settings, metrics, self.tasks, self._open_models)
        self.records = Records(bus)
        self.limiter = Limiter(bus, self.id)
        self._verdicts = Verdicts(bus)
        self._served_lately = ServedLately(bus)
        finder = RequestFinder(bus)
        self.charges = Charges(self.limiter, self.records, finder, self.tasks, bus.clock)
        self.publisher = publisher
        self._subscriptions = TokenSubscriptions(bus, self.id, self.tasks)
        self._cancelling = 0
        self.unstored = UnstoredRequests(
            bus,
            publisher,
            self.id,
            settings.no_store_grace_s,
            subscriptions=self._subscriptions,
            records=self.records,
            tasks=self.tasks,
        )
        self._completion = Completion(self.records, self.read_again, self.tasks)
        self._lookup = RequestLookup(bus, self.records, finder, settings.no_store_grace_s, self.unstored.streams)
        self.conversations = Conversations(
            self._lookup, self._answered, self.fleet.detokenizer, settings.max_body_bytes
        )
        loader = MediaLoader(bus, settings, metrics, self.unstored.keep_medium)
        self._preparer = RequestPreparer(self.fleet, loader, self.conversations, self.id, settings, bus.clock.now_ns)
        self.progress = ProgressReader(bus, self.id, self._subscriptions.readers_of)
        self.listing = RequestListing(bus, self.records, self.progress, self._progress_in_log)
        self._retention = Retention(bus, metrics)
        self._store_check = StoreCheck(bus, self.id, self.tasks)
        self._quiet = False  # at the last sweep, some open request had had no item for a while
        self._memory = MemoryCheck(bus, self.unstored.streams, lambda: self.unstored.open)
        own, name_in = (lambda: self._subscriptions.own_readers), self.fleet.name_in
        self._queue_monitor = QueueMonitor(bus, metrics, settings.max_queue, own, name_in)

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        await self.unstored.start()  # before what publishes to its streams after a reconnect
        await self._own.start(new=True)
        await self.progress.open()
        await self.fleet.open()
        await self.guard.open(self.tasks)
        await self.limiter.open(self.tasks)
        await self._verdicts.open(self.tasks)
        await self._lookup.deleted.start(self.tasks)
        with contextlib.suppress(NatsError, TimeoutError):
            await self._queue_monitor.poll()
        self.tasks.spawn(self._sweep(), name="sweep")
        self.tasks.spawn(self._queue_monitor.run(), name="poll")
        self.tasks.spawn(self._retention.run(), name="retention")

    async def close(self) -> None:
        await self.tasks.aclose()
        await self.unstored.close()
        await self._preparer.close()
        await self.fleet.close()
        await self.guard.close()
        await self.limiter.close()
        await self._verdicts.close()
        await self._lookup.deleted.stop()
        await self._subscriptions.close()

    def _keys_lost(self, lost: bool) -> None:
        self.metrics.keys_lost.set(lost)
        if lost:  # there, `penstock doctor` sees it without an address of this gateway
            self.audit.note(AuditEntry(KEYS_LOST, self.id))

    @property
    def _own(self) -> TokenSubscription:
        return self._subscriptions.own

    @property
    def open_requests(self) -> int:
        return len(self._subscriptions)

    @property
    def has_routers(self) -> bool:
        """Whether some router takes requests."""
        return self._queue_monitor.has_routers

    @property
    def lacks_consumer(self) -> str:
        """The stream whose consumers for routers are missing; "": none."""
        return self._queue_monitor.lacks_consumer

    def not_ready(self) -> list[str]:
        """Why a request could not be served now; empty: ready."""
        reasons = ["this gateway is shutting down"] if self.draining else []
        if not self.bus.connected:  # nothing is known then of routers and workers
            return [*reasons, "the broker is not connected"]
        if self._store_check.failing:
            reasons.append("the broker stores nothing; is its disk full?")
        if stream := self.lacks_consumer:
            reasons.append(f"a consumer of {stream} is missing on the broker; run 'penstock streams apply'")
        elif not self._queue_monitor.has_routers:
            reasons.append("no router takes requests; start one with 'penstock router'")
        if lacks := self.fleet.lacks:
            reasons.append(f"no {lacks} worker is there, without which the others run no request; start one")
        elif not self.fleet.has_worker():
            names = " or ".join(repr(model.name) for model in self.fleet.models) or "a model"
            reasons.append(f"no worker serves {names}; start one with 'penstock worker'")
        return reasons

    # --- accepting ---

    async def prepare(
        self,
        endpoint: str,
        body: bytes,
        *,
        no_store: bool = False,
        caller: Caller = ANYONE,
    ) -> PreparedRequest:
        """
        Args:
            no_store: as if the body asked for it.
            caller: whose request it becomes.
        Raises:
            ServingError: the body cannot be served, or the queue is full.
        """
        if self.stopped:
            raise stopping("")
        body = body.removeprefix(BOM)
        self._store_check.check()
        self._queue_monitor.check_log()
        if self._queue_monitor.class_matters:
            await self.run_for(body, self._queue_monitor.check_class, body)
        try:
            return await self._preparer.prepare(endpoint, body, no_store=no_store, caller=caller)
        except ServingError as error:
            without_tokens = endpoint in (EMBEDDING, *IMAGE_PATHS)
            if error.code is Code.model_not_found and (without_tokens or self.fleet.learns):
                named = await self.run_for(body, named_in, body)
                if named and caller.may_name(named):
                    await self._served_lately.check(endpoint if without_tokens else "", named)
            raise

    async def input_tokens(self, body: bytes, caller: Caller = ANYONE) -> InputTokens:
        """Tokens of the prompt of a response, the conversation before it included.

        Raises:
            ServingError: the body cannot be served.
        """
        return InputTokens(await self._preparer.count_response(body, caller))

    async def compute(self, work: Callable[[bytes, PrepareContext], T], body: bytes, caller: Caller = ANYONE) -> T:
        """What a body says by itself, such as its number of tokens.

        Raises:
            ServingError: the body cannot be served.
        """
        return await self._preparer.compute(work, body, caller)

    async def run_for(self, body: bytes, work: Callable[..., T], *args: Any) -> T:
        """``work`` on a body, in a thread if that is large."""
        return await self._preparer.run_for(body, work, *args)

    def accepts_submissions(self) -> bool:
        """Whether a submission should be taken now."""
        return not (self.draining or self._store_check.failing) and self._queue_monitor.has_room

    def room(self, priority: Priority) -> int:
        """How many more requests of a class would be taken."""
        return self._queue_monitor.room(priority)

    def hurry(self, waits: bool) -> None:
        """Whether work waits for the next place in a queue: then places are looked for more often."""
        self._queue_monitor.hurried = waits

    async def submit(self, request: GenerateRequest, *, owner: bool = True) -> InflightRequest:
        """Put a request into the log; returns when it is durable.

        Args:
            owner: the request has no other reader: it is cancelled if its acceptance is not confirmed.
        Raises:
            ServingError: it could not be stored, or too much of its tenant or class waits; it will not run.
        """
        self._queue_monitor.check_log(request.tenant)
        request = await self._verdicts.check(request)
        payload = wire.encode(request)
        limit = self.bus.max_message - JOB_BYTES
        if len(payload) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the prompt takes {len(payload)} bytes as a message; the broker carries {limit} (max_payload)",
            )
        # What is kept to be put again is kept to be read, too.
        inflight, subscription, content = InflightRequest(request, bounded=not request.no_store), self._own, b""
        if request.no_store:
            await self._memory.check(request, len(payload))
            subscription = await self.unstored.subscription()
            content, payload = payload, wire.encode(self.unstored.without_content(request))
        self._queue_monitor.accept(request.priority, request.model)
        inflight.turns = self.turns
        self._verdicts.follow(inflight)
        subscription.subscribe(inflight)  # before publishing: the first token may overtake the acknowledgement
        if self.charges.reserved:
            self.charges.began(inflight)
        now_ns = self.bus.clock.now_ns()
        waited_s = min(LIMITS_S, max(0.0, (now_ns - request.created_ns) / 1e9))  # for the limits of its key, say
        timeout = min(ACCEPT_S - waited_s, max(0.1, (request.deadline_ns - now_ns) / 1e9))
        kept: asyncio.Future[Ack] | None = None
        try:
            if content:  # in the same write as the request, and before it
                kept = await self.unstored.put(inflight, content, timeout)
                if self.bus.clustered:  # its stream may have no leader when that of requests has one
                    await kept
            ack = await self.publisher.publish(
                self.bus.subjects.request(request.model, request.priority.value, request.id),
                payload,
                request.id,
                timeout=timeout,
                insist=False,  # clients can retry; otherwise requests would pile up behind a full disk
            )
            if kept is not None:
                await kept
            await self.turns.resume()  # hundreds may be acknowledged together
        except BaseException:
            # It may be stored nevertheless: the acknowledgement may have been lost, and then a repeat reads its answer.
            # It cannot run without its content.
            if owner or (kept is not None and _was_refused(kept)):
                self.cancel_unfinished(inflight, "the acceptance was not confirmed")
            else:
                self.release(inflight)
            raise
        if ack.duplicate:  # a resend, a repeat, or a submission that another gateway had accepted before it crashed
            return await self._attach_repeated(inflight)
        return inflight

    async def _attach_repeated(self, inflight: InflightRequest) -> InflightRequest:
        """The log had the request already."""
        self.charges.repeated(inflight)
        self.unstored.drop(inflight)
        try:
            stored, record = await self.look_up(inflight.request.id)
        finally:
            self.release(inflight)
        return await self.attach(stored, record)

    def cancel_unfinished(self, inflight: InflightRequest, reason: str = "the client disconnected") -> None:
        """The client has disconnected or has everything. An unfinished request is cancelled, repeatedly until it ends.

        A gateway that is stopping cancels nothing: clients continue at other gateways. Nor does one that could not read
        or store the rest: its client was told to ask for it later.
        """
        if inflight.ended or inflight.cut_off or self.stopped:
            self.release(inflight)
            return
        inflight.cancelling = reason
        self.metrics.of(inflight.request.model).cancelled.inc()
        self._spawn_cancel(inflight)

    def release(self, inflight: InflightRequest) -> None:
        """Stop reading, without cancelling."""
        if inflight.request.no_store and self.unstored.holds(inflight):  # what was streamed may have to be put again
            inflight.cancelling = "released"  # never sent
            inflight.cancel_sent = math.inf
        else:
            self._subscriptions.unsubscribe(inflight)
            if inflight.request.no_store:
                self.unstored.released(inflight)
        self._verdicts.released(inflight)
        if inflight.paid is not None:
            self.charges.ended(inflight)

    def stop(self) -> None:
        """Leave all requests to the pipeline: each open answer ends with the id from which it can be continued."""
        self.stopped = True
        for inflight in self.answering:
            inflight.fail(stopping(inflight.request.id))

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
                again is safe. Once it was noted, nobody finds the request, and routers delete the rest.
        """
        await check_stores(self.bus, self.id)
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
        inflight.turns = self.turns
        if record is not None and is_whole(record) and (request.n == 1 or not ordered):
            inflight.complete(done.items(record))
            return inflight
        if record is None:
            self._verdicts.follow(inflight)
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

    async def _answered(self, request: GenerateRequest) -> bool:
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

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(self.bus.clock.now_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed")

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        with contextlib.suppress(ServingError):  # the broker is away; the next sweep asks again
            await self._completion.complete_idle(self._subscriptions.readers, now)
        self._store_check.look(now, quiet=self._quiet, position=self._own.tail.position)
        self.fleet.refresh()
        quiet, open_ = False, Counter[str]()
        time_slice = TimeSlice()
        for inflight in self._subscriptions.readers:
            await time_slice.yield_if_spent()
            open_[inflight.request.model] += 1
            if inflight.quiet_s(now) >= QUIET_S and not inflight.cancelling:
                quiet = True
                if self._store_check.failing:
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
        self._quiet = quiet
        for model in {*open_, *self.metrics.models}:
            if open_[model] or self.fleet.counted(model):
                self.metrics.of(model).open.set(open_[model])
            else:
                self.metrics.forget(model)
        await self._subscriptions.close_unused()

    def _open_models(self) -> set[str]:
        return {inflight.request.model for inflight in self._subscriptions.readers}


def named_models(models: Sequence[ModelDir], settings: GatewaySettings) -> list[tuple[tuple[str, ...], ModelDir]]:
    """The models that the operator named, with the names of each for clients."""
    names = served_names(settings.served_model_name)
    if names and len(models) == 1:
        return [(names, models[0])]
    given = [served_names(split_name(each)[0]) for each in settings.model]
    given = given if len(given) == len(models) else [()] * len(models)
    return [(own or (model.name,), model) for own, model in zip(given, models, strict=True)]


def _was_refused(done: "asyncio.Future[Ack]") -> bool:
    return done.done() and not done.cancelled() and isinstance(done.exception(), Refused)


def _end_overdue(inflight: InflightRequest, late_ns: int) -> None:
    if inflight.paused:
        if late_ns > ABORT_NS and inflight.abort is not None:
            inflight.abort()  # its client does not read: no message would reach it
    elif not inflight.ended and not inflight.behind:
        inflight.fail(ServingError(Code.deadline_exceeded, "the request did not finish before its deadline"))


def _not_cancelled(error: BaseException) -> None:
    log.debug("cancel_failed", error=repr(error))  # sent again by the sweep until the request ends


async def submit_claimed(
    gateway: Gateway, tenant: str, name: str, body: bytes | None, request: GenerateRequest, claimed: Claim
) -> InflightRequest:
    """Run a request under a claim that another gateway made before it crashed, or whose request was deleted.

    In the first case the claim's own id is used: two gateways that find this at once store it once. In the second the
    log discards that id, and the request runs under its own.

    Args:
        name, body: as for ``claim``.
    Raises:
        ServingError: idempotency_conflict; or it could not be stored.
    """
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed)
    try:
        return await _submit_as(gateway, request, claim.request)
    except ServingError as error:
        if error.code is not Code.request_not_found:
            raise
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed, deleted=True)
    return await _submit_as(gateway, request, claim.request)


async def _submit_as(gateway: Gateway, request: GenerateRequest, request_id: str) -> InflightRequest:
    """Submit a request under another id, which is paid by what was reserved for its own."""
    gateway.charges.rename(request.id, request_id)
    try:
        return await gateway.submit(msgspec.structs.replace(request, id=request_id), owner=False)
    finally:
        gateway.charges.rename(request_id, request.id)  # if it was not submitted
