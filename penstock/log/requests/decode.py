"""``penstock decode``: turns Penstock's messages in the output of the ``nats`` command into readable lines.

Messages within what the stock ``nats`` command prints. Pure: lines in, messages and other lines out.

Understood: ``nats sub`` (plain, ``--raw``, ``--dump=-``), ``nats stream view`` (plain, ``--raw``) and
``nats stream get`` (plain, ``--json``). The command prints bodies as they are, so that a body may contain newlines. A
body is complete as soon as it can be decoded, or when the next heading comes.
"""

import base64
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import BinaryIO, NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.figures import clock
from penstock.cli.terminal import print_hanging, stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import format_time, parse_time
from penstock.log.requests.describe import Described, describe, guess, is_known, plain
from penstock.log.requests.tail import markup

MAX_BODY = 16 << 20  # bytes of one body; more is passed through

_HEADINGS = (
    re.compile(rb"\[(?P<seq>\d+)\] Subject: (?P<subject>\S+) Received: (?P<time>.+)"),  # stream view
    re.compile(rb"\[#\d+\] Received JetStream message: .*?stream: \S+ seq (?P<seq>\d+) / subject: (?P<subject>\S+)"),
    re.compile(rb"\[#\d+\] Received JetStream message: .*?subject: (?P<subject>\S+).*stream seq: (?P<seq>\d+)"),
    re.compile(rb'\[#\d+\] Received on "(?P<subject>[^"]+)"'),
    re.compile(
        rb"Item: (?P<stream>\S+)#(?P<seq>\d+) received (?P<time>\S+ \S+(?: [+-]\d{4})?).* on Subject (?P<subject>\S+)"
    ),
)
_HEADER = re.compile(rb"\s*([\w-]+): (.*)")
_PACKED = frozenset((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))  # first bytes of msgpack maps and arrays


class Message(NamedTuple):
    """A message that could be read. ``seq`` and ``time_ns``: 0 if they were not printed."""

    subject: str
    seq: int
    time_ns: int
    headers: dict[str, str]
    about: Described


class _Json(msgspec.Struct):
    """As ``nats stream get --json`` prints it, and with capitals as ``nats sub --dump=-`` does."""

    subject: str = ""
    seq: int = 0
    hdrs: str | None = ""
    data: str | None = ""
    time: str = ""
    Subject: str = ""
    Header: dict[str, list[str]] | None = None
    Data: str | None = ""


class NatsOutput:
    """Feed it lines with their ends; it returns messages, and lines of anything else unchanged."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # of the message that is being read, as they came
        self._heading: re.Match[bytes] | None = None
        self._headers: dict[str, str] = {}
        self._body: bytearray | None = None
        self._json = False

    def feed(self, line: bytes) -> Iterator[Message | bytes]:
        """Add one line."""
        text = line.rstrip(b"\r\n")
        heading = next((match for form in _HEADINGS if (match := form.match(text))), None)
        if heading is not None:
            yield from self.end()
            self._heading = heading
            self._lines.append(line)
        elif self._json:
            self._lines.append(line)
            if text == b"}":
                yield from self._end_json()
        elif self._body is not None:
            yield from self._grow(line)
        elif self._heading is not None:
            yield from self._after_heading(line, text)
        else:
            yield from self._outside(line, text)

    def end(self) -> Iterator[Message | bytes]:
        """End the input: the last message is complete."""
        heading, headers = self._heading, self._headers
        if heading is None or self._body is not None or not headers or not is_known(heading["subject"].decode()):
            yield from self._pass()
            return
        yield _message(heading, headers, describe(heading["subject"].decode(), headers, b""))  # printed without a body
        self._pass()

    def _pass(self) -> list[bytes]:
        """Drop the message that is being read, and return its lines."""
        lines = self._lines
        self._lines, self._heading, self._headers, self._body, self._json = [], None, {}, None, False
        return lines

    def _outside(self, line: bytes, text: bytes) -> Iterator[Message | bytes]:
        if text.startswith(b'{"Subject":'):
            for part in line.split(b"\0"):
                if part.strip():
                    yield _of_json(part) or part
        elif text == b"{":
            self._json = True
            self._lines.append(line)
        elif line[0] in _PACKED:
            self._body = bytearray()
            yield from self._grow(line)
        else:
            yield line

    def _after_heading(self, line: bytes, text: bytes) -> Iterator[Message | bytes]:
        header = _HEADER.fullmatch(text)
        if line[0] in _PACKED:
            self._body = bytearray()
            yield from self._grow(line)
        elif text == b"nil body":
            self._lines.append(line)
            yield from self._pass()
        elif header is not None and not line[0] & 0x80:
            self._lines.append(line)
            self._headers[header[1].decode()] = header[2].decode("utf-8", "replace")
        elif text and text != b"Headers:":  # a body that is none of ours
            self._lines.append(line)
            yield from self._pass()
        else:
            self._lines.append(line)

    def _grow(self, line: bytes) -> Iterator[Message | bytes]:
        assert self._body is not None
        self._lines.append(line)
        self._body += line
        if len(self._body) > MAX_BODY:
            yield from self._pass()
            return
        heading, headers, body = self._heading, self._headers, bytes(self._body)
        for data in (body.removesuffix(b"\n"), body):
            about = describe(heading["subject"].decode(), headers, data) if heading is not None else guess(data)
            if about is not None and about.content is not None:
                self._pass()
                yield _message(heading, headers, about)
                return

    def _end_json(self) -> Iterator[Message | bytes]:
        message = _of_json(b"".join(self._lines))
        lines = self._pass()
        yield from lines if message is None else [message]


def _message(heading: re.Match[bytes] | None, headers: dict[str, str], about: Described) -> Message:
    if heading is None:
        return Message("", 0, 0, headers, about)
    groups = heading.groupdict()
    seq = int(groups.get("seq") or 0)
    return Message(heading["subject"].decode(), seq, _time((groups.get("time") or b"").decode()), headers, about)


def _time(text: str) -> int:
    """Unix time in ns of a heading's time, which is local if it names no zone; 0 if it has an unknown format."""
    text = text.strip()
    try:
        if text.endswith("Z"):
            return parse_time(text)
        date, _, zone = text.rpartition(" ") if text.count(" ") > 1 else (text, "", "")
        return int(datetime.fromisoformat(date + zone).timestamp() * 1e6) * 1000
    except ValueError:
        return 0


def _of_json(text: bytes) -> Message | None:
    """The message in ``text``. None: it is not a Penstock message."""
    try:
        decoded = msgspec.json.decode(text, type=_Json)
        subject = decoded.subject or decoded.Subject
        data = base64.b64decode(decoded.data or decoded.Data or "")
        headers = {name: values[0] for name, values in (decoded.Header or {}).items() if values}
        for line in base64.b64decode(decoded.hdrs or "").decode("utf-8", "replace").split("\r\n")[1:]:
            name, colon, value = line.partition(":")
            if colon:
                headers[name] = value.strip()
        if not is_known(subject):
            return None
        return Message(subject, decoded.seq, _time(decoded.time), headers, describe(subject, headers, data))
    except (msgspec.MsgspecError, ValueError):
        return None


def run(argv: Sequence[str]) -> int:
    """Decode standard input; returns the exit status."""
    parser = Parser(
        prog="penstock decode",
        description="decode Penstock messages in the output of the `nats` command: pipe `nats sub`, `nats stream view` "
        "or `nats stream get` into it. Other lines pass through unchanged",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per message, with the whole message")
    args = parser.parse_args(argv)
    try:
        decode(sys.stdin.buffer, stdout(), as_json=args.json)
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
    except KeyboardInterrupt:
        pass
    return 0


def decode(source: BinaryIO, console: Console, *, as_json: bool = False) -> None:
    """Print each message as soon as it is complete."""
    output = NatsOutput()
    for line in source:
        _print(output.feed(line), console, as_json)
    _print(output.end(), console, as_json)


def _print(messages: Iterable[Message | bytes], console: Console, as_json: bool) -> None:
    for each in messages:
        if isinstance(each, bytes):
            console.file.write(each.decode("utf-8", "replace"))
        elif as_json:
            line = {
                "subject": each.subject,
                "seq": each.seq,
                "time": format_time(each.time_ns) if each.time_ns else "",
                "headers": {name: value for name, value in each.headers.items() if not name.startswith("Nats-")},
                "kind": each.about.kind,
                "message": plain(each.about.content),
            }
            console.file.write(msgspec.json.encode(line).decode() + "\n")
        else:
            at = clock(each.time_ns, time.time_ns()) if each.time_ns else ""
            kind = each.subject.split(".")[1] if "." in each.subject else ""
            where = f"{kind}#{each.seq}" if each.seq else kind
            print_hanging(console, *markup(at, where, each.about))
    console.file.flush()
