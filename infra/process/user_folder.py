"""This user's folder for what ends with processes, such as sockets and locks (``locked``). No other user can reach it.

It is below the folder for temporary files, where names can be foreseen and others can be faster. So it is used only if
it is a folder of this user's without permissions for others.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path


class FolderTaken(ValueError):
    """The folder is not this user's alone; the text says what to do."""


def user_folder() -> Path:
    """The same for all processes of a user with one folder for temporary files (``TMPDIR``).

    Raises:
        FolderTaken: another user has made it, or others have permissions there.
        OSError: it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise FolderTaken(
            f"{path} is not a folder of this user: have it removed, or set TMPDIR to another folder for temporary files"
        )
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise FolderTaken(
            f"other users have permissions for {path}: remove it, or `chmod 700` it if all in it is yours"
        )
    return path


def locked(file: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of a file, which is made if there is none; -1: another process holds it.

    Args:
        flags: of ``os.open``, besides those for reading and writing.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class OwnFolder:
    """A new folder of this process in ``user_folder``.

    ``close`` deletes it. That of a process that was killed is deleted when the next of its kind is made.

    Args:
        kind: the beginning of its name.
    Raises:
        FolderTaken, OSError: there can be none.
    """

    def __init__(self, kind: str) -> None:
        self._closing = threading.Lock()
        top = user_folder()
        guard = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)  # until the new one is locked: no process takes it for a leftover
            for folder in top.glob(f"{kind}-*"):
                _delete_left_behind(folder)
            self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=top))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # programs that delete old temporary files respect it, too
        finally:
            os.close(guard)

    def close(self) -> None:
        """May be called twice, from any thread."""
        with self._closing:
            if self._lock >= 0:
                shutil.rmtree(self.path, ignore_errors=True)
                os.close(self._lock)
                self._lock = -1


def _delete_left_behind(folder: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
