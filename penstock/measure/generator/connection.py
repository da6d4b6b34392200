"""One keep-alive connection of a load generator: it sends a request, follows the answer, and is idle again.

The generator shares the machine with the server, so each read costs as little as possible: it searches the bytes for
markers (events, text, the end) and parses only the usage at the end.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import cast

from penstock.measure.generator.exchange import Exchange

_EVENT = b"data: {"
_CHUNKED_END = b"\r\n0\r\n\r\n"
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"(?!")')  # some events have empty text
_USAGE = {
    "prompt_tokens": re.compile(rb'"prompt_tokens": ?(\d+)'),
    "cached_tokens": re.compile(rb'"cached_tokens": ?(\d+)'),
    "output_tokens": re.compile(rb'"completion_tokens": ?(\d+)'),
}
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TAIL_BYTES = 2048
_QUOTED_BYTES = 200  # of an error's body


class Connection(asyncio.Protocol):
    """
    Args:
        idle: called when an answer is complete and another request may be sent, before ``Exchange.done``.
        lost: called when the connection has ended, wanted or not.
    """

    def __init__(self, idle: Callable[["Connection"], None], lost: Callable[["Connection"], None]) -> None:
        self._idle = idle
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None  # under way
        self._reset()

    def _reset(self) -> None:
        self._head = b""  # until the headers are complete
        self._in_body = False
        self._left = -1  # bytes of the body to come; -1: chunked
        self._close = False
        self._end = b""  # the last bytes, where a mark may be cut by the border of two reads
        self._tail = b""  # the last part of the body, where the usage is

    @property
    def exchange(self) -> Exchange | None:
        """The request in flight."""
        return self._exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def send(self, exchange: Exchange) -> None:
        """Send a request; the connection must be open and idle."""
        assert self._transport is not None
        assert self._exchange is None
        self._reset()
        self._exchange = exchange
        exchange.sent = time.perf_counter()
        self._transport.write(exchange.request)

    def close(self, error: str = "") -> None:
        """Close. A request in flight fails with ``error``, or is dropped without a call if ``error`` is empty."""
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            if exchange is None:
                self._transport.close()
            else:
                self._transport.abort()
        if exchange is not None and error:
            exchange.error = error
            exchange.done(exchange)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return  # closed, or more than was asked for
        if self._in_body:
            self._body(exchange, data)
            return
        self._head += data
        head, mark, body = self._head.partition(b"\r\n\r\n")
        if not mark:
            return
        self._in_body = True
        lower = head.lower()
        exchange.status = int(head[9:12])
        self._close = b"connection: close" in lower
        if b"transfer-encoding: chunked" not in lower:
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else 0
        # The end of the headers may already be the beginning of the last chunk's mark.
        self._end = b"\r\n"
        if body or self._left == 0:
            self._body(exchange, body)

    def _body(self, exchange: Exchange, data: bytes) -> None:
        joined = self._end + data
        exchange.events += joined.count(_EVENT)
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:] if self._left < 0 else self._tail + data
        if _TEXT.search(joined):  # ends at the first match, mostly in the first event
            self._text(exchange)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._answered(exchange)
        elif joined.endswith(_CHUNKED_END):
            self._answered(exchange)
        else:
            self._end = joined[1 - len(_EVENT) :]

    def _text(self, exchange: Exchange) -> None:
        now = time.perf_counter()
        if exchange.first:
            exchange.gaps_s.append(now - exchange.last)
        else:
            exchange.first = now
        exchange.last = now

    def _answered(self, exchange: Exchange) -> None:
        assert self._transport is not None
        exchange.ended = time.perf_counter()
        if exchange.status != 200:
            quoted = self._tail[:_QUOTED_BYTES].decode(errors="replace")
            exchange.error = f"HTTP {exchange.status}: {quoted}"
        else:
            for name, pattern in _USAGE.items():
                if matches := pattern.findall(self._tail):
                    setattr(exchange, name, int(matches[-1]))
        self._exchange = None
        if self._close:
            self._transport.close()
        else:
            self._idle(self)
        exchange.done(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        self._lost(self)
        if exchange is not None:
            exchange.error = "connection lost" + (f": {exc!r}" if exc else "")
            exchange.done(exchange)
