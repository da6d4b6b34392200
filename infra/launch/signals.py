"""Ctrl-C and SIGTERM as events: the first asks to stop in order, the second insists."""

import asyncio
import signal
from types import TracebackType

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Within ``with Stop() as stop``, signals set ``stop.asked``, then ``stop.insisted``."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> "Stop":
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()
