"""Headers that are added to an answer when it begins, such as what an API key has left."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.access.limiter import Limiter
from gateway.http.connections import SCOPE, Connection
from schemas.keys import ApiKey

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def with_header(send: Send, name: bytes, value: bytes) -> Send:
    """``send`` with one more header in the answer."""

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (name, value)]}
        await send(message)

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
