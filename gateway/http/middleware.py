"""What wraps the HTTP application: log lines, cross-origin rules, and the addresses of clients behind a proxy.

The log has one line per request: client, method, path, status, duration and request id; no query, header or body.

``--cors-origins`` names the origins whose pages may use the API in a browser; without it, none may. Keys are sent by
scripts, never by the browser itself, so credentials (cookies) are not allowed.

``X-Forwarded-For`` and ``X-Forwarded-Proto`` count only if the peer is a proxy that ``--trusted-proxies`` names, since
anyone can send them; of several addresses only those count that trusted proxies have written, from the right.
"""

import inspect
import ipaddress
import re
import time
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import structlog
from starlette.middleware.cors import CORSMiddleware

from penstock.gateway.access.authentication import ANYONE, CALLER, Caller
from penstock.gateway.http.asgi import REQUEST_ID, App, Receive, Scope, Send

log = structlog.get_logger("gateway.access")

_KEY = re.compile("pst-[A-Za-z0-9-]+")  # in a path, where none belongs


def with_access_log(app: App) -> App:
    """Log each request when its answer has ended. Status 0: the client left before an answer began."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began = time.monotonic()
        status, request_id = 0, ""

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message.get("headers", ())).get(REQUEST_ID, b"").decode("latin-1")
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            caller: Caller = scope.get(CALLER, ANYONE)
            key = caller.key
            log.info(
                "http_request",
                method=scope["method"],
                path=_KEY.sub("pst-…", scope["path"]),
                status=status,
                duration_ms=round(1e3 * (time.monotonic() - began), 1),
                request_id=request_id,
                client=scope["client"][0] if scope.get("client") else "",
                tenant=caller.tenant if key is not None else "",
                key=key.prefix if key is not None else "",
            )

    return logged


ANY = "*"
MAX_AGE_S = 600
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
_EXPOSED = [
    *("x-request-id", "request-id", "retry-after", "x-penstock-ignored-options"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]


def check_origins(origins: Sequence[str]) -> None:
    """
    Raises:
        ValueError: one of them is not an origin.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"--cors-origins {origin!r}: write https://app.example.com, without a path, or *")


def with_cors(app: App, origins: Sequence[str]) -> App:
    """``app`` for pages of these origins.

    Some browsers ask whether a public page may use a server in a private network: a page of these origins may. Earlier
    releases of Starlette neither grant nor refuse that.
    """
    private = "allow_private_network"
    more: dict[str, Any] = {private: True} if private in inspect.signature(CORSMiddleware).parameters else {}
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=[ANY],
        expose_headers=_EXPOSED,
        max_age=MAX_AGE_S,
        **more,
    )


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
FORWARDED_FOR, FORWARDED_PROTO = b"x-forwarded-for", b"x-forwarded-proto"
MAX_HOPS = 16


class TrustedProxies:
    """
    Args:
        networks: addresses and networks, such as 10.0.0.0/8.
    Raises:
        ValueError: one of them is neither; the text says which.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        try:
            self._networks = [ipaddress.ip_network(text) for text in networks]
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}; write addresses or networks, such as 10.0.0.0/8") from None

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def client(self, peer: str, forwarded: Iterable[bytes]) -> str:
        """The address of the client: the last one that is not a trusted proxy's.

        Args:
            forwarded: values of X-Forwarded-For, in their order.
        """
        client = peer
        hops = b",".join(forwarded).split(b",")[-MAX_HOPS:]
        for hop in reversed(hops):
            if not self.trusts(client):
                return client
            found = _address(hop.decode("latin-1").strip())
            if found is None:
                return client
            client = str(found)
        return client


def with_proxies(app: App, trusted: TrustedProxies) -> App:
    """``app`` with the client's address and scheme in its scope."""

    async def forwarded(scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope["client"]
        if peer and trusted.trusts(peer[0]):
            values = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
            if values:
                scope["client"] = (trusted.client(peer[0], values), 0)
            schemes = [value for name, value in scope["headers"] if name == FORWARDED_PROTO]
            scheme = schemes[-1].rpartition(b",")[2].strip().lower() if schemes else b""
            if scheme in (b"http", b"https"):
                scope["scheme"] = scheme.decode()
        await app(scope, receive, send)

    return forwarded


def _address(text: str) -> Address | None:
    """An address as proxies write it, with a port or not; IPv4 within IPv6 as IPv4."""
    host = text
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        host = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
