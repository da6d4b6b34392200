"""One keep-alive connection of a load generator: sends a request, watches the answer, sends the next.

It shares the machine with what it measures, so it does as little as it can per read: it looks for marks in the
bytes (events, text, the end) and parses no JSON but the usage at the end.
"""

import asyncio
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

_EVENT = b"data: {"
_CHUNKED_END = b"\r\n0\r\n\r\n"
_USAGE = b'"completion_tokens"'
_TEXT = re.compile(rb'("(?:content|reasoning_content|text)": ?")(?!")')
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MOST_REASONS = 20
_TAIL_BYTES = 1024


@dataclass(slots=True)
class Tally:
    """What one stage of a benchmark saw; times in seconds."""

    first_s: "array[float]" = field(default_factory=lambda: array("d"))  # to the first text
    between_s: "array[float]" = field(default_factory=lambda: array("d"))  # between reads that carried text
    total_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: int = 0
    events: int = 0  # server-sent events but [DONE]
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """Answered as they should be."""
        return len(self.total_s)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def clear(self) -> None:
        for series in (self.first_s, self.between_s, self.total_s):
            del series[:]
        self.tokens = self.events = 0
        self.errors.clear()

    def copy(self) -> "Tally":
        return replace(
            self,
            first_s=self.first_s[:],
            between_s=self.between_s[:],
            total_s=self.total_s[:],
            errors=self.errors.copy(),
        )

    def fail(self, reason: str) -> None:
        known = reason in self.errors or len(self.errors) < _MOST_REASONS
        self.errors[reason if known else "other"] += 1


class Connection(asyncio.Protocol):
    """Sends what ``next_request`` gives until it gives None; reopening is the caller's (``lost``).

    Args:
        next_request: the next request's bytes and where to count it; None: no more.
        expected_tokens: an answer with another number is an error; 0: any will do.
        lost: called when the connection has ended, wanted or not.
    """

    def __init__(
        self,
        next_request: Callable[[], tuple[bytes, Tally] | None],
        expected_tokens: int,
        lost: Callable[[], None],
    ) -> None:
        self._next = next_request
        self._expected = expected_tokens
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._tally: Tally | None = None  # of the request under way
        self._sent = 0.0
        self._reset()

    def _reset(self) -> None:
        self._head = b""  # until the headers are complete
        self._in_body = False
        self._status = 0
        self._left = -1  # bytes of the body to come; -1: chunked
        self._close = False
        self._end = b""  # the last bytes, where a mark may be cut by the border of two reads
        self._tail = b""  # the last part of the body, where the usage is
        self._mark = b""  # what stands before text, once seen
        self._text_at = 0.0
        self._events = 0
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._reset()
        following = self._next()
        if following is None:
            self._tally = None
            self._transport.close()
            return
        request, self._tally = following
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._in_body:
            self._body(data)
            return
        self._head += data
        head, mark, body = self._head.partition(b"\r\n\r\n")
        if not mark:
            return
        self._in_body = True
        lower = head.lower()
        self._status = int(head[9:12])
        self._close = b"connection: close" in lower
        if b"transfer-encoding: chunked" not in lower:
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else 0
        # The end of the headers may already be the beginning of the last chunk's mark.
        self._end = b"\r\n"
        if body or self._left == 0:
            self._body(body)

    def _body(self, data: bytes) -> None:
        joined = self._end + data
        self._events += joined.count(_EVENT)
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if self._left < 0 else self._tail + data
        if self._mark:
            if self._mark in data:
                now = time.perf_counter()
                assert self._tally is not None
                self._tally.between_s.append(now - self._text_at)
                self._text_at = now
        elif found := _TEXT.search(joined):
            self._mark = found[1]
            self._text_at = time.perf_counter()
            self._first = self._text_at - self._sent
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._answered()
        elif joined.endswith(_CHUNKED_END):
            self._answered()
        else:
            self._end = joined[1 - len(_EVENT) :]

    def _answered(self) -> None:
        tally = self._tally
        assert tally is not None
        assert self._transport is not None
        took = time.perf_counter() - self._sent
        end = self._tail
        if self._status != 200:
            tally.fail(f"HTTP {self._status}: {end[:200].decode(errors='replace')}")
        else:
            found = _TOKENS.findall(end) if _USAGE in end else []
            tokens = int(found[-1]) if found else -1
            if tokens < 0:
                tally.fail("answer without usage")
            elif self._expected and tokens != self._expected:
                tally.fail(f"{tokens} tokens instead of {self._expected}")
            else:
                tally.tokens += tokens
                tally.events += self._events
                tally.total_s.append(took)
                if self._first:
                    tally.first_s.append(self._first)
        if self._close:
            self._tally = None
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._tally is not None:
            self._tally.fail("connection lost" + (f": {exc!r}" if exc else ""))
            self._tally = None
        self._lost()
