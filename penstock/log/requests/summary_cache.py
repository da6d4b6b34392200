"""Summaries of records, read from the log once and then from files: a list of 100,000 requests decodes no record again.

Records never change, so a segment of 5,000 sequences of DONE is cached once it is full. It is named by the stream's
creation and its number. Reading a record costs 17 us of this process and 12 us of the broker, its summary 2 us.
"""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.infra.bus.direct_get import LogFiles, Readable, StreamState, read, read_backwards
from penstock.infra.bus.jetstream import ApiError
from penstock.log.sources.data_folder import StoredLog
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.summary import STATES, Criteria, RequestSummary, of_encoded_done

log = structlog.get_logger("timeline")

SEGMENT = 5_000  # sequences
MOST_SEGMENTS = 300  # of a stream: about 1.5 million requests, 300 MB
BATCH = 1_000


class _Summary(RequestSummary, frozen=True, array_like=True, omit_defaults=False):
    """A summary as the cache stores it: without the names of its fields. These and the states have a ``_VERSION``."""


class _Segment(msgspec.Struct, frozen=True, array_like=True):
    """``seqs`` and ``times`` (Unix ns): where and when each record was stored."""

    seqs: list[int]
    times: list[int]
    summaries: list[_Summary]


class _State(msgspec.Struct):
    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0
    deleted: list[int] | None = None


class _Info(msgspec.Struct):
    created: str = ""
    state: _State = msgspec.field(default_factory=_State)
    error: ApiError | None = None


_VERSION = hashlib.sha256(" ".join((*RequestSummary.__struct_fields__, *STATES)).encode()).hexdigest()[:8]
_decode = msgspec.msgpack.Decoder(_Segment).decode
_encode = msgspec.msgpack.Encoder().encode


def cache_folder(data_dir: Path | None) -> Path:
    """Where summaries are cached: in the data folder, or in the user's cache folder if there is none.

    Args:
        data_dir: of the deployment; None: its broker was named by a URL.
    """
    if data_dir is not None and data_dir.is_dir() and os.access(data_dir, os.W_OK):
        return data_dir / "cache" / "requests"
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "penstock" / "requests"


async def summaries(bus: Readable, criteria: Criteria, folder: Path) -> AsyncGenerator[RequestSummary, None]:
    """Ended requests, latest end first.

    Args:
        folder: of the cache; it is made. If it cannot be used, everything is read from the log.
    Raises:
        ServingError: the stream cannot be read.
    """
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.all("done")
    info = await _info(bus, stream)
    first, last = info.first_seq, info.last_seq
    full = last // SEGMENT
    async with aclosing(read_backwards(bus, stream, subject)) as entries:
        async for entry in entries:
            if entry.seq <= full * SEGMENT:
                break
            if criteria.since_ns and entry.time_ns < criteria.since_ns:  # it was accepted even earlier
                return
            summary = _summary(entry.seq, entry.data)
            if summary is not None and criteria.accepts(summary):
                yield summary
    files = _Files(folder / hashlib.sha256(f"{stream} {info.created}".encode()).hexdigest()[:16])
    gone = frozenset(info.deleted)
    for number in range(full - 1, max(0, first - 1) // SEGMENT - 1, -1):
        segment = await _segment(bus, files, number, first, gone)
        await asyncio.sleep(0)  # lets nats-py answer the broker's pings, or the connection is closed
        if criteria.since_ns and segment.times and segment.times[-1] < criteria.since_ns:
            return
        for summary in reversed(segment.summaries):
            if criteria.accepts(summary):
                yield summary


async def _segment(bus: Readable, files: "_Files", number: int, first: int, gone: frozenset[int]) -> _Segment:
    """Read a segment from its file or from the log. Records that the stream no longer has are left out."""
    cached = files.load(number)
    if cached is None:
        segment = await _read_segment(bus, number)
    elif cached.seqs and (cached.seqs[0] < first or not gone.isdisjoint(cached.seqs)):
        kept = [place for place, seq in enumerate(cached.seqs) if seq >= first and seq not in gone]
        segment = _Segment(
            [cached.seqs[place] for place in kept],
            [cached.times[place] for place in kept],
            [cached.summaries[place] for place in kept],
        )
    else:
        return cached
    files.store(number, segment)
    return segment


async def _read_segment(bus: Readable, number: int) -> _Segment:
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.all("done")
    after, until = number * SEGMENT, (number + 1) * SEGMENT
    segment = _Segment([], [], [])
    if isinstance(bus, StoredLog):
        for seq, time_ns, data in bus.bodies(stream, after=after, until_seq=until):
            if (summary := _summary(seq, data)) is not None:
                segment.seqs.append(seq)
                segment.times.append(time_ns)
                segment.summaries.append(summary)
        return segment
    async for entry in read(bus, stream, subject, after=after, until_seq=until, batch=BATCH):
        summary = _summary(entry.seq, entry.data)
        if summary is not None:
            segment.seqs.append(entry.seq)
            segment.times.append(entry.time_ns)
            segment.summaries.append(summary)
    return segment


def _summary(seq: int, data: bytes) -> _Summary | None:
    """The summary of a record. None: another message, or one of a later release."""
    try:
        return of_encoded_done(data, _Summary)
    except msgspec.MsgspecError as error:
        log.warning("record_unreadable", seq=seq, error=str(error))
        return None


async def _info(bus: Readable, stream: str) -> StreamState:
    if isinstance(bus, LogFiles):
        return bus.state(stream)
    from nats.errors import Error as NatsError

    try:
        message: Any = await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b'{"deleted_details": true}', timeout=5.0)
    except (NatsError, TimeoutError) as error:
        raise ServingError(Code.broker_unavailable, f"stream {stream} cannot be read: {error!r}") from error
    info = msgspec.json.decode(message.data, type=_Info)
    if info.error is not None:
        raise ServingError(Code.broker_unavailable, f"stream {stream} cannot be read: {info.error}")
    state = info.state
    return StreamState(info.created, state.messages, state.first_seq, state.last_seq, state.deleted or [])


class _Files:
    """The files of one stream. A file that cannot be read or written counts as missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, number: int) -> _Segment | None:
        try:
            return _decode(self._path(number).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def store(self, number: int, segment: _Segment) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:  # readable by its owner only
                file.write(_encode(segment))
            os.replace(file.name, self._path(number))
            self._trim()
        except OSError as error:
            log.debug("summaries_not_cached", folder=str(self._folder), error=str(error))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.{_VERSION}"

    def _trim(self) -> None:
        """Remove the oldest segments beyond the limit, and those of other versions."""
        names = sorted(path.name for path in self._folder.iterdir() if "." in path.name)
        own = [name for name in names if name.endswith(_VERSION)]
        for name in {*names, *own} - set(own[-MOST_SEGMENTS:]):
            (self._folder / name).unlink(missing_ok=True)
