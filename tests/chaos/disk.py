"""A disk of its own for a broker's data, which can be full; and what its files hold."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

SIZE_MIB = 512
CHUNK_BYTES = 8 << 20
REQUEST_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BEFORE_BYTES = 64 << 10  # of a message, between the id in its subject and what is looked for


class Disk:
    """A file system in memory, mounted over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    @classmethod
    def mounted(cls, folder: Path, size_mib: int = SIZE_MIB) -> Self | None:
        """None: only root can mount."""
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "penstock-chaos", str(folder)]
        return cls(folder) if subprocess.run(command, capture_output=True).returncode == 0 else None

    def fill(self) -> int:
        """Take all that is free; how many bytes that were."""
        taken = 0
        with self._filler.open("ab") as file:
            for _ in range(5):  # the broker takes and gives meanwhile
                there = os.statvfs(self._folder)
                free = there.f_bavail * there.f_bsize
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), taken, max(1, free))
                    taken += free
        return taken

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        """What is on it stays, in an ordinary folder."""
        kept = self._folder.with_name(f"{self._folder.name}.kept")
        self.free()
        try:
            shutil.copytree(self._folder, kept, symlinks=True, ignore_dangling_symlinks=True)
        finally:
            subprocess.run(["umount", "-l", str(self._folder)], check=True, capture_output=True)
        self._folder.rmdir()
        kept.rename(self._folder)


def found_in(folder: Path, wanted: Mapping[str, bytes], left_out: str = "") -> dict[str, str]:
    """Which of these bytes some file below the folder holds: the name of the one, and of the file.

    Args:
        left_out: the name of a folder, anywhere in it, whose files are not looked at.
    """
    found: dict[str, str] = {}
    longest = max(map(len, wanted.values()), default=1)
    for path in sorted(_files(folder, left_out)) if wanted else ():
        for part in _parts(path, longest - 1):
            for name, needle in wanted.items():
                if name not in found and needle in part:
                    found[name] = str(path.relative_to(folder))
    return found


def requests_with(path: Path, wanted: bytes) -> set[str]:
    """The requests whose messages in this file have these bytes: the last id that is named before them; "": none."""
    data, found, at = path.read_bytes(), set[str](), -1
    while (at := data.find(wanted, at + 1)) >= 0:
        ids = REQUEST_ID.findall(data, max(0, at - BEFORE_BYTES), at)
        found.add(ids[-1].decode() if ids else "")
    return found


def _files(folder: Path, left_out: str) -> Iterator[Path]:
    """A folder that a broker removes meanwhile, as it does with a stream's, is passed over (``rglob`` raises)."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != left_out]
        yield from (Path(at, name) for name in names)


def _parts(path: Path, overlap: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # a broker that runs replaces its files
        if not path.is_file():
            return
        with path.open("rb") as file:
            rest = b""
            while data := file.read(CHUNK_BYTES):
                yield rest + data
                rest = data[-overlap:] if overlap else b""
