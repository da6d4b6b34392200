"""Selected messages of the log as lines of an export."""

import contextlib
import gc
from collections.abc import Iterator
from typing import BinaryIO

from penstock.log.export.media import media_of
from penstock.log.export.redaction import Redactor
from penstock.log.sources.log_line import LogLine, SequenceOf, append_line
from penstock.log.sources.requests_of_file import WrittenRequests
from penstock.log.sources.selection import Selection

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
