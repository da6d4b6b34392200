"""A small HTTP client that can break off, read slowly and see exactly how far a request came."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import h11

CONNECT_S = 3.0
_CONTEXTS: dict[str, ssl.SSLContext] = {}  # by the file of trusted certificates
SLOW_BYTES, SLOW_S = 2048, 0.05  # 40 KB/s, at most


class Broken(Exception):
    """The connection broke. ``sent``: the request may have arrived."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Answer:
    """Head of an answer; ``data`` reads on."""

    def __init__(self, connection: "_Connection", head: h11.Response) -> None:
        self.status: int = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self._connection = connection

    @property
    def request(self) -> str:
        return self.headers.get("x-request-id", "")

    async def data(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._connection.next(), h11.Data):
            yield bytes(event.data)

    async def read(self) -> bytes:
        return b"".join([part async for part in self.data()])

    async def events(self) -> AsyncIterator[tuple[str, str]]:
        """(id, data) of each server-sent event that came whole."""
        rest = b""
        async for part in self.data():
            *blocks, rest = (rest + part).split(b"\n\n")
            for block in blocks:
                fields = dict(line.split(": ", 1) for line in block.decode().split("\n") if ": " in line[1:])
                if "data" in fields:
                    yield fields.get("id", ""), fields["data"]


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        self._reader, self._writer, self._slow = reader, writer, slow
        self._state = h11.Connection(h11.CLIENT)

    async def send(self, *events: Any) -> None:
        for event in events:
            self._writer.write(self._state.send(event) or b"")
        await self._writer.drain()

    async def next(self) -> Any:
        while (event := self._state.next_event()) is h11.NEED_DATA:
            if self._slow:
                await asyncio.sleep(SLOW_S)
            self._state.receive_data(await self._reader.read(SLOW_BYTES if self._slow else 1 << 16))
        return event


async def _answer(connection: _Connection) -> Answer:
    while isinstance(head := await connection.next(), h11.InformationalResponse):
        pass
    if not isinstance(head, h11.Response):
        raise h11.RemoteProtocolError("the connection was closed before an answer")
    return Answer(connection, head)


def _context() -> ssl.SSLContext:
    trusted = os.environ.get("SSL_CERT_FILE", "")
    return _CONTEXTS.setdefault(trusted, ssl.create_default_context())


@asynccontextmanager
async def opened(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    slow: bool = False,
) -> AsyncIterator[Answer]:
    """Send a request; leaving closes the connection, whatever is still on its way.

    Raises:
        Broken: also from reading the answer.
    """
    at = urlsplit(url)
    payload = json.dumps(body).encode() if body is not None else b""
    sent = False
    writer = None
    try:
        async with asyncio.timeout(CONNECT_S):
            connecting = socket.socket()
            connecting.setblocking(False)
            if slow:
                connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                await asyncio.get_running_loop().sock_connect(connecting, (at.hostname, at.port))
                secured: dict[str, Any] = {}
                if at.scheme == "https":
                    secured = {"ssl": _context(), "server_hostname": at.hostname}
                limit = 2048 if slow else 1 << 16
                reader, writer = await asyncio.open_connection(sock=connecting, limit=limit, **secured)
            except BaseException:
                connecting.close()
                raise
        connection = _Connection(reader, writer, slow)
        head = [("host", at.netloc), ("content-length", str(len(payload))), ("content-type", "application/json")]
        sent = True
        await connection.send(
            h11.Request(method=method, target=path, headers=[*head, *(headers or {}).items()]),
            *([h11.Data(data=payload)] if payload else ()),
            h11.EndOfMessage(),
        )
        yield await _answer(connection)
    except (OSError, h11.ProtocolError) as error:
        raise Broken(repr(error), sent=sent) from None
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()
