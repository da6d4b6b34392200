"""What is changed of an answer when it begins: further headers, such as what an API key has left, or its status."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.access.limiter import Limiter
from gateway.http.connections import SCOPE, Connection
from schemas.errors import Code
from schemas.keys import ApiKey

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def with_header(send: Send, name: bytes, value: bytes) -> Send:
    """``send`` with one more header in the answer."""

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (name, value)]}
        await send(message)

    return wrapped


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
