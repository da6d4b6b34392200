"""Watches TensorRT-LLM's log for known problems.

Its Python code in this process logs through ``logging``. Its ranks are separate processes, started while the engine is
constructed, and log to the standard output that they inherit. They get a pipe as standard output; whatever they write
there is inspected and forwarded. Standard error is not redirected, so that the last message of a crashing process does
not end in a pipe of this very process. Ranks started by a launcher (``launch``) write elsewhere and are not watched.

Lines of the engine's log that announce a deadlock or a loss, and the fix for each. Pure; ``now`` is an argument.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

QUIET_S = 60.0  # a diagnosis is repeated only after this


class Diagnosis(NamedTuple):
    code: str
    advice: str


_NO_ROOM = "too few KV blocks for a prompt that arrives from a prefill worker"
_DIAGNOSES: tuple[tuple[re.Pattern[str], Diagnosis], ...] = (
    (
        re.compile(
            r"num_fitting_reqs\s*=\s*0\b.*fitting_disagg_gen_init_requests(?:\s*=\s*\[\s*\]|\W+is\W+empty)", re.I
        ),
        Diagnosis(
            "disagg_deadlock",
            f"{_NO_ROOM}: the decode engine starts no more requests; set cache_transceiver_config.max_tokens_in_buffer "
            "to the longest prompt or more, raise kv_cache_config.free_gpu_memory_fraction, or lower max_batch_size",
        ),
    ),
    (
        re.compile(
            r"num_fitting_reqs\s*=\s*0\b|fitting_disagg_gen_init_requests(?:\s*=\s*\[\s*\]|\W+is\W+empty)", re.I
        ),
        Diagnosis("no_request_fits", "no waiting request fits into the KV pool; if this persists, the engine hangs"),
    ),
    (
        re.compile(r"may use dynamic buffer|dynamic buffer.*(?:fail|nixl)", re.I),
        Diagnosis(
            "transfer_buffer_small",
            "a prompt is longer than cache_transceiver_config.max_tokens_in_buffer; set it to the longest prompt",
        ),
    ),
    (
        re.compile(
            r"(?:kv|cache).{0,40}transfer.{0,60}(?:timed? ?out|timeout)|(?:timed? ?out|timeout).{0,60}transfer", re.I
        ),
        Diagnosis(
            "transfer_timeout",
            "a KV transfer timed out; check the network between the workers and kv_transfer_timeout_ms",
        ),
    ),
    (
        re.compile(r"can ?not find (?:the )?sequence", re.I),
        Diagnosis(
            "sequence_lost",
            "a sequence was removed during its KV transfer (TensorRT-LLM issue 12540); restart the engine",
        ),
    ),
    (
        re.compile(r"event queue has reached the max size", re.I),
        Diagnosis("kv_events_lost", "raise kv_cache_config.event_buffer_max_size"),
    ),
    (
        re.compile(r"maxNumTokens\s*%\s*tokensPerBlock", re.I),
        Diagnosis(
            "not_block_aligned",
            "make max_num_tokens and max_tokens_in_buffer multiples of kv_cache_config.tokens_per_block",
        ),
    ),
)


class Detector:
    """Feed it every line of the log; it returns each diagnosis at most once per ``quiet_s`` seconds."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._last: dict[str, float] = {}

    def line(self, text: str, now: float) -> Diagnosis | None:
        """The diagnosis of a line; None: it has none, or a recent one."""
        for pattern, diagnosis in _DIAGNOSES:
            if pattern.search(text):
                last = self._last.get(diagnosis.code)
                if last is not None and now - last < self._quiet_s:
                    return None
                self._last[diagnosis.code] = now
                return diagnosis
        return None


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
