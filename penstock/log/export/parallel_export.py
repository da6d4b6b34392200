"""An export of a stopped deployment by several processes, each of which turns blocks of the store into lines.

Messages of the log do not depend on each other, so a block is a piece of work. The processes take the blocks in turn,
and write them in turn too: only one at a time learns where its lines belong in the file, and then writes them there.

Selected messages of the log as lines of an export.
"""

import contextlib
import gc
import gzip
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.log.export.read_lines import record_of
from penstock.log.export.recording import media_of
from penstock.log.export.redaction import Redactor
from penstock.log.sources.data_folder import StoredLog
from penstock.log.sources.export_file import PACKED, StoredRequests, WrittenRequests
from penstock.log.sources.log_line import LogLine, Selection, SequenceOf, append_line
from penstock.log.sources.stream import StoredStream
from penstock.schemas.errors import Code, ServingError

WRITTEN_BYTES = 256 << 10  # together


class LineWriter:
    """Writes the selected messages to a file.

    Args:
        file: None: keep the lines until ``taken``.
        sequence_of: as of ``append_line``; None: what this one has written.
    Attributes:
        requests: ids of those written.
        left_out: messages that cannot be redacted.
        media: digests, in the order of the requests.
    """

    def __init__(
        self,
        chosen: Selection,
        file: BinaryIO | None,
        redactor: Redactor | None,
        sequence_of: SequenceOf | None = None,
    ) -> None:
        self._chosen = chosen
        self._everything = chosen.everything
        self._file = file
        self._redactor = redactor
        self._lines = bytearray()
        self._written = WrittenRequests()
        self._sequence_of = sequence_of or self._written.sequence_of
        self.requests: set[str] = set()
        self.messages = 0
        self.left_out = 0
        self.media: dict[bytes, None] = {}

    def add(self, record: LogLine) -> None:
        part: LogLine | None = record
        if not self._everything:
            part = self._chosen.part(record)
            if part is None:
                return
        if part is not None and self._redactor is not None:
            part = self._redactor.record(part)
        if part is None:
            self.left_out += 1
            return
        if record.stream in ("REQUESTS", "DONE"):
            request = record.headers.get("Nats-Msg-Id", "")[:36]
            self.requests.add(request)
            if record.stream == "REQUESTS":
                self._written.add(request, record.seq, part.data)
            for each in media_of(record):
                self.media[each.digest] = None
        append_line(part, self._lines, self._sequence_of)
        self.messages += 1
        if len(self._lines) >= WRITTEN_BYTES and self._file is not None:
            self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.write(self._lines)
            self._lines.clear()

    def taken(self) -> bytearray:
        """The lines that were not written to a file. They are the caller's from now on."""
        lines, self._lines = self._lines, bytearray()
        return lines


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Pause garbage collection: nothing here makes cycles, and a collection would visit everything that was read."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


LEAST_BYTES = 64 << 20  # of a log; for less, starting processes takes longer than it saves
MOST_PROCESSES = 8
END_S = 5.0


class Blocks(NamedTuple):
    """The blocks of one stream that may hold selected messages, and between which times (Unix, ns; 0: open).

    ``verify``: leave out messages whose checksums are wrong.
    """

    stream: str  # without the namespace
    folder: Path
    indices: range
    since_ns: int
    until_ns: int
    verify: bool = False


class Written(NamedTuple):
    """What all processes have written together."""

    end: int  # of the file
    requests: set[str]
    messages: int
    left_out: int
    media: dict[bytes, None]


class _Shared:
    """What the processes share. ``place``: the next block to be written, and where; negative: it has failed."""

    def __init__(self, context: SpawnContext, offset: int) -> None:
        self.taken = context.Value("q", 0)
        self.turn = context.Condition()
        self.place = context.Array("q", [0, offset], lock=False)

    def take(self) -> int:
        with self.taken.get_lock():
            number = int(self.taken.value)
            self.taken.value = number + 1
            return number

    def reserve(self, number: int, size: int) -> int | None:
        """Where the lines of a block belong, once those before it have their place; None: another process failed."""
        with self.turn:
            self.turn.wait_for(lambda: self.place[0] in (number, -1))
            if self.place[0] < 0:
                return None
            offset = int(self.place[1])
            self.place[0], self.place[1] = number + 1, offset + size
            self.turn.notify_all()
            return offset

    def fail(self) -> None:
        with self.turn:
            self.place[0] = -1
            self.turn.notify_all()


def processes_for(log: StoredLog, streams: Sequence[str]) -> int:
    """How many processes are worth it; 1: do it in this one."""
    folders = [stored for name in streams if (stored := log.stream(log.subjects.stream(name))) is not None]
    size = sum(path.stat().st_size for stored in folders for path in stored.blocks)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_PROCESSES) if size >= LEAST_BYTES else 1


def export_blocks(work: Sequence[Blocks], chosen: Selection, path: Path, offset: int, processes: int) -> Written:
    """Write the selected messages of these blocks into a file, from ``offset`` on.

    Args:
        path: an existing file; with the suffixes ``.gz.part`` each block is compressed on its own.
    Raises:
        ServingError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    shared = _Shared(context, offset)
    written = Written(0, set(), 0, 0, {})
    running: dict[Connection, SpawnProcess] = {}
    try:
        for number in range(processes):
            reading, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(work, chosen, path, shared, sending), name=f"export-{number}", daemon=True
            )
            process.start()
            sending.close()
            running[reading] = process
        waiting = list(running)
        while waiting:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                waiting.remove(connection)
                written = _with(written, _received(connection))
    except BaseException:
        for process in running.values():
            process.terminate()
        raise
    finally:
        for connection, process in running.items():
            process.join(END_S)
            connection.close()
    return written._replace(end=int(shared.place[1]))


def _received(connection: Connection) -> Written:
    try:
        result = connection.recv()
    except EOFError:
        raise ServingError(Code.internal, "a process of the export ended: there may be too little memory") from None
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Written)
    return result


def _with(one: Written, other: Written) -> Written:
    requests = one.requests | other.requests
    return Written(0, requests, one.messages + other.messages, one.left_out + other.left_out, one.media | other.media)


def _run(work: Sequence[Blocks], chosen: Selection, path: Path, shared: Any, sending: Connection) -> None:
    """One process: take blocks until there are none left."""
    with closing(sending):
        try:
            with without_gc():
                result: Written | Exception = _take_blocks(work, chosen, path, shared)
        except Exception as error:
            shared.fail()
            result = error
        sending.send(result)


def _take_blocks(work: Sequence[Blocks], chosen: Selection, path: Path, shared: _Shared) -> Written:
    pieces = [(blocks, index) for blocks in work for index in blocks.indices]
    streams: dict[str, StoredStream] = {}
    requests: set[str] = set()
    messages = left_out = 0
    media: dict[bytes, None] = {}
    sequence_of = _sequence_of(work, chosen)
    file = os.open(path, os.O_WRONLY)
    try:
        while (number := shared.take()) < len(pieces):
            blocks, index = pieces[number]
            if blocks.stream not in streams:
                streams[blocks.stream] = StoredStream(blocks.folder, verify=blocks.verify)
            writer = LineWriter(chosen, None, None, sequence_of)
            data, places = streams[blocks.stream].block(index)
            for seq, time_ns, at in places:
                if time_ns >= blocks.since_ns and (not blocks.until_ns or time_ns <= blocks.until_ns):
                    writer.add(record_of(blocks.stream, data, seq, time_ns, at))
            lines = writer.taken()
            packed = gzip.compress(lines, 1, mtime=0) if path.name.endswith(PACKED) and lines else lines
            offset = shared.reserve(number, len(packed))
            if offset is None:
                break
            _write_at(file, packed, offset)
            requests |= writer.requests
            messages += writer.messages
            left_out += writer.left_out
            media |= writer.media
    finally:
        os.close(file)
    return Written(0, requests, messages, left_out, media)


def _sequence_of(work: Sequence[Blocks], chosen: Selection) -> SequenceOf:
    for blocks in work:
        if blocks.stream == "REQUESTS":
            stored = StoredStream(blocks.folder, verify=blocks.verify)
            return StoredRequests(stored, chosen, blocks.since_ns, blocks.until_ns).sequence_of
    return lambda request, data: 0


def _write_at(file: int, data: bytes | bytearray, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        size = os.pwrite(file, rest, offset)
        rest, offset = rest[size:], offset + size
