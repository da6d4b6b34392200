"""The NATS API of a gateway, and its request/reply part: ask (run now), read (an answer again), cancel."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import TenantTable
from penstock.gateway.admission.idempotency import find_claim
from penstock.gateway.nats.acceptor import RequestAcceptor
from penstock.gateway.nats.delivery import AcceptedRequest, AnswerDelivery, KeyedSlots, ReplyPublisher
from penstock.gateway.nats.messages import failure
from penstock.gateway.nats.protocol import AnswerQuery, Origin, origin_of, parse_headers, parse_query
from penstock.gateway.nats.submissions import Submissions
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.tasks import Tasks, as_serving_error
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import DEFAULT_TENANT, token

log = structlog.get_logger("gateway")

MAX_ASKS = 1024
MAX_READS = 1024
SAME_ANSWER = 32  # reads of one answer: each message of it is sent to all of them
SAME_KEY = 8  # asks with one message id that are answered at a time; as many wait
MAX_REASON = 200  # characters
CUT_S = 1.0
QUEUE = "gateway"
_ANY = "any"
_Reader = tuple[str, str, str]  # tenant, request, the name or the subject of who reads

_json = msgspec.json.encode


class _Reading(msgspec.Struct, frozen=True):
    """Between gateways: this reader reads this answer here from now on."""

    gateway: str
    tenant: str
    request: str
    reader: str


_decode_reading = msgspec.json.Decoder(_Reading).decode


class Services:
    """Gateways share the calls as one queue group; a call for another model is passed to a gateway of that model.

    Attributes:
        readers: who reads an answer here, and what sends it.
        same_answer: those that read one answer, by tenant and request.
        subscriptions: to the calls; none once it is closed.
        tasks: calls that are being answered.
    """

    def __init__(
        self, gateway: Gateway, table: TenantTable, acceptor: RequestAcceptor, delivery: AnswerDelivery, tasks: Tasks
    ) -> None:
        self._gateway = gateway
        self._bus = gateway.bus
        self._nc = gateway.bus.nc
        self._subjects = gateway.bus.subjects
        self._table = table
        self._acceptor = acceptor
        self._delivery = delivery
        self.tasks = tasks.group("services")
        self._asks: Counter[str] = Counter()  # open, by tenant
        self._same_key = KeyedSlots(SAME_KEY, SAME_KEY)
        self._reads: Counter[str] = Counter()  # open, by tenant
        self.readers: dict[_Reader, ReplyPublisher] = {}
        self.same_answer: defaultdict[tuple[str, str], set[ReplyPublisher]] = defaultdict(set)
        self.subscriptions: list[Any] = []
        self._models = tasks.group("passed-models")
        self._models_changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._passed: dict[str, Any] = {}  # subscriptions for calls that other gateways pass on, by the model's token

    async def start(self) -> None:
        n = self._subjects.namespace
        for subject, handle in (
            (f"{n}.ask.>", self._on_ask),
            (f"{n}.read", self._on_read),
            (f"{n}.read.*", self._on_read),
            (f"{n}.cancel.*", self._on_cancel),
        ):
            self.subscriptions.append(await self._nc.subscribe(subject, queue=QUEUE, cb=handle))
        self.subscriptions.append(await self._nc.subscribe(self._subjects.reading, cb=self._on_reading))
        await self._take_passed()
        self._gateway.fleet.on_models = self._models_changed.set
        self._following = self._models.spawn(self._follow_models(), name="passed-models")

    async def _follow_models(self) -> None:
        while True:
            await self._models_changed.wait()
            self._models_changed.clear()
            try:
                await self._take_passed()
            except (NatsError, TimeoutError, OSError) as error:
                log.warning("calls_of_models_not_taken", error=repr(error))
                self._models_changed.set()
                await asyncio.sleep(CUT_S)

    async def _take_passed(self) -> None:
        """Take the calls that other gateways pass on: they do not know the model, and this one does."""
        names = {token(name) for name in self._gateway.fleet.names}
        for name in self._passed.keys() - names:
            await self._unsubscribe(self._passed.pop(name))
        for name in names - self._passed.keys():
            subject = f"{self._subjects.namespace}.pass.*.{name}.*"
            self._passed[name] = await self._nc.subscribe(subject, queue=QUEUE, cb=self._on_passed)

    async def close(self, timeout: float) -> None:
        """Take no more calls, wait ``timeout`` seconds for those that run, and end the rest with ``shutting_down``."""
        deadline = time.monotonic() + timeout
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
        subs, self.subscriptions = [*self.subscriptions, *self._passed.values()], []
        self._passed.clear()
        await asyncio.gather(*map(self._unsubscribe, subs))
        while self.tasks and time.monotonic() < deadline:  # noqa: ASYNC110 - the tasks have many ends
            await asyncio.sleep(0.05)
        await self.tasks.aclose(CUT_S)

    async def _unsubscribe(self, sub: Any) -> None:
        """Take the calls that are on their way: the broker has given them to this gateway, and they would be lost."""
        if self._bus.connected:
            with contextlib.suppress(NatsError, TimeoutError, OSError):
                async with asyncio.timeout(CUT_S):
                    await sub.drain()

    # --- incoming messages ---

    async def _on_ask(self, message: Any) -> None:
        origin = origin_of(message.subject, "ask")
        if model := self._acceptor.served_elsewhere(message.subject):
            await self._pass_on("ask", model, origin, message)
        else:
            self._spawn(self._ask, message, origin, number=0)

    async def _on_read(self, message: Any) -> None:
        self._spawn(self._read, message, origin_of(message.subject, "read"), number=-1)

    async def _on_cancel(self, message: Any) -> None:
        self._spawn(self._cancel, message, origin_of(message.subject, "cancel"), number=-1)

    async def _on_passed(self, message: Any) -> None:
        _, _, kind, _, tenant = message.subject.split(".")
        origin = Origin(DEFAULT_TENANT if tenant == _ANY else tenant, direct=tenant == _ANY)
        if kind == "ask":
            self._spawn(self._ask, message, origin, number=0)
        else:
            self._spawn(self._read, message, origin, number=-1)

    async def _pass_on(self, kind: str, model: str, origin: Origin, message: Any) -> None:
        tenant = _ANY if origin.direct else origin.tenant
        subject = f"{self._subjects.namespace}.pass.{kind}.{model}.{tenant}"
        await self._nc.publish(subject, message.data, reply=message.reply, headers=message.headers)

    def _spawn(
        self,
        serve: Callable[[Any, Origin, ReplyPublisher], Awaitable[None]],
        message: Any,
        origin: Origin,
        *,
        number: int,
    ) -> None:
        # The broker's own reply subjects do not survive its restart; those of clients in our own account do.
        replies = ReplyPublisher(self._bus, [message.reply] if message.reply else [], durable=origin.direct)

        async def run() -> None:
            try:
                await serve(message, origin, replies)
            except ServingError as error:
                continues = error.code is Code.broker_unavailable and replies.request_id
                await replies.refuse(failure(error, -1 if continues else number))
            except asyncio.CancelledError:
                await replies.refuse(failure(_stopping(replies.request_id), -1), at_once=True)
                raise
            except Exception as error:
                log.exception("service_failed", subject=message.subject)
                await replies.refuse(failure(as_serving_error(error, "this call"), number))
            finally:
                await replies.close()

        self.tasks.spawn(run(), name=f"nats-{message.subject}")

    # --- work ---

    async def _ask(self, message: Any, origin: Origin, replies: ReplyPublisher) -> None:
        if not message.reply:
            log.warning("ask_without_reply", tenant=origin.tenant)
            return
        limit = min(self._table.limits(origin.tenant).max_pending, MAX_ASKS)
        if self._asks[origin.tenant] >= limit:
            raise ServingError(
                Code.queue_full, f"{limit} asks of {origin.tenant!r} are open (--max-pending); try again later",
                retry_after=1.0,
            )  # fmt: skip
        self._asks[origin.tenant] += 1
        code, model = "ok", ""
        try:
            options = parse_headers(message.headers or {}, self._subjects.namespace)
            replies.first = options.first
            name = f"id:{options.message_id}" if options.message_id else ""
            async with contextlib.AsyncExitStack() as stack:
                if name:
                    await stack.enter_async_context(
                        self._same_key.hold((origin.tenant, name), "asks with this message id")
                    )
                accepted = await self._acceptor.accept(message, origin, name)
                model = accepted.request.model
                code = await self._delivery.deliver(accepted, replies)
        except ServingError as error:
            code = error.code.value
            raise
        finally:
            self._asks[origin.tenant] -= 1
            self._gateway.metrics.of(model).requests.labels("nats", code).inc()

    @contextlib.contextmanager
    def _read_slot(self, tenant: str) -> Iterator[None]:
        """Count one more look-up."""
        if self._reads[tenant] >= MAX_READS:
            raise ServingError(Code.queue_full, f"{MAX_READS} reads of {tenant!r} are open at this gateway; try again")
        self._reads[tenant] += 1
        try:
            yield
        finally:
            self._reads[tenant] -= 1

    async def _read(self, message: Any, origin: Origin, replies: ReplyPublisher) -> None:
        if not message.reply:
            return
        with self._read_slot(origin.tenant):
            query = parse_query(message.data)
            accepted = await self._resolve(query, origin)
            request = accepted.request
            fleet = self._gateway.fleet
            if (
                not request.output
                and fleet.find(request.model) is None
                and fleet.serves_elsewhere(token(request.model))
            ):
                await self._pass_on("read", token(request.model), origin, message)
                return
            replies.first, replies.until = query.first, query.until
            replies.check_interest = True
            reading = _Reading(self._gateway.id, origin.tenant, request.id, query.reader or message.reply)
            await self._nc.publish(self._subjects.reading, _json(reading))
            readers = [(origin.tenant, request.id, reading.reader)]
            self._replace(readers[0], replies)

            def named(inbox: str) -> None:  # a reader in another account, whose reads have all another reply subject
                if not query.reader:
                    readers.append((origin.tenant, request.id, inbox))
                    self._replace(readers[-1], replies)

            replies.on_inbox = named
            try:
                with self._shared(origin.tenant, request.id, replies):
                    await self._delivery.deliver(accepted, replies)
            finally:
                for reader in readers:
                    if self.readers.get(reader) is replies:
                        del self.readers[reader]

    @contextlib.contextmanager
    def _shared(self, tenant: str, request_id: str, replies: ReplyPublisher) -> Iterator[None]:
        """Count one more read of an answer; those that were replaced, or have lost their reader, do not count."""
        answer = (tenant, request_id)
        others = self.same_answer[answer]
        if sum(not each.unread for each in others) >= SAME_ANSWER:
            raise ServingError(
                Code.queue_full,
                f"{SAME_ANSWER} reads of this answer are open at this gateway; read it once and share it, or try again",
                retry_after=1.0,
            )
        others.add(replies)
        try:
            yield
        finally:
            others.discard(replies)
            if not others:
                self.same_answer.pop(answer, None)

    def _replace(self, reader: _Reader, replies: ReplyPublisher) -> None:
        """One read of an answer for each reader: it asks again because messages were lost."""
        before = self.readers.get(reader)
        if before is not None and before is not replies:
            before.give_up()
        self.readers[reader] = replies

    async def _on_reading(self, message: Any) -> None:
        """A reader began to read at some gateway: it reads no longer here."""
        try:
            reading = _decode_reading(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if reading.gateway != self._gateway.id:
            before = self.readers.pop((reading.tenant, reading.request, reading.reader), None)
            if before is not None:
                before.give_up()

    async def _cancel(self, message: Any, origin: Origin, replies: ReplyPublisher) -> None:
        query = parse_query(message.data)
        with self._read_slot(origin.tenant):
            accepted = await self._resolve(query, origin)
            request, ended = accepted.request, accepted.record is not None
            if not ended:  # again and again, until it ends
                self._gateway.cancel_unfinished(await self._gateway.attach(request), query.reason[:MAX_REASON])
        if message.reply:
            status = {"id": request.id, "status": "ended" if ended else "cancelling"}
            await self._nc.publish(message.reply, _json(status))

    async def _resolve(self, query: AnswerQuery, origin: Origin) -> AcceptedRequest:
        if query.id:
            return await self._delivery.find(origin.tenant, query.id)
        stored_claim = await find_claim(self._bus, origin.tenant, f"id:{query.key}")
        if stored_claim is None:
            raise ServingError(Code.request_not_found, f"no submission with the message id {query.key[:80]!r} is known")
        return await self._delivery.find(origin.tenant, stored_claim.request)


def _stopping(request_id: str) -> ServingError:
    action = f"request {request_id} continues: read its answer at ps.read" if request_id else "try again"
    return ServingError(Code.shutting_down, f"this gateway is stopping; {action}", retry_after=1.0)


class NatsApi:
    """
    Args:
        tasks: of the process; if one of the background tasks fails, the process shuts down.
    Attributes:
        submissions: requests from the tenants' streams.
        services: requests and questions that are answered directly.
    """

    def __init__(self, gateway: Gateway, tasks: Tasks) -> None:
        self._tasks = tasks.group("nats")
        delivery = AnswerDelivery(gateway)
        self._table = gateway.tenants
        self._table.on_joined, self._table.on_left = self._joined, self._left
        acceptor = RequestAcceptor(gateway, self._table, delivery)
        self.submissions = Submissions(gateway, acceptor, delivery, self._tasks)
        self.services = Services(gateway, self._table, acceptor, delivery, self._tasks)

    async def open(self) -> None:
        """
        Raises:
            ServingError: the tenants cannot be read.
        """
        await self.submissions.start()
        await self._table.start()
        await self.services.start()

    async def close(self, timeout: float) -> None:
        """Take nothing more and wait ``timeout`` seconds for open answers; the rest is left to other gateways."""
        await asyncio.gather(self.services.close(timeout), self.submissions.close(timeout))
        await self._table.stop()
        await self._tasks.aclose()

    def _joined(self, tenant: str) -> None:
        self.submissions.add_tenant(tenant)

    def _left(self, tenant: str) -> None:
        self.submissions.remove_tenant(tenant)
