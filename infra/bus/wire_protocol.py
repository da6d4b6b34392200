"""Messages of the NATS client protocol: cut out of what the server sends, and made of what is published. Pure."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from nats.errors import ProtocolError

CRLF = b"\r\n"
_VERSION = b"NATS/1.0\r\n"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MOST_NAMES = 256
# The headers that the server adds, in its order.
_REPUBLISHED = re.compile(
    rb"\r\nNats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: [^\r]*\r\nNats-Last-Sequence: (\d+)\r\n"
)
_names: dict[str, str] = {}  # header names that are valid, with what stands before their value


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message as it came. ``headers``: with the line of the version; b"": none."""

    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes


class FrameReader:
    """Cuts a stream of bytes into messages and other lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._size = 0
        self._needed = 0  # bytes from its beginning

    def read(self, data: bytes) -> Iterator[Frame | bytes]:
        """Messages, and other lines with their CRLF.

        Iterate to the end: what is left over is kept then, for the next call.

        Raises:
            ProtocolError: a message's line is malformed.
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
    """The headers of a message; None: they need a more careful parser, such as those with a status.

    Args:
        raw: with the line of the version and the empty line at the end.
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
    """Whether headers begin with a status: the server's answer has no message then, or no more."""
    return raw.startswith(b"NATS/1.0 ")


@lru_cache(maxsize=256)
def _beginning(name: str) -> bytes:
    """Of a header's line, with the end of the line before."""
    return b"\r\n%b:" % name.encode()


class Headers(Mapping[str, str]):
    """The headers of a message, found when they are asked for: most readers want one or two of ten.

    Args:
        raw: as for ``read_headers``.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def get(self, name: str, /, default: Any = None) -> Any:
        raw, line = self._raw, _beginning(name)
        at = raw.rfind(line)  # what the server adds comes last
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
    """Subject and sequence of a republished message, and the sequence of the one before on this subject.

    None: a client published it, not the server.

    Args:
        raw: as for ``read_headers``.
    """
    found = _REPUBLISHED.match(raw, max(0, raw.rfind(b"\r\nNats-Stream: ")))
    if found is not None:
        subject, seq, previous = found.groups()
        return subject.decode(errors="replace"), int(seq), int(previous)
    headers = Headers(raw)  # another order
    try:
        return headers["Nats-Subject"], int(headers["Nats-Sequence"]), int(headers["Nats-Last-Sequence"])
    except (KeyError, ValueError):
        return None


def publish_command(subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> bytes | None:
    """What publishes a message; None: something is wrong with the subject or a header, or unusual."""
    where = f"{subject} {reply}"
    if len(where.split()) != (2 if reply else 1) or not where.isascii():
        return None
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (where.encode(), len(payload), payload)
    lines = [prefix + value for name, value in headers.items() if (prefix := _names.get(name) or _prefix(name))]
    text = "\r\n".join(lines)
    # A line break in a value would begin another header.
    if len(lines) != len(headers) or text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        return None
    head = b"NATS/1.0\r\n%b\r\n\r\n" % text.encode()
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (where.encode(), len(head), len(head) + len(payload), head, payload)


def _prefix(name: str) -> str:
    """ "": the name is not valid."""
    if not _NAME.fullmatch(name):
        return ""
    prefix = name + ": "  # not an f-string: nats-py's own names are members of an enum, which format as its name
    if len(_names) < _MOST_NAMES:
        _names[name] = prefix
    return prefix
