"""``Client``: sends requests to a Penstock deployment over NATS; answers arrive complete, whatever fails meanwhile."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload
from uuid import uuid4

import msgspec
from nats.errors import Error as NatsError

from .answers import Answer, Chunk, Kind, NotFound, PenstockError, Position, error, read_answer, read_chunk, read_error
from .connection import Connection, connect
from .reader import AGAIN_S, HEADER_CONTENT_TYPE, HEADER_ERROR, HEADER_KEY, AnswerReader, ReplyMessage, Submission

TIMEOUT_S = 600.0  # the gateway's default deadline of a request
CANCEL_S = 10.0

_API_KEY = re.compile(r"(pst-[a-z0-9]{12})(?:-[A-Za-z0-9]+)?\Z")
_json = msgspec.json.encode
_CONTENT_TYPES: dict[Kind, str] = {
    "chat": "application/json; schema=ChatCompletionRequest",
    "text": "application/json; schema=CompletionRequest",
}


class Client:
    """Use as ``async with Client(url) as client``.

    Args:
        url: ``client_nats_url`` of ``state.json``, or a tenant's ``nats_url``; several servers comma-separated.
        key: an API key of the tenant, whose limits, models and budget hold for the requests too, and which they are
            counted for; calls can override it. Only its public part is sent: what the connection may do, its user says.
        namespace: as the deployment's ``--namespace``.
        timeout: seconds that a call waits for its answer; calls can override it.
        options: of ``nats.connect``.

    Raises:
        ValueError: not an API key.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        *,
        key: str = "",
        namespace: str = "ps",
        timeout: float = TIMEOUT_S,
        **options: Any,
    ) -> None:
        self._url = url
        self._key = _public_part(key)
        self._namespace = namespace
        self._timeout = timeout
        self._options = options
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        self._connection = await connect(self._url, self._namespace, **self._options)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Requests continue; ``resume`` reads their answers later."""
        if self._connection is not None:
            await self._connection.close()

    @overload
    def chat(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], stream: Literal[True], **options: Any
    ) -> "Stream": ...

    @overload
    def chat(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], stream: Literal[False] = False, **options: Any
    ) -> "Call": ...

    def chat(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], stream: bool = False, **options: Any
    ) -> "Call | Stream":
        """A chat completion: ``await`` it for the whole ``Answer``, or iterate over its chunks with ``stream=True``.

        Args:
            options: fields of the request (``temperature``, ``max_tokens``, ``tools``, ...), and ``idempotency_key``,
                ``position``, ``timeout``, ``key``, ``headers`` as described at ``complete``.
        """
        return self._ask("chat", {"model": model, "messages": list(messages)}, stream, options)

    @overload
    def complete(
        self, *, model: str, prompt: str | Sequence[int], stream: Literal[True], **options: Any
    ) -> "Stream": ...

    @overload
    def complete(
        self, *, model: str, prompt: str | Sequence[int], stream: Literal[False] = False, **options: Any
    ) -> "Call": ...

    def complete(
        self, *, model: str, prompt: str | Sequence[int], stream: bool = False, **options: Any
    ) -> "Call | Stream":
        """A text completion, as ``chat``.

        Args:
            options: fields of the request, and:
                ``idempotency_key``: within 24 h, the same request under the same key runs once and has one answer.
                ``position``: continue from there; as ``resume``, but it also works if the request was never accepted.
                ``timeout``: seconds to wait here; the request's own deadline is its field ``timeout_s``.
                ``key``: as of the client; "": none.
                ``headers``: ``traceparent`` and ``tracestate``.
        """
        return self._ask("text", {"model": model, "prompt": prompt}, stream, options)

    def resume(self, position: "Position | str", *, timeout: float | None = None) -> "Call | Stream":
        """Continue an answer, from this process or another: a ``Stream`` if it was one, else a ``Call``.

        Raises:
            ValueError: not a position.
        """
        resumed_at = Position.parse(position) if isinstance(position, str) else position
        return self._made(resumed_at, None, timeout)

    async def cancel(self, request: "Position | str") -> str:
        """Cancel a request by its position or its id: returns "cancelling", or "ended" if it has ended already.

        Raises:
            PenstockError: the request is unknown, or no gateway answers.
        """
        connection = self._connected()
        query = {"id": request} if isinstance(request, str) else {"key": request.key}
        until = time.monotonic() + CANCEL_S
        while True:
            try:
                reply = await connection.nc.request(connection.cancel, _json(query), timeout=2.0)
                if code := (reply.headers or {}).get(HEADER_ERROR):
                    raise read_error(reply.data, code)
                return str(msgspec.json.decode(reply.data).get("status", ""))
            except (NatsError, TimeoutError, OSError, NotFound) as problem:  # it may just be on its way
                if time.monotonic() > until:
                    if isinstance(problem, NotFound):
                        raise
                    raise error("timeout", f"no gateway answers ({problem!r}); try again") from None
                await asyncio.sleep(AGAIN_S / 2)

    def _ask(self, kind: Kind, body: dict[str, Any], stream: bool, options: dict[str, Any]) -> "Call | Stream":
        position: Position | str | None = options.pop("position", None)
        if isinstance(position, str):
            position = Position.parse(position)
        key = options.pop("idempotency_key", None) or (position.key if position else str(uuid4()))
        timeout, headers = options.pop("timeout", None), options.pop("headers", {})
        named = options.pop("key", None)
        if api_key := self._key if named is None else _public_part(named):
            headers = {HEADER_KEY: api_key, **headers}
        body |= {name: value for name, value in options.items() if value is not None}
        if stream:
            body["stream"] = True
        submission = Submission(body["model"], _json(body), {HEADER_CONTENT_TYPE: _CONTENT_TYPES[kind], **headers})
        first = position.next if position else 0
        return self._made(Position(key, first, kind, stream), submission, timeout)

    def _made(self, position: Position, submission: Submission | None, timeout: float | None) -> "Call | Stream":
        seconds = self._timeout if timeout is None else timeout
        return (Stream if position.stream else Call)(self, position, submission, seconds)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("use the client as 'async with Client(...) as client'")
        return self._connection

    def _reader(self, position: Position, submission: Submission | None, seconds: float) -> AnswerReader:
        until = time.monotonic() + seconds
        return AnswerReader(self._connected(), position.key, position.next, submission, until)


class _Request:
    """What calls and streams share."""

    def __init__(self, client: Client, position: Position, submission: Submission | None, seconds: float) -> None:
        self._client = client
        self._submission = submission
        self._seconds = seconds
        self.position = position
        self.request = ""  # the request's id, known from the first message of the answer on

    async def cancel(self) -> str:
        """Cancel the request; the answer then ends with ``Cancelled``."""
        return await self._client.cancel(self.position)

    def _reader(self) -> AnswerReader:
        return self._client._reader(self.position, self._submission, self._seconds)

    def _note(self, message: ReplyMessage) -> None:
        self.position = msgspec.structs.replace(self.position, next=message.seq + 1)
        self.request = message.request or self.request
        if message.error:
            raise read_error(message.body, message.error)


class Call(_Request):
    """A pending whole answer: ``await`` it."""

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._whole().__await__()

    async def _whole(self) -> Answer:
        self.position = msgspec.structs.replace(self.position, next=0)  # an answer that was read can be read again
        reader = self._reader()
        try:
            await reader.open()
            message = await reader.next()
            assert message is not None, "an answer has at least one message"
            self._note(message)
            return read_answer(message.body, self.position, self.request)
        finally:
            await reader.close()


class Stream(_Request):
    """A streamed answer: iterate over its chunks, once.

    ``position`` is after the last chunk that was returned: save it to continue there. Leaving the loop early leaves
    the request running; ``cancel`` ends it.
    """

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        reader = self._reader()
        try:
            await reader.open()
            while (message := await reader.next()) is not None:
                self._note(message)
                yield read_chunk(message.body, self.position, self.request, replaces=message.record)
        finally:
            await reader.close()


def _public_part(key: str) -> str:
    """The part of an API key that names it. The secret stays here: headers are stored with a submission."""
    if not key:
        return ""
    found = _API_KEY.match(key)
    if found is None:
        raise ValueError("key is not an API key of Penstock, or its first part, such as pst-0a1b2c3d4e5f")
    return found[1]


__all__ = ["Call", "Client", "PenstockError", "Stream"]
