"""Sending the answer of an accepted request, from the log: as often as asked, and again after the broker was away."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from gateway.http.answers import written
from gateway.log.inflight import Exchange
from gateway.log.records import has_output, is_whole
from gateway.nats.numbered import Chunks, Message, failure
from gateway.nats.outlet import Outlet
from gateway.openai.render import AnswerAggregator
from gateway.service import Gateway
from schemas.done import Done, items
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest

LINK_S = 0.05
GRACE_NS = 60_000_000_000  # beyond the deadline, for a broker that is away


class Found(NamedTuple):
    """An accepted request; its exchange if it was accepted just now, its record if it is over."""

    request: GenerateRequest
    record: Done | None = None
    exchange: Exchange | None = None


class Answering:
    """Holds no state: whatever it sends follows from the log."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bus = gateway.bus

    async def find(self, tenant: str, request_id: str) -> Found:
        """
        Raises:
            ServingError: request_not_found, also if it is another tenant's; broker_unavailable.
        """
        request, record = await self._gateway.look_up(request_id, tenant)
        return Found(request, record)

    async def deliver(self, found: Found, outlet: Outlet) -> str:
        """Send an answer to its end, following it while it runs; the code for the metrics.

        Raises:
            ServingError: the log cannot be read.
        """
        request = found.request
        outlet.about(request.id)
        while True:
            links = self._bus.reconnects
            code = await self._send(found, outlet, links)
            if code is not None:
                return code
            await self._until_linked(request.deadline_ns + GRACE_NS)
            # What its exchange held was sent to nobody: the log still has it.
            found = Found(request, found.record or await self._gateway.records.find(request.id))
            if not outlet.lasting:
                return "cut"
            outlet.doubt()

    def _cut(self, links: int) -> bool:
        return not self._bus.connected or self._bus.reconnects != links

    async def _send(self, found: Found, outlet: Outlet, links: int) -> str | None:
        """Once through the answer; None: the link to the broker broke meanwhile."""
        code = "ok"
        late: Message | None = None
        exchange = found.exchange
        if exchange is None:
            exchange, late = await self._again(found.request, found.record)
        try:
            async for message in _messages(self._gateway, exchange, late):
                if message.error:
                    code = message.error
                await outlet.send(message)
                if self._cut(links):
                    return None
                if outlet.past(message):
                    if outlet.missed(message):
                        await outlet.send(failure(_ended(message.number, outlet.first), -1))
                    break
            await self._bus.nc.flush()
        except TimeoutError:
            return None  # of the flush
        finally:
            self._gateway.detach(exchange)
        return None if self._cut(links) else code

    async def _again(self, request: GenerateRequest, record: Done | None) -> tuple[Exchange, Message | None]:
        """A reader of the answer from its beginning; or the whole answer, if its chunks cannot be told any more."""
        usable = record is not None and has_output(record)
        if record is not None and usable and is_whole(record):
            exchange = Exchange(request)
            exchange.complete(items(record))
            return exchange, None
        exchange = await self._gateway.attach(request, whole=record is not None)
        if record is None or not usable or exchange.ended:
            return exchange, None
        collector = AnswerAggregator(request, self._gateway.model.detokenizer, late=True)
        collector.push(items(record))
        try:
            return exchange, Message(0, await written(collector), record=True)
        except ServingError as error:
            return exchange, failure(error)._replace(record=True)

    async def _until_linked(self, deadline_ns: int) -> None:
        """
        Raises:
            ServingError: the broker did not come back while the request could run.
        """
        while not self._bus.connected:
            if time.time_ns() > deadline_ns:
                raise ServingError(Code.broker_unavailable, "the broker is away")
            await asyncio.sleep(LINK_S)


def _ended(last: int, wanted: int) -> ServingError:
    return ServingError(Code.answer_ended, f"the answer ended with message {last}; there is no message {wanted}")


async def _messages(gateway: Gateway, exchange: Exchange, late: Message | None) -> AsyncIterator[Message]:
    if late is not None:
        yield late
    elif exchange.request.form:
        chunks = Chunks(exchange.request, gateway.model.detokenizer)
        while not chunks.done:
            try:
                made = chunks.push(await exchange.take())
            except ServingError as error:
                made = chunks.fail(error)
            for message in made:
                yield message
    else:
        yield await _whole(gateway, exchange)


async def _whole(gateway: Gateway, exchange: Exchange) -> Message:
    collector = AnswerAggregator(exchange.request, gateway.model.detokenizer)
    limit = gateway.bus.max_message
    try:
        while not collector.push(await exchange.take()):
            pass
        body = await written(collector)
        if len(body) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the answer has {len(body)} bytes and a message {limit}; ask for stream: true, or ask over HTTP",
            )
    except ServingError as error:
        return failure(error)
    return Message(0, body)
