"""Messages of the log as records: read from a broker in bulk or one after the other, or from files.

Reading a whole stream as fast as one core can: direct get over a plain socket, without a client library.

``penstock.infra.bus.direct_get.read`` takes 70 us a message, most of it in the client library's parser and tasks. This
takes 4. It is for one server without TLS; the caller reads clusters the other way.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from penstock.infra.bus.connection import CONNECT_S
from penstock.infra.bus.direct_get import Entry, before_time, format_time, read
from penstock.log.sources.blocks import message, parse_headers
from penstock.log.sources.data_folder import StoredLog
from penstock.log.sources.log_line import LogLine, Selection
from penstock.log.sources.open_log import Log
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.ids import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import inbox_prefix

BATCH = 5_000
BATCH_BYTES = 16 << 20
STALL_S = 10.0
RECEIVE_BYTES = 1 << 20
_INBOX = f"{inbox_prefix('reader')}.export"
_OWN = "Nats-Stream"  # the first of the headers that the server adds to a direct get


class StoredMessage(NamedTuple):
    """One stored message. ``time``: RFC 3339, as the server writes it."""

    subject: str
    seq: int
    time: str
    headers: dict[str, str]
    data: bytes


class NeedsTls(Exception):
    """The server takes connections with TLS only."""


def read_bulk(url: str, stream: str, subject: str, *, after: int = 0, until_seq: int = 0) -> Iterator[StoredMessage]:
    """Stored messages of ``subject`` in stream order; the arguments are those of ``direct_get.read``.

    The next batch is read in a thread while the caller works on one. Each has a connection of its own: the broker ends
    connections that do not read, so none may be open meanwhile.

    Raises:
        ServingError: no server answers, or the stream cannot be read.
        NeedsTls: read with ``penstock.infra.bus.direct_get`` instead.
    """

    def fetch(start: dict[str, Any]) -> list[StoredMessage]:
        with _Connection(url) as connection:
            return connection.batch(stream, {"batch": BATCH, "max_bytes": BATCH_BYTES, "next_by_subj": subject} | start)

    with ThreadPoolExecutor(1, "export") as thread:
        batch = fetch({"seq": after + 1})
        while batch:
            last = batch[-1].seq
            over = bool(until_seq) and last >= until_seq
            coming = None if over else thread.submit(fetch, {"seq": last + 1})
            for stored in batch:
                if until_seq and stored.seq > until_seq:
                    return
                yield stored
            batch = [] if coming is None else coming.result()


class _Connection:
    """One connection, for one batch."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        where = (parts.hostname or "127.0.0.1", parts.port or 4222)
        try:
            self._socket = socket.create_connection(where, CONNECT_S)
        except OSError as error:
            raise _unavailable(f"no NATS server answers at {where[0]}:{where[1]} ({error})") from error
        self._buffer = b""
        try:
            self._hello(unquote(parts.username or ""), unquote(parts.password or ""))
        except BaseException:
            self._socket.close()
            raise

    def _hello(self, user: str, password: str) -> None:
        info = json.loads(self._line().removeprefix(b"INFO "))
        if info.get("tls_required"):
            raise NeedsTls
        login: dict[str, Any] = {"user": user, "pass": password} if password else {"auth_token": user} if user else {}
        options = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "name": "export"}
        self._socket.sendall(b"CONNECT " + json.dumps(options | login).encode() + b"\r\nPING\r\n")
        while not (line := self._line()).startswith(b"PONG"):
            if line.startswith(b"-ERR"):
                raise _unavailable(f"the broker refuses the connection ({line.decode()})")
        self._socket.sendall(f"SUB {_INBOX} 1\r\n".encode())
        self._socket.settimeout(STALL_S)

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def batch(self, stream: str, query: dict[str, Any]) -> list[StoredMessage]:
        """
        Raises:
            ServingError: the stream does not answer, or cannot be read.
        """
        body = json.dumps(query)
        try:
            self._socket.sendall(f"PUB $JS.API.DIRECT.GET.{stream} {_INBOX} {len(body)}\r\n{body}\r\n".encode())
            return list(self._batch(stream))
        except OSError as error:
            raise _unavailable(f"stream {stream} cannot be read ({error})") from error

    def _batch(self, stream: str) -> Iterator[StoredMessage]:
        buffer, at = self._buffer, 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                buffer, at = buffer[at:] + self._receive(), 0
                continue
            if not buffer.startswith(b"HMSG", at):
                self._other(buffer[at:end])
                at = end + 2
                continue
            *_, header_size, size = buffer[at:end].split()
            start, header_bytes, total = end + 2, int(header_size), int(size)
            while len(buffer) < start + total + 2:
                buffer, start = buffer[at:] + self._receive(start + total + 2 - len(buffer)), start - at
                at = 0
            lines = buffer[start : start + header_bytes].decode().split("\r\n")
            at = start + total + 2
            if lines[0] != "NATS/1.0":
                status = lines[0].split(" ", 2)[1:]
                if status[0] in ("204", "404"):
                    return
                raise _unavailable(f"stream {stream} cannot be read ({' '.join(status)}); see 'penstock streams apply'")
            yield _stored(lines, buffer[start + header_bytes : start + total])

    def _other(self, line: bytes) -> None:
        if line == b"PING":
            self._socket.sendall(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise _unavailable(f"the broker ended the connection ({line.decode()})")

    def _receive(self, wanted: int = 0) -> bytes:
        parts: list[bytes] = []
        received = 0
        try:
            while not parts or received < wanted:
                part = self._socket.recv(RECEIVE_BYTES)
                if not part:
                    raise _unavailable("the broker closed the connection")
                parts.append(part)
                received += len(part)
        except TimeoutError:
            raise _unavailable(f"the broker sent nothing for {STALL_S:g} s") from None
        return b"".join(parts)

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._buffer += self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line


def _stored(lines: list[str], data: bytes) -> StoredMessage:
    headers: dict[str, str] = {}
    own: dict[str, str] = {}
    into = headers
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        if name == _OWN:
            into = own
        into[name] = value.strip()
    return StoredMessage(own["Nats-Subject"], int(own["Nats-Sequence"]), own["Nats-Time-Stamp"], headers, data)


def _unavailable(text: str) -> ServingError:
    return ServingError(Code.broker_unavailable, text)


NS = 1_000_000_000
_SERVERS_HEADERS = "Nats-"
_KEPT_HEADERS = ("Nats-Msg-Id",)


async def copy_messages(
    log: Log, stream: str, until_seq: int, chosen: Selection, add: Callable[[LogLine], None]
) -> None:
    """Pass the messages of a stream that may be about selected requests to ``add``.

    Raises:
        ServingError: the stream cannot be read.
    """
    since, until = span(chosen)
    if stream == "KV":
        since = 0  # routers know what workers held from its beginning on
    before = format_time(until) if until else ""
    name = log.reader.subjects.stream(stream)
    if log.files is not None:
        for record in records_of(log.files, stream, since_ns=since, until_seq=until_seq, until_ns=until):
            add(record)
        return
    if log.url and not log.bus.clustered:
        with contextlib.suppress(NeedsTls):
            after = await before_time(log.bus, name, since) if since else 0
            await asyncio.to_thread(_copy_bulk, log.url, stream, name, after, until_seq, before, add)
            return
    async for entry in read(log.bus, name, ">", since_ns=since, until_seq=until_seq):
        record = of_entry_as_record(stream, entry)
        if before and record.time > before:
            return
        add(record)


def _copy_bulk(
    url: str,
    stream: str,
    name: str,
    after: int,
    until_seq: int,
    before: str,
    add: Callable[[LogLine], None],
) -> None:
    for stored in read_bulk(url, name, ">", after=after, until_seq=until_seq):
        if before and stored.time > before:
            return
        add(LogLine(stream, stored.seq, stored.time, stored.subject, stored.headers, stored.data))


def records_of(
    log: StoredLog, stream: str, *, since_ns: int = 0, until_seq: int = 0, until_ns: int = 0
) -> Iterator[LogLine]:
    """The messages of a stopped deployment's stream (without the namespace), between two times and up to a sequence."""
    stored = log.stream(log.subjects.stream(stream))
    for data, places in stored.by_block(since_ns=since_ns) if stored is not None else ():
        for seq, time_ns, at in places:
            if (until_seq and seq > until_seq) or (until_ns and time_ns > until_ns):
                return
            yield record_of(stream, data, seq, time_ns, at)


def record_of(stream: str, block: bytes, seq: int, time_ns: int, at: int) -> LogLine:
    """The message at a place of a block."""
    stored = message(block, at)
    headers = parse_headers(stored.headers) if stored.headers else {}
    return LogLine(stream, seq, format_time(time_ns), stored.subject, headers, stored.data)


def of_entry_as_record(stream: str, entry: Entry) -> LogLine:
    headers = {
        name: value
        for name, value in entry.headers.items()
        if name in _KEPT_HEADERS or not name.startswith(_SERVERS_HEADERS)
    }
    return LogLine(stream, entry.seq, entry.headers["Nats-Time-Stamp"], entry.subject, headers, entry.data)


def span(chosen: Selection) -> tuple[int, int]:
    """When the messages of the selected requests were stored, at the earliest and at the latest; 0: open."""
    first = min(map(time_of, chosen.ids), default=0) or chosen.since_ns
    last = max(map(time_of, chosen.ids), default=0) or chosen.until_ns
    longest = int(LONGEST_DEADLINE_S * NS) + CLOCK_SKEW_NS
    return max(0, first - CLOCK_SKEW_NS), last + longest if last else 0
