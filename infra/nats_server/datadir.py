"""Files of a data directory: private, atomically replaced, locked by one process at a time."""

import fcntl
import json
import os
import pwd
import secrets
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.schemas.audit import PUBLIC_KEY


class DataDirBusy(Exception):
    """Another process runs on this data directory."""


class DataDirUnusable(Exception):
    """The data folder cannot be used; the text says why and what to do."""


def prepare(path: Path) -> None:
    """Create the data folder if it is missing, and check that files can be created there.

    Raises:
        DataDirUnusable: it is a file, or this user may not write there, or the disk is read-only or full.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Tried, not looked up: access control lists, read-only mounts and quotas count too.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise unusable(path, error) from None


def unusable(path: Path, error: OSError) -> DataDirUnusable:
    """Turn an error while writing below the data folder ``path`` into one that says the cause and the fix."""
    nearest = Path(error.filename) if isinstance(error.filename, str) else path
    while not os.path.exists(nearest) and nearest != nearest.parent:  # Path.exists raises if a parent is not readable
        nearest = nearest.parent
    if not path.is_dir() and nearest.is_file():
        return DataDirUnusable(f"--data-dir {path}: {_same(nearest, path)}is a file; name a folder")
    if isinstance(error, PermissionError):
        owner = _owner(nearest)
        whose = f"belongs to user {owner} and " if owner != _user(os.geteuid()) else ""
        fix = f"run as {owner}, or name another folder" if whose else "change its permissions, or name another folder"
        return DataDirUnusable(f"--data-dir {path}: {_same(nearest, path)}{whose}is not writable for you; {fix}")
    return DataDirUnusable(f"--data-dir {path}: {_same(nearest, path)}cannot be written: {error.strerror}")


def _same(nearest: Path, path: Path) -> str:
    return "it " if nearest == path else f"{nearest} "


def _owner(path: Path) -> str:
    try:
        return _user(path.stat().st_uid)
    except OSError:
        return "unknown"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Lock:
    """An exclusive lock on a file, held until ``release`` or until this process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, purpose: str) -> None:
        """Take the lock; nothing happens if it is held already by this object.

        Raises:
            DataDirBusy: it is held; the text has ``purpose`` and the holder's pid.
            DataDirUnusable: its folder cannot be used.
        """
        if self._fd is not None:
            return
        prepare(self.path.parent)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by children
        except OSError as error:
            raise unusable(self.path.parent, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DataDirBusy(
                f"{purpose} is already running on {self.path.parent} (pid {holder}): stop it, or use another --data-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def holder(path: Path) -> int | None:
    """Process id of the holder of a ``Lock`` on ``path``; None: it is not held."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read(32))
    return None


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
    stored: dict[str, str] = {}
    if path.exists():
        try:
            stored = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and start every process with the new passwords"
            ) from error
        if not isinstance(stored, dict) or not all(isinstance(value, str) for value in stored.values()):
            raise ValueError(f"{path} is damaged: remove it, and start every process with the new passwords")
    passwords = stored | {user: stored.get(user) or secrets.token_urlsafe(24) for user in users}
    if passwords != stored:
        write_private(path, json.dumps(passwords, indent=2))
    return passwords


def load_nkeys(folder: Path, users: Iterable[str], second: str) -> dict[str, str]:
    """The users' public keys, from ``USER.pub`` or the seed in ``USER.nk``; where neither is, a new seed is made.

    Args:
        second: what ends the names of a role's second users, for which no seed is made.
    Raises:
        ValueError: a file has no key of a user, or the package that makes them is missing.
        DataDirUnusable: the folder cannot be written.
    """
    keys = {}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for user in users:
            seed, public = folder / f"{user}.nk", folder / f"{user}.pub"
            if not public.exists():
                if not seed.exists():
                    if user.endswith(second):
                        continue
                    write_private(seed, _new_seed() + "\n")
                write_private(public, _public_key(seed) + "\n")
            keys[user] = public.read_text().strip()
            if not PUBLIC_KEY.fullmatch(keys[user]):
                raise ValueError(f"{public}: no public key of a user, which is U and 55 characters (`nk -pubout`)")
    except OSError as error:
        raise DataDirUnusable(
            f"--nkeys {folder}: {error.filename} cannot be written or read: {error.strerror}"
        ) from None
    return keys


def users_of(folder: Path) -> dict[str, str]:
    """The users by their public keys, which are in ``USER.pub``.

    Raises:
        ValueError: there are none.
    """
    try:
        users = {file.read_text().strip(): file.stem for file in sorted(folder.glob("*.pub"))}
    except OSError as error:
        raise ValueError(f"--nkeys {folder}: {error.filename} cannot be read: {error.strerror}") from None
    if not users:
        raise ValueError(f"--nkeys {folder}: no public keys are there (USER.pub, of `penstock nats --print-config`)")
    return users


def _new_seed() -> str:
    nkeys = _nkeys()
    return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())


def _public_key(file: Path) -> str:
    nkeys = _nkeys()
    try:
        return str(nkeys.from_seed(bytearray(file.read_bytes().strip())).public_key.decode())
    except (ValueError, nkeys.NkeysError):
        raise ValueError(f"{file}: no seed of an nkey, which begins with SU (`nk -gen user`)") from None


def _nkeys() -> Any:
    try:
        import nkeys
    except ImportError:
        raise ValueError("--nkeys needs nkeys: pip install 'penstock[nkeys]'") from None
    return nkeys
