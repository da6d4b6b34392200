"""A message of the log as a line of JSON, and back, byte for byte. Pure.

    {"stream":"REQUESTS","seq":7,"time":"2026-11-22T09:30:00.000000001Z","subject":"ps.request.tiny.standard.1f3",
     "headers":{"Nats-Msg-Id":"..."},"body":{"id":"...","model":"tiny",...}}

``stream`` is without the namespace. ``body`` is the message of ``schemas`` under its field names; packed tokens and
digests are base64 of their bytes. The request within a record is in ``request``. A message that would not come back as
the same bytes (of a newer build, or none of ours) is in ``data``, as base64. The first line is a ``FileHeader``.

A request that the file has as a message of REQUESTS is not repeated in jobs and records: ``request`` is then the
sequence of that message (``penstock.log_tools.sources.export_file``).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from penstock.infra.bus.direct_get import parse_time
from penstock.schemas import done, jobs, kv, requests, tokens, transfer, wire
from penstock.schemas.done import Done, Returned
from penstock.schemas.jobs import Revoke, WorkMessage
from penstock.schemas.kv import KvBatch
from penstock.schemas.requests import GenerateRequest, PackedRequest
from penstock.schemas.subjects import HEADER_MSG_ID
from penstock.schemas.tokens import TokenBatch
from penstock.schemas.transfer import Handoffs

FORMAT = "penstock-export"
VERSION = 2  # 1 repeats the request in each job and record
STREAMS = ("REQUESTS", "WORK", "TOKENS", "DONE", "KV", "HANDOFF")
Message = GenerateRequest | PackedRequest | WorkMessage | TokenBatch | Done | Returned | KvBatch | Handoffs


class BadLine(ValueError):
    """A line of an export that cannot be read; the text says why."""


class StreamLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stream as it was when it was exported. Limits as JetStream has them: 0 or -1 is none."""

    first_seq: int
    last_seq: int
    messages: int
    max_age_s: float = 0.0
    max_bytes: int = -1


class RecordedModel(msgspec.Struct, frozen=True, omit_defaults=True):
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
    models: tuple[RecordedModel, ...] = ()
    streams: dict[str, StreamLimits] = {}


class LogLine(NamedTuple):
    """One message of the log. ``time``: RFC 3339 with nanoseconds, UTC; ``stream`` without the namespace."""

    stream: str
    seq: int
    time: str
    subject: str
    headers: dict[str, str]
    data: bytes


_ABSENT = msgspec.Raw()


class ParsedLine(msgspec.Struct):
    """A line as it is read."""

    stream: str
    seq: int
    time: str
    subject: str
    headers: dict[str, str] = {}
    body: msgspec.Raw = _ABSENT
    request: msgspec.Raw = _ABSENT
    data: bytes | None = None
    packed: bool = False


_json = msgspec.json.Encoder().encode
_json_into = msgspec.json.Encoder().encode_into
_read_line = msgspec.json.Decoder(ParsedLine).decode
_read_header = msgspec.json.Decoder(FileHeader).decode
_read_plain = msgspec.json.Decoder(GenerateRequest).decode
_read_packed = msgspec.json.Decoder(PackedRequest).decode

DECODE: dict[str, Callable[[bytes], Any]] = {
    "REQUESTS": requests.decode_stored,
    "WORK": jobs.decode,
    "TOKENS": tokens.decode,
    "DONE": done.decode,
    "KV": kv.decode,
    "HANDOFF": transfer.decode_ledger,
}


def _read_request(text: bytes) -> GenerateRequest | PackedRequest:
    return _read_packed(text) if text[:1] == b"[" else _read_plain(text)


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

SequenceOf = Callable[[str, bytes], int]  # of a request's id and bytes; see ``append_line``
RequestAt = Callable[[int], bytes]  # see ``decode_line``
_ID_LENGTH = 36  # of a UUID, with which message ids of jobs and records begin


def _no_sequence(request: str, data: bytes) -> int:
    return 0


def no_request(sequence: int) -> bytes:
    raise BadLine(f"its request is message {sequence} of REQUESTS, which the lines before do not have")


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


def encode_line(record: LogLine) -> bytes:
    """The line of a record, with its line feed."""
    line = bytearray()
    append_line(record, line, _no_sequence)
    return bytes(line)


def append_line(record: LogLine, lines: bytearray, sequence_of: SequenceOf) -> None:
    """Add the line of a record to others. Never raises for what a message says.

    Args:
        sequence_of: of the message of REQUESTS in the same file with these bytes; 0: the file has none.
    """
    stream, seq, time, subject, headers, data = record
    lines += b'{"stream":%b,"seq":%d,"time":"%b","subject":%b' % (_json(stream), seq, time.encode(), _json(subject))
    if headers:
        lines += b',"headers":'
        _json_into(headers, lines, -1)
    end = len(lines)
    try:
        opened = _append_body(record, lines, sequence_of)
    except (msgspec.MsgspecError, ValueError):
        opened = False
    if not opened:
        del lines[end:]
        lines += b',"data":'
        _json_into(data, lines, -1)
    lines += b"}\n"


def decode_line(line: bytes, request_at: RequestAt = no_request) -> LogLine:
    """The record of a line.

    Args:
        request_at: the message of REQUESTS at a sequence; raises ``BadLine`` if there is none.
    Raises:
        BadLine: the line is damaged.
    """
    try:
        record = _read_line(line)
        whole = bytes(record.body)
        data = closed(record.stream, whole, record.request, request_at, packs=record.packed) if whole else record.data
        parse_time(record.time)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise BadLine(str(error)) from error
    if data is None:
        raise BadLine("neither a body nor data")
    if record.seq >> 62:  # of a stream's, the two top bits are flags; below 0 they are set
        raise BadLine(f"no stream has a sequence {record.seq}")
    return LogLine(record.stream, record.seq, record.time, record.subject, record.headers, data)


def _append_body(record: LogLine, lines: bytearray, sequence_of: SequenceOf) -> bool:
    """Add a message as JSON, and the request of a record; False: it would not come back as it is."""
    stream, data = record.stream, record.data
    decode = DECODE.get(stream)
    if decode is None or not data:
        return False
    message = decode(data)
    packs = isinstance(message, PackedRequest)
    if packs:
        message = requests.decode(data)
    elif isinstance(message, Done) and wire.encode(message) != data:
        packs = True
    if wire.encode(_packed(message) if packs else message) != data:
        return False
    request = _ABSENT
    if stream == "WORK" and not isinstance(message, Revoke):
        message = _job_to_json(message, record, sequence_of)
    elif stream == "DONE" and isinstance(message, Done) and message.submitted:
        request = _request_to_json(message.submitted, record, sequence_of)
        message = _replace(message, submitted=b"")
    lines += b',"body":'
    body = len(lines)
    _json_into(message, lines, -1)
    # JSON has no infinities: they are written as null, as None is.
    if (lines.find(b"null", body) >= 0 or b"null" in bytes(request)) and _may_be_infinite(data):
        back = closed(stream, bytes(lines[body:]), request, lambda _: _request_in(decode(data)), packs=packs)
        if back != data:
            return False
    if request is not _ABSENT:
        lines += b',"request":'
        lines += request
    if packs:
        lines += b',"packed":true'
    return True


def closed(stream: str, body: bytes, request: msgspec.Raw, request_at: RequestAt, *, packs: bool = False) -> bytes:
    """The message of a line's body.

    Args:
        packs: it is a request whose prompt was packed, or a record whose tokens were.
    Raises:
        KeyError: no stream of ours.
        BadLine: see ``decode_line``.
        msgspec.MsgspecError: the body is not what its stream has.
    """
    message = _FROM_JSON[stream](body)
    if stream == "WORK" and not isinstance(message, Revoke):
        message = _job_from_json(message, request_at)
    elif stream == "DONE" and (text := bytes(request)):
        message = _replace(message, submitted=_request_from_json(text, request_at))
    return wire.encode(_packed(message) if packs else message)


def _packed(message: Any) -> Any:
    return done.packed(message) if isinstance(message, Done) else requests.packed(message)


def _request_to_json(data: bytes, record: LogLine, sequence_of: SequenceOf) -> msgspec.Raw:
    sequence = sequence_of(record.headers.get(HEADER_MSG_ID, "")[:_ID_LENGTH], data)
    if sequence:
        return msgspec.Raw(b"%d" % sequence)
    request = requests.decode_stored(data)
    if wire.encode(request) != data:
        raise ValueError("of another build")
    return msgspec.Raw(_json(request))


def _request_from_json(text: bytes, request_at: RequestAt) -> bytes:
    return request_at(int(text)) if text.isdigit() else wire.encode(_read_request(text))


def _request_in(message: Any) -> bytes:
    if isinstance(message, Done):
        return message.submitted
    return bytes(message.request) if isinstance(message, jobs.Job) else _request_in(jobs.decode_job(message.job))


def _job_to_json(message: Any, record: LogLine, sequence_of: SequenceOf) -> Any:
    if isinstance(message, jobs.Job):
        return _replace(message, request=_request_to_json(bytes(message.request), record, sequence_of))
    job = jobs.decode_job(message.job)
    if wire.encode(job) != bytes(message.job):
        raise ValueError("of another build")
    return _replace(message, job=msgspec.Raw(_json(_job_to_json(job, record, sequence_of))))


def _job_from_json(message: Any, request_at: RequestAt) -> Any:
    if isinstance(message, jobs.Job):
        return _replace(message, request=msgspec.Raw(_request_from_json(bytes(message.request), request_at)))
    return _replace(message, job=msgspec.Raw(wire.encode(_job_from_json(_read_job(message.job), request_at))))


_ID = 36  # characters of a UUID


class Selection(NamedTuple):
    """Requests by their ids, or by the time that is in their ids. All by default.

    Attributes:
        ids: these; empty: those accepted from ``since_ns`` until before ``until_ns`` (0: without that end).
        kv: with the KV events, which belong to no request.
    """

    ids: frozenset[str] = frozenset()
    since_ns: int = 0
    until_ns: int = 0
    kv: bool = True

    @property
    def everything(self) -> bool:
        return not self.ids and not self.since_ns and not self.until_ns

    def has(self, request: str) -> bool:
        """Whether a request is selected."""
        if self.ids:
            return request in self.ids
        try:
            at_ns = int(request[:8] + request[9:13], 16) * 1_000_000
        except ValueError:
            return False
        return at_ns >= self.since_ns // 1_000_000 * 1_000_000 and (not self.until_ns or at_ns < self.until_ns)

    def part(self, record: LogLine) -> LogLine | None:
        """The selected part of a message: all of it, the items about selected requests, or None.

        A message that cannot be decoded is selected only if everything is.
        """
        if record.stream == "KV":
            return record if self.kv else None
        if self.everything:
            return record
        try:
            if record.stream == "TOKENS":
                return self._items(record)
            if record.stream == "HANDOFF":
                return self._ledger(record)
            return record if self.has(request_id_of(record)) else None
        except msgspec.MsgspecError:
            return None

    def _items(self, record: LogLine) -> LogLine | None:
        batch = tokens.decode(record.data)
        items = tuple(item for item in batch.items if self.has(item.request))
        if len(items) == len(batch.items):
            return record if items else None
        batch = msgspec.structs.replace(batch, items=items)
        return record._replace(data=wire.encode(batch)) if items else None

    def _ledger(self, record: LogLine) -> LogLine | None:
        ledger = transfer.decode_ledger(record.data)
        events = tuple(event for event in ledger.events if self.has(event.ticket[:_ID]))
        if len(events) == len(ledger.events):
            return record if events else None
        ledger = msgspec.structs.replace(ledger, events=events)
        return record._replace(data=wire.encode(ledger)) if events else None


def request_id_of(record: LogLine) -> str:
    """The request that a message of REQUESTS, WORK or DONE is about."""
    name = record.headers.get(HEADER_MSG_ID, "")
    if len(name) >= _ID and name.count("-", 0, _ID) == 4:
        return name[:_ID]
    if record.stream == "DONE":
        return str(done.decode(record.data).request)
    if record.stream == "WORK":
        message = jobs.decode(record.data)
        return "" if isinstance(message, jobs.Job) else message.request
    return ""
