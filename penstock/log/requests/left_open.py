"""What a stopped deployment has stored about requests that have no record: they have not ended.

Where these messages are is noted in a file, for the files of the streams as they are: a list of a million requests
looks for them once. The note has sequences only, nothing of the messages.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from penstock.log.sources.blocks import Place, message, message_id, subject_of
from penstock.log.sources.data_folder import StoredLog
from penstock.log.sources.stream import Raw, StoredStream
from penstock.schemas.ids import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS

log = structlog.get_logger("timeline")

_ID = 36  # characters of a request's id
_STREAMS = ("REQUESTS", "WORK", "DONE")
_SUFFIX = ".open-1"
MOST_NOTED = 10_000  # messages


class Left(NamedTuple):
    """A message about such a request. ``stream``: without the namespace."""

    stream: str
    subject: str
    data: bytes


def left_open(stored: StoredLog, since_ns: int, cache: Path | None = None) -> list[Left]:
    """The messages of REQUESTS and WORK about requests without a record, of those stored since a time (Unix, ns).

    Args:
        cache: the folder of the note; None: there is none.
    """
    note = _Note(stored, since_ns, cache) if cache is not None else None
    places = note.read() if note is not None else None
    if places is None:
        found = list(_search(stored, since_ns))
        if note is not None and len(found) <= MOST_NOTED:
            note.write([(name, raw.seq) for name, raw in found])
    else:
        found = [(name, raw) for name, seq in places if (raw := _get(stored, name, seq)) is not None]
    return [_left(name, raw) for name, raw in found]


def _search(stored: StoredLog, since_ns: int) -> Iterator[tuple[str, Raw]]:
    over: set[bytes] = set()
    for data, places in _blocks(stored, "DONE", since_ns):
        over.update([subject_of(data, at)[-_ID:] for _, _, at in places])
    waiting: set[bytes] = set()
    for raw in _without(stored, "REQUESTS", since_ns, over):
        waiting.add(message_id(raw.block, raw.at)[:_ID])
        yield "REQUESTS", raw
    if _has_all(_stream(stored, "REQUESTS"), since_ns):
        if not waiting:
            return  # WORK is several times as large, and has no request that REQUESTS lacks
        since_ns = min(_made_ns(each) for each in waiting)
    for raw in _without(stored, "WORK", since_ns, over):
        yield "WORK", raw


def _without(stored: StoredLog, name: str, since_ns: int, over: set[bytes]) -> Iterator[Raw]:
    """The messages of a stream about other requests than these."""
    for data, places in _blocks(stored, name, since_ns):
        for seq, time_ns, at in places:
            if message_id(data, at)[:_ID] not in over:
                yield Raw(seq, time_ns, data, at)


def _left(name: str, raw: Raw) -> Left:
    stored = message(raw.block, raw.at)
    return Left(name, stored.subject, stored.data)


def _made_ns(request_id: bytes) -> int:
    """When a request was made; its jobs were stored later."""
    try:
        return max(0, time_of(request_id.decode()) - CLOCK_SKEW_NS)
    except ValueError:  # no request of ours
        return 0


def _has_all(stream: StoredStream | None, since_ns: int) -> bool:
    """Whether a stream has all messages that it has got since a time (Unix, ns)."""
    if stream is None or not stream.blocks:
        return False
    return stream.first_seq <= 1 or next(stream.forward()).time_ns <= since_ns


def _stream(stored: StoredLog, name: str) -> StoredStream | None:
    return stored.stream(stored.subjects.stream(name))


def _get(stored: StoredLog, name: str, seq: int) -> Raw | None:
    stream = _stream(stored, name)
    return stream.get(seq) if stream is not None else None


def _blocks(stored: StoredLog, name: str, since_ns: int) -> Iterator[tuple[bytes, list[Place]]]:
    stream = _stream(stored, name)
    if stream is not None:
        yield from stream.by_block(since_ns=since_ns)


class _Note:
    """Where the messages were found: a file. One that cannot be read or written counts as missing."""

    def __init__(self, stored: StoredLog, since_ns: int, folder: Path) -> None:
        streams = [(name, stream) for name in _STREAMS if (stream := _stream(stored, name)) is not None]
        self._folder = folder
        self._whose = _digest([str(stream.folder.resolve()) for _, stream in streams])
        state = _digest((since_ns, [(name, stream.state_of_files()) for name, stream in streams]))
        self._name = f"{self._whose}-{state}{_SUFFIX}"

    def read(self) -> list[tuple[str, int]] | None:
        try:
            return msgspec.msgpack.decode((self._folder / self._name).read_bytes(), type=list[tuple[str, int]])
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, places: list[tuple[str, int]]) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(msgspec.msgpack.encode(places))
            for earlier in self._folder.glob(f"{self._whose}-*{_SUFFIX}"):
                earlier.unlink(missing_ok=True)
            os.replace(file.name, self._folder / self._name)
        except OSError as error:
            log.debug("open_requests_not_cached", folder=str(self._folder), error=str(error))


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()[:16]
