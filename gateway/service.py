"""What a gateway does for both of its doors: accept requests into the log, follow their answers, find them again."""

import asyncio
import contextlib
import secrets
import time

import structlog
from nats.errors import Error as NatsError

from configs.bus.connection import Bus
from configs.bus.fleet import FleetWatch, Member
from configs.bus.publish import Publisher
from configs.bus.read import read
from configs.modeldir import ModelDir
from configs.settings import GatewaySettings
from gateway.attachments import Attachments
from gateway.exchange import CLOCK_SKEW_NS, Exchange, TokenFeed
from gateway.metrics import Metrics
from gateway.parsers.table import Parsers, agreed
from gateway.pictures import PATHS, prepare_picture
from gateway.prepare import CHAT, Draft, Prepared, finish, prepare_chat, prepare_text
from gateway.studios import ROLE, Studios
from gateway.target import Target
from schemas import control, done, fleet, requests, wire
from schemas.errors import Code, ServingError
from schemas.ids import time_of
from schemas.requests import GenerateRequest, Priority
from schemas.subjects import HEADER_MSG_ID

log = structlog.get_logger("gateway")

SWEEP_S = 0.25
POLL_S = 0.5
CANCEL_AGAIN_S = 1.0
SILENT_S = 2.0
DEADLINE_GRACE_NS = 500_000_000  # the worker's own word on a missed deadline comes first
LARGE_BODY = 32_768  # bytes; larger ones are tokenised in a thread
LARGE_PROMPT = 8_192  # tokens; longer ones with images get their block names in a thread
FIND_WINDOW_NS = 10_000_000_000
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
        self.studios = Studios()
        self.fleet = FleetWatch(bus, joined=self._joined, left=self._left)
        self.started_ns = time.time_ns()
        self.draining = False
        self._publisher = publisher
        self._feed = TokenFeed(bus, self.id)
        self._others: dict[str, TokenFeed] = {}
        self._opening = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._attachments = Attachments(bus, settings, metrics)
        self._disagreed: set[frozenset[Parsers]] = set()  # of which it was warned
        self._target = self._make_target()
        self._queued = 0  # accepted and not yet taken by a router, at the last look
        self._accepted_since = 0
        self._routers = False
        self._delivered: dict[str, int] = {}

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        await self._feed.start(since_ns=self.started_ns)
        await self.fleet.start()
        with contextlib.suppress(NatsError, TimeoutError):
            await self._poll_queue()
        self._tasks = [
            asyncio.create_task(self._sweep(), name="gateway-sweep"),
            asyncio.create_task(self._poll(), name="gateway-poll"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for feed in (self._feed, *self._others.values()):
            await feed.tail.stop()

    # --- what is known ---

    @property
    def open_requests(self) -> int:
        return len(self._feed) + sum(map(len, self._others.values()))

    def not_ready(self) -> list[str]:
        """Why a request could not be served now; empty: it could."""
        reasons = []
        if not self.bus.connected:
            reasons.append("the broker is not connected")
        if not self._routers:
            reasons.append("no router takes requests; start one with 'penstock router'")
        pictures = not self.settings.model and self.studios.present()  # nobody asked for a language model
        served = (self._serves(m) and m.registration.state is fleet.State.ready for m in self.fleet.members.values())
        if not pictures and not any(served):
            reasons.append(f"no worker serves {self.names[0]!r}; start one with 'penstock worker'")
        if self.draining:
            reasons.append("this gateway is shutting down")
        return reasons

    def _serves(self, member: Member) -> bool:
        if member.registration.role == ROLE:
            return False
        return member.registration.model == self.names[0] or self.names[0] in member.registration.aliases

    def _joined(self, member: Member) -> None:
        self.studios.put(member.registration)
        self._target = self._make_target()

    def _left(self, member: Member, why: str) -> None:
        log.info("worker_left", worker=member.registration.worker, why=why)
        self.studios.left(member.registration.worker)
        self._target = self._make_target()

    def _make_target(self) -> Target:
        workers = [m.registration for m in self.fleet.members.values() if self._serves(m)]
        parsers, named = agreed(workers)
        if len(named) > 1 and named not in self._disagreed:
            self._disagreed.add(named)
            log.warning("workers_name_different_parsers", parsers=sorted(named), used=parsers)
        return Target(
            self.model,
            self.names,
            self.id,
            block_size=workers[0].block_size if workers else self.settings.block_size,
            default_max_tokens=self.settings.default_max_tokens,
            default_deadline_s=self.settings.default_deadline_s,
            max_model_len=max((w.max_model_len for w in workers), default=0),
            revision=workers[0].revision if workers else "",
            max_images=self.settings.max_images,
            processors=frozenset(name for w in workers for name in w.logits_processors) if workers else None,
            parsers=parsers if any(parsers) else None,
        )

    # --- in ---

    async def prepare(self, endpoint: str, body: bytes, request_id: str | None = None) -> Prepared:
        """
        Raises:
            ServingError: the body cannot be served, or the queue is full.
        """
        self.check_room()
        if endpoint in PATHS:
            return prepare_picture(
                endpoint,
                body,
                self.studios.known,
                gateway=self.id,
                default_deadline_s=self.settings.default_deadline_s,
                now_ns=time.time_ns(),
                request_id=request_id,
            )
        prepare = prepare_chat if endpoint == CHAT else prepare_text
        target, now_ns = self._target, time.time_ns()
        if len(body) <= LARGE_BODY:
            prepared = prepare(body, target, now_ns=now_ns, request_id=request_id)
        else:
            prepared = await asyncio.to_thread(prepare, body, target, now_ns=now_ns, request_id=request_id)
        return await self._illustrated(prepared, target) if isinstance(prepared, Draft) else prepared

    async def _illustrated(self, draft: Draft, target: Target) -> Prepared:
        """A draft with its media loaded and stored."""
        assert target.model.vision is not None
        left_s = draft.deadline_s - (time.time_ns() - draft.now_ns) / 1e9
        try:
            async with asyncio.timeout(left_s):
                media = await self._attachments.load(draft.media, target.model.vision, left_s)
        except TimeoutError:
            raise ServingError(Code.deadline_exceeded, "the images did not arrive before the deadline") from None
        if len(draft.tokens) <= LARGE_PROMPT:
            return finish(draft, media, target)
        return await asyncio.to_thread(finish, draft, media, target)

    def has_room(self) -> bool:
        """Whether a request would be taken now."""
        try:
            self.check_room()
        except ServingError:
            return False
        return True

    def check_room(self) -> None:
        """
        Raises:
            ServingError: queue_full or shutting_down.
        """
        if self.draining:
            raise ServingError(Code.shutting_down, "this gateway is shutting down; try again", retry_after=1.0)
        limit = self.settings.max_queue
        if self._queued + self._accepted_since < limit:
            return
        # Of those accepted since the last look, some have begun: they are counted only when it matters.
        unheard = sum(exchange.fold.attempt < 0 for exchange in self._feed.exchanges)
        waiting = self._queued + min(self._accepted_since, unheard)
        if waiting >= limit:
            raise ServingError(
                Code.queue_full,
                f"{waiting} requests wait for a worker and the limit is {limit} (--max-queue); "
                "try again later or add workers",
                retry_after=1.0,
            )

    async def submit(self, request: GenerateRequest, *, owner: bool = True) -> Exchange:
        """Put a request into the log; returns when it is durable.

        Args:
            owner: nobody else knows of the request: if its acceptance is not confirmed it is cancelled.
        Raises:
            ServingError: it could not be stored; it will not run.
        """
        payload = wire.encode(request)
        limit = self.bus.max_message - JOB_BYTES
        if len(payload) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the prompt takes {len(payload)} bytes as a message; the broker carries {limit} (max_payload)",
            )
        exchange = Exchange(request)
        self._feed.watch(exchange)  # before publishing: the first token may overtake the acknowledgement
        self._accepted_since += 1
        try:
            ack = await self._publisher.publish(
                self.bus.subjects.request(request.model, request.priority.value),
                payload,
                request.id,
                timeout=min(10.0, max(0.1, (request.deadline_ns - time.time_ns()) / 1e9)),
            )
        except BaseException:
            # It may be stored all the same (the acknowledgement was lost).
            if owner:
                self.leave(exchange, "the acceptance was not confirmed")
            else:
                self.detach(exchange)
            raise
        if ack.duplicate:  # sent again by us, or a submission that another gateway had taken before it died
            stored = await self.find(request.id)
            if stored.gateway != self.id:
                self.detach(exchange)
                return await self.attach(stored)
        return exchange

    def leave(self, exchange: Exchange, reason: str = "the client disconnected") -> None:
        """The client has gone or has everything. An unfinished request is cancelled, again until it ends."""
        if exchange.ended:
            self._unwatch(exchange)
            return
        exchange.abandoned = True
        self.metrics.cancelled.inc()
        self._spawn_cancel(exchange, reason)

    def detach(self, exchange: Exchange) -> None:
        """Stop watching without cancelling: the reader was only a second one."""
        self._unwatch(exchange)

    def _unwatch(self, exchange: Exchange) -> None:
        self._feed_of(exchange).unwatch(exchange)

    def _feed_of(self, exchange: Exchange) -> TokenFeed:
        return self._others.get(exchange.request.gateway, self._feed)

    def _spawn_cancel(self, exchange: Exchange, reason: str) -> None:
        exchange.cancel_sent = time.monotonic()
        task = asyncio.ensure_future(self.cancel(exchange.request.id, reason))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def cancel(self, request_id: str, reason: str) -> None:
        if self.bus.connected:
            await self.bus.nc.publish(self.bus.subjects.cancel, wire.encode(control.Cancel(request_id, reason)))

    # --- finding requests again ---

    async def find(self, request_id: str) -> GenerateRequest:
        """An accepted request, by any gateway.

        Raises:
            ServingError: request_not_found.
        """
        try:
            made_ns = time_of(request_id)
        except ValueError:
            raise _unknown(request_id) from None
        stream = self.bus.subjects.stream("REQUESTS")
        for before_ns in (50_000_000, CLOCK_SKEW_NS):
            since = made_ns - before_ns
            async for entry in read(self.bus, stream, self.bus.subjects.all("request"), since_ns=since):
                if entry.headers.get(HEADER_MSG_ID) == request_id:
                    return requests.decode(entry.data)
                if entry.time_ns > made_ns + FIND_WINDOW_NS:
                    break
        raise _unknown(request_id)

    async def attach(self, request: GenerateRequest) -> Exchange:
        """Follow an accepted request from its first token on.

        Raises:
            ServingError: the log cannot be read.
        """
        exchange = Exchange(request)
        if request.gateway == self.id:
            await self._feed.attach(exchange)
            return exchange
        async with self._opening:
            feed = self._others.get(request.gateway)
            if feed is None:
                feed = TokenFeed(self.bus, request.gateway)
                await feed.start(since_ns=time.time_ns())
                self._others[request.gateway] = feed
        await feed.attach(exchange)
        return exchange

    async def outcome(self, request: GenerateRequest) -> done.Done | None:
        """The terminal event, if there is one."""
        stream, subject = self.bus.subjects.stream("DONE"), self.bus.subjects.done(request.model)
        async for entry in read(self.bus, stream, subject, since_ns=request.created_ns - CLOCK_SKEW_NS):
            if entry.headers.get(HEADER_MSG_ID) == request.id:
                event = done.decode(entry.data)
                assert isinstance(event, done.Done)
                return event
        return None

    # --- upkeep ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(time.time_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed")

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        self.fleet.expire()
        for feed in (self._feed, *self._others.values()):
            for exchange in feed.exchanges:
                overdue = now_ns > exchange.request.deadline_ns + DEADLINE_GRACE_NS
                if exchange.abandoned:
                    if exchange.ended or now_ns > exchange.request.deadline_ns + 60_000_000_000:
                        feed.unwatch(exchange)
                    elif now - exchange.cancel_sent > CANCEL_AGAIN_S:
                        self._spawn_cancel(exchange, "repeated")
                elif overdue and not exchange.ended:
                    exchange.fail(
                        ServingError(Code.deadline_exceeded, "the request did not finish before its deadline")
                    )
        for gateway, feed in list(self._others.items()):
            if not feed:
                del self._others[gateway]
                await feed.tail.stop()

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
        accepted = self._accepted_since
        queued, routers = 0, False
        for priority in Priority:
            name = f"router-{priority.value}"
            info = await self.bus.js.consumer_info(self.bus.subjects.stream("REQUESTS"), name, timeout=2.0)
            queued += (info.num_pending or 0) + (info.num_ack_pending or 0)
            delivered = info.delivered.consumer_seq if info.delivered else 0
            # Full of work, a router has no request waiting for the moment, but it moves on.
            routers |= bool(info.num_waiting) or delivered > self._delivered.get(name, delivered)
            self._delivered[name] = delivered
        self._queued, self._routers = queued, routers
        self._accepted_since -= accepted
        self.metrics.queued.set(queued)
        self.metrics.open.set(self.open_requests)


def _unknown(request_id: str) -> ServingError:
    return ServingError(Code.request_not_found, f"no request {request_id[:80]!r} in the log; ids look like UUIDv7")
