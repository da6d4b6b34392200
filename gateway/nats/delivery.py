"""Sends the answer of an accepted request from the log, as often as asked, and again after the broker was away.

Whether the client still reads is asked of the broker, every second or every 32 messages. In the pipeline's own account
a message with a reply subject brings "no responders". The reply subjects that the broker makes for other accounts
(``_R_.…``) never do. There a message asks for the broker's trace of it: as long as the client is subscribed, the trace
has the step into the client's account; the broker drops that mapping for good once the subscription has gone.

``KeyedSlots`` limits how many answers of one key are sent at a time: a client's repeats must not delay other clients.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import Sight
from penstock.gateway.apis.endpoints import aggregator_for, encode_answer
from penstock.gateway.base.gateway_metrics import account
from penstock.gateway.nats.messages import DeliveredMessage, StreamMessages, failure
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import has_output, is_whole
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.connection import Bus
from penstock.schemas.done import Done, items
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import HEADER_IGNORED, HEADER_REQUEST
from penstock.schemas.tokens import TokenItem

INTEREST_S = 5.0  # nats-py's clients reconnect within 2 s of the broker's return
PROBE_S = 0.1
FLUSH_S = 2.0  # for which the broker's answer is waited for
RETURN_S = 60.0  # for which a refusal waits for the broker's return
CHECK_EVERY = 32  # messages after which, as after CHECK_S, the broker is asked whether there is a subscriber
CHECK_S = 1.0
TRACED_S = 1.5  # by then every server of a cluster has sent its part of a trace
MAPPED = "_R_."  # begins the reply subjects that the broker makes for clients of other accounts
HEADER_TRACE = "Nats-Trace-Dest"


class _Step(msgspec.Struct):
    type: str = ""
    to: str = ""


class _Trace(msgspec.Struct):
    """What one server did with a message; ``si``: it passed it into the account of a service's caller."""

    events: list[_Step] = []


_decode_trace = msgspec.json.Decoder(_Trace).decode


class ReplyPublisher:
    """
    Args:
        first, until: numbers of the first and last message to send.
        durable: the subjects survive a restart of the broker. The broker's own reply subjects do not.
        check_interest: set ``unread`` once there was no subscriber for ``INTEREST_S``; requires ``close``.

    Attributes:
        unread: the answer has no reader.
        on_inbox: called with the client's own subject once the broker has named it, in another account.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Sequence[str],
        *,
        first: int = 0,
        until: int | None = None,
        durable: bool = True,
        check_interest: bool = False,
    ) -> None:
        self._bus = bus
        self._links = bus.reconnects
        self._subjects = tuple(dict.fromkeys(subjects))
        self.request_id = ""
        self._headers: dict[str, str] = {}
        self._subscriber_required = False
        self.first = first
        self.until = until
        self.durable = durable
        self.check_interest = check_interest
        self.unread = False
        self._checks: Any = None  # subscription to the broker's "no responders"
        self._check_inbox = ""
        self._unchecked = 0  # messages since the last check
        self._checked_at = 0.0
        self.on_inbox: Callable[[str], None] | None = None
        self._mapped = any(subject.startswith(MAPPED) for subject in self._subjects)
        self._check_number = 0
        self._traced = 0  # number of the last check whose message reached the client's account
        self._dropped: tuple[int, float] | None = None  # a check whose message did not, and when that was first seen

    def set_request(self, request_id: str, ignored: str = "") -> None:
        """Set the request that is answered; its id is known only once it is accepted.

        Args:
            ignored: options of its body that are not known here; "": none, or it was accepted elsewhere.
        """
        self.request_id = request_id
        self._headers = {HEADER_REQUEST: request_id}
        if ignored:
            self._headers[HEADER_IGNORED] = ignored

    def is_last(self, message: DeliveredMessage) -> bool:
        """Whether no later message is to be sent."""
        return message.final or (self.until is not None and message.number >= self.until)

    def ended_before_first(self, message: DeliveredMessage) -> bool:
        """Whether the answer ends with this message, before the first that is to be sent."""
        return message.final and not message.record and message.number < self.first

    def require_subscriber(self) -> None:
        """Have the next message wait for a subscriber: after a reconnect, a gateway is back before its clients."""
        self._subscriber_required = True

    def give_up(self) -> None:
        """Stop sending: the same reader reads the answer again."""
        self.unread = True

    @property
    def waits_for_subscriber(self) -> bool:
        return self._subscriber_required

    async def send(self, message: DeliveredMessage) -> None:
        in_range = message.number >= self.first or message.number < 0 or message.record
        if self.unread or not in_range or (self.until is not None and message.number > self.until):
            return
        headers = message.headers(self._headers)
        if self._subscriber_required:
            received = await self._send_until_received(message.body, headers)
            self._subscriber_required = False
            self.unread = self.unread or (self.check_interest and not received)
            return
        reply = await self._check_reply() if self.check_interest else ""
        if reply and self._mapped:
            headers = headers | {HEADER_TRACE: reply}
            reply = ""
        for subject in self._subjects:
            await self._bus.nc.publish(subject, message.body, reply=reply, headers=headers)

    async def refuse(self, refusal: DeliveredMessage, *, at_once: bool = False) -> None:
        """Send why there is no answer, whichever of its messages were wanted.

        If the connection to the broker broke meanwhile, the client may not be back yet, and is waited for unless
        ``at_once``.
        """
        self.first, self.until = 0, None
        if self.durable and not at_once and (not self._bus.connected or self._bus.reconnects != self._links):
            deadline = time.monotonic() + RETURN_S
            while not self._bus.connected and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(PROBE_S)
            self.require_subscriber()
        await self.send(refusal)

    async def close(self) -> None:
        if self._checks is not None and not self._bus.nc.is_closed:
            await self._checks.unsubscribe()

    async def _check_reply(self) -> str:
        """The reply subject of the next message: an inbox if it checks for subscribers, else ""."""
        now = time.monotonic()
        self._unchecked += 1
        if self._checks is not None and self._unchecked < CHECK_EVERY and now - self._checked_at < CHECK_S:
            return ""
        if self._checks is None:
            self._check_inbox = self._bus.nc.new_inbox()
            if self._mapped:
                self._checks = await self._bus.nc.subscribe(f"{self._check_inbox}.*", cb=self._on_trace)
            else:
                self._checks = await self._bus.nc.subscribe(self._check_inbox, cb=self._on_no_responders)
        self._unchecked, self._checked_at = 0, now
        if not self._mapped:
            return self._check_inbox
        if self._dropped is not None and now - self._dropped[1] > TRACED_S:
            self.unread = True
        self._check_number += 1
        return f"{self._check_inbox}.{self._check_number}"

    async def _on_trace(self, message: Any) -> None:
        try:
            steps = _decode_trace(message.data).events
            number = int(message.subject.rpartition(".")[2])
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            return
        into = next((step.to for step in steps if step.type == "si"), "")
        if into:
            self._traced = max(self._traced, number)
            if self._dropped is not None and self._dropped[0] <= number:
                self._dropped = None
            if self.on_inbox is not None:
                on_inbox, self.on_inbox = self.on_inbox, None
                on_inbox(into)
        elif number > self._traced and self._dropped is None:  # another server may still report the step
            self._dropped = (number, time.monotonic())

    async def _on_no_responders(self, message: object) -> None:
        self._subscriber_required = True

    async def _send_until_received(self, body: bytes, headers: dict[str, str]) -> bool:
        """Send until there is a subscriber, for at most ``INTEREST_S``; False: there was none."""
        inbox, no_responders = self._bus.nc.new_inbox(), asyncio.Event()

        async def on_no_responders(message: object) -> None:
            no_responders.set()

        deadline = time.monotonic() + INTEREST_S
        sub = await self._bus.nc.subscribe(inbox, cb=on_no_responders)
        try:
            while self._bus.connected:
                received = False
                for subject in self._subjects:
                    no_responders.clear()
                    await self._bus.nc.publish(subject, body, reply=inbox, headers=headers)
                    for _ in range(2):  # nats-py writes the first PING ahead of buffered messages
                        await self._bus.nc.flush(timeout=FLUSH_S)
                    await asyncio.sleep(0)  # the callback runs in another task
                    received |= not no_responders.is_set()
                if received or time.monotonic() > deadline:
                    return received
                await asyncio.sleep(PROBE_S)
        except (NatsError, OSError):  # it does not answer in time, or the link just broke
            pass
        finally:
            if not self._bus.nc.is_closed:
                with suppress(NatsError, OSError):
                    await sub.unsubscribe()
        return True  # unknown: the broker is away


RECONNECT_POLL_S = 0.05
MAX_FINISHED = 4  # finished answers rendered at a time: each takes 2 ms in every turn of the event loop
GRACE_NS = 60_000_000_000  # beyond the deadline, for a broker that is away


class AcceptedRequest(NamedTuple):
    """An accepted request; its in-flight request if it was accepted just now, its record if it is over.

    ``ignored``: options of its body that are not known here, as text.
    """

    request: GenerateRequest
    record: Done | None = None
    inflight: InflightRequest | None = None
    ignored: str = ""


class AnswerDelivery:
    """Sends answers. Everything that it sends is derived from the log."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bus = gateway.bus
        self._finished = asyncio.Semaphore(MAX_FINISHED)

    async def find(self, tenant: str, request_id: str) -> AcceptedRequest:
        """
        Raises:
            ServingError: request_not_found, also if it is another tenant's; broker_unavailable.
        """
        request, record = await self._gateway.look_up(request_id, Sight(tenant))
        return AcceptedRequest(request, record)

    async def deliver(self, accepted: AcceptedRequest, replies: ReplyPublisher) -> str:
        """Send an answer to its end, following it while it runs; returns the code for the metrics.

        Raises:
            ServingError: the log cannot be read.
        """
        request = accepted.request
        replies.set_request(request.id, accepted.ignored)
        while True:
            links = self._bus.reconnects
            code = await self._send(accepted, replies, links)
            if code is not None:
                return code
            await self._wait_connected(request.deadline_ns + GRACE_NS)
            if not replies.durable:
                return "cut"
            # The buffered items were never received; the log still has them. It also knows when the request was stored:
            # the time in the request is by this gateway's clock, and its tokens are looked for from then on.
            accepted = await self.find(request.tenant, request.id)
            replies.require_subscriber()

    def _link_broken(self, links: int) -> bool:
        return not self._bus.connected or self._bus.reconnects != links

    async def _send(self, accepted: AcceptedRequest, replies: ReplyPublisher, links: int) -> str | None:
        """Send the answer once; None: the connection to the broker broke meanwhile."""
        if accepted.record is None or replies.waits_for_subscriber:
            return await self._send_messages(accepted, replies, links)
        async with self._finished:
            return await self._send_messages(accepted, replies, links)

    async def _send_messages(self, accepted: AcceptedRequest, replies: ReplyPublisher, links: int) -> str | None:
        code = "ok"
        late: DeliveredMessage | None = None
        inflight = accepted.inflight
        if inflight is None:
            inflight, late = await self._reopen(accepted.request, accepted.record)
        try:
            async for message in _messages(self._gateway, inflight, late, counted=accepted.inflight is not None):
                if message.error:
                    code = message.error
                await replies.send(message)
                if self._link_broken(links):
                    return None
                if replies.unread:
                    return "unread"
                if replies.is_last(message):
                    if replies.ended_before_first(message):
                        await replies.send(failure(_ended(message.number, replies.first), -1))
                    break
            try:
                await self._bus.nc.flush()
            except (NatsError, OSError):  # the link broke just now; it may not be known to be broken yet
                await asyncio.sleep(RECONNECT_POLL_S)
                return None
        except TimeoutError:
            return None  # of the flush
        finally:
            self._gateway.release(inflight)
        return None if self._link_broken(links) else code

    async def _reopen(
        self, request: GenerateRequest, record: Done | None
    ) -> tuple[InflightRequest, DeliveredMessage | None]:
        """A reader of the answer from its beginning; or the whole answer, if its chunks are no longer known."""
        usable = record is not None and has_output(record)
        if record is not None and usable and is_whole(record):
            inflight = InflightRequest(request)
            inflight.complete(items(record))
            return inflight, None
        inflight = await self._gateway.attach(request, whole=record is not None)
        if record is None or not usable or inflight.ended:
            return inflight, None
        collector = aggregator_for(
            request,
            await self._gateway.fleet.detokenizer(request),
            late=True,
            ended_ns=lambda: record.timings.ended_ns,
        )
        collector.push(items(record))
        try:
            return inflight, DeliveredMessage(0, await encode_answer(collector), record=True)
        except ServingError as error:
            return inflight, failure(error)._replace(record=True)

    async def _wait_connected(self, deadline_ns: int) -> None:
        while not self._bus.connected:
            if self._bus.clock.now_ns() > deadline_ns:
                raise ServingError(Code.broker_unavailable, "the broker is away")
            await asyncio.sleep(RECONNECT_POLL_S)


def _ended(last: int, wanted: int) -> ServingError:
    return ServingError(Code.answer_ended, f"the answer ended with message {last}; there is no message {wanted}")


async def _messages(
    gateway: Gateway, inflight: InflightRequest, late: DeliveredMessage | None, *, counted: bool
) -> AsyncIterator[DeliveredMessage]:
    """``counted``: its tokens are counted when it has ended: it is sent for the first time."""
    if late is not None:
        yield late
    elif inflight.request.form:
        chunks: StreamMessages | None = None
        while chunks is None or not chunks.done:
            items, failed = list[TokenItem](), None
            try:
                items = await inflight.take()
            except ServingError as error:
                if error.code is Code.broker_unavailable:
                    raise  # it is not part of the answer: that comes when the broker stores messages again
                failed = error
            if chunks is None:  # which model answers is known now
                detokenizer = await gateway.fleet.detokenizer(inflight.request)
                assert detokenizer is not None
                chunks = StreamMessages(inflight.request, detokenizer)
            made = chunks.push(items) if failed is None else chunks.fail(failed)
            if counted and chunks.done:
                account(gateway.metrics.of(inflight.request.model), chunks.usage)
            for message in made:
                yield message
    else:
        yield await _whole(gateway, inflight, counted=counted)


def _smaller(request: GenerateRequest) -> str:
    return "ask for stream: true" if request.embedding is None else "ask for fewer inputs at once"


async def _whole(gateway: Gateway, inflight: InflightRequest, *, counted: bool) -> DeliveredMessage:
    limit = gateway.bus.max_message
    try:
        collector = await gateway.collected(inflight)
        if counted:
            account(gateway.metrics.of(inflight.request.model), collector.usage)
        body = await encode_answer(collector)
        if len(body) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the answer has {len(body)} bytes and a message {limit}; {_smaller(inflight.request)}, or ask over "
                "HTTP",
            )
    except ServingError as error:
        if error.code is Code.broker_unavailable:
            raise
        return failure(error)
    return DeliveredMessage(0, body)


@dataclass(slots=True)
class _Key:
    free: asyncio.Semaphore
    held: int = 0  # or waited for


class KeyedSlots:
    """
    Args:
        slots: of each key.
        waiting: for a slot of each key; further ones are refused.
    """

    def __init__(self, slots: int, waiting: int) -> None:
        self._slots = slots
        self._waiting = waiting
        self._keys: dict[Hashable, _Key] = {}

    def __len__(self) -> int:
        """Keys in use."""
        return len(self._keys)

    @asynccontextmanager
    async def hold(self, key: Hashable, what: str) -> AsyncIterator[None]:
        """One slot of a key, first come, first served.

        Args:
            what: is limited, for the error.
        Raises:
            ServingError: queue_full.
        """
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key(asyncio.Semaphore(self._slots))
        if entry.held >= self._slots + self._waiting:
            raise ServingError(
                Code.queue_full,
                f"{entry.held} {what} are open, {self._slots} are answered at once; read the answer at ps.read, or try "
                "again later",
                retry_after=1.0,
            )
        entry.held += 1
        try:
            async with entry.free:
                yield
        finally:
            entry.held -= 1
            if not entry.held:
                del self._keys[key]
