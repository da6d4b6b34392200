"""Reads the body of a request within its limits, decompressed if it came compressed."""

import asyncio
import contextlib
import zlib

from penstock.gateway.base.common import BOM
from penstock.gateway.http.headers import Receive, Scope
from penstock.schemas.errors import Code, ServingError

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
