"""What is changed of an answer when it begins: further headers, such as what an API key has left, or its status."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from penstock.gateway.access.limiter import Limiter
from penstock.gateway.http.connections import SCOPE, Connection
from penstock.schemas.errors import Code
from penstock.schemas.ids import new_request_id
from penstock.schemas.keys import ApiKey

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
REQUEST_ID, CLIENT_ID = b"x-request-id", b"x-client-request-id"
MAX_CLIENT_ID = 128

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def with_header(send: Send, name: bytes, value: bytes) -> Send:
    """``send`` with one more header in the answer."""

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (name, value)]}
        await send(message)

    return wrapped


def with_request_id(send: Send, client_id: bytes = b"") -> Send:
    """``send`` for an answer that may have no id of a stored request: it gets one, so that logs can be joined on it.

    Args:
        client_id: the client's own id, which is sent back beside it; b"": none.
    """

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            if all(name != REQUEST_ID for name, _ in headers):
                headers.append((REQUEST_ID, new_request_id().encode()))
            if client_id:
                headers.append((CLIENT_ID, client_id))
            message = {**message, "headers": headers}
        await send(message)

    return wrapped


def client_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's own ``X-Request-Id``, if it can be kept; b"": none."""
    for name, value in headers:
        if name == REQUEST_ID and len(value) <= MAX_CLIENT_ID and value.decode("latin-1").isprintable():
            return value
    return b""


def with_status_of_full(send: Send, code: Code, status: int) -> Send:
    """``send`` for an error, which has this status if the queue is full."""
    if code is not Code.queue_full:
        return send

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        await send({**message, "status": status} if message["type"] == "http.response.start" else message)

    return wrapped


def show_limits(scope: MutableMapping[str, Any], limiter: Limiter, key: ApiKey) -> None:
    """Have the answer say what the key has left. Without a layer around ``send``, which every event would pass."""
    connection: Connection = scope[SCOPE]
    connection.add_headers(limit_headers(limiter, key))


def limit_headers(limiter: Limiter, key: ApiKey) -> list[tuple[bytes, bytes]]:
    """As OpenAI names them, of requests and tokens per minute: limit, rest, seconds until all of it is free again."""
    headers: list[tuple[bytes, bytes]] = []
    for name, standing in zip((b"requests", b"tokens"), limiter.standing(key), strict=True):
        if standing.limit:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % standing.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % standing.remaining),
                (b"x-ratelimit-reset-" + name, b"%ds" % standing.reset_s),
            ]
    return headers
