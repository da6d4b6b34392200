"""Accepts from a socket that several gateways share, so that each gets its share of the connections.

The kernel wakes every gateway when a connection arrives, and the first to accept gets it. An idle gateway is first, and
accepts all that wait: of 256 simultaneous connections, one of four gateways got all, or 144, or 106 (on two busy
cores). So each gateway writes its number of connections into shared memory. A gateway that has more than the others
waits for a moment, and accepts only connections that no other has taken: none waits long for a gateway that is stopped
or hangs. Then each of the four had 55 to 71 of 256 connections, and 12 to 20 of 64.

Clients keep connections for hours, so a gateway that is started under load would get none. Gateways with clearly more
than the mean close some connections after their next answer, which announces it.
"""

import asyncio
import contextlib
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from penstock.infra.bus.tasks import Tasks

log = structlog.get_logger("gateway")

SLOTS = 64  # gateways whose numbers are known; two may share one, and then one of them counts
_SLOT = struct.Struct("=QQd")  # process id, connections, monotonic time: one clock for all processes of a machine
TABLE_BYTES = SLOTS * _SLOT.size
STALE_S = 3.0  # a number that was not renewed for this long belongs to a gateway that hangs or has ended
AHEAD_CONNECTIONS, AHEAD_SHARE = 1, 1 / 16  # with this many more than the emptiest gateway, others accept first
AHEAD_WAIT_S = 0.002  # time for others to accept; the event loop's timers count milliseconds
AT_ONCE = 16  # connections accepted in one turn of the event loop
MOVE_CONNECTIONS, MOVE_SHARE = 1, 1 / 4  # with this many more than the mean, kept connections move to others
MOVE_SECONDS = 4  # in which most of them do: each costs its client a new connection
NO_FILES_S = 0.25  # wait after the process or the machine has run out of descriptors


def is_running(process: int) -> bool:
    """Whether a process of the same user exists. A zombie does."""
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


class ConnectionCounts:
    """The number of connections of each gateway, in memory that all of them map."""

    def __init__(self, descriptor: int, process: int | None = None, runs: Callable[[int], bool] = is_running) -> None:
        """
        Args:
            process: its id; None: this one's.
            runs: whether a process runs; a killed one does not remove its entry.
        Raises:
            OSError, ValueError: the descriptor is not such memory.
        """
        os.ftruncate(descriptor, TABLE_BYTES)
        self._table = mmap.mmap(descriptor, TABLE_BYTES)
        self._pid = process or os.getpid()
        self._runs = runs
        self._own = self._pid % SLOTS * _SLOT.size

    def set(self, connections: int) -> None:
        _SLOT.pack_into(self._table, self._own, self._pid, connections, time.monotonic())

    def leave(self) -> None:
        """Remove this gateway, which accepts no more connections."""
        _SLOT.pack_into(self._table, self._own, 0, 0, 0.0)

    def fewest(self) -> int | None:
        """The connections of the emptiest other gateway; None: there is no other."""
        return next((count for count, pid in sorted(self._others()) if self._runs(pid)), None)

    def others(self) -> list[int]:
        """The connections of each other gateway."""
        return [count for count, pid in self._others() if self._runs(pid)]

    def _others(self) -> list[tuple[int, int]]:
        since = time.monotonic() - STALE_S
        return [
            (count, pid)
            for pid, count, at in _SLOT.iter_unpack(self._table)
            if pid and pid != self._pid and at >= since
        ]


def surplus(own: int, others: Sequence[int]) -> int:
    """The number of connections that a gateway closes now: a quarter of its excess, if that is large."""
    share = (own + sum(others)) / (1 + len(others))
    if own <= share * (1 + MOVE_SHARE) + MOVE_CONNECTIONS:
        return 0
    return math.ceil((own - share) / MOVE_SECONDS)


class SharedSocket:
    """
    Args:
        connections: how many this gateway has.
        connect: makes a connection of an accepted socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        counts: ConnectionCounts,
        tasks: Tasks,
        *,
        connections: Callable[[], int],
        connect: Callable[[socket.socket], Any],
    ) -> None:
        self._listener = listener
        self._counts = counts
        self._tasks = tasks
        self._connections = connections
        self._connect = connect
        self._opening = 0  # accepted, and not yet among the connections
        self._waited = False
        self._again: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        self.note()
        self._listen()

    def note(self) -> None:
        """Tell the others how many connections this gateway has: after each change, and every second."""
        if not self._closed:
            self._counts.set(self._connections() + self._opening)

    @property
    def gateways(self) -> int:
        return 1 + len(self._counts.others())

    def to_move(self) -> int:
        """How many connections are to close within the next second, so that a gateway with fewer accepts them."""
        return 0 if self._closed else surplus(self._connections() + self._opening, self._counts.others())

    def close(self) -> None:
        """Stop accepting. The socket stays open for the other gateways."""
        if self._closed:
            return
        self._closed = True
        self._counts.leave()
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._again = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._again = loop.call_later(seconds, self._listen)

    def _accept(self) -> None:
        fewest, waited = self._counts.fewest(), self._waited
        self._waited = False
        for number in range(AT_ONCE):
            if fewest is not None and self._is_ahead(fewest) and not (waited and number == 0):
                self._waited = True
                self._pause(AHEAD_WAIT_S)
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another gateway took it, or its client has left
            except OSError as error:
                log.warning("connections_not_accepted", error=str(error), again_s=NO_FILES_S)
                self._pause(NO_FILES_S)
                return
            self._opening += 1
            self.note()
            self._tasks.spawn(self._open(accepted), name="accept")

    def _is_ahead(self, fewest: int) -> bool:
        own = self._connections() + self._opening
        return own > fewest + AHEAD_CONNECTIONS + fewest * AHEAD_SHARE

    async def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            with contextlib.suppress(OSError):  # TLS failed, or its client has left
                await self._connect(accepted)
        finally:
            self._opening -= 1
            self.note()
