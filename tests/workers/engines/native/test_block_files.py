"""KV blocks in files: as they were written, or not at all, whatever happened to the folder in between."""

import errno
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from penstock.workers.engines.core.blocks import FileResult
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native import block_files
from penstock.workers.engines.native.block_files import UNUSED_S, FolderFiles

BYTES, SLOTS = 1000, 8
NAMES = [bytes([at]) * 16 for at in range(1, 9)]


class Slots:
    def __init__(self) -> None:
        self.data = bytearray(os.urandom(BYTES * SLOTS))

    def view(self, slot: int) -> memoryview:
        return memoryview(self.data)[slot * BYTES : (slot + 1) * BYTES]


def files(folder: Path, slots: Slots, layout: str = "kv") -> FolderFiles:
    return FolderFiles(folder, layout, BYTES, slots.view)


def results(of: FolderFiles, count: int) -> list[FileResult]:
    found: list[FileResult] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += of.results()
        time.sleep(0.001)
    return found


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*-*") if path.is_file())


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Slots]:
    """A folder with blocks 0 to 3, each the child of the one before."""
    slots = Slots()
    first = files(tmp_path / "kv", slots)
    for at in range(4):
        assert first.write(NAMES[at], NAMES[at - 1] if at else None, at)
    assert {each.name for each in results(first, 4) if each.ok} == set(NAMES[:4])
    first.close()
    return tmp_path / "kv", slots


def test_blocks_are_read_as_they_were_written_by_whoever_starts_next(written: tuple[Path, Slots]) -> None:
    folder, slots = written
    again = files(folder, slots)
    assert again.present == {name: NAMES[at - 1] if at else None for at, name in enumerate(NAMES[:4])}
    for at in range(4):
        again.read(NAMES[at], again.present[NAMES[at]], 4 + at)
    assert sorted(results(again, 4)) == [FileResult(name, True, True) for name in NAMES[:4]]
    assert slots.data[: 4 * BYTES] == slots.data[4 * BYTES :]
    assert again.read_s > 0
    again.remove(NAMES[3], NAMES[2])
    again.close()
    assert [path.name[:32] for path in paths(folder)] == [name.hex() for name in NAMES[:3]]


@pytest.mark.parametrize("damage", ["flipped", "cut", "other", "gone"])
def test_a_damaged_file_is_not_read(damage: str, written: tuple[Path, Slots]) -> None:
    folder, slots = written
    again = files(folder, slots)
    before = bytes(slots.data[:BYTES])
    first, second, *_ = paths(folder)
    if damage == "flipped":
        data = bytearray(first.read_bytes())
        data[-7] ^= 1
        first.write_bytes(data)
    elif damage == "cut":
        os.truncate(first, BYTES)
    elif damage == "other":
        first.write_bytes(second.read_bytes())
    else:
        first.unlink()
    again.read(NAMES[0], None, 5)
    assert results(again, 1) == [FileResult(NAMES[0], True, False)]
    assert bytes(slots.data[:BYTES]) == before
    again.close()
    if damage == "cut":
        third = files(folder, slots)
        assert NAMES[0] not in third.present
        third.close()
        assert first not in paths(folder)


def test_a_worker_that_was_killed_while_it_wrote_leaves_its_other_blocks_to_the_next_one(tmp_path: Path) -> None:
    slots = Slots()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        worker = files(tmp_path / "kv", slots)
        assert worker.write(NAMES[0], None, 0)
        results(worker, 1)
        path = worker._path(NAMES[1], NAMES[0])
        path.with_name(f"{path.name}.part").write_bytes(b"half")
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(1)
    assert os.read(reader, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    again = files(tmp_path / "kv", slots)
    assert again.present == {NAMES[0]: None}
    assert len(paths(tmp_path)) == 1, "what was not written as a whole is removed"
    again.read(NAMES[0], None, 5)
    assert results(again, 1) == [FileResult(NAMES[0], True, True)]
    again.close()
    os.close(reader)
    os.close(writer)


def test_workers_of_one_folder_have_parts_of_their_own_and_layouts_too(written: tuple[Path, Slots]) -> None:
    folder, slots = written
    one, two, other = files(folder, slots), files(folder, slots), files(folder, slots, "another")
    assert len(one.present) == 4
    assert not two.present
    assert not other.present
    for each in (one, two, other):
        each.close()
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [folder, *folder.rglob("*")])


def test_what_no_worker_has_used_for_long_is_removed(written: tuple[Path, Slots]) -> None:
    folder, slots = written
    (lock,) = folder.glob("*/*/lock")
    old = time.time() - UNUSED_S - 60
    os.utime(lock, (old, old))
    files(folder, slots, "another").close()
    assert paths(folder) == []


def test_a_folder_that_another_worker_removes_meanwhile_stops_no_start(
    written: tuple[Path, Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slots = written
    (lock,) = folder.glob("*/*/lock")
    old = time.time() - UNUSED_S - 60
    os.utime(lock, (old, old))

    def removed() -> float:
        lock.unlink(missing_ok=True)
        return old + UNUSED_S + 60

    monkeypatch.setattr(block_files.time, "time", removed)
    files(folder, slots, "another").close()


def test_the_folder_of_a_worker_that_was_killed_is_as_old_as_its_last_block(written: tuple[Path, Slots]) -> None:
    folder, slots = written
    worker = files(folder, slots)
    (lock,) = folder.glob("*/*/lock")
    old = time.time() - UNUSED_S - 60
    os.utime(lock, (old, old))
    worker.read(NAMES[0], None, 5)
    assert results(worker, 1) == [FileResult(NAMES[0], True, True)]
    assert lock.stat().st_mtime > old + 60
    worker.close()


def test_a_folder_that_became_read_only_is_read(written: tuple[Path, Slots], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slots = written
    worker = files(folder, slots)

    def fails(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(block_files.os, "utime", fails)
        worker.read(NAMES[0], None, 5)
        assert results(worker, 1) == [FileResult(NAMES[0], True, True)]
    worker.close()


def test_a_disk_that_is_full_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    slots = Slots()
    full = FolderFiles(tmp_path, "kv", BYTES, slots.view, clock=lambda: now[0])

    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files.os, "writev", fails)
    assert full.write(NAMES[0], None, 0)
    assert results(full, 1) == [FileResult(NAMES[0], False, False)]
    monkeypatch.undo()
    assert not full.write(NAMES[0], None, 0)
    assert paths(tmp_path) == []
    now[0] += block_files.PAUSE_S
    assert full.write(NAMES[0], None, 0)
    assert results(full, 1) == [FileResult(NAMES[0], False, True)]
    full.close()
    assert capsys.readouterr().out.count("kv_disk_paused") <= 1


def test_a_read_that_takes_long_is_late_and_ends_later(written: tuple[Path, Slots]) -> None:
    folder, slots = written
    now = [0.0]
    gate = block_files.threading.Event()
    slow = FolderFiles(
        folder, "kv", BYTES, slots.view, lambda: lambda: bool(gate.wait(20)) and None, clock=lambda: now[0]
    )
    slow.read(NAMES[0], None, 5)
    assert slow.results() == []
    now[0] += block_files.LATE_S + 1
    assert slow.results() == [FileResult(NAMES[0], True, False, True)]
    assert slow.results() == []
    gate.set()
    assert results(slow, 1) == [FileResult(NAMES[0], True, True)]
    slow.close()


def test_a_disk_that_hangs_is_late_and_keeps_no_worker_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, gate = [0.0], block_files.threading.Event()
    slots = Slots()
    hung = FolderFiles(
        tmp_path, "kv", BYTES, slots.view, lambda: lambda: bool(gate.wait(20)) and None, clock=lambda: now[0]
    )
    assert hung.write(NAMES[0], None, 0)
    assert hung.results() == []
    now[0] += block_files.LATE_S + 1
    assert hung.results() == [FileResult(NAMES[0], False, False, True)]
    assert hung.results() == []
    monkeypatch.setattr(block_files, "CLOSE_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(block_files.os, "close", lambda _: pytest.fail("this call hangs as well"))
        hung.close()
    gate.set()
    assert results(hung, 1) == [FileResult(NAMES[0], False, True)]
    hung.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"file.*name a folder instead of a file"):
        files(tmp_path / "file", Slots())


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EROFS, "mount it for writing, or name a folder on another disk"),
        (errno.EACCES, "name a folder that this user may write"),
        (errno.ENOSPC, "free space there, or name a folder on another disk"),
        (errno.ESTALE, "name another folder, or leave --kv-disk out"),
    ],
)
def test_the_fix_fits_what_is_wrong_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(block_files.Path, "mkdir", fails)
    with pytest.raises(EngineError) as raised:
        files(tmp_path / "kv", Slots())
    assert str(raised.value) == f"--kv-disk {tmp_path / 'kv'}: [Errno {number}] {os.strerror(number)}; {fix}"
