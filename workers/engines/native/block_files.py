"""KV blocks in files, so that a prompt is found again after a restart.

Each worker has a folder of its own below the one that it was given, by the layout of its blocks: the first that no
other process has locked. So a restarted worker finds its files. A file is one block; its name has the block's and
that of the block before it, so a start reads names only. A header has the layout, the names and a checksum; a file that
is short or damaged is removed when it is read, and its block is computed.

Threads write and read, so no step waits for a disk. A disk that is full, or fails, is left alone for ``PAUSE_S``.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
from blake3 import blake3

from penstock.infra.process.user_folder import locked
from penstock.schemas.block_hashes import DIGEST_BYTES
from penstock.workers.engines.core.blocks import MOST_WRITES, FileResult
from penstock.workers.engines.engine_protocol import EngineError

log = structlog.get_logger("engine")

READERS = 4
MOST_QUEUED = 2 * MOST_WRITES  # writes and removals
PAUSE_S = 60.0  # without writes, after one failed
LATE_S = 5.0  # a sequence waits for a block, or an idle engine for a write
CLOSE_S = 5.0  # for what is being written
UNUSED_S = 7 * 86400.0  # after which folders of workers that did not come back are removed
MOST_WORKERS = 64  # of one layout on one folder
_MAGIC = b"PSKV\x00\x00\x00\x01"
_NO_PARENT = bytes(DIGEST_BYTES)
_HEADER = struct.Struct(f"<8sQ16s{DIGEST_BYTES}s{DIGEST_BYTES}s32s")  # magic, bytes, layout, name, parent, checksum

_FIXES = {
    errno.EACCES: "name a folder that this user may write",
    errno.EPERM: "name a folder that this user may write",
    errno.EROFS: "mount it for writing, or name a folder on another disk",
    errno.ENOSPC: "free space there, or name a folder on another disk",
    errno.EDQUOT: "free some of this user's quota there, or name a folder on another disk",
    errno.EEXIST: "name a folder instead of a file",
    errno.ENOTDIR: "name a folder instead of a file",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}


class _Task(NamedTuple):
    kind: str  # "write", "read", "remove"
    name: bytes
    parent: bytes | None
    slot: int
    ready: Callable[[], None]
    at: float


def _nothing() -> None: ...


class FolderFiles:
    """Implements ``penstock.workers.engines.core.blocks.BlockFiles``.

    Args:
        folder: made if it is missing; only this user may read it.
        layout: of a block's bytes. Blocks of another one are not read.
        block_bytes: of a slot.
        view: the bytes of a slot.
        ready: what to call, in any thread, to wait for the copies of slots so far.

    Attributes:
        present: the names in the folder at the start, with their parents, the least recently used first.

    Raises:
        EngineError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        layout: str,
        block_bytes: int,
        view: Callable[[int], memoryview],
        ready: Callable[[], Callable[[], None]] = lambda: _nothing,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.read_s = 0.0
        self.file_bytes = block_bytes + _HEADER.size
        self._block_bytes = block_bytes
        self._layout = blake3(layout.encode()).digest(16)
        self._view, self._ready, self._clock = view, ready, clock
        top = Path(folder)
        try:
            top.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unused(top)
            self._folder, self._lock = self._claim(top / self._layout.hex())
            self.present = self._scan()
        except OSError as error:
            fix = _FIXES.get(error.errno or 0, "name another folder, or leave --kv-disk out")
            raise EngineError(f"--kv-disk {folder}: {error}; {fix}") from error
        self._done: deque[FileResult] = deque()
        self._awaited: dict[tuple[bytes, bool], float] = {}  # (name, read) -> since when; late ones are gone
        self._last_read = 0.0
        self._paused_until = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._write_queue: deque[_Task] = deque()
        self._read_queue: deque[_Task] = deque()
        queues = [self._write_queue] + [self._read_queue] * READERS
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"kv-files-{number}", daemon=True)
            for number, queue in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    # -- in the engine thread --------------------------------------------------------------------------------

    def write(self, name: bytes, parent: bytes | None, slot: int) -> bool:
        if self._clock() < self._paused_until or len(self._write_queue) >= MOST_QUEUED:
            return False
        now = self._awaited[name, False] = self._clock()
        self._put(self._write_queue, _Task("write", name, parent, slot, self._ready(), now))
        return True

    def read(self, name: bytes, parent: bytes | None, slot: int) -> None:
        now = self._awaited[name, True] = self._clock()
        self._put(self._read_queue, _Task("read", name, parent, slot, self._ready(), now))

    def remove(self, name: bytes, parent: bytes | None) -> None:
        self._put(self._write_queue, _Task("remove", name, parent, 0, _nothing, 0.0))

    def results(self) -> list[FileResult]:
        results: list[FileResult] = []
        while self._done:
            results.append(self._done.popleft())
            self._awaited.pop((results[-1].name, results[-1].read), None)
        if self._awaited:
            before = self._clock() - LATE_S
            for name, read in [each for each, since in self._awaited.items() if since < before]:
                del self._awaited[name, read]
                results.append(FileResult(name, read, ok=False, late=True))
        return results

    def close(self) -> None:
        """Write what is queued, within ``CLOSE_S``, and let others have the folder."""
        with self._changed:
            self._closed = True
            self._read_queue.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):  # the disk hangs, and so might the calls below
            log.warning("kv_disk_hangs", folder=str(self._folder), seconds=CLOSE_S)
            return
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        os.close(self._lock)

    def _put(self, queue: "deque[_Task]", task: _Task) -> None:
        with self._changed:
            queue.append(task)
            self._changed.notify_all()

    # -- in threads ------------------------------------------------------------------------------------------

    def _run(self, queue: "deque[_Task]") -> None:
        while True:
            with self._changed:
                while not queue:
                    if self._closed:
                        return
                    self._changed.wait()
                task = queue.popleft()
            if task.kind == "remove":
                with contextlib.suppress(OSError):
                    self._path(task.name, task.parent).unlink(missing_ok=True)
                continue
            ok = False
            try:
                task.ready()
                ok = self._write(task) if task.kind == "write" else self._read(task)
            except OSError as error:
                if task.kind == "write":
                    self._pause(error)
            except Exception as error:  # the device is lost: its own thread says so
                log.warning("kv_file_failed", error=repr(error))
            if task.kind == "read" and ok:
                self._measure(task.at)
            with contextlib.suppress(OSError):  # not only at the end: a worker may be killed
                os.utime(self._folder / "lock")
            self._done.append(FileResult(task.name, task.kind == "read", ok))

    def _write(self, task: _Task) -> bool:
        view = self._view(task.slot)
        path = self._path(task.name, task.parent)
        part = path.with_name(f"{path.name}.part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                data: list[bytes | memoryview] = [self._header(task, view), view]
                if os.writev(descriptor, data) != self.file_bytes:
                    raise OSError(f"{part} was not written as a whole")
            finally:
                os.close(descriptor)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return True

    def _read(self, task: _Task) -> bool:
        view = self._view(task.slot)
        header = bytearray(_HEADER.size)
        descriptor = os.open(self._path(task.name, task.parent), os.O_RDONLY)
        try:
            whole = os.readv(descriptor, [header, view]) == self.file_bytes
            with contextlib.suppress(OSError):  # it may be mounted read-only by now
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return whole and bytes(header) == self._header(task, view)

    def _header(self, task: _Task, view: memoryview) -> bytes:
        parent = task.parent or _NO_PARENT
        head = (_MAGIC, self._block_bytes, self._layout, task.name, parent)
        return _HEADER.pack(*head, blake3(view, key=self._layout * 2).digest())

    def _measure(self, since: float) -> None:
        now = self._clock()
        with self._changed:
            took = now - max(since, self._last_read)  # several are read at once
            self._last_read = now
            self.read_s = took if not self.read_s else 0.9 * self.read_s + 0.1 * took

    def _pause(self, error: OSError) -> None:
        with self._changed:
            if self._clock() < self._paused_until:
                return
            self._paused_until = self._clock() + PAUSE_S
        log.warning("kv_disk_paused", folder=str(self._folder), error=str(error), seconds=PAUSE_S)

    # -- the folder ------------------------------------------------------------------------------------------

    def _path(self, name: bytes, parent: bytes | None) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}-{parent.hex() if parent else ''}"

    def _claim(self, layout: Path) -> tuple[Path, int]:
        layout.mkdir(mode=0o700, exist_ok=True)
        for number in range(MOST_WORKERS):
            folder = layout / str(number)
            folder.mkdir(mode=0o700, exist_ok=True)
            if (lock := locked(folder / "lock")) < 0:
                continue
            os.utime(lock)
            for byte in range(256):
                (folder / f"{byte:02x}").mkdir(mode=0o700, exist_ok=True)
            return folder, lock
        raise OSError(f"{MOST_WORKERS} workers use {layout} already")

    def _scan(self) -> dict[bytes, bytes | None]:
        found: list[tuple[float, bytes, bytes | None]] = []
        for byte in range(256):
            with os.scandir(self._folder / f"{byte:02x}") as entries:
                for entry in entries:
                    stat, names = entry.stat(), _names_of(entry.name)
                    if names is None or stat.st_size != self.file_bytes:  # unfinished, or cut
                        os.unlink(entry.path)
                    else:
                        found.append((stat.st_mtime, *names))
        return {name: parent for _, name, parent in sorted(found, key=lambda each: each[0])}


def _names_of(file: str) -> tuple[bytes, bytes | None] | None:
    name, dash, parent = file.partition("-")
    try:
        names = bytes.fromhex(name), bytes.fromhex(parent) or None
    except ValueError:
        return None
    right = dash and len(names[0]) == DIGEST_BYTES and len(parent) in (0, 2 * DIGEST_BYTES)
    return names if right else None


def _remove_unused(top: Path) -> None:
    """Remove folders of other layouts, or of more workers, that were not used for ``UNUSED_S``."""
    for lock in top.glob("*/*/lock"):
        try:
            if time.time() - lock.stat().st_mtime < UNUSED_S:
                continue
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:  # another worker that starts was faster
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
