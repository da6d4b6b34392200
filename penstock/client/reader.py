"""Follows one answer to its end: submits the request, and reads on from where it stopped if messages were lost."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from .answers import PenstockError, error, read_error
from .connection import Connection

MAX_AHEAD = 4096  # messages kept while earlier ones are missing; later ones are read again

HEADER_SEQ = "Penstock-Seq"
HEADER_FINAL = "Penstock-Final"
HEADER_ERROR = "Penstock-Error"
HEADER_RECORD = "Penstock-Record"
HEADER_REQUEST = "Penstock-Request-Id"
HEADER_KEY = "Penstock-Key"


class ReplyMessage(NamedTuple):
    """One message of an answer. ``record``: the whole answer, which replaces what came before."""

    seq: int
    body: bytes
    final: bool = False
    error: str = ""
    record: bool = False
    request: str = ""


def message_of(headers: Mapping[str, str], body: bytes) -> ReplyMessage | None:
    """None: it has no number, so it is not part of an answer."""
    seq = headers.get(HEADER_SEQ, "")
    if not (seq.isascii() and seq.isdigit()):
        return None
    return ReplyMessage(
        int(seq),
        body,
        HEADER_FINAL in headers,
        headers.get(HEADER_ERROR, ""),
        HEADER_RECORD in headers,
        headers.get(HEADER_REQUEST, ""),
    )


class ReorderBuffer:
    """Takes messages in any order, from several sources; returns them by number."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.ended = False
        self._ahead: dict[int, ReplyMessage] = {}

    def take(self, message: ReplyMessage) -> list[ReplyMessage]:
        """Add a message; returns those that are next in order."""
        if self.ended:
            return []
        if message.record:
            return self._end([message])
        if message.seq != self.next:
            if message.seq > self.next and (len(self._ahead) < MAX_AHEAD or message.seq in self._ahead):
                self._ahead[message.seq] = message
            return []
        ready = []
        following: ReplyMessage | None = message
        while following is not None:
            ready.append(following)
            self.next += 1
            if following.final:
                return self._end(ready)
            following = self._ahead.pop(self.next, None)
        return ready

    @property
    def hole(self) -> tuple[int, int] | None:
        """Numbers of the first and last message missing before one that has arrived."""
        return (self.next, min(self._ahead) - 1) if self._ahead else None

    def end(self) -> None:
        """No message follows those that were returned."""
        self._end([])

    def _end(self, ready: list[ReplyMessage]) -> list[ReplyMessage]:
        self.ended = True
        self._ahead.clear()
        return ready


SILENCE_S = 10.0  # without a message; then the answer is read again
AGAIN_S = 1.0  # between attempts to read or submit; reads that bring nothing new are asked less and less often
MOST_AGAIN_S = 8.0
ACK_S = 3.0
UNKNOWN_S = 15.0  # how long an unknown request may still turn up
BUFFER = 8192  # messages waiting for a slow reader; further ones are read again later

HEADER_CONTENT_TYPE = "Content-Type"
HEADER_MSG_ID = "Nats-Msg-Id"
HEADER_FROM = "Penstock-From"

_TEMPORARY = frozenset({"shutting_down", "broker_unavailable", "internal", "queue_full", "overloaded", "no_responders"})


class Submission(NamedTuple):
    """The request; without it an answer can be read, but the request cannot be submitted again."""

    model: str
    body: bytes
    headers: Mapping[str, str] = {}


class AnswerReader:
    """Owns its subscriptions from ``open`` to ``close``. One task uses it.

    Args:
        first: number of the first message wanted.
        until: monotonic time at which ``next`` gives up.
    """

    def __init__(
        self, connection: Connection, key: str, first: int, submission: Submission | None, until: float
    ) -> None:
        self._connection = connection
        self._key = key
        self._submission = submission
        self._until = until
        self._buffer = ReorderBuffer(first)
        self._ready: deque[ReplyMessage] = deque()
        self._name = connection.nc.new_inbox().rpartition(".")[2]  # its next read of the answer replaces the one before
        self._events: asyncio.Queue[Any] = asyncio.Queue(BUFFER)
        self._live: Any = None
        self._again: Any = None
        self._read_at = 0.0  # monotonic; when it was last asked for again, 0: never
        self._again_s = AGAIN_S  # from then to the next time
        self._wanted = False  # it must be read again as soon as possible
        self._unknown_since = 0.0
        self._submitted_at = 0.0
        self._patience_s = SILENCE_S  # before a submission that was acknowledged is repeated

    async def open(self) -> None:
        """Subscribe, then submit; without a submission, ask for the messages so far.

        Raises:
            PenstockError: it cannot be submitted in time.
        """
        self._connection.listeners.add(self._changed)
        self._live = await self._subscribe(self._connection.answer(self._key))
        if self._submission is None:
            await self._read()
        else:
            await self._submit()

    async def close(self) -> None:
        self._connection.listeners.discard(self._changed)
        for subscription in (self._live, self._again):
            await self._connection.unsubscribe(subscription)

    async def next(self) -> ReplyMessage | None:
        """The next message in order; None: the answer has ended.

        Raises:
            PenstockError: it cannot be read, or not in time. An error that is part of the answer is a message.
        """
        while not self._ready:
            if self._buffer.ended:
                return None
            await self._step()
        return self._ready.popleft()

    # -- what arrives ---------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Wait for one event and act on it."""
        if self._connection.closed:
            raise error("disconnected", "the connection is closed; resume from this position with another client")
        now = time.monotonic()
        if now >= self._until:
            raise error("timeout", "no answer in time; the request continues: resume from this position, or cancel it")
        quiet = AGAIN_S if self._wanted or self._buffer.hole else SILENCE_S
        try:
            async with asyncio.timeout(min(quiet, self._until - now)):
                event = await self._events.get()
        except TimeoutError:
            self._wanted = self._wanted or time.monotonic() < self._until
        else:
            if event is not None:
                self._take(dict(event.headers or {}), event.data)
        if self._buffer.hole:
            self._wanted = True
        if self._wanted and not self._buffer.ended and time.monotonic() - self._read_at >= self._again_s:
            self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
            await self._read()

    def _take(self, headers: Mapping[str, str], data: bytes) -> None:
        message = message_of(headers, data)
        if message is not None:
            self._unknown_since = 0.0
            ready = self._buffer.take(message)
            if ready:
                self._again_s = AGAIN_S
                self._ready.extend(ready)
            return
        code = "no_responders" if headers.get("Status") == "503" else headers.get(HEADER_ERROR, "internal")
        if code == "answer_ended":  # its final message was read before
            self._buffer.end()
            return
        if code == "request_not_found":
            self._not_found(read_error(data, code))
        elif code not in _TEMPORARY:
            raise read_error(data, code)
        self._wanted = True

    def _not_found(self, problem: PenstockError) -> None:
        """A request may still be waiting in its queue: it counts as unknown only after ``UNKNOWN_S``."""
        now = time.monotonic()
        self._unknown_since = self._unknown_since or now
        if self._submission is None and now - self._unknown_since > UNKNOWN_S:
            raise problem

    def _changed(self) -> None:
        """The client has reconnected, or is closed: messages in flight are lost."""
        self._wanted = True
        self._read_at, self._again_s = 0.0, AGAIN_S
        if not self._events.full():
            self._events.put_nowait(None)

    async def _subscribe(self, subject: str) -> Any:
        async def arrived(message: Any) -> None:
            if self._events.full():
                self._wanted = True
            else:
                self._events.put_nowait(message)

        return await self._connection.nc.subscribe(subject, cb=arrived)

    # -- asking ---------------------------------------------------------------------------------------------------

    async def _submit(self) -> None:
        """Publish until it is acknowledged."""
        assert self._submission is not None
        model, body, more = self._submission
        while True:
            headers = {**more, HEADER_MSG_ID: self._key}
            if self._buffer.next:
                headers[HEADER_FROM] = str(self._buffer.next)
            left = self._until - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(left, ACK_S + 1))):
                    await self._connection.js.publish(
                        self._connection.submit(model), body, headers=headers, timeout=ACK_S
                    )
            except MaxPayloadError:
                raise error("body_too_large", f"the request has {len(body)} bytes, more than a message may") from None
            except (NatsError, TimeoutError, OSError) as problem:
                if self._connection.closed:
                    raise error("disconnected", "the connection is closed, and the request not acknowledged") from None
                if time.monotonic() >= self._until:
                    raise error("timeout", f"the request was not acknowledged in time ({problem!r})") from None
                await asyncio.sleep(min(AGAIN_S, max(0.0, self._until - time.monotonic())))
            else:
                self._submitted_at = time.monotonic()
                return

    async def _read(self) -> None:
        """Ask for everything from the next message on; replaces earlier calls."""
        if not self._connection.connected:
            return  # once it is, ``_changed`` is called
        self._wanted = False
        self._read_at = now = time.monotonic()
        if self._submission is not None and self._unknown_since and now - self._submitted_at > self._patience_s:
            self._patience_s *= 2  # every repeat is stored, which fills a full queue further
            await self._submit()
        inbox = self._connection.nc.new_inbox()
        before, self._again = self._again, await self._subscribe(inbox)
        await self._connection.unsubscribe(before)
        query = msgspec.json.encode({"key": self._key, "from": self._buffer.next, "reader": self._name})
        try:
            await self._connection.nc.publish(self._connection.read, query, reply=inbox)
        except NatsError:
            self._wanted = True
