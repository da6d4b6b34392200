"""A message of the log as a line of JSON, and back, byte for byte. Pure.

    {"stream":"REQUESTS","seq":7,"time":"2026-11-22T09:30:00.000000001Z","subject":"ps.request.tiny.standard.1f3",
     "headers":{"Nats-Msg-Id":"..."},"body":{"id":"...","model":"tiny",...}}

``stream`` is without the namespace. ``body`` is the message of ``schemas`` under its field names; packed tokens and
digests are base64 of their bytes. The request within a record is in ``request``. A message that would not come back as
the same bytes (of a newer build, or none of ours) is in ``data``, as base64. The first line is a ``FileHeader``.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from infra.bus.direct_get import parse_time
from schemas import done, jobs, kv, requests, tokens, transfer, wire
from schemas.done import Done, Returned
from schemas.jobs import Revoke, WorkMessage
from schemas.kv import KvBatch
from schemas.requests import GenerateRequest
from schemas.tokens import TokenBatch
from schemas.transfer import Handoffs

FORMAT = "penstock-export"
VERSION = 1
STREAMS = ("REQUESTS", "WORK", "TOKENS", "DONE", "KV", "HANDOFF")
Message = GenerateRequest | WorkMessage | TokenBatch | Done | Returned | KvBatch | Handoffs


class BadLine(ValueError):
    """A line of an export that cannot be read; the text says why."""


class StreamLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stream as it was when it was exported. Limits as JetStream has them: 0 or -1 is none."""

    first_seq: int
    last_seq: int
    messages: int
    max_age_s: float = 0.0
    max_bytes: int = -1


class ModelInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model of the recorded requests, as its workers had registered it, if they still run."""

    name: str
    revision: str = ""
    tokenizer: str = ""
    block_size: int = 0
    engine: str = ""
    workers: int = 0


class FileHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line. ``selection``: which messages were asked for, as flags; ``redacted``: texts and tokens are
    placeholders."""

    format: str
    version: int
    build: str
    created: str
    namespace: str
    selection: str = ""
    redacted: bool = False
    models: tuple[ModelInfo, ...] = ()
    streams: dict[str, StreamLimits] = {}


class LogLine(NamedTuple):
    """One message of the log. ``time``: RFC 3339 with nanoseconds, UTC; ``stream`` without the namespace."""

    stream: str
    seq: int
    time: str
    subject: str
    headers: dict[str, str]
    data: bytes


_ABSENT = msgspec.Raw()  # the same object everywhere, so that encoders leave the default out


class Line(msgspec.Struct, omit_defaults=True):
    """A line as it is written."""

    stream: str
    seq: int
    time: str
    subject: str
    headers: dict[str, str] = {}
    body: msgspec.Raw = _ABSENT
    request: msgspec.Raw = _ABSENT
    data: bytes | None = None


_json = msgspec.json.Encoder().encode
_json_into = msgspec.json.Encoder().encode_into
_read_line = msgspec.json.Decoder(Line).decode
_read_header = msgspec.json.Decoder(FileHeader).decode
_read_request = msgspec.json.Decoder(GenerateRequest).decode

DECODE: dict[str, Callable[[bytes], Any]] = {
    "REQUESTS": requests.decode,
    "WORK": jobs.decode,
    "TOKENS": tokens.decode,
    "DONE": done.decode,
    "KV": kv.decode,
    "HANDOFF": transfer.decode_ledger,
}
_FROM_JSON: dict[str, Callable[[bytes], Any]] = {
    "REQUESTS": _read_request,
    "WORK": msgspec.json.Decoder(WorkMessage).decode,
    "TOKENS": msgspec.json.Decoder(TokenBatch).decode,
    "DONE": msgspec.json.Decoder(Done | Returned).decode,
    "KV": msgspec.json.Decoder(KvBatch).decode,
    "HANDOFF": msgspec.json.Decoder(Handoffs).decode,
}
_read_job = msgspec.json.Decoder(jobs.Job).decode
# Finds the first bytes of an infinity or a NaN; they may be part of something else. An expression that begins with a
# set of bytes, instead of one byte, is 30 times as slow.
_may_be_infinite = re.compile(rb"\xcb[\x7f\xff]").search
_replace = msgspec.structs.replace


def header_line(header: FileHeader) -> bytes:
    return _json(header) + b"\n"


def read_header(line: bytes) -> FileHeader:
    """
    Raises:
        BadLine: not an export, or of a later format.
    """
    try:
        header = _read_header(line)
    except msgspec.MsgspecError as error:
        raise BadLine(f"not the first line of an export ({error})") from error
    if header.format != FORMAT:
        raise BadLine(f"not the first line of an export (its format is {header.format!r})")
    if header.version > VERSION:
        raise BadLine(f"format {header.version} of build {header.build}; this build reads up to {VERSION}: upgrade it")
    return header


def line_of(record: LogLine) -> Line:
    """The line of a record. Never raises for what a message says."""
    stream, seq, time, subject, headers, data = record
    body, request = _opened(stream, data)
    return Line(stream, seq, time, subject, headers, body, request, data if body is _ABSENT else None)


def encode_line(record: LogLine) -> bytes:
    """The line of a record, with its line feed."""
    return _json(line_of(record)) + b"\n"


def append_line(record: LogLine, lines: bytearray) -> None:
    """Add the line of a record to others."""
    _json_into(line_of(record), lines, -1)
    lines += b"\n"


def decode_line(line: bytes) -> LogLine:
    """The record of a line.

    Raises:
        BadLine: the line is damaged.
    """
    try:
        record = _read_line(line)
        whole = bytes(record.body)
        data = closed(record.stream, whole, record.request) if whole else record.data
        parse_time(record.time)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise BadLine(str(error)) from error
    if data is None:
        raise BadLine("neither a body nor data")
    return LogLine(record.stream, record.seq, record.time, record.subject, record.headers, data)


def _opened(stream: str, data: bytes) -> tuple[msgspec.Raw, msgspec.Raw]:
    """A message as JSON, and the request of a record; absent: it would not come back as it is."""
    decode = DECODE.get(stream)
    if decode is None or not data:
        return _ABSENT, _ABSENT
    try:
        message = decode(data)
        if wire.encode(message) != data:
            return _ABSENT, _ABSENT
        request = _ABSENT
        if stream == "WORK" and not isinstance(message, Revoke):
            message = _job_to_json(message)
        elif stream == "DONE" and isinstance(message, Done) and message.submitted:
            request = _request_to_json(message.submitted)
            message = _replace(message, submitted=b"")
        body = _json(message)
        # JSON has no infinities: they are written as null, as None is.
        if _may_be_infinite(data) and closed(stream, body, request) != data:
            return _ABSENT, _ABSENT
    except (msgspec.MsgspecError, ValueError):
        return _ABSENT, _ABSENT
    return msgspec.Raw(body), request


def closed(stream: str, body: bytes, request: msgspec.Raw) -> bytes:
    """The message of a line's body.

    Raises:
        KeyError: no stream of ours.
        msgspec.MsgspecError: the body is not what its stream has.
    """
    message = _FROM_JSON[stream](body)
    if stream == "WORK" and not isinstance(message, Revoke):
        message = _job_from_json(message)
    elif stream == "DONE" and len(bytes(request)):
        message = _replace(message, submitted=wire.encode(_read_request(request)))
    return wire.encode(message)


def _request_to_json(data: bytes) -> msgspec.Raw:
    request = requests.decode(data)
    if wire.encode(request) != data:
        raise ValueError("of another build")
    return msgspec.Raw(_json(request))


_request_of_job = lru_cache(maxsize=256)(_request_to_json)  # the next stage's message has the same request


def _job_to_json(message: Any) -> Any:
    if isinstance(message, jobs.Job):
        return _replace(message, request=_request_of_job(bytes(message.request)))
    job = jobs.decode_job(message.job)
    if wire.encode(job) != bytes(message.job):
        raise ValueError("of another build")
    return _replace(message, job=msgspec.Raw(_json(_job_to_json(job))))


def _job_from_json(message: Any) -> Any:
    if isinstance(message, jobs.Job):
        return _replace(message, request=msgspec.Raw(wire.encode(_read_request(message.request))))
    return _replace(message, job=msgspec.Raw(wire.encode(_job_from_json(_read_job(message.job)))))
