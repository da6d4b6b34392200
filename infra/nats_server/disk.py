"""Detects a full disk, and recovers from it.

A stream of nats-server (2.15) that got "no space left on device" answers no more publishes, even when there is room
again, until the server restarts. So the server is stopped when there is room, and its supervisor restarts it; clients
reconnect and resend what was not confirmed.
"""

import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

import structlog

from penstock.infra.process.child import bound_log

log = structlog.get_logger("broker")

FULL = b"no space left on device"
ROOM_BYTES = 64 << 20  # free space from which a restart makes sense, or a twentieth of a small disk
# Free parts of the disk below which it is reported, once each until there is more again. A disk at 98 % fills within
# minutes under load: too late for an operator on call.
LEVELS = ((0.15, "warning"), (0.05, "error"))
LEVEL_MARGIN = 0.01  # of the disk that must get free before a level is reported again: use varies by itself
EVERY_S = 1.0
# Between two restarts, at first and at most: a disk without inodes, or over a quota, has free bytes and is full
# nevertheless. One that had none since the last restart was really full, and its next restart waits no longer than the
# first one's.
FIRST_REST_S, REST_S = 2.0, 30.0


class WatchedServer(Protocol):
    """The broker that is watched; see ``EmbeddedNats``."""

    log_path: Path
    data_dir: Path

    @property
    def pid(self) -> int | None: ...

    def terminate(self) -> None: ...


class DiskWatch:
    """Runs from ``async with`` to its end.

    Args:
        restart: has the server end and start again; None: it is ended, and something else starts it.
    """

    def __init__(
        self,
        server: WatchedServer,
        every_s: float = EVERY_S,
        *,
        restart: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._restart = restart or server.terminate
        self._every_s = every_s
        self._clock = clock
        self._restarted = -math.inf
        self._rest_s = FIRST_REST_S
        self._lacked = False  # there was no room since the last restart
        self._read = 0  # bytes of the log
        with contextlib.suppress(OSError):
            self._read = server.log_path.stat().st_size
        self._rest = b""
        self._ending: int | None = None  # the server that was asked to end: until it has, it still meets the full disk
        self._full = False
        self._reported = 0  # of the levels
        # The server's process, and the inode of its folder; 0: it is not there yet, or was removed.
        self._store: tuple[int | None, int] = (None, 0)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "DiskWatch":
        self._task = asyncio.create_task(self._watch(), name="disk-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        failed = ""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.look()
                failed = ""
            except OSError as error:
                if failed != (failed := str(error)):  # once, not each second for as long as it lasts
                    log.warning("disk_check_failed", error=failed)

    def look(self) -> None:
        """Once; called each second.

        Raises:
            OSError: the folder or the log cannot be read.
        """
        folder = self._server.data_dir
        self._look_for(folder / "nats")
        usage = shutil.disk_usage(folder)
        if self._met_the_end() and not self._full:
            self._full = True
            log.error(
                "disk_full", folder=str(folder), free_bytes=usage.free, action="make room; the broker then recovers"
            )
        room = min(ROOM_BYTES, usage.total // 20)
        self._lacked |= usage.free < room
        if self._lacked:
            self._rest_s = FIRST_REST_S
        if self._full and usage.free >= room and (now := self._clock()) >= self._restarted + self._rest_s:
            again = not self._lacked and now < self._restarted + self._rest_s + REST_S
            self._rest_s = min(REST_S, 2 * self._rest_s) if again else FIRST_REST_S
            self._full, self._lacked, self._restarted = False, False, now
            log.warning("broker_restarts", reason="the disk was full and has room again", free_bytes=usage.free)
            self._ending = self._server.pid
            self._restart()
        reached = sum(usage.free < part * usage.total for part, _ in LEVELS)
        if reached > self._reported and not self._full:
            part, level = LEVELS[reached - 1]
            getattr(log, level)(
                "disk_nearly_full",
                folder=str(folder),
                free_bytes=usage.free,
                free_percent=round(100 * usage.free / usage.total, 1),
                below_percent=round(100 * part),
                action="make room, or make streams smaller with `penstock streams set`",
            )
        rising = sum(usage.free < (part + LEVEL_MARGIN) * usage.total for part, _ in LEVELS)
        self._reported = max(reached, min(self._reported, rising))

    def _look_for(self, store: Path) -> None:
        """Report that the store was removed: the server does not notice, and confirms what it writes to lost files."""
        try:
            found = store.stat().st_ino
        except FileNotFoundError:
            found = 0
        pid, known = self._server.pid, self._store[1]
        if self._store[0] != pid or not known:
            self._store = pid, found
        elif found != known:
            self._store = pid, 0
            log.error(
                "store_removed",
                folder=str(store),
                action="let open requests end, then restart the broker: it loses what it holds whenever it ends",
            )

    def _met_the_end(self) -> bool:
        """Whether the server's log has reported a full disk since the last call."""
        with self._server.log_path.open("rb") as file:
            file.seek(self._read)
            new = file.read(1 << 20)
        self._read += len(new)
        if bound_log(self._server.log_path):
            self._read = 0
        *lines, self._rest = (self._rest + new).split(b"\n")
        gone = b"[%d] " % (self._ending or 0)
        return any(FULL in line and not line.startswith(gone) for line in lines)
