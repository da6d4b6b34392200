"""Logging: structlog set up once per process; an event name and fields, as JSON lines or readable on a terminal.

Log records of libraries that use ``logging`` (uvicorn, nats, faststream) are written in the same format. A call below
the level costs a fraction of a microsecond. To add a field to all log lines of a request, use
``structlog.contextvars.bound_contextvars(request=...)``, or pass it to each call.
"""

import logging
import sys
from typing import IO, Any, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

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
    out = sys.stderr if stream is None else stream
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


def _route_stdlib(out: IO[str], level: int, shared: list[Processor], last: list[Processor]) -> None:
    handler = logging.StreamHandler(out)
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

    def __init__(self, out: IO[str], name: str = "") -> None:
        self.name = name
        self._out = out

    def msg(self, line: str) -> None:
        try:
            self._out.write(line + "\n")  # one call: lines of several threads do not mix
            self._out.flush()
        except (OSError, ValueError):  # the reader of a pipe has exited: serving must continue
            pass

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
