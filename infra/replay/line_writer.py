"""Selected messages of the log as lines of an export."""

import contextlib
import gc
from collections.abc import Iterator
from typing import BinaryIO

from infra.replay.log_line import LogLine, encode_line
from infra.replay.media import media_of
from infra.replay.redaction import Redactor
from infra.replay.selection import Selection

GROUP = 256  # lines per write


class LineWriter:
    """Writes the selected messages to a file.

    Attributes:
        requests: ids of those written.
        left_out: messages that cannot be redacted.
        media: digests, in the order of the requests.
    """

    def __init__(self, chosen: Selection, file: BinaryIO, redactor: Redactor | None) -> None:
        self._chosen = chosen
        self._file = file
        self._redactor = redactor
        self._lines: list[bytes] = []
        self.requests: set[str] = set()
        self.messages = 0
        self.left_out = 0
        self.media: dict[bytes, None] = {}

    def add(self, record: LogLine) -> None:
        part: LogLine | None = record
        if not self._chosen.everything:
            part = self._chosen.part(record)
            if part is None:
                return
        if part is not None and self._redactor is not None:
            part = self._redactor.record(part)
        if part is None:
            self.left_out += 1
            return
        if record.stream in ("REQUESTS", "DONE"):
            self.requests.add(record.headers.get("Nats-Msg-Id", "")[:36])
            self.media.update(dict.fromkeys(each.digest for each in media_of(record)))
        self.write(part)

    def write(self, record: LogLine) -> None:
        self._lines.append(encode_line(record))
        self.messages += 1
        if len(self._lines) == GROUP:
            self.flush()

    def flush(self) -> None:
        self._file.write(b"".join(self._lines))
        self._lines.clear()


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
