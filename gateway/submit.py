"""The NATS door: OpenAI bodies from the SUBMIT stream, answers to the subject that the client named.

A submission is acknowledged only when its answer was sent. If this gateway dies, another one gets it again, finds
the request in the log (its id follows from the submission) and sends the answer from the start; each message
carries ``Penstock-Event-Id``, equal from every gateway, so that the client can drop what it has.
"""

import asyncio
import contextlib
import re
import time
from typing import Any

import msgspec
import structlog
from blake3 import blake3

from configs.bus.pull import ACK, IN_PROGRESS, NAK, TERM, Puller
from gateway.answers import written
from gateway.exchange import Exchange
from gateway.prepare import CHAT, TEXT, Prepared
from gateway.render import DONE, Collector, Renderer
from gateway.responses import error_body
from gateway.service import Gateway
from gateway.studios import ROLE
from gateway.tracing import of_nats, traced
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.subjects import HEADER_EVENT_ID, HEADER_FINAL, HEADER_REPLY_TO, HEADER_REQUEST, token

log = structlog.get_logger("gateway")

MAX_OPEN = 256
ELSEWHERE = NAK + b' {"delay": 50000000}'  # ns
LATER = NAK + b' {"delay": 1000000000}'
RENEW_S = 1.5  # the consumer's ack_wait is 5 s
OLD_S = 60.0
MAX_REPLY = 512  # characters of a reply subject; the server cuts whoever sends a line of more than 4,096
_SUBJECT = re.compile(r"[!-)+-\-/-=?-~]+(\.[!-)+-\-/-=?-~]+)*")  # tokens of visible ASCII, without wildcards

_json = msgspec.json.encode


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Kind(msgspec.Struct):
    """The parts of a body that decide how it is answered."""

    messages: msgspec.Raw = msgspec.Raw()  # not "Raw | None": that takes nothing but null
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def endpoint(self) -> str:
        return CHAT if self.messages and bytes(self.messages) != b"null" else TEXT

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _kind(body: bytes) -> _Kind:
    try:
        return msgspec.json.decode(body, type=_Kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Kind(msgspec.Raw(b"[]" if b'"messages"' in body else b""))  # preparing it says what is wrong


class SubmitDoor:
    """Owns one task per submission; ``close`` leaves the unfinished ones to another gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._nc = gateway.bus.nc
        self._tasks: dict[int, asyncio.Task[None]] = {}
        subjects = gateway.bus.subjects
        self._allowed = ("_INBOX.", subjects.reply(""))
        self._puller = Puller(gateway.bus, subjects.stream("SUBMIT"), "gateway", self._on_message, self._room)

    async def open(self) -> None:
        await self._puller.start()

    async def close(self, timeout: float) -> None:
        await self._puller.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _room(self) -> int:
        """None while the queue is full: submissions are durable where they are, and wait there."""
        return MAX_OPEN - len(self._tasks) if self._gateway.has_room() else 0

    async def _on_message(self, message: Any) -> None:
        sequence = message.metadata.sequence.stream
        if sequence in self._tasks:
            return  # delivered again while it is being answered here
        task = asyncio.create_task(self._serve(message, sequence), name=f"submit-{sequence}")
        self._tasks[sequence] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[sequence]
            if not task.cancelled() and task.exception() is not None:
                log.error("submission_failed", sequence=sequence, error=repr(task.exception()))

        task.add_done_callback(ended)

    def _elsewhere(self, subject: str) -> bool:
        """Whether a submission is for a model of another gateway of this namespace."""
        model = subject.rpartition(".")[2]
        if model in map(token, self._gateway.names):
            return False
        served = (member.registration for member in self._gateway.fleet.members.values())
        # Pictures are not for this door: one that asks for them is told so, not passed on for ever.
        return any(model in (token(r.model), *map(token, r.aliases)) for r in served if r.role != ROLE)

    def _may_answer(self, subject: str) -> bool:
        """Whether clients may read there, and nothing but an answer can come of it.

        Anything else would let a client make the gateway publish where the client itself may not, or send a line
        for which the server cuts the gateway's connection.
        """
        return (
            subject.startswith(self._allowed) and len(subject) <= MAX_REPLY and _SUBJECT.fullmatch(subject) is not None
        )

    async def _serve(self, message: Any, sequence: int) -> None:
        headers = message.headers or {}
        if self._elsewhere(message.subject):
            await self._nc.publish(message.reply, ELSEWHERE)
            return
        reply_to = headers.get(HEADER_REPLY_TO, "")
        if not self._may_answer(reply_to):
            log.warning("submission_without_reply", sequence=sequence, reply_to=reply_to[:200])
            await self._nc.publish(message.reply, TERM)
            return
        stored_ns = int(message.metadata.timestamp.timestamp() * 1e9)
        request_id = self._request_id(sequence, stored_ns)
        renewal = asyncio.create_task(self._renew(message.reply), name=f"submit-renew-{sequence}")
        code = "ok"
        try:
            code = await self._answer(message, request_id, stored_ns, reply_to)
        except ServingError as error:
            code = error.code.value
            if error.code in (Code.shutting_down, Code.queue_full):  # not the end of it: another gateway, or later
                await self._nc.publish(message.reply, LATER if error.code is Code.queue_full else NAK)
                return
            await self._send(reply_to, _json(error_body(error)), "", final=True, request_id=request_id)
        except Exception as error:  # not again and again from one gateway to the next
            code = Code.internal.value
            log.exception("submission_failed", sequence=sequence, error=repr(error))
            failure = ServingError(Code.internal, "internal error; the gateway's log has the details")
            await self._send(reply_to, _json(error_body(failure)), "", final=True, request_id=request_id)
        finally:
            renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewal
            self._gateway.metrics.requests.labels("nats", code).inc()
        await self._nc.flush()
        await self._nc.publish(message.reply, ACK)

    async def _answer(self, message: Any, request_id: str, stored_ns: int, reply_to: str) -> str:
        gateway = self._gateway
        kind = _kind(message.data)
        exchange = None
        if message.metadata.num_delivered > 1 or time.time_ns() - stored_ns > OLD_S * 1e9:
            exchange = await self._known(request_id)
        if exchange is None:
            prepared: Prepared = await gateway.prepare(kind.endpoint, message.data, request_id)
            prepared = traced(prepared, of_nats(message.headers or {}, gateway.settings.tracing))
            exchange = await gateway.submit(prepared.request, owner=False)
        try:
            if kind.stream:
                return await self._stream(exchange, reply_to, kind.include_usage)
            return await self._whole(exchange, reply_to)
        finally:
            gateway.detach(exchange)

    def _request_id(self, sequence: int, stored_ns: int) -> str:
        """The same on every gateway, so that the log has the request once."""
        name = f"{self._gateway.bus.subjects.stream('SUBMIT')}:{sequence}:{stored_ns}".encode()
        return new_request_id(stored_ns, blake3(name).digest(length=10))

    async def _known(self, request_id: str) -> Exchange | None:
        try:
            return await self._gateway.attach(await self._gateway.find(request_id))
        except ServingError as error:
            if error.code is Code.request_not_found:
                return None
            raise

    async def _stream(self, exchange: Exchange, reply_to: str, include_usage: bool) -> str:
        renderer = Renderer(exchange.request, self._gateway.model.detokenizer, include_usage=include_usage)
        while not renderer.done:
            try:
                data = renderer.push(await exchange.take())
            except ServingError as error:
                data = renderer.fail(error)
            events = data.removesuffix(DONE).split(b"\n\n")[:-1]
            for number, event in enumerate(events, 1):
                head, _, body = event.rpartition(b"data: ")
                event_id = head.removeprefix(b"id: ").strip().decode()
                final = renderer.done and number == len(events)
                await self._send(reply_to, body, event_id, final=final, request_id=exchange.request.id)
        return renderer.error.code.value if renderer.error is not None else "ok"

    async def _whole(self, exchange: Exchange, reply_to: str) -> str:
        collector = Collector(exchange.request, self._gateway.model.detokenizer)
        while not collector.push(await exchange.take()):
            pass
        body, limit = await written(collector), self._gateway.bus.max_message
        if len(body) > limit:
            raise ServingError(
                Code.body_too_large,
                f"the answer has {len(body)} bytes and a message {limit}; ask for stream: true, or ask over HTTP",
            )
        await self._send(reply_to, body, "", final=True, request_id=exchange.request.id)
        return "ok"

    async def _send(self, reply_to: str, body: bytes, event_id: str, *, final: bool, request_id: str = "") -> None:
        headers = {}
        if event_id:
            headers[HEADER_EVENT_ID] = event_id
        if request_id:
            headers[HEADER_REQUEST] = request_id
        if final:
            headers[HEADER_FINAL] = "1"
        await self._nc.publish(reply_to, body, headers=headers)

    async def _renew(self, reply: str) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self._gateway.bus.connected:
                await self._nc.publish(reply, IN_PROGRESS)
