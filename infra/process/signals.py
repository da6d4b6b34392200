"""Ctrl-C and SIGTERM as events: the first stops in order, the second at once. SIGUSR1 resumes."""

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Callable
from types import TracebackType

RESUME = signal.SIGUSR1
_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Within ``with StopSignals() as stop``, signals set ``stop.asked``, then ``stop.insisted``.

    Args:
        resume: called on SIGUSR1.
    """

    def __init__(self, resume: Callable[[], None] | None = None) -> None:
        self._resume = resume
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.add_signal_handler(number, self._on_signal)
        if self._resume is not None:
            loop.add_signal_handler(RESUME, self._resume)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.remove_signal_handler(number)
        if self._resume is not None:
            loop.remove_signal_handler(RESUME)

    def _on_signal(self) -> None:
        leave_closed_terminal()
        (self.insisted if self.asked.is_set() else self.asked).set()


def leave_closed_terminal() -> None:
    """If the terminal was closed, discard output: each line would raise and interrupt the stop."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):  # a device, but no terminal any more
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
