"""A request over ASGI: its body within limits, what its headers say, and what is changed of its answer's head.

Of clients' own ids, ``X-Request-Id`` is kept beside ours, ``X-Session-Id`` is a hint for routing, and
``Idempotency-Key`` names a request for its repeats (``idempotency``). A W3C trace context has a request traced.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any, NamedTuple

import msgspec

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.base.request_bodies import BOM, read_switch
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.trace import Trace, asked

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENCODINGS = ("gzip", "x-gzip", "deflate")
MOST_MEMBERS = 4_096
_PART_BYTES = 64 << 10
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib finds out which by the header


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request body, without a byte order mark. Its connection enforces the time limits.

    Raises:
        ServingError: larger than ``limit`` bytes, as it came or decompressed; compressed in another way than
            ``ENCODINGS``, or damaged.
        ClientDisconnected: the client went away, or was too slow.
    """
    encoding = b""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"content-encoding":
            encoding += b"," + value if encoding else value
    kind = encoding.decode("latin-1").strip().lower()
    if kind in ("", "identity"):
        return (await _received(receive, limit)).removeprefix(BOM)
    if kind not in ENCODINGS:
        message = f"Content-Encoding {kind[:40]!r} is not supported; use gzip or deflate, or send the body as it is"
        raise ServingError(Code.unsupported_encoding, message, param="Content-Encoding")
    body = await _received(receive, limit)
    return (await asyncio.to_thread(decompress, body, limit)).removeprefix(BOM)


async def _received(receive: Receive, limit: int) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def decompress(body: bytes, limit: int) -> bytes:
    """A body in gzip (one or more members), or in deflate with or without the header of zlib.

    No more than ``limit`` bytes and one are ever made of it, however small it came. The time is linear in its size.

    Raises:
        ServingError: invalid_request: damaged or cut off, or of more than ``MOST_MEMBERS``; body_too_large.
    """
    out, view, at = bytearray(), memoryview(body), 0
    for _ in range(MOST_MEMBERS):
        if at == len(view):
            return bytes(out)
        at = _inflate(view, at, out, limit + 1, _GZIP_OR_ZLIB) or _inflate(view, at, out, limit + 1, -zlib.MAX_WBITS)
        if not at:
            raise _damaged("the body is not what Content-Encoding says, or was cut off")
        if len(out) > limit:
            raise _too_large(limit)
    if at < len(view):
        raise _damaged(f"the body has more than {MOST_MEMBERS} compressed members; compress it as one")
    return bytes(out)


def _inflate(view: memoryview, at: int, out: bytearray, most: int, wbits: int) -> int:
    """Append a compressed text to ``out``, up to ``most`` bytes; returns where it ends in ``view``, 0: it is none.

    It is read in parts, since zlib copies what follows a member in the part that it is given.
    """
    stream, before = zlib.decompressobj(wbits), len(out)
    with contextlib.suppress(zlib.error):
        while at < len(view) and len(out) < most:
            part = view[at : at + _PART_BYTES]
            out += stream.decompress(part, most - len(out))
            at += len(part) - len(stream.unused_data)
            if stream.eof:
                return at
        if len(out) >= most:
            return at
    del out[before:]
    return 0


def _damaged(message: str) -> ServingError:
    return ServingError(Code.invalid_request, message, param="Content-Encoding")


def _too_large(limit: int) -> ServingError:
    return ServingError(Code.body_too_large, f"the body is larger than {limit} bytes (--max-body-bytes)")


REQUEST_ID, CLIENT_ID = b"x-request-id", b"x-client-request-id"
MAX_CLIENT_ID = 128


def client_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's own ``X-Request-Id``, if it can be kept; b"": none."""
    for name, value in headers:
        if name == REQUEST_ID and len(value) <= MAX_CLIENT_ID and value.decode("latin-1").isprintable():
            return value
    return b""


KEY, NO_STORE = b"idempotency-key", b"x-penstock-no-store"
SESSION_IDS = (b"x-session-id", b"x-dynamo-session-id")  # the latter is what agents send that know Dynamo
MAX_KEY = 255
MAX_SESSION = 256


class ClientIds(NamedTuple):
    """As the client wrote them; "": not given. ``no_store``: the header asks for it."""

    key: str = ""
    client_id: str = ""
    no_store: bool = False
    session: str = ""


def read_client_ids(headers: Collection[tuple[bytes, bytes]]) -> ClientIds:
    """From ASGI headers, whose names are lower case.

    Raises:
        ServingError: invalid_request: the key is empty or too long, or no_store is neither on nor off.
    """
    key, session, no_store = "", "", False
    client_id = client_id_of(headers).decode("latin-1")
    for name, value in headers:
        if name == KEY:
            key = value.decode("latin-1").strip()
            if not 0 < len(key) <= MAX_KEY:
                raise ServingError(
                    Code.invalid_request, f"Idempotency-Key needs 1 to {MAX_KEY} characters", param="Idempotency-Key"
                )
        elif name in SESSION_IDS:
            text = value.decode("latin-1")
            session = text if text.isprintable() and len(text) <= MAX_SESSION else ""
        elif name == NO_STORE:
            # Sent twice, as by a proxy that adds its own: asked for once is enough.
            no_store = read_switch(value.decode("latin-1"), "X-Penstock-No-Store") or no_store
    return ClientIds(key, client_id, no_store, session)


def with_client_id(prepared: PreparedRequest, names: ClientIds) -> PreparedRequest:
    if not names.client_id and not names.session:
        return prepared
    request = prepared.request
    session = names.session or request.session
    changed = msgspec.structs.replace(request, client_request_id=names.client_id, session=session)
    return prepared._replace(request=changed)


PARENT, STATE = "traceparent", "tracestate"
_PARENT, _STATE = PARENT.encode(), STATE.encode()

NEW_TRACE = Trace()


def from_http_headers(headers: Iterable[tuple[bytes, bytes]], tracing: str) -> Trace | None:
    """ASGI headers: names are lower case."""
    if tracing == "off":
        return None
    parent, states = b"", b""
    for name, value in headers:
        if name == _PARENT:
            parent = value
        elif name == _STATE:
            states = states + b"," + value if states else value
    if parent and (trace := asked(parent.decode("latin-1"), states.decode("latin-1"))) is not None:
        return trace
    return NEW_TRACE if tracing == "all" else None


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


def with_status_of_full(send: Send, code: Code, status: int) -> Send:
    """``send`` for an error, which has this status if the queue is full."""
    if code is not Code.queue_full:
        return send

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        await send({**message, "status": status} if message["type"] == "http.response.start" else message)

    return wrapped
