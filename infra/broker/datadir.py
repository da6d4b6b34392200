"""Files of a data directory: private, atomically replaced, locked by one process at a time."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class DataDirBusy(Exception):
    """Another process runs on this data directory."""


class Lock:
    """An exclusive lock on a file, held until ``release`` or until this process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, what: str) -> None:
        """Take the lock; nothing happens if it is held already by this object.

        Raises:
            DataDirBusy: it is held; the text names ``what`` is running and the holder's pid.
        """
        if self._fd is not None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by children
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DataDirBusy(
                f"{what} is already running on {self._path.parent} (pid {holder}): stop it, or use another --data-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; only its owner may read it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def load_secrets(path: Path, users: Iterable[str]) -> dict[str, str]:
    """The users' passwords: those in the file, new random ones for users it does not name.

    Raises:
        ValueError: the file is not what this function wrote.
    """
    known: dict[str, str] = {}
    if path.exists():
        try:
            known = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it and restart every process") from error
        if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
            raise ValueError(f"{path} is damaged: remove it and restart every process")
    passwords = {user: known.get(user) or secrets.token_urlsafe(24) for user in users}
    if passwords != known:
        write_private(path, json.dumps(passwords, indent=2))
    return passwords
