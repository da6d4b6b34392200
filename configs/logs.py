"""Logging: structlog set up once per process; an event name and fields, as JSON lines or readable on a terminal.

Log records of libraries that use ``logging`` (uvicorn, nats, faststream) are written in the same format. A call below
the level costs a fraction of a microsecond. To add a field to all log lines of a request, use
``structlog.contextvars.bound_contextvars(request=...)``, or pass it to each call.
"""

import contextlib
import logging
import os
import select
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any, Literal, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

log = structlog.get_logger("logs")

Format = Literal["auto", "text", "json"]
Level = Literal["debug", "info", "warning", "error"]

# At level info these log every request or reconnect attempt, which our own events report already.
_QUIET = ("uvicorn.access", "nats", "httpx", "httpcore", "asyncio", "faststream")
_ENCODE = msgspec.json.Encoder(enc_hook=repr).encode


def setup(format: Format = "auto", level: Level = "info", *, name: str = "", stream: IO[str] | None = None) -> None:
    """Set up logging of the whole process; later calls replace the earlier set-up.

    Args:
        format: auto is text on a terminal, else json.
        name: of the process, a field ``process`` of every line.
        stream: where to write; default stderr, so that stdout is left to the program's output.
    """

    def lost(lines: int) -> None:
        log.warning("log_lines_lost", lines=lines)

    out = OutputStream(sys.stderr if stream is None else stream, recovered=lost)
    text = format == "text" or (format == "auto" and out.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_logger,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if text else "iso", utc=not text),
    ]
    if name:
        shared.insert(0, _Named(name))
    if text:
        # Not rich's tracebacks: they print local variables, prompts and keys among them, and take up to a second each.
        plain = structlog.dev.plain_traceback
        last: list[Processor] = [
            structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, exception_formatter=plain)
        ]
    else:
        last = [structlog.processors.format_exc_info, _json]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *names: _Writer(out, *names),
        cache_logger_on_first_use=True,
    )
    _route_stdlib(out, number, shared, last)


class OutputStream:
    """A text stream that holds its process up for ``WAIT_MS`` at most, and never fails.

    A pipe whose reader has stopped (a parent that reads no output, a log driver that hangs) takes 64 KiB; then each
    write would wait for ever, in the event loop. One whose reader has exited (``| tee`` after Ctrl-C) would raise. What
    is not taken is lost, without a further wait, until the reader reads again; one that reads slowly is waited for once
    in ``AGAIN_S``.

    Args:
        stream: None: closed by the parent.
        recovered: called with the number of lost writes once one was taken again.
    """

    WAIT_MS = 50
    AGAIN_S = 10.0

    def __init__(self, stream: IO[str] | None, recovered: Callable[[int], None] = lambda _: None) -> None:
        self._stream = stream
        self._recovered = recovered
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._lost = 0
        self._wait_from = 0.0  # monotonic time
        self._cut = False  # the last line that was taken has no end
        self._lock = threading.RLock()  # an object that is destroyed meanwhile may log
        self._fd, self._to, self._most, self._poll = -1, -1, sys.maxsize, select.poll()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # text in memory has none
            self._fd = self._to = stream.fileno()  # type: ignore[union-attr]
            self._poll.register(self._fd, select.POLLOUT)
            # When poll says that a pipe takes something, it takes PIPE_BUF bytes without a wait.
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._most = select.PIPE_BUF
            if os.isatty(self._fd):  # one that takes a byte may wait with the next, and the shared file would block
                file = os.open(f"/dev/fd/{self._fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._to = file
                weakref.finalize(self, os.close, file)

    def write(self, text: str) -> int:
        self.write_bytes(text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write whole lines, or nothing; of a line that is cut off, the end is lost."""
        if self._fd < 0:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                cast(IO[str], self._stream).write(data.decode(self.encoding, "replace"))
            return
        with self._lock:
            left = memoryview(b"\n" + data if self._cut else data)
            waits = may_wait = 0 if self._lost or time.monotonic() < self._wait_from else self.WAIT_MS
            while left and self._poll.poll(waits):
                try:
                    left = left[os.write(self._to, left[: self._most]) :]
                except BlockingIOError:  # whoever shares this pipe made it so; or a terminal takes no line break
                    if not waits:
                        break
                    waits -= 1
                    time.sleep(0.001)
                    continue
                except OSError:
                    break
                self._cut = bool(left)
            if left and may_wait:
                self._wait_from = time.monotonic() + self.AGAIN_S
            lost, self._lost = self._lost, self._lost + 1 if left else 0
        if lost and not left:
            self._recovered(lost)
            self._lost += lost if self._lost else 0  # not even that was taken

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        return self._fd >= 0 and os.isatty(self._fd)

    def fileno(self) -> int:
        if self._fd < 0:
            raise OSError("no file")
        return self._fd


def _route_stdlib(out: OutputStream, level: int, shared: list[Processor], last: list[Processor]) -> None:
    handler = logging.StreamHandler(cast(IO[str], out))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _Writer:
    """Writes the lines of one named logger."""

    def __init__(self, out: OutputStream, name: str = "") -> None:
        self.name = name
        self._out = out

    def msg(self, line: str) -> None:
        self._out.write(line + "\n")  # one call: lines of several threads do not mix

    debug = info = warning = error = critical = exception = log = msg


def _add_logger(logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if name := (record.name if record is not None else getattr(logger, "name", "")):
        event["logger"] = name
    return event


class _Named:
    """Adds the process's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = self._name
        return event


def _json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """One JSON line, time and event first; values that JSON cannot represent are written as their repr."""
    first: dict[str, Any] = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    line = {**first, **event}
    try:
        return _ENCODE(line).decode()
    except (TypeError, ValueError, RecursionError):  # a key that is not text, a lone surrogate: never lose the line
        return _ENCODE({"event": repr(line)}).decode()
