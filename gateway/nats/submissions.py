"""Durable submissions: pulled from each tenant's stream, and acknowledged when the answer was sent.

If this gateway crashes, the submission is delivered to another one, which finds the request that was made of it and
sends the answer from the start. The stream discards a repeat within its duplicate window, so gateways also subscribe to
the subject itself, and the one that answers the first submission answers the repeat.

A submission that is sent back to its stream is delivered again after a second, when others may have taken the places
that were free meanwhile: with a short queue, most places would stay empty. So some of each tenant wait here for a place
in the queue of their class (``WaitingLine``, pure).
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from typing import Any, NamedTuple

import structlog
from nats.errors import Error as NatsError

from penstock.gateway.admission.idempotency import IdempotencyConflict, digest_of
from penstock.gateway.admission.queues import class_of
from penstock.gateway.base.chat_objects import stopping
from penstock.gateway.nats.acceptor import RequestAcceptor
from penstock.gateway.nats.delivery import AcceptedRequest, AnswerDelivery, KeyedSlots, ReplyPublisher
from penstock.gateway.nats.messages import DeliveredMessage, failure
from penstock.gateway.nats.protocol import (
    MAX_MESSAGE_ID,
    Origin,
    SubmitHeaders,
    key_of,
    may_ask_for_no_store,
    origin_of,
    parse_headers,
    usable_reply_to,
)
from penstock.gateway.request_log.lookup import unknown
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.forget import Eraser
from penstock.infra.bus.puller import ACK, IN_PROGRESS, NAK, Puller, config_of, make_again
from penstock.infra.bus.tasks import Tasks, as_serving_error
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority, new_request_id
from penstock.schemas.streams import submissions
from penstock.schemas.subjects import HEADER_MSG_ID

OF_TENANT = 32  # of each class


class WaitingLine:
    """In each class, tenants take turns; of a tenant, the first that came is the first."""

    def __init__(self) -> None:
        self._tenants: dict[Priority, OrderedDict[str, deque[asyncio.Future[None]]]] = {
            each: OrderedDict() for each in Priority
        }

    def __len__(self) -> int:
        return sum(len(line) for tenants in self._tenants.values() for line in tenants.values())

    def enter(self, priority: Priority, tenant: str, *, again: bool = False) -> "asyncio.Future[None] | None":
        """A future that is done when there may be a place; None: too many of the tenant's wait.

        Args:
            again: it waited before, and others took its place: it is the tenant's first.
        """
        line = self._tenants[priority].setdefault(tenant, deque())
        if len(line) >= OF_TENANT and not again:
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if again:
            line.appendleft(turn)
        else:
            line.append(turn)
        return turn

    def admit(self, priority: Priority, places: int) -> None:
        """Wake as many of a class as there are places."""
        tenants = self._tenants[priority]
        while places > 0 and tenants:
            tenant, line = tenants.popitem(last=False)
            turn = line.popleft()
            if line:
                tenants[tenant] = line
            if not turn.done():  # its submission may have been given up
                turn.set_result(None)
                places -= 1


log = structlog.get_logger("gateway")

MAX_OPEN = 256
RESERVED = 16  # of each tenant, however many of others are open
MAX_REPEATS = 1024
SAME_KEY = 8  # answers of one message id that are sent at a time: the first, and repeats at other reply subjects
SAME_KEY_WAITING = 56  # further ones; beyond, the stream delivers them again later
ELSEWHERE = NAK + b' {"delay": 50000000}'  # ns
LATER = NAK + b' {"delay": 1000000000}'
RENEW_S = 1.5  # the consumer's ack_wait is 5 s
ADMIT_S = 0.05  # between two looks for places
ERASING = 16  # submissions that wait to be overwritten
DISCARDED_S = 1.0  # a delivery is remembered for so long after its end, and a repeat that came before its first
STORED_S = 0.25  # a repeat so long after the first was stored: the window is 0.1 s, and the loop may be late

_Key = tuple[str, str]  # tenant, message id
_AGAIN = {
    Code.queue_full: LATER,
    Code.overloaded: LATER,
    Code.broker_unavailable: LATER,
    Code.model_unavailable: LATER,
    Code.shutting_down: NAK,
}
# These may take long: the client is informed meanwhile.
_REPORTED_EARLY = (Code.broker_unavailable, Code.model_unavailable)


class _Delivery:
    """One submission that is being answered here, or was until a moment ago."""

    __slots__ = ("body", "candidate", "decided", "ended", "first_seen", "reply")

    def __init__(self, reply: str, body: bytes) -> None:
        self.reply = reply  # of the delivery
        self.body = body  # digest
        self.candidate = new_request_id()  # the request's id, if none was accepted before
        # None: accepted; else why it was not.
        self.decided: asyncio.Future[DeliveredMessage | None] = asyncio.get_running_loop().create_future()
        self.ended = 0.0
        self.first_seen = 0.0  # when it was received from the subject; 0: it was not, or the stream delivered it again

    def decide(self, refusal: DeliveredMessage | None) -> None:
        if not self.decided.done():
            self.decided.set_result(refusal)


class _SeenSubmission(NamedTuple):
    """A submission that was received from the subject, beside the stream."""

    at: float
    reply_to: str
    options: SubmitHeaders | ServingError  # not its headers: they may have megabytes
    body: bytes  # digest


class Submissions:
    """Answers the submissions of all tenants; ``close`` leaves unfinished ones to other gateways.

    Attributes:
        open_deliveries: those that are being answered, by stream and sequence.
        recent: the first delivery of each message id, by tenant and id.
        repeats: deliveries that were received before their first.
        line: those that wait for room in the queues.
    """

    def __init__(self, gateway: Gateway, acceptor: RequestAcceptor, delivery: AnswerDelivery, tasks: Tasks) -> None:
        self._gateway = gateway
        self._bus = gateway.bus
        self._nc = gateway.bus.nc
        self._subjects = gateway.bus.subjects
        self._acceptor = acceptor
        self._delivery = delivery
        self._tasks = tasks.group("submissions")
        self._eraser = Eraser(gateway.bus, ERASING)
        self._pullers: dict[str, Puller] = {}
        self.open_deliveries: dict[tuple[str, int], _Delivery] = {}  # by stream and sequence
        self._open_of: Counter[str] = Counter()  # by tenant
        self._undecided: Counter[str] = Counter()  # of these, neither accepted nor refused yet
        self._full: set[str] = set()  # tenants of which as many requests wait as may
        self.recent: OrderedDict[_Key, _Delivery] = OrderedDict()
        self.repeats: OrderedDict[_Key, list[_SeenSubmission]] = OrderedDict()
        self._same_key = KeyedSlots(SAME_KEY, SAME_KEY_WAITING)
        self.line = WaitingLine()
        self._entered = asyncio.Event()  # something waits in the line
        self._sub: Any = None

    async def start(self) -> None:
        self._sub = await self._nc.subscribe(self._subjects.all("submit"), cb=self._on_submission_seen)
        self._tasks.spawn(self._renew(), name="submit-renew")
        self._tasks.spawn(self._admit(), name="submit-admit")
        self._tasks.spawn(self._look_again(), name="submit-look-again")

    def add_tenant(self, tenant: str) -> None:
        """Take this tenant's submissions."""
        if tenant in self._pullers:
            return
        pending = self._acceptor.table.limits(tenant).max_pending
        stream, consumer = submissions(self._subjects, tenant, pending)

        async def take(message: Any) -> None:
            await self._on_message(message, stream.name)

        async def remake(last: str) -> bool:  # what was answered is deleted, so all that is left is to be delivered
            return await make_again(self._bus, stream.name, config_of(consumer))

        puller = Puller(self._bus, stream.name, consumer.name, take, lambda: self._room(tenant), remake=remake)
        self._pullers[tenant] = puller
        self._tasks.spawn(puller.start(), name=f"submit-pull-{tenant}")

    def remove_tenant(self, tenant: str) -> None:
        puller = self._pullers.pop(tenant, None)
        if puller is not None:
            self._tasks.spawn(puller.close(), name=f"submit-remove-{tenant}")

    async def close(self, timeout: float) -> None:
        """Take no more, wait ``timeout`` seconds for those that run, and leave the rest to other gateways."""
        for puller in self._pullers.values():
            await puller.stop()
        deadline = time.monotonic() + timeout
        while self.open_deliveries and time.monotonic() < deadline:  # noqa: ASYNC110 - the tasks have many ends
            await asyncio.sleep(0.05)
        if self._sub is not None and not self._nc.is_closed:
            await self._sub.unsubscribe()
        left = list(self.open_deliveries.values())
        await self._tasks.aclose()
        if self._bus.connected:
            for one in left:  # they need not wait until the delivery expires
                await self._nc.publish(one.reply, NAK)

    def _room(self, tenant: str) -> int:
        """How many more to pull; 0 while the queue is full: submissions wait durably in their stream.

        Those beyond a tenant's own bound stay there, too: each would be prepared, refused and delivered again, every
        second.
        """
        if not self._gateway.accepts_submissions():
            return 0
        may_wait = max(0, self._gateway.room_of(tenant) - self._undecided[tenant])
        if not may_wait:
            self._full.add(tenant)
        return min(may_wait, max(0, MAX_OPEN - len(self.open_deliveries), RESERVED - self._open_of[tenant]))

    async def _look_again(self) -> None:
        """Pull more once fewer requests of a tenant wait than may."""
        while True:
            await asyncio.sleep(ADMIT_S)
            full, self._full = self._full, set()
            for tenant in full:
                if (puller := self._pullers.get(tenant)) is not None:
                    with suppress(NatsError):  # the connection broke; the puller asks again after it
                        await puller.top_up()

    # --- from the stream ---

    async def _on_message(self, message: Any, stream: str) -> None:
        at = (stream, message.metadata.sequence.stream)
        if at in self.open_deliveries:
            self.open_deliveries[at].reply = message.reply  # delivered again while it is being answered here
            return
        origin = origin_of(message.subject, "submit")
        # Each tenant's stream was asked for as many as there was room for.
        if len(self.open_deliveries) >= 2 * MAX_OPEN and self._open_of[origin.tenant] >= RESERVED:
            await self._nc.publish(message.reply, LATER)
            return
        if self._acceptor.served_elsewhere(message.subject):
            await self._nc.publish(message.reply, ELSEWHERE)
            return
        entry = self.open_deliveries[at] = _Delivery(message.reply, digest_of(message.data))
        self._open_of[origin.tenant] += 1
        self._undecided[origin.tenant] += 1
        entry.decided.add_done_callback(lambda _: self._undecided.subtract((origin.tenant,)))
        work = self._serve(message, at, entry, origin)
        task = self._tasks.spawn(work, name=f"submit-{stream}-{at[1]}", on_failure=_note_failed_submission)
        task.add_done_callback(lambda _: self._ended(at, origin))

    def _ended(self, at: tuple[str, int], origin: Origin) -> None:
        entry = self.open_deliveries.pop(at)
        self._open_of[origin.tenant] -= 1
        entry.ended = time.monotonic()
        entry.decide(failure(stopping(""), -1))
        puller = self._pullers.get(origin.tenant)
        if puller is not None and (
            len(self.open_deliveries) == MAX_OPEN // 2 or self._open_of[origin.tenant] == RESERVED // 2
        ):
            self._tasks.spawn(puller.top_up(), name="submit-top-up")

    async def _serve(self, message: Any, at: tuple[str, int], entry: _Delivery, origin: Origin) -> None:
        """Answer one submission, then acknowledge it or have it delivered again."""
        code, verdict, accepted = "ok", ACK, None
        headers, namespace = message.headers or {}, self._subjects.namespace
        message_id = str(headers.get(HEADER_MSG_ID, ""))
        stored = f"{at[0]}:{at[1]}:{message.metadata.timestamp.timestamp():.6f}"
        name = f"id:{message_id}" if message_id else f"at:{stored}"
        key = key_of(message_id) if message_id else entry.candidate
        # Until the headers are read: a refusal of another header must arrive, too.
        replies = self._replies_for(origin, key, usable_reply_to(headers, namespace), 0)
        replies.set_request(entry.candidate)
        if 0 < len(message_id) <= MAX_MESSAGE_ID:
            await self._remember((origin.tenant, message_id), entry, origin)
        try:
            options = parse_headers(headers, namespace)
            replies.first = options.first
            self._check_stored(message)
            async with self._same_key.hold((origin.tenant, name), "submissions with this message id"):
                accepted = await self._accept(message, origin, name)
                entry.decide(None)
                if not message_id:
                    replies = self._replies_for(origin, accepted.request.id, options.reply_to, options.first)
                code = await self._delivery.deliver(accepted, replies)
        except ServingError as error:
            code, verdict = error.code.value, _AGAIN.get(error.code, ACK)
            is_answer = (
                verdict == ACK and accepted is None and not await self._acceptor.stands_for(origin, name, entry.body)
            )
            refusal = failure(error, 0 if is_answer else -1)
            entry.decide(refusal)
            if verdict == ACK or error.code in _REPORTED_EARLY:
                await replies.refuse(refusal)
        except Exception as error:  # else every gateway would try and fail in turn
            code = Code.internal.value
            log.exception("submission_failed", stream=at[0], sequence=at[1], error=repr(error))
            refusal = failure(as_serving_error(error, "the submission"), 0 if accepted is None else -1)
            entry.decide(refusal)
            await replies.refuse(refusal)
        if verdict == ACK:  # otherwise it is delivered again, and counted when it has ended
            model = accepted.request.model if accepted is not None else ""
            self._gateway.metrics.of(model).requests.labels("nats", code).inc()
        if verdict == ACK and self._refuses(message):
            await self._erase(at)
        await self._nc.publish(entry.reply, verdict)

    async def _accept(self, message: Any, origin: Origin, name: str) -> AcceptedRequest:
        """Have it accepted, waiting for a place in the queue of its class.

        Raises:
            ServingError: it cannot be served, or too many of its tenant wait already (queue_full).
        """
        waited = False
        while True:
            try:
                return await self._acceptor.accept(message, origin, name)
            except ServingError as error:
                if error.code is not Code.queue_full:
                    raise
                priority = await self._gateway.run_for(message.data, class_of, message.data)
                turn = None if self._gateway.room(priority) else self.line.enter(priority, origin.tenant, again=waited)
                if turn is None:
                    raise
            waited = True
            self._entered.set()
            await turn

    async def _admit(self) -> None:
        while True:
            await self._entered.wait()
            self._entered.clear()
            while len(self.line):
                self._gateway.hurry(True)
                await asyncio.sleep(ADMIT_S)
                if self._gateway.accepts_submissions():
                    for priority in Priority:
                        self.line.admit(priority, self._gateway.room(priority))
            self._gateway.hurry(False)

    def _refuses(self, message: Any) -> bool:
        """Whether a submission must not be stored, and was: its client had to ask."""
        return self._gateway.settings.always_no_store or may_ask_for_no_store(message.headers or {}, message.data)

    def _check_stored(self, message: Any) -> None:
        if self._refuses(message):
            ask = self._subjects.submit("MODEL").replace(".submit.", ".ask.")
            raise ServingError(
                Code.unsupported,
                "a submission is stored, and this one must not be (no_store, store: false, or --always-no-store of the "
                f"gateway): ask at {ask}, where nothing is stored",
                param="no_store",
            )

    async def _erase(self, at: tuple[str, int]) -> None:
        """Overwrite a refused submission: its acknowledgement would leave its bytes on the broker's disk.

        Where too many are to be overwritten, the bytes go with their file.
        """
        try:
            if not await self._eraser.erase(*at):
                log.warning("submission_not_erased", stream=at[0], sequence=at[1], error="too many wait")
        except ServingError as error:
            log.warning("submission_not_erased", stream=at[0], sequence=at[1], error=error.message)

    def _replies_for(self, origin: Origin, key: str, reply_to: str, first: int) -> ReplyPublisher:
        subjects = self._subjects
        if origin.direct:
            return ReplyPublisher(self._bus, [subjects.answer(key), *([reply_to] if reply_to else [])], first=first)
        mapped = [subjects.mailbox(origin.tenant, reply_to)] if reply_to else []
        return ReplyPublisher(self._bus, [subjects.answer(key, origin.tenant), *mapped], first=first)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._forget()
            try:
                for entry in list(self.open_deliveries.values()):
                    if self._bus.connected:
                        await self._nc.publish(entry.reply, IN_PROGRESS)
            except NatsError as error:  # the connection broke; they are delivered again
                log.debug("renewal_failed", error=repr(error))

    # --- repeats that the stream may have discarded ---

    async def _on_submission_seen(self, message: Any) -> None:
        """Called for every submission, also on gateways that do not answer it."""
        headers, namespace = message.headers or {}, self._subjects.namespace
        message_id = headers.get(HEADER_MSG_ID, "")
        if not 0 < len(message_id) <= MAX_MESSAGE_ID:
            return
        options: SubmitHeaders | ServingError
        try:
            options = parse_headers(headers, namespace)
        except ServingError as error:
            options = error
        seen = _SeenSubmission(time.monotonic(), usable_reply_to(headers, namespace), options, digest_of(message.data))
        origin = origin_of(message.subject, "submit")
        key = (origin.tenant, message_id)
        entry = self.recent.get(key)
        if (
            entry is not None
            and (not entry.ended or seen.at - entry.ended < DISCARDED_S)
            and (not entry.first_seen or seen.at - entry.first_seen < STORED_S)
        ):
            await self._handle_repeat(key, entry, seen, origin)
            return
        # A later repeat is stored, and the stream delivers it like a first one.
        waiting = self.repeats.setdefault(key, [])
        waiting.append(seen)
        del waiting[:-16]
        while len(self.repeats) > MAX_REPEATS:
            self.repeats.popitem(last=False)

    async def _remember(self, key: _Key, entry: _Delivery, origin: Origin) -> None:
        """Pass repeats to ``_handle_repeat`` from now on, and immediately those received before this delivery."""
        self.recent[key] = entry
        self.recent.move_to_end(key)
        seen_before = self.repeats.pop(key, [])
        entry.first_seen = seen_before[0].at if seen_before else 0.0  # the first is this submission itself
        for seen in seen_before[1:]:
            await self._handle_repeat(key, entry, seen, origin)

    async def _handle_repeat(self, key: _Key, entry: _Delivery, seen: _SeenSubmission, origin: Origin) -> None:
        """Answer a repeat, even where the first answer goes: of that, its reader may have missed the beginning."""
        replies = self._replies_for(origin, key_of(key[1]), seen.reply_to, 0)
        replies.set_request(entry.candidate)
        if len(self._tasks) > 4 * MAX_OPEN:
            error = ServingError(Code.queue_full, "too many repeats are being answered; read the answer at ps.read")
            await replies.refuse(failure(error, -1))
            return
        self._tasks.spawn(
            self._answer_repeat(key, entry, seen, origin, replies),
            name="submit-repeat",
            on_failure=_note_failed_repeat,
        )

    async def _answer_repeat(
        self, key: _Key, entry: _Delivery, seen: _SeenSubmission, origin: Origin, replies: ReplyPublisher
    ) -> None:
        refusal = await asyncio.shield(entry.decided)
        name = f"id:{key[1]}"
        try:
            if isinstance(seen.options, ServingError):
                raise seen.options
            replies.first = seen.options.first
            async with self._same_key.hold((origin.tenant, name), "repeats of this submission"):
                accepted = await self._acceptor.find_repeated(origin, name, seen.body)
                if accepted is not None:
                    await self._delivery.deliver(accepted, replies)
                elif seen.body != entry.body:
                    raise IdempotencyConflict
                elif refusal is not None:
                    await replies.refuse(refusal)
                else:
                    raise unknown(entry.candidate)
        except ServingError as error:
            await replies.refuse(failure(error, -1))

    def _forget(self) -> None:
        limit = time.monotonic() - DISCARDED_S
        for key in [key for key, entry in self.recent.items() if entry.ended and entry.ended < limit]:
            del self.recent[key]
        while self.repeats:
            key, waiting = next(iter(self.repeats.items()))
            if waiting[-1].at > limit:
                return
            del self.repeats[key]


def _note_failed_submission(error: BaseException) -> None:
    """The broker did not take the refusal or the acknowledgement: it delivers the submission again."""
    log.warning("submission_failed", error=repr(error))


def _note_failed_repeat(error: BaseException) -> None:
    log.warning("repeat_failed", error=repr(error))
