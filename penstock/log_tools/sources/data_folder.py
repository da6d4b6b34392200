"""The streams of one namespace of a data folder, read as ``penstock.infra.bus.direct_get`` reads those of a broker."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from penstock.infra.bus.direct_get import Entry, LogFiles, StreamState
from penstock.log_tools.sources.store_files import Raw, StoredStream, message, parse_headers, subject_pattern
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects


class StoredLog(LogFiles):
    """The log of a broker that does not run.

    Args:
        streams: the folder of the streams.
        names: which streams are read, with the namespace. Those that are not in the folder have no messages.
        check: called after each look at the files; raises if a broker has started on them.
        verify: leave out messages whose checksums are wrong, and say so.
    Raises:
        UnreadableFiles: a stream is encrypted or compressed.
        OSError, msgspec.MsgspecError: a stream cannot be read.
    """

    clustered = False

    def __init__(
        self,
        streams: Path,
        subjects: Subjects,
        names: Collection[str],
        check: Callable[[], None] = lambda: None,
        *,
        verify: bool = False,
    ) -> None:
        self.subjects = subjects
        self._streams = {
            name: StoredStream(streams / name, check, verify=verify) if (streams / name / "meta.inf").exists() else None
            for name in names
        }

    def stream(self, name: str) -> StoredStream | None:
        """A stream; None: the folder has none of this name.

        Raises:
            ServingError: it was not asked for.
        """
        if name not in self._streams:
            raise ServingError(Code.broker_unavailable, f"stream {name} is not read from this folder")
        return self._streams[name]

    def is_intact(self, entry: Entry, stream: str) -> bool:
        """Whether a message that was read from a stream is as the broker stored it."""
        stored = self.stream(stream)
        return stored is None or stored.is_intact(entry.seq)

    def read(self, stream: str, subject: str, *, after: int, since_ns: int, until_seq: int | None) -> Iterator[Entry]:
        """As ``direct_get.read``."""
        stored = self.stream(stream)
        if stored is None:
            return
        for raw in stored.forward(subject_pattern(subject), after=after, since_ns=since_ns):
            if until_seq is not None and raw.seq > until_seq:
                return
            yield entry_of(raw)

    def read_backwards(self, stream: str, subject: str, *, before: int) -> Iterator[Entry]:
        """As ``direct_get.read_backwards``."""
        stored = self.stream(stream)
        if stored is not None:
            yield from map(entry_of, stored.backward(subject_pattern(subject), before=before))

    def get_last(self, stream: str, subject: str) -> Entry | None:
        """As ``direct_get.get_last``."""
        return next(self.read_backwards(stream, subject, before=0), None)

    def get_last_of(self, stream: str, subjects: Sequence[str]) -> list[Entry]:
        """As ``direct_get.get_last_of``: one walk for all of them."""
        stored = self.stream(stream)
        if stored is None or not subjects:
            return []
        wanted = set(subjects)
        last = []
        for raw in stored.backward(re.compile(b"|".join(re.escape(each.encode()) for each in subjects))):
            entry = entry_of(raw)
            if entry.subject in wanted:
                wanted.remove(entry.subject)
                last.append(entry)
                if not wanted:
                    break
        return last[::-1]

    def state(self, stream: str) -> StreamState:
        """What the broker would say about a stream. One that does not exist is empty."""
        stored = self.stream(stream)
        if stored is None:
            return StreamState("", 0, 0, 0, [])
        deleted = stored.deleted()
        messages = stored.last_seq - stored.first_seq + 1 - len(deleted) if not stored.empty else 0
        limits = stored.max_age_s, stored.max_bytes
        return StreamState(stored.created, messages, stored.first_seq, stored.last_seq, deleted, *limits)

    def get_next(self, stream: str, subject: str, after: int) -> Entry | None:
        """As ``direct_get.get_next``."""
        return next(self.read(stream, subject, after=after, since_ns=0, until_seq=None), None)


def entry_of(raw: Raw) -> Entry:
    """A stored message as direct get returns it, without the headers that the server adds."""
    stored = message(raw.block, raw.at)
    headers = parse_headers(stored.headers) if stored.headers else {}
    return Entry(stored.subject, raw.seq, stored.data, headers, 0, raw.time_ns)
