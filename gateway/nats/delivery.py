"""Sends the answer of an accepted request from the log, as often as asked, and again after the broker was away."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from penstock.gateway.apis.answer_shapes import aggregator_for, encode_answer
from penstock.gateway.base.metrics import account
from penstock.gateway.log.inflight import InflightRequest
from penstock.gateway.log.records import has_output, is_whole
from penstock.gateway.nats.messages import AnswerMessage, StreamMessages, failure
from penstock.gateway.nats.reply_publisher import ReplyPublisher
from penstock.gateway.service.service import Gateway
from penstock.schemas.done import Done, items
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

RECONNECT_POLL_S = 0.05
MAX_FINISHED = 4  # finished answers rendered at once: each takes 2 ms in every turn of the event loop
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
        request, record = await self._gateway.look_up(request_id, tenant)
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
            # the time in the request is by a clock of ours, and its tokens are looked for from then on.
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
        late: AnswerMessage | None = None
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
            await self._bus.nc.flush()
        except TimeoutError:
            return None  # of the flush
        finally:
            self._gateway.release(inflight)
        return None if self._link_broken(links) else code

    async def _reopen(
        self, request: GenerateRequest, record: Done | None
    ) -> tuple[InflightRequest, AnswerMessage | None]:
        """A reader of the answer from its beginning; or the whole answer, if its chunks are no longer known."""
        usable = record is not None and has_output(record)
        if record is not None and usable and is_whole(record):
            inflight = InflightRequest(request)
            inflight.complete(items(record))
            return inflight, None
        inflight = await self._gateway.attach(request, whole=record is not None)
        if record is None or not usable or inflight.ended:
            return inflight, None
        collector = aggregator_for(request, await self._gateway.fleet.detokenizer(request), late=True)
        collector.push(items(record))
        try:
            return inflight, AnswerMessage(0, await encode_answer(collector), record=True)
        except ServingError as error:
            return inflight, failure(error)._replace(record=True)

    async def _wait_connected(self, deadline_ns: int) -> None:
        """
        Raises:
            ServingError: the broker did not come back while the request could run.
        """
        while not self._bus.connected:
            if self._bus.clock.now_ns() > deadline_ns:
                raise ServingError(Code.broker_unavailable, "the broker is away")
            await asyncio.sleep(RECONNECT_POLL_S)


def _ended(last: int, wanted: int) -> ServingError:
    return ServingError(Code.answer_ended, f"the answer ended with message {last}; there is no message {wanted}")


async def _messages(
    gateway: Gateway, inflight: InflightRequest, late: AnswerMessage | None, *, counted: bool
) -> AsyncIterator[AnswerMessage]:
    """``counted``: its tokens are counted when it has ended: it is sent for the first time."""
    if late is not None:
        yield late
    elif inflight.request.form:
        detokenizer = await gateway.fleet.detokenizer(inflight.request)
        assert detokenizer is not None
        chunks = StreamMessages(inflight.request, detokenizer)
        while not chunks.done:
            try:
                made = chunks.push(await inflight.take())
            except ServingError as error:
                if error.code is Code.broker_unavailable:
                    raise  # it is no part of the answer: that comes when the broker stores messages again
                made = chunks.fail(error)
            if counted and chunks.done:
                account(gateway.metrics.of(inflight.request.model), chunks.usage)
            for message in made:
                yield message
    else:
        yield await _whole(gateway, inflight, counted=counted)


def _smaller(request: GenerateRequest) -> str:
    return "ask for stream: true" if request.embedding is None else "ask for fewer inputs at once"


async def _whole(gateway: Gateway, inflight: InflightRequest, *, counted: bool) -> AnswerMessage:
    collector = aggregator_for(inflight.request, await gateway.fleet.detokenizer(inflight.request))
    limit = gateway.bus.max_message
    try:
        while not collector.push(await inflight.take()):
            pass
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
    return AnswerMessage(0, body)
