"""Exports as files: plain or gzip by their suffix, "-" for standard input and output.

An export has each request once, as a message of REQUESTS; its jobs and records refer to it by the message's sequence.
Writers know which messages of REQUESTS the file gets, readers keep those that they have read.
"""

import contextlib
import gzip
import sys
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.cli.figures import counted
from penstock.cli.terminal import reason
from penstock.log_tools.sources.log_line import BadLine, FileHeader, LogLine, decode_line, no_request, read_header

IN_MEMORY_BYTES = 64 << 20


class WrittenRequests:
    """The requests that were written so far, by id: their sequences, and hashes of their bytes."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[int, int]] = {}

    def add(self, request: str, sequence: int, data: bytes) -> None:
        self._by_id[request] = sequence, hash(data)

    def sequence_of(self, request: str, data: bytes) -> int:
        """Of the message of REQUESTS with these bytes; 0: it was not written."""
        sequence, hashed = self._by_id.get(request, (0, 0))
        return sequence if sequence and hashed == hash(data) else 0


class ReadRequests:
    """The messages of REQUESTS that were read so far, in a temporary file once they are many."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115 - until `close`
        self._sequences = array("Q")
        self._ends = array("Q", [0])  # in the file; of the message after the place of its sequence

    def add(self, sequence: int, data: bytes) -> None:
        """Sequences ascend; another one is left out.

        Raises:
            ValueError: the temporary file cannot be written.
        """
        if self._sequences and sequence <= self._sequences[-1]:
            return
        try:
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._file.flush()
        except OSError as error:  # not as an OSError, which readers take for the end of a damaged file
            raise ValueError(
                f"requests of the export cannot be kept in {tempfile.gettempdir()}: {reason(error)}; "
                "set TMPDIR to a disk with room"
            ) from error
        self._sequences.append(sequence)
        self._ends.append(self._ends[-1] + len(data))

    def at(self, sequence: int) -> bytes:
        """
        Raises:
            BadLine: there is none.
        """
        place = bisect_left(self._sequences, sequence)
        if place == len(self._sequences) or self._sequences[place] != sequence:
            return no_request(sequence)
        self._file.seek(self._ends[place])
        return self._file.read(self._ends[place + 1] - self._ends[place])

    def close(self) -> None:
        self._file.close()


STDIO = "-"
BUFFER_BYTES = 1 << 20
_START = b'{"stream":"'


class ExportFile:
    """An export that is read from its beginning.

    Attributes:
        header: its first line.
        bad: lines that were left out, as "line 17: why".
    """

    def __init__(self, name: str, lines: Iterator[bytes], requests: ReadRequests, *, skip_bad: bool) -> None:
        self._name = name
        self._lines = lines
        self._skip = skip_bad
        self._number = 1
        self._requests = requests
        self.bad: list[str] = []
        try:
            self.header: FileHeader = read_header(next(lines, b""))
        except (BadLine, OSError, EOFError) as error:
            raise BadLine(f"{name}, line 1: {error}") from None

    def records(self, streams: Collection[str] = ()) -> Iterator[LogLine]:
        """Every record, in the order of the file.

        Args:
            streams: only theirs; empty: all. Lines of others are not looked at.
        Raises:
            BadLine: a line is damaged, and ``skip_bad`` is off. It names the line.
        """
        while True:
            self._number += 1
            try:
                line = next(self._lines, b"")
                if not line:
                    return
                stream = _stream_of(line) if line.startswith(_START) else ""
                wanted = not streams or not stream or stream in streams
                if not wanted and stream != "REQUESTS":
                    continue
                record = decode_line(line, self._requests.at)
                if record.stream == "REQUESTS":
                    self._requests.add(record.seq, record.data)
                if wanted:
                    yield record
            except (OSError, EOFError) as error:  # of gzip: the rest cannot be read
                self.reject(error)
                return
            except BadLine as error:
                self.reject(error)

    def left_out(self) -> str:
        """How many lines are ``bad``, as a sentence."""
        first = f"the first is {self.bad[0]}" if len(self.bad) > 1 else self.bad[0]
        return f"left out {counted(len(self.bad), 'damaged line')}: {first}"

    def reject(self, error: Exception) -> None:
        """Report that the last record cannot be used.

        Raises:
            BadLine: ``skip_bad`` is off.
        """
        text = f"line {self._number}: {error}"
        if not self._skip:
            raise BadLine(f"{self._name}, {text}; --skip-bad leaves damaged lines out")
        self.bad.append(text)


def _stream_of(line: bytes) -> str:
    return line[len(_START) : line.find(b'"', len(_START))].decode(errors="replace")


@contextlib.contextmanager
def open_export(name: str, *, skip_bad: bool = False) -> Iterator[ExportFile]:
    """
    Args:
        name: a path, "-" for standard input.
        skip_bad: leave damaged lines out instead of raising.
    Raises:
        BadLine: it is not an export, or a damaged one.
        ValueError: it cannot be opened.
    """
    with _reading(name) as file, contextlib.closing(ReadRequests()) as requests:
        yield ExportFile("standard input" if name == STDIO else name, iter(file), requests, skip_bad=skip_bad)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[BinaryIO]:
    _check(name)
    if name == STDIO:
        yield sys.stdin.buffer
    elif name.endswith(".gz"):
        with _opened(name) as file, gzip.GzipFile(fileobj=file) as packed:
            yield packed  # type: ignore[misc]  # a BinaryIO in all that is used of it
    else:
        with _opened(name) as file:
            yield file


def _opened(name: str) -> BinaryIO:
    try:
        return Path(name).open("rb", buffering=BUFFER_BYTES)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {reason(error)}") from error


@contextlib.contextmanager
def writing(name: str) -> Iterator[BinaryIO]:
    """Open a file for an export, readable by its owner only. It appears under its name once it is complete.

    Raises:
        ValueError: a suffix that is not supported, or it cannot be written.
    """
    _check(name)
    if name == STDIO:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb", buffering=BUFFER_BYTES) as file:
            part.chmod(0o600)
            if name.endswith(".gz"):
                with gzip.GzipFile(path.stem, "wb", compresslevel=1, fileobj=file, mtime=0) as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield file
        part.replace(path)
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {reason(error)}") from error
    finally:
        part.unlink(missing_ok=True)


def _check(name: str) -> None:
    if name.endswith((".zst", ".zstd")):
        raise ValueError(f"{name}: Zstandard is not built in; name a .gz file, or '-' and pipe it through zstd")


def write_json(name: str, value: object) -> None:
    """A report as indented JSON; "-" for standard output."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    with writing(name) as file:
        file.write(text)
