"""Watches TensorRT-LLM's log for known problems (``log_diagnosis``).

Its Python code in this process logs through ``logging``. Its ranks are separate processes, started while the engine is
constructed, and log to the standard output that they inherit. They get a pipe as standard output; whatever they write
there is inspected and forwarded. Standard error is not redirected, so that the last message of a crashing process does
not end in a pipe of this very process. Ranks started by a launcher (``launch``) write elsewhere and are not watched.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from penstock.workers.engines.trtllm.log_diagnosis import Detector

log = structlog.get_logger("engine")

LOGGERS = ("TRT-LLM", "tensorrt_llm")
STDOUT = 1
LINE_BYTES = 1 << 16  # a longer line is inspected in pieces


class LogWatch(logging.Handler):
    """Logs a diagnosis event for each known problem, at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._detector = Detector()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        self.inspect(record.getMessage())

    def inspect(self, line: str) -> None:
        """Inspect one line of the log."""
        detected = self._detector.line(line, self._clock())
        if detected is not None:
            log.error("engine_diagnosis", code=detected.code, advice=detected.advice)

    def attach(self) -> Callable[[], None]:
        """Watch the log of this process; the returned function ends that."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

        def detach() -> None:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(self)

        return detach

    @contextlib.contextmanager
    def processes(self) -> Iterator[None]:
        """Inspect the output of processes started within the context, until they end, and forward it to our output."""
        try:
            ours = os.dup(STDOUT)
        except OSError:  # this process has no standard output
            yield
            return
        reads, writes = os.pipe()
        os.dup2(writes, STDOUT)  # inheritable, unlike the pipe's own ends
        os.close(writes)
        threading.Thread(target=self._forward, args=(reads, ours), name="engine output", daemon=True).start()
        try:
            yield
        finally:
            os.dup2(ours, STDOUT)

    def _forward(self, reads: int, ours: int) -> None:
        """Read the pipe until all processes that could write to it have ended."""
        partial_line = b""
        try:
            while chunk := os.read(reads, LINE_BYTES):
                with contextlib.suppress(OSError):  # our output is closed; the writers must not block on it
                    _write(ours, chunk)
                *lines, partial_line = (partial_line + chunk).split(b"\n")
                if len(partial_line) > LINE_BYTES:
                    lines, partial_line = [*lines, partial_line], b""
                for line in lines:
                    self.inspect(line.decode(errors="replace"))
            self.inspect(partial_line.decode(errors="replace"))
        finally:
            os.close(reads)
            os.close(ours)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
