"""nats-py's client with fixes, and with faster paths for what is sent and received most.

nats-py runs six regular expressions, a queue and a task for each received message, and a queue and a task for each sent
one. That is most of a message's cost. Here, pure functions cut messages out of the server's bytes (``FrameReader``) and
build published ones (``publish_command``). Only this module and ``puller`` use nats-py's private parts.

The link to a broker, over TCP or TLS, is nats-py's transport with fixes for TLS. The scheme ``tls`` demands TLS; a
server that requires TLS gets it with any scheme. Certificates are verified against the system's authorities, or those
in the file of ``SSL_CERT_FILE`` or ``PENSTOCK_NATS_CA`` (``connection.authenticate``).
"""

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import ParseResult

import msgspec
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error, ProtocolError
from nats.protocol.parser import Parser

CRLF = b"\r\n"
_VERSION = b"NATS/1.0\r\n"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_is_name = lru_cache(maxsize=256)(_NAME.fullmatch)  # of headers: programs use few different ones
# The headers that the server adds, in its order.
_REPUBLISHED = re.compile(
    rb"\r\nNats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: [^\r]*\r\nNats-Last-Sequence: (\d+)\r\n"
)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message as received. ``headers`` includes the version line, and is empty if there are none."""

    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes


class FrameReader:
    """Cuts a stream of bytes into messages and other lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # an incomplete frame
        self._size = 0
        self._needed = 0  # bytes of the complete frame, as far as known

    def read(self, data: bytes) -> Iterator[Frame | bytes]:
        """Yield messages, and other lines with their CRLF.

        Iterate to the end: only then is the rest kept for the next call.

        Raises:
            ProtocolError: the line that announces a message is malformed.
        """
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._parts)
            self._parts = []
        at = self._needed = 0
        while (line_end := data.find(CRLF, at)) >= 0:
            start = line_end + 2
            fields = data[at:line_end].split()
            kind = fields[0] if fields else b""
            if kind != b"HMSG" and kind != b"MSG":
                line, at = data[at:start], start
                yield line
                continue
            sizes = 1 if kind == b"MSG" else 2
            try:
                sid, end = int(fields[2]), start + int(fields[-1])
                body = start if sizes == 1 else start + int(fields[-2])
                reply = fields[3] if len(fields) == 4 + sizes else b""
                if len(fields) < 3 + sizes:
                    raise ValueError
            except (ValueError, IndexError):
                raise ProtocolError(f"malformed line: {data[at:line_end][:100]!r}") from None
            if len(data) < end + 2:
                self._needed = end + 2 - at
                break
            at = end + 2
            yield Frame(sid, fields[1], reply, data[start:body], data[body:end])
        if at < len(data):
            self._parts = [data[at:]]
            self._size = len(data) - at


def read_headers(raw: bytes) -> dict[str, str] | None:
    """The headers of a message. None if they need a full parser, for example because they have a status.

    Args:
        raw: headers with the version line and the empty line at the end.
    """
    if not raw.startswith(_VERSION) or not raw.isascii():
        return None
    headers = {}
    for line in raw[len(_VERSION) : -4].decode("ascii").split("\r\n"):
        name, colon, value = line.partition(":")
        if not colon or " " in name or "\t" in name:
            return None
        headers[name] = value.strip()
    return headers


def has_status(raw: bytes) -> bool:
    """Whether headers begin with a status: the server's answer has no (further) message."""
    return raw.startswith(b"NATS/1.0 ")


@lru_cache(maxsize=256)
def _beginning(name: str) -> bytes:
    """The beginning of a header's line, with the preceding line break."""
    return b"\r\n%b:" % name.encode()


class Headers(Mapping[str, str]):
    """The headers of a message, looked up on demand, because most readers need one or two of ten.

    Args:
        raw: as for ``read_headers``.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def get(self, name: str, /, default: Any = None) -> Any:
        raw, line = self._raw, _beginning(name)
        at = raw.rfind(line)  # the server appends its headers
        if at < 0:
            return default
        at += len(line)
        return raw[at : raw.index(CRLF, at)].decode("utf-8", "replace").strip()

    def __getitem__(self, name: str) -> str:
        value: str | None = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _beginning(name) in self._raw

    def __iter__(self) -> Iterator[str]:
        lines = self._raw.decode(errors="replace").split("\r\n")[1:-2]
        return iter(dict.fromkeys(line.partition(":")[0] for line in lines))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_republished(raw: bytes) -> tuple[str, int, int] | None:
    """Subject and sequence of a republished message, and the previous sequence on its subject.

    None if a client published it, not the server.

    Args:
        raw: as for ``read_headers``.
    """
    found = _REPUBLISHED.match(raw, max(0, raw.rfind(b"\r\nNats-Stream: ")))
    if found is not None:
        subject, seq, previous = found.groups()
        return subject.decode(errors="replace"), int(seq), int(previous)
    headers = Headers(raw)  # the usual headers in another order
    try:
        return headers["Nats-Subject"], int(headers["Nats-Sequence"]), int(headers["Nats-Last-Sequence"])
    except (KeyError, ValueError):
        return None


def publish_command(subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> bytes | None:
    """The protocol command that publishes a message. None if the subject or a header is invalid or unusual."""
    where = f"{subject} {reply}"
    if len(where.split()) != (2 if reply else 1) or not where.isascii():
        return None
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (where.encode(), len(payload), payload)
    # Not f-strings: nats-py's own names are members of an enum, which format as its name.
    lines = [name + ": " + value for name, value in headers.items() if _is_name(name)]
    text = "\r\n".join(lines)
    # A line break in a value would begin another header.
    if len(lines) != len(headers) or text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        return None
    head = b"NATS/1.0\r\n%b\r\n\r\n" % text.encode()
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (where.encode(), len(head), len(head) + len(payload), head, payload)


CLOSED_S = 1.0


class LinkTransport(TcpTransport):  # type: ignore[misc]  # untyped
    """A transport that reports a closed link as a connection error.

    uvloop raises a RuntimeError when a closed link is used. nats-py would take it for the end of the event loop, stop
    flushing, pinging and reconnecting for good, and raise it to publishers.
    """

    @property
    def writer(self) -> asyncio.StreamWriter | None:
        """None: there is no connection yet."""
        writer: asyncio.StreamWriter | None = self._io_writer
        return writer

    def __bool__(self) -> bool:
        return True  # otherwise nats-py replaces an unconnected transport with its own

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        reader, writer = self._io_reader, self._io_writer
        reader.set_transport(writer.transport)  # otherwise nothing can pause reading, and the buffer is unbounded
        writer._protocol._over_ssl = True  # as for any TLS stream; otherwise asyncio warns when it is closed

    def write(self, payload: bytes) -> None:
        try:
            self._io_writer.write(payload)
        except RuntimeError as error:
            self._check_closed(error)
            raise

    def writelines(self, payload: Sequence[bytes]) -> None:
        try:
            super().writelines(payload)
        except RuntimeError as error:
            self._check_closed(error)
            raise

    async def drain(self) -> None:
        try:
            await super().drain()
        except RuntimeError as error:
            self._check_closed(error)
            raise

    async def read(self, buffer_size: int) -> bytes:
        try:
            return bytes(await self._io_reader.read(buffer_size))
        except RuntimeError as error:
            self._check_closed(error)
            raise

    async def readline(self) -> bytes:
        try:
            return bytes(await super().readline())
        except RuntimeError as error:
            self._check_closed(error)
            raise

    def _check_closed(self, error: RuntimeError) -> None:
        if self._io_writer.is_closing():
            raise ConnectionResetError("the link to the broker is closed") from error

    def peer_certificate(self) -> bytes:
        """The server's certificate in DER form. Empty without TLS."""
        link = self._io_writer.get_extra_info("ssl_object") if self._io_writer is not None else None
        return (link.getpeercert(binary_form=True) or b"") if link is not None else b""

    async def wait_closed(self) -> None:
        """Wait for the end of the link, with a bound. nats-py waits here before it reconnects, and a server that hangs
        never answers the TLS shutdown."""
        if self._io_writer is None:
            return
        closed: asyncio.Future[None] = self._io_writer._protocol._get_close_waiter(self._io_writer)
        await asyncio.wait([closed], timeout=CLOSED_S)  # does not cancel the future, which others may wait for
        if not closed.done():
            self._io_writer.transport.abort()
        elif not closed.cancelled():
            closed.exception()  # retrieved, so that asyncio does not warn: the link broke, which is why it was closed


_BUFFERED_BYTES = 64 << 10  # in the write buffer; above this, nats-py's flusher waits for the server
# For messages without a waiting task, such as acknowledgements. At one connection a request takes 9 % less CPU than if
# they were sent at once, at 64 the same (``penstock bench http``, 40 and 45 alternating pairs on two busy cores).
_LATER_S = 0.01
# Turns of a few milliseconds that share one write. If each turn is written by itself, the receiving processes wake up
# more often: 12 % more CPU at 64 and at 600 connections (``penstock bench http``, 45 and 10 pairs on two cores).
MOST_TURNS = 5
READ_S = 0.002  # handling messages in one turn; 0.001 costs 4 % of all CPU time at 256 connections
_BURST_BYTES = 64 << 10  # after reading more than this, there is no pause

Handler = Callable[[Frame], None]

# A new login may succeed: this one was late because the link stalled, the credentials' file has been replaced since, or
# the server's configuration is repaired. nats-py would close the connection for good.
_LATE = "authentication timeout"
_REFUSED = ("authorization violation", "authentication expired", "authentication revoked")


def refuses_login(text: str) -> bool:
    """Whether an error of the server means that it does not accept this client's login, now or any more."""
    return any(each in text.lower() for each in _REFUSED)


class BusClient(Client):  # type: ignore[misc]  # untyped
    """Sends everything that is published in one turn of the event loop in a single write, at the end of the turn.

    It also repairs five faults of nats-py:

    - The read loop survives the answer to a flush that timed out. nats-py's loop would end and receive nothing more.
    - The link to a server that accepted it and then sent nothing is closed before the next server is tried.
    - Reconnecting ends with ``close``. A cancellation that arrives as a connect fails gets lost (``asyncio.wait_for``
      before Python 3.12), and the loop would try servers forever while the event loop waits for it.
    - ``flush`` also waits for what was published and subscribed in the same turn.
    - Servers that the cluster no longer announces are forgotten. Pods get new addresses whenever they are replaced, and
      each one of before would be tried for a second at a reconnect.

    Attributes:
        tls_context: called at each connect, so that certificate files may change.
        read_pause_s: seconds between two reads of the link; 0 is no pause. A pause lets a process that only follows a
            log read many messages at once, with far fewer wake-ups, but delays every answer by as much.
        expects_more: whether more is about to be published. Up to ``MOST_TURNS`` turns then share one write.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._pending: list[bytes] = []
        self._pending_data_size = 0
        self._handlers: dict[int, Handler] = {}  # by subscription
        self._write_scheduled = False
        self._write_later: asyncio.TimerHandle | None = None
        self.tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context
        self.read_pause_s = 0.0
        self.expects_more: Callable[[], bool] | None = None
        self._turns = 0  # turns without a write, because more was expected
        self._written: list[Callable[[], object]] = []
        self._ended = False
        self._transport: Any = None

    async def connect_within(self, timeout_s: float, servers: list[str], **options: Any) -> None:
        """Connect within this time. No attempt outlives the wait, whatever ends it.

        Raises:
            TimeoutError: no server has accepted the connection.
        """
        opening = asyncio.ensure_future(self.connect(servers, **options))
        try:
            # ``wait_for`` would wait for the end of the cancelled connect, which can lose its cancellation (see above)
            # and then tries forever a server that refuses it.
            await asyncio.wait([opening], timeout=timeout_s)
            if not opening.done():
                raise TimeoutError
            opening.result()
        except BaseException:
            self._ended = True
            opening.cancel()
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.drop_link()
            raise

    def drop_link(self) -> None:
        """Close a half-open link. nats-py leaves it open when ``connect`` fails or is cancelled."""
        if self._transport is not None:
            with contextlib.suppress(Exception):
                self._transport.close()

    @property
    def link(self) -> Any:
        """The connection to the server, as nats-py has it; None: there was none yet."""
        return self._transport

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return self.tls_context()

    @property
    def peer_certificate(self) -> bytes:
        """The broker's certificate in DER form. Empty without TLS."""
        return self.link.peer_certificate() if isinstance(self.link, LinkTransport) else b""

    async def _connect_to_server(self, s: Any) -> None:
        if self._ended:
            raise asyncio.CancelledError
        self.drop_link()
        if self._transport is None and s.uri.scheme not in ("ws", "wss"):
            self._transport = LinkTransport()
        await super()._connect_to_server(s)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._ended = self._ended or status == Client.CLOSED  # not when nats-py closes between two attempts
        await super()._close(status, do_cbs)

    async def _process_err(self, err_msg: str) -> None:
        if not refuses_login(err_msg) and _LATE not in err_msg.lower():
            await super()._process_err(err_msg)
            return
        error = Error(f"nats: {err_msg.strip()}")
        if not self.is_connected:
            raise error  # only this attempt to connect has failed
        await self._process_op_err(error)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._current_server.uri.scheme == "tls" and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise Error("the URL asks for TLS (tls://), but the server does not offer it")
            info["tls_required"] = True  # otherwise nats-py sends the password in the clear
        await super()._process_info(info, initial_connection)
        if announced := set(info.get("connect_urls") or ()):
            self._server_pool[:] = [
                each
                for each in self._server_pool
                if not each.discovered or each is self._current_server or each.uri.netloc in announced
            ]

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    # Receiving

    async def subscribe_direct(self, subject: str, handler: Handler) -> Subscription:
        """Subscribe with a handler that is called as soon as a message is read, in the order of the link.

        The handler must be quick, because nothing else is read meanwhile. Its errors go to nats-py's error callback.
        """
        sid = self._sid + 1  # ``subscribe`` takes this id before it awaits anything
        self._handlers[sid] = handler
        try:
            sub = await self.subscribe(subject)
        except BaseException:
            self._handlers.pop(sid, None)
            raise
        assert sub._id == sid
        return sub

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if not headers:
            return None
        parsed = read_headers(headers)
        return parsed if parsed is not None else await super()._process_headers(headers)

    # Sending

    def post(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, str] | None = None,
        *,
        later: bool = False,
    ) -> bool:
        """Publish without waiting. False if only ``publish`` can: the link is down, or the message is unusual.

        Args:
            later: no task waits for the message: it is sent with the next one, or after 10 ms.
        """
        if self._status != Client.CONNECTED or len(payload) > self._max_payload:
            return False
        command = publish_command(subject, payload, reply, headers)
        if command is None or self._pending_data_size + len(command) > self._max_pending_size:
            return False
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if later and not self._write_scheduled:
            if self._write_later is None:
                self._write_later = asyncio.get_running_loop().call_later(_LATER_S, self._write)
        else:
            self._write_soon()
        return True

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if not self.post(subject, payload, reply, headers):
            await super().publish(subject, payload, reply, headers)

    async def _send_ping(self, future: Any = None) -> None:
        try:
            if future is not None and self._pending and self.is_connected:
                # A flush ends with the answer to its ping, and nats-py sends the ping before these messages.
                self._transport.write(b"".join(self._pending))
                self._pending, self._pending_data_size = [], 0
            await super()._send_ping(future)
        except OSError:  # the link just broke: the read loop will notice, and reconnecting sends the rest
            if future is not None:
                raise

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self.is_connected:
            return await super()._flush_pending(force_flush)
        self._write_soon()
        return None

    def _write_soon(self) -> None:
        if not self._write_scheduled:
            self._write_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if self._turns < MOST_TURNS and self.expects_more is not None and self.expects_more():
            self._turns += 1
            asyncio.get_running_loop().call_soon(self._end_turn)
        else:
            self._turns = 0
            self._write()

    def when_written(self, then: Callable[[], object]) -> None:
        """Call ``then`` once everything published so far was written, possibly at once."""
        if self._write_scheduled:
            self._written.append(then)
        else:
            then()

    def _write(self) -> None:
        self._write_pending()
        written, self._written = self._written, []
        for then in written:
            then()

    def _write_pending(self) -> None:
        """Send pending messages. If the server reads slowly, leave them to nats-py's flusher, which waits for it."""
        self._write_scheduled = False
        if self._write_later is not None:
            self._write_later.cancel()
            self._write_later = None
        if not self._pending_data_size or not self.is_connected:
            return  # reconnecting sends the pending messages
        writer = getattr(self.link, "writer", None)
        if writer is None or writer.transport.get_write_buffer_size() > _BUFFERED_BYTES:
            if self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending, self._pending_data_size = [], 0
        try:
            self._transport.write(data)
        except OSError:  # the link just broke: the read loop will notice, and reconnecting sends this
            self._pending, self._pending_data_size = [data], len(data)


class _Parser(Parser):  # type: ignore[misc]  # untyped
    """Hands messages to the client. nats-py parses all other lines (PING, INFO, ...).

    Messages with a direct handler are handled as they arrive, because waking the reading task takes a tenth of the CPU
    time of a process with little load. As soon as something must be awaited, that task handles it and everything after
    it, so the order is that of the link.
    """

    def __init__(self, client: BusClient) -> None:
        self._frames = FrameReader()
        self._burst = 0  # bytes since the last pause
        self._reader: Any = None  # of the link
        self._late: list[Frame | bytes | Exception] = []  # arrived but not handled; also errors of handlers
        self._malformed: ProtocolError | None = None
        super().__init__(client)

    def reset(self) -> None:
        self._frames = FrameReader()
        self._reader, self._malformed = None, None
        self._late.clear()
        super().reset()

    def _handle_arriving(self, reader: Any) -> None:
        self._reader, feed = reader, reader.feed_data

        def take(data: bytes) -> None:
            waiter = reader._waiter  # of the reading task, while it is idle
            idle = waiter is not None and not waiter.done() and not reader._buffer
            if not idle or reader is not self._reader or self.nc.read_pause_s:
                feed(data)
            elif self._take(data):
                reader._wakeup_waiter()

        reader.feed_data = take

    def _take(self, data: bytes) -> bool:
        """Handle the arrived messages. True: the reading task has to continue."""
        handlers, late = self.nc._handlers, self._late
        messages = size = 0
        until = time.monotonic() + READ_S
        try:
            for frame in self._frames.read(data):
                handler = None if isinstance(frame, bytes) else handlers.get(frame.sid)
                if handler is None or late or time.monotonic() > until:
                    late.append(frame)
                    continue
                assert isinstance(frame, Frame)
                messages += 1
                size += len(frame.data)
                try:
                    handler(frame)
                except Exception as error:
                    late.append(error)
        except ProtocolError as error:
            self._malformed = error
        stats = self.nc.stats
        stats["in_msgs"] += messages
        stats["in_bytes"] += size
        return bool(late) or self._malformed is not None

    async def parse(self, data: bytes = b"") -> None:
        frames, handlers = self._frames, self.nc._handlers
        messages = size = 0
        late, self._late = self._late, []
        until = time.monotonic() + READ_S
        arrived = chain(late, self._read(frames, data)) if late or self._malformed else frames.read(data)
        for frame in arrived:
            if time.monotonic() > until:  # one read may bring hundreds of messages
                await asyncio.sleep(0)
                until = time.monotonic() + READ_S
            if self._frames is not frames:
                return  # the link has broken, so the rest is void
            if isinstance(frame, bytes):
                await super().parse(frame)
            elif isinstance(frame, Exception):
                await self.nc._error_cb(frame)
            elif (handler := handlers.get(frame.sid)) is None:
                await self.nc._process_msg(frame.sid, frame.subject, frame.reply, frame.data, frame.headers)
            else:
                messages += 1
                size += len(frame.data)
                try:
                    handler(frame)
                except Exception as error:
                    await self.nc._error_cb(error)
        stats = self.nc.stats
        stats["in_msgs"] += messages
        stats["in_bytes"] += size
        reader = getattr(self.nc._transport, "_io_reader", None)
        if reader is None:
            return
        if reader is not self._reader:
            self._handle_arriving(reader)
        self._burst += len(data)
        if reader._buffer:  # nats-py would read on without letting other tasks run
            await asyncio.sleep(0)
        elif self.nc.read_pause_s and not self.nc.is_closed:
            await self._pause(reader)

    def _read(self, frames: FrameReader, data: bytes) -> Iterator[Frame | bytes]:
        """Add data after the late messages."""
        if self._malformed is not None:
            raise self._malformed
        yield from frames.read(data)

    async def _pause(self, reader: Any) -> None:
        """Leave incoming bytes to the kernel for a while, unless this link is behind."""
        behind, self._burst = self._burst >= _BURST_BYTES, 0
        if behind:
            return
        with contextlib.suppress(RuntimeError):  # the link is closing, or is not reading now
            if not reader._paused:
                reader._transport.pause_reading()
                reader._paused = True  # the next read resumes
        await asyncio.sleep(self.nc.read_pause_s)
