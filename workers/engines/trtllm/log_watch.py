"""Reads what TensorRT-LLM logs, and says what it means (``log_diagnosis``).

Its Python code in this process logs through ``logging``. Its ranks are processes of their own, started while the engine
is made, and log to the standard output that they inherit: they get a pipe instead, and what comes out is handed on. The
standard error stays as it is, so that the last words of a process that crashes are not in a pipe that it reads itself.
Ranks that a launcher has started (``launch``) write elsewhere and are not heard.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from workers.engines.trtllm.log_diagnosis import Detector

log = structlog.get_logger("engine")

LOGGERS = ("TRT-LLM", "tensorrt_llm")
STDOUT = 1
LINE_BYTES = 1 << 16  # of a line without end, so many are looked at together


class Watch(logging.Handler):
    """One diagnosis event per kind of trouble and minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._detector = Detector()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        self.inspect(record.getMessage())

    def inspect(self, line: str) -> None:
        """Look at a line of its log."""
        found = self._detector.line(line, self._clock())
        if found is not None:
            log.error("engine_diagnosis", code=found.code, advice=found.advice)

    def attach(self) -> Callable[[], None]:
        """Start with this process; call what it returns to stop."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

        def detach() -> None:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(self)

        return detach

    @contextlib.contextmanager
    def processes(self) -> Iterator[None]:
        """Inspect what processes started within write, for as long as they live, and pass it on to our output."""
        try:
            ours = os.dup(STDOUT)
        except OSError:  # this process has none
            yield
            return
        reads, writes = os.pipe()
        os.dup2(writes, STDOUT)  # inheritable, unlike the pipe's own ends
        os.close(writes)
        threading.Thread(target=self._hand_on, args=(reads, ours), name="engine output", daemon=True).start()
        try:
            yield
        finally:
            os.dup2(ours, STDOUT)

    def _hand_on(self, reads: int, ours: int) -> None:
        """Until everybody who could write has ended."""
        rest = b""
        try:
            while chunk := os.read(reads, LINE_BYTES):
                with contextlib.suppress(OSError):  # nobody reads it any more; whoever writes must not wait for that
                    _write(ours, chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self.inspect(line.decode(errors="replace"))
            self.inspect(rest.decode(errors="replace"))
        finally:
            os.close(reads)
            os.close(ours)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
