"""Which pages of browsers may use the API: ``--cors-origins``. Without it, none of another origin.

Keys are sent by scripts, never by the browser itself, so credentials (cookies) are not allowed.
"""

import re
from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.gateway.http.answers import App, Receive, Scope, Send

ANY = "*"
MAX_AGE_S = 600
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
_METHODS = b"GET, POST, DELETE"
_EXPOSED = b"x-request-id, request-id, retry-after, x-penstock-ignored-options, " + b", ".join(
    b"x-ratelimit-%s-%s" % (what, of) for what in (b"limit", b"remaining", b"reset") for of in (b"requests", b"tokens")
)


def check_origins(origins: Sequence[str]) -> None:
    """
    Raises:
        ValueError: one of them is not an origin.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"--cors-origins {origin!r}: write https://app.example.com, without a path, or *")


def with_cors(app: App, origins: Sequence[str]) -> App:
    """``app`` for pages of these origins."""
    allowed = frozenset(origin.encode() for origin in origins)

    async def cors(scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None:
            await app(scope, receive, send)
            return
        permitted = ANY.encode() in allowed or origin in allowed
        shown = ANY.encode() if ANY.encode() in allowed else origin
        own = [(b"vary", b"origin"), *([(b"access-control-allow-origin", shown)] if permitted else [])]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _preflight(send, own, headers, permitted)
            return

        async def answered(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                exposed = [(b"access-control-expose-headers", _EXPOSED)] if permitted else []
                message = {**message, "headers": [*message["headers"], *own, *exposed]}
            await send(message)

        await app(scope, receive, answered)

    return cors


async def _preflight(send: Send, own: list[tuple[bytes, bytes]], headers: dict[bytes, bytes], permitted: bool) -> None:
    """Answer whether a request may be sent. It needs no key: browsers send none with it."""
    if permitted:
        wanted = headers.get(b"access-control-request-headers", b"authorization, content-type, x-api-key")
        own = [
            *own,
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", wanted[:1024]),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
    await send({"type": "http.response.start", "status": 204 if permitted else 403, "headers": own})
    await send({"type": "http.response.body", "body": b""})
