"""The streams of a stopped deployment's data folder: read in place, or copied for a broker.

``StoredLog`` reads those of one namespace as ``penstock.infra.bus.direct_get`` reads those of a broker.

A broker can start on a copy (``copy_streams``) without changing or expiring anything. nats-server has no read-only
mode: on start it deletes what is older than a stream's ``max_age``, and it writes to the files. So the limits in the
copy's metadata are lifted before the server first reads them.
"""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.infra.bus.direct_get import Entry, LogFiles, StreamState
from penstock.log_tools.sources.store_files import (
    Raw,
    StoredStream,
    message,
    parse_headers,
    subject_pattern,
    without_limits,
)
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


MEDIA = "MEDIA"
STREAMS_DIR = Path("nats", "jetstream", "APP", "streams")
MARGIN_BYTES = 64 << 20  # for what the server writes itself
_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file (btrfs, XFS, ...)


class CopyFailed(Exception):
    """The streams cannot be copied; the text says why and what to do."""


def namespaces(data_dir: Path) -> list[str]:
    """The namespaces that have streams in a data folder."""
    paths = (data_dir / STREAMS_DIR).glob("*_DONE/meta.inf")
    return sorted(path.parent.name.removesuffix("_DONE") for path in paths)


def stream_name(subjects: Subjects, stream: str) -> str:
    """A stream's name with the namespace; ``MEDIA`` is the bucket of the requests' images."""
    return f"OBJ_{subjects.bucket('media')}" if stream == MEDIA else subjects.stream(stream)


def copy_streams(data_dir: Path, target: Path, streams: Sequence[str]) -> None:
    """Copy streams into ``target``, a data folder to be. Blocks are shared where the file system can.

    No broker may run on ``data_dir`` meanwhile. Streams that do not exist are left out, and consumers.

    Args:
        streams: names with the namespace, as ``stream_name`` makes them.
    Raises:
        CopyFailed: the disk has too little room, or a file cannot be read.
    """
    try:
        folders = [data_dir / STREAMS_DIR / name for name in streams]
        folders = [folder for folder in folders if (folder / "meta.inf").exists()]
        files = [path for folder in folders for path in (folder / "msgs").iterdir() if path.is_file()]
        for folder in folders:
            into = target / STREAMS_DIR / folder.name
            (into / "msgs").mkdir(mode=0o700, parents=True)
            try:
                meta, checksum = without_limits(folder.name, (folder / "meta.inf").read_bytes())
            except ValueError as error:
                raise CopyFailed(str(error)) from error
            (into / "meta.inf").write_bytes(meta)
            (into / "meta.sum").write_text(checksum)
        for number, path in enumerate(files):
            into = target / STREAMS_DIR / path.parent.parent.name / "msgs" / path.name
            if not _clone(path, into):
                if number == 0 or number % 64 == 0:
                    _check_room(target, files[number:])
                shutil.copyfile(path, into)
    except OSError as error:
        raise CopyFailed(f"the log of {data_dir} cannot be copied to {target}: {error}") from error


def recorded_max_age_s(data_dir: Path, name: str) -> float:
    """How long a stream of a data folder keeps messages while its deployment runs, in seconds; 0: for good.

    Raises:
        CopyFailed: the stream's metadata cannot be read.
    """
    try:
        config = msgspec.json.decode((data_dir / STREAMS_DIR / name / "meta.inf").read_bytes(), type=_Limits)
    except (OSError, msgspec.MsgspecError) as error:
        raise CopyFailed(f"the metadata of stream {name} cannot be read: {error}") from error
    return config.max_age / 1e9


class _Limits(msgspec.Struct):
    max_age: int = 0  # ns


def _clone(source: Path, into: Path) -> bool:
    """Share the source's blocks instead of copying them; False: this file system cannot."""
    with source.open("rb") as reading, into.open("wb") as writing, contextlib.suppress(OSError):
        fcntl.ioctl(writing, _FICLONE, reading.fileno())
        return True
    return False


def _check_room(target: Path, files: Sequence[Path]) -> None:
    needed = sum(path.stat().st_size for path in files) + MARGIN_BYTES
    free = shutil.disk_usage(target).free
    if free < needed:
        raise CopyFailed(
            f"reading a stopped deployment takes a copy of its log: {needed >> 20} MiB, and {target} has {free >> 20} "
            "MiB free; make room there, or set TMPDIR to a larger disk"
        )
