"""A copy of a stopped deployment's streams, on which a broker can start without changing or expiring anything.

nats-server has no read-only mode: on start it deletes what is older than a stream's ``max_age``, and it writes to the
files. So a copy is served, and the limits in its metadata are lifted before the server first reads them.
"""

import contextlib
import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.log_tools.sources.store_files import without_limits
from penstock.schemas.subjects import Subjects

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
