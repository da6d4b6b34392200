"""What a gateway does for both of its doors: accept requests into the log, follow their answers, find them again."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import structlog
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig

from configs.settings import GatewaySettings
from gateway.admission.log_capacity import LogCapacity
from gateway.admission.queues import QueueLimits, class_of
from gateway.admission.retention import Retention
from gateway.images.model_registry import ROLE, DiffusionModelRegistry
from gateway.images.prepare import PATHS, prepare_images
from gateway.log.completion import Completion
from gateway.log.find import RequestFinder
from gateway.log.inflight import InflightRequest
from gateway.log.lookup import RequestLookup, StoredRequest
from gateway.log.progress import Progress
from gateway.log.records import Records, is_whole
from gateway.log.subscription import TokenSubscription
from gateway.media.loader import MediaLoader
from gateway.metrics import Metrics
from gateway.openai.common import CHAT
from gateway.openai.prepare import (
    PendingMediaRequest,
    PreparedRequest,
    attach_media,
    prepare_chat,
    prepare_completion,
)
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.responses import stopping
from gateway.parsers.registry import ParserNames, agreed_parsers
from gateway.roster import Roster, Sorted
from infra.bus.connection import Bus
from infra.bus.publisher import Publisher
from infra.bus.registry import FleetWatch, RegisteredWorker
from infra.bus.tasks import Tasks
from infra.model.modeldir import ModelDir
from schemas import control, done, wire
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest, Priority

log = structlog.get_logger("gateway")

T = TypeVar("T")

SWEEP_S = 0.25
POLL_S = 0.5
ACCEPT_S = 15.0  # longer than an election in a cluster (4 to 9 s) and what follows it
CANCEL_AGAIN_S = 1.0
SILENT_S = 2.0
DEADLINE_GRACE_NS = 500_000_000  # the worker's own word on a missed deadline comes first
LARGE_BODY = 8_192  # bytes; larger ones are tokenised in a thread: 1 KB takes 0.3 ms
LARGE_PROMPT = 8_192  # tokens; longer ones with images get their block names in a thread
THREADS = 2  # that prepare large bodies: each takes its turn with the event loop
ABORT_NS = 5_000_000_000  # beyond the deadline, for a client that still has not read what there is
JOB_BYTES = 65_536  # what a job adds to its request: the decision and its score table


class Gateway:
    """One replica. ``open`` it, use it from one event loop, ``close`` it."""

    def __init__(
        self, bus: Bus, publisher: Publisher, model: ModelDir, settings: GatewaySettings, metrics: Metrics
    ) -> None:
        self.id = f"{settings.name or 'gateway'}-{secrets.token_hex(4)}"
        self.bus = bus
        self.model = model
        self.settings = settings
        self.metrics = metrics
        self.names = tuple(n for n in settings.served_model_name.split(",") if n) or (model.name,)
        self.diffusion_models = DiffusionModelRegistry()
        self.fleet = FleetWatch(bus, joined=self._joined, left=self._left)
        self.started_ns = time.time_ns()
        self.draining = False  # not ready any more; what is asked all the same is served
        self.stopped = False  # what is open was left to other gateways
        self.answering: set[InflightRequest] = set()  # over HTTP
        self.tasks: Tasks = bus.tasks.group("gateway")
        self.records = Records(bus)
        self._completion = Completion(self.records)
        self._publisher = publisher
        self._tokens = TokenSubscription(bus, self.id, self.tasks)
        self._other_tokens: dict[str, TokenSubscription] = {}
        self._opening = asyncio.Lock()
        self._finder = RequestFinder(bus, self.tasks)
        self._lookup = RequestLookup(self.records, self._finder)
        self.progress = Progress(bus, self.id, self._tokens.readers_of)
        self._sharded = True  # routers read shards of REQUESTS; not so where an earlier release applied its streams
        self._threads = ThreadPoolExecutor(THREADS, "prepare")
        self._media_loader = MediaLoader(bus, settings, metrics)
        self._disagreed: set[frozenset[ParserNames]] = set()  # of which it was warned
        self._roster = Roster(self.names[0], model.tokenizer_digest, metrics)
        self._sorted: Sorted | None = None  # both are made when they are needed, after the fleet has changed
        self._current: PrepareContext | None = None
        self._log_capacity = LogCapacity(bus, metrics)
        self._retention = Retention(bus, metrics)
        self._queues = QueueLimits(settings.max_queue, self._unstarted)
        self._routers = False
        self._delivered: dict[str, int] = {}

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        await self._tokens.start(since_ns=self.started_ns)
        await self.progress.open()
        await self.fleet.start()
        with contextlib.suppress(NatsError, TimeoutError):
            await self._poll_queue()
        self.tasks.spawn(self._sweep(), name="sweep")
        self.tasks.spawn(self._poll(), name="poll")
        self.tasks.spawn(self._retention.run(), name="retention")

    async def close(self) -> None:
        await self.tasks.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for subscription in (self._tokens, *self._other_tokens.values()):
            await subscription.close()

    # --- what is known ---

    @property
    def open_requests(self) -> int:
        return len(self._tokens) + sum(map(len, self._other_tokens.values()))

    def not_ready(self) -> list[str]:
        """Why a request could not be served now; empty: it could."""
        reasons = []
        if not self.bus.connected:
            reasons.append("the broker is not connected")
        if not self._routers:
            reasons.append("no router takes requests; start one with 'penstock router'")
        diffusion_only = not self.settings.model and self.diffusion_models.ready()  # nobody asked for a language model
        if not diffusion_only and not self._known_workers().ready:
            reasons.append(f"no worker serves {self.names[0]!r}; start one with 'penstock worker'")
        if self.draining:
            reasons.append("this gateway is shutting down")
        return reasons

    def _serves(self, member: RegisteredWorker) -> bool:
        if member.registration.role == ROLE:
            return False
        return member.registration.model == self.names[0] or self.names[0] in member.registration.aliases

    def _joined(self, member: RegisteredWorker) -> None:
        self.diffusion_models.put(member.registration)
        self._sorted = self._current = None

    def _left(self, member: RegisteredWorker, why: str) -> None:
        log.info("worker_left", worker=member.registration.worker, why=why)
        self.diffusion_models.remove(member.registration.worker)
        self._sorted = self._current = None

    @property
    def _prepare_context(self) -> PrepareContext:
        if self._current is None:
            self._current = self._make_prepare_context()
        return self._current

    def _known_workers(self) -> Sorted:
        if self._sorted is None:
            serving = (m.registration for m in self.fleet.members.values() if self._serves(m))
            self._sorted = self._roster.sort(serving)
        return self._sorted

    def _make_prepare_context(self) -> PrepareContext:
        workers, revision, _ = self._known_workers()
        parsers, named = agreed_parsers(workers)
        if len(named) > 1 and named not in self._disagreed:
            self._disagreed.add(named)
            log.warning("workers_name_different_parsers", parsers=sorted(named), used=parsers)
        return PrepareContext(
            self.model,
            self.names,
            self.id,
            block_size=workers[0].block_size if workers else self.settings.block_size,
            default_max_tokens=self.settings.default_max_tokens,
            default_deadline_s=self.settings.default_deadline_s,
            worker_max_model_len=max((w.max_model_len for w in workers), default=0),
            revision=revision if workers else "",
            max_images=self.settings.max_images,
            logits_processors=frozenset(name for w in workers for name in w.logits_processors) if workers else None,
            parsers=parsers if any(parsers) else None,
            special_tokens_as_text=self.settings.special_tokens_in_messages == "text",
        )

    # --- in ---

    async def prepare(self, endpoint: str, body: bytes, request_id: str | None = None) -> PreparedRequest:
        """
        Raises:
            ServingError: the body cannot be served, or the queue is full.
        """
        self.check_capacity(body)
        if endpoint in PATHS:
            return prepare_images(
                endpoint,
                body,
                self.diffusion_models.known,
                gateway=self.id,
                default_deadline_s=self.settings.default_deadline_s,
                now_ns=time.time_ns(),
                request_id=request_id,
            )
        prepare = prepare_chat if endpoint == CHAT else prepare_completion
        context, now_ns = self._prepare_context, time.time_ns()
        if len(body) <= LARGE_BODY:
            prepared = prepare(body, context, now_ns=now_ns, request_id=request_id)
        else:
            prepared = await self._in_thread(prepare, body, context, now_ns=now_ns, request_id=request_id)
        return await self._with_media(prepared, context) if isinstance(prepared, PendingMediaRequest) else prepared

    async def _in_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **options))

    async def _with_media(self, pending: PendingMediaRequest, context: PrepareContext) -> PreparedRequest:
        """Load and store the media of a request."""
        assert context.model.vision is not None
        left_s = pending.deadline_s - (time.time_ns() - pending.now_ns) / 1e9
        try:
            async with asyncio.timeout(left_s):
                media = await self._media_loader.load(pending.prompt.media, context.model.vision, left_s)
        except TimeoutError:
            raise ServingError(Code.deadline_exceeded, "the images did not arrive before the deadline") from None
        if len(pending.prompt.tokens) <= LARGE_PROMPT:
            return attach_media(pending, media, context)
        return await self._in_thread(attach_media, pending, media, context)

    def accepts_submissions(self) -> bool:
        """Whether a submission should be taken now."""
        if self.draining:
            return False
        try:
            self._log_capacity.check()
        except ServingError:
            return False
        return not (self._queues.near and self._queues.full)

    def check_capacity(self, body: bytes) -> None:
        """
        Args:
            body: not checked yet; it says of which class it is.
        Raises:
            ServingError: queue_full or shutting_down.
        """
        if self.stopped:
            raise stopping("")
        self._log_capacity.check()
        if self._queues.near:
            self._queues.check(class_of(body))

    def _unstarted(self, priority: Priority) -> int:
        """Open requests of a class of which no worker has said anything."""
        return sum(each.fold.attempt < 0 and each.request.priority is priority for each in self._tokens.readers)

    async def submit(self, request: GenerateRequest, *, owner: bool = True) -> InflightRequest:
        """Put a request into the log; returns when it is durable.

        Args:
            owner: nobody else knows of the request: if its acceptance is not confirmed it is cancelled.
        Raises:
            ServingError: it could not be stored, or its tenant has too much waiting (queue_full); it will not run.
        """
        self._log_capacity.check(request.tenant)
        payload = wire.encode(request)
        limit = self.bus.max_message - JOB_BYTES
        if len(payload) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the prompt takes {len(payload)} bytes as a message; the broker carries {limit} (max_payload)",
            )
        inflight = InflightRequest(request)
        self._tokens.subscribe(inflight)  # before publishing: the first token may overtake the acknowledgement
        self._queues.accepted(request.priority)
        try:
            ack = await self._publisher.publish(
                self.bus.subjects.request(request.model, request.priority.value, request.id if self._sharded else ""),
                payload,
                request.id,
                timeout=min(ACCEPT_S, max(0.1, (request.deadline_ns - time.time_ns()) / 1e9)),
                insist=False,  # a client can come again, and others would pile up behind a full disk
            )
        except BaseException:
            # It may be stored all the same (the acknowledgement was lost).
            if owner:
                self.cancel_unfinished(inflight, "the acceptance was not confirmed")
            else:
                self.release(inflight)
            raise
        if ack.duplicate:  # sent again by us, or a repeat, or a submission that a gateway had taken before it died
            stored, record = await self.look_up(request.id)
            self.release(inflight)
            return await self.attach(stored, record)
        return inflight

    def cancel_unfinished(self, inflight: InflightRequest, reason: str = "the client disconnected") -> None:
        """The client has gone or has everything. An unfinished request is cancelled, again until it ends.

        Not by a gateway that stops: the request is then somebody else's to read.
        """
        if inflight.ended or self.stopped:
            self._subscription_of(inflight).unsubscribe(inflight)
            return
        inflight.cancelling = True
        self.metrics.cancelled.inc()
        self._spawn_cancel(inflight, reason)

    def stop(self) -> None:
        """Leave all requests to the pipeline: each open answer ends with the id at which it goes on."""
        self.stopped = True
        for inflight in self.answering:
            inflight.fail(stopping(inflight.request.id))

    def release(self, inflight: InflightRequest) -> None:
        """Stop watching without cancelling: the reader was only a second one."""
        self._subscription_of(inflight).unsubscribe(inflight)

    def _unwatch(self, inflight: InflightRequest) -> None:
        self._subscription_of(inflight).unsubscribe(inflight)

    def _subscription_of(self, inflight: InflightRequest) -> TokenSubscription:
        return self._other_tokens.get(inflight.request.gateway, self._tokens)

    def _spawn_cancel(self, inflight: InflightRequest, reason: str) -> None:
        inflight.cancel_sent = time.monotonic()
        self.tasks.spawn(self.cancel(inflight.request.id, reason), name="cancel", on_failure=_not_cancelled)

    async def cancel(self, request_id: str, reason: str) -> None:
        if self.bus.connected:
            await self.bus.nc.publish(self.bus.subjects.cancel, wire.encode(control.Cancel(request_id, reason)))

    # --- finding requests again ---

    async def find(self, request_id: str, tenant: str | None = None) -> GenerateRequest:
        """An accepted request, by any gateway; see ``RequestLookup.find``."""
        return (await self.look_up(request_id, tenant)).request

    async def look_up(self, request_id: str, tenant: str | None = None) -> StoredRequest:
        """An accepted request, by any gateway, and its record if it is over; see ``RequestLookup.find``."""
        return await self._lookup.find(request_id, tenant)

    async def attach(
        self, request: GenerateRequest, record: done.Done | None = None, *, whole: bool = False, ordered: bool = True
    ) -> InflightRequest:
        """Follow an accepted request from its first token on. The in-flight request fails if the log cannot be read.

        Args:
            record: of one that is over: it is read instead of the token stream, if it has everything.
            ordered: the reader wants the tokens of several choices as they followed each other, which a record
                does not tell.
            whole: keep everything, and return when all that the log has is here.
        Raises:
            ServingError: the log cannot be read.
        """
        inflight = InflightRequest(request, bounded=not whole)
        if record is not None and is_whole(record) and (request.n == 1 or not ordered):
            inflight.complete(done.items(record))
            return inflight
        subscription = self._tokens if request.gateway == self.id else await self._subscribed(request.gateway)
        subscription.subscribe_from_start(inflight)
        if whole:
            try:
                await inflight.caught_up()
            except BaseException:
                self.release(inflight)
                raise
        return inflight

    async def _subscribed(self, gateway: str) -> TokenSubscription:
        """The tokens of another gateway."""
        async with self._opening:
            subscription = self._other_tokens.get(gateway)
            if subscription is None:
                subscription = TokenSubscription(self.bus, gateway, self.tasks)
                await subscription.start(since_ns=time.time_ns())
                self._other_tokens[gateway] = subscription
            return subscription

    async def outcome(self, request: GenerateRequest) -> done.Done | None:
        """The terminal event, if there is one."""
        return await self.records.find(request.id) or await self.records.find_unrecorded(request)

    # --- upkeep ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(time.time_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed")

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        open_ = [
            inflight
            for subscription in (self._tokens, *self._other_tokens.values())
            for inflight in subscription.readers
        ]
        with contextlib.suppress(ServingError):  # the broker is away; the next sweep asks again
            await self._completion.complete_idle(open_, now)
        self.fleet.expire()
        if self._current is None:  # what workers are refused for, or disagree on, is said also while nobody asks
            self._current = self._make_prepare_context()
        for subscription in (self._tokens, *self._other_tokens.values()):
            for inflight in subscription.readers:
                late_ns = now_ns - inflight.request.deadline_ns
                if inflight.cancelling:
                    if inflight.ended or late_ns > 60_000_000_000:
                        subscription.unsubscribe(inflight)
                    elif now - inflight.cancel_sent > CANCEL_AGAIN_S:
                        self._spawn_cancel(inflight, "repeated")
                elif late_ns > DEADLINE_GRACE_NS:
                    _overdue(inflight, late_ns)
        for gateway, subscription in list(self._other_tokens.items()):
            if not subscription:
                del self._other_tokens[gateway]
                await subscription.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._poll_queue()
            except Exception as error:
                self._routers = False
                log.debug("queue_unknown", error=repr(error))

    async def _poll_queue(self) -> None:
        """How many requests no router has placed yet, and whether any router asks for more."""
        before, queued = self._queues.begin_poll(), dict.fromkeys(Priority, 0)
        routers, consumers = False, []
        for priority in Priority:
            name = f"router-{priority.value}"
            info = await self.bus.js.consumer_info(self.bus.subjects.stream("REQUESTS"), name, timeout=2.0)
            consumers.append(info)
            queued[priority] = (info.num_pending or 0) + (info.num_ack_pending or 0)
            delivered = info.delivered.consumer_seq if info.delivered else 0
            # Full of work, a router has no request waiting for the moment, but it moves on.
            routers |= bool(info.num_waiting) or delivered > self._delivered.get(name, delivered)
            self._delivered[name] = delivered
        self._queues.polled(queued, before)
        self._routers = routers
        # Not before 'penstock streams apply' of this release.
        self._sharded = all(any(map(self.bus.subjects.is_sharded, _filters(info.config))) for info in consumers)
        self.metrics.queued.set(self._queues.total)
        await self._log_capacity.refresh(consumers, self._unended())
        self.metrics.open.set(self.open_requests)

    def _unended(self) -> Iterator[tuple[str, int]]:
        """Tenants of open requests, and bytes of their prompts."""
        for inflight in self._tokens.readers:
            if not inflight.ended:
                yield inflight.request.tenant, len(inflight.request.prompt)


def _filters(config: ConsumerConfig) -> list[str]:
    return config.filter_subjects or [config.filter_subject or ""]


def _overdue(inflight: InflightRequest, late_ns: int) -> None:
    if inflight.paused:
        if late_ns > ABORT_NS and inflight.abort is not None:
            inflight.abort()  # its client does not read: nothing that is sent would reach it
    elif not inflight.ended and not inflight.behind:
        inflight.fail(ServingError(Code.deadline_exceeded, "the request did not finish before its deadline"))


def _not_cancelled(error: BaseException) -> None:
    log.debug("cancel_failed", error=repr(error))  # sent again by the sweep until the request ends
