"""How an agent's thread sleeps: until there is a command, the agent has something to do, or a time has passed."""

import contextlib
import os
import select
import time
from collections.abc import Iterable

POLL_FLOOR_S = 0.001  # poll() counts in milliseconds


class Waker:
    """``wake`` from any thread, the rest from the one that sleeps."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._watched: tuple[int, ...] = ()

    def watch(self, descriptors: Iterable[int]) -> None:
        """Wake up when one of these is readable, too; replaces the ones before."""
        for descriptor in self._watched:
            self._poll.unregister(descriptor)
        self._watched = tuple(descriptors)
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            os.write(self._write, b"\0")

    def sleep(self, seconds: float) -> bool:
        """Sleep; returns whether a watched descriptor ended it. A sleep below a millisecond cannot end early."""
        if seconds < POLL_FLOOR_S:
            time.sleep(seconds)
            return False
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000)]
        if self._read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        return any(descriptor != self._read for descriptor in ready)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
