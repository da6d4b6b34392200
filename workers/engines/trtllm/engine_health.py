"""Whether an engine works: its events, statistics and health, read in a thread of its own, and its log.

TensorRT-LLM's calls go to its processes and wait for their answers, without a timeout. The asynchronous ones do so as
well, and take at least 0.1 s on an empty queue: in the event loop they delay every token. So the synchronous ones are
used, which return at once with ``timeout=0``, and not in the loop.

An engine whose processes hang answers nothing and reports nothing: its calls have no timeout, and its health check may
still say yes. Three signs are therefore watched: that polls of its queues return, that the event loop which submits
requests runs, and that it generates. Where nothing was generated for ``QUIET_S``, idle or not, one token is asked for.

Lines of the log that announce a deadlock or a loss are reported with their fix. TensorRT-LLM's code in this process
logs through ``logging``. Its ranks are separate processes, started while the engine is constructed: they get a pipe as
standard output; whatever they write there is inspected and forwarded. Standard error is not redirected, so that the
last message of a crashing process does not end in a pipe of this very process. Ranks started by a launcher (``launch``)
write elsewhere and are not watched.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog

POLL_LATE_S = 10.0  # a poll that should return at once
LOOP_LATE_S = 60.0  # the event loop: it also tokenizes prompts with images
QUIET_S = 60.0  # without output, after which a token is asked for
ANSWER_S = 60.0  # for that token
CHECK_S = 1.0  # between two checks


class Liveness:
    """Each method may be called by another thread: a sign is one attribute, and one that is lost is soon replaced.

    Args:
        now: the start.
        quiet_s, answer_s: as the constants.
    Attributes:
        checked: when ``problem`` was last called.
    """

    def __init__(self, now: float, *, quiet_s: float = QUIET_S, answer_s: float = ANSWER_S) -> None:
        self._polled = self._looped = self._generated = now
        self._asked: float | None = None
        self.checked = now
        self.quiet_s, self.answer_s = quiet_s, answer_s

    def polled(self, now: float) -> None:
        """A round of polls has returned."""
        self._polled = now

    def looped(self, now: float) -> None:
        """The event loop has run a callback."""
        self._looped = now

    def generated(self, now: float) -> None:
        """The engine has produced output, for anyone."""
        self._generated = now

    def wants_token(self, now: float) -> bool:
        """Whether to ask for a token. If so, ``asked`` must follow."""
        return self._asked is None and now - self._generated >= self.quiet_s

    def asked(self, now: float) -> None:
        self._asked = now

    def answered(self, now: float) -> None:
        """The token has come, or the engine has refused it by itself: it is alive."""
        self._asked, self._generated = None, now

    def problem(self, now: float) -> str:
        """Why the engine counts as broken; "": it does not. Called every ``CHECK_S``.

        What a check comes too late by is not a sign of the engine: this process had no processor, or was stopped.
        """
        stalled = now - self.checked - 2 * CHECK_S
        self.checked = now
        if stalled > 0:
            self._polled += stalled
            self._looped += stalled
            self._generated += stalled
            self._asked = None if self._asked is None else self._asked + stalled
        late = now - self._polled
        if late > POLL_LATE_S:
            return f"it has not answered a poll for {late:.0f} s"
        late = now - self._looped
        if late > LOOP_LATE_S:
            return f"a call that submits a request has not returned for {late:.0f} s"
        if self._asked is not None:
            late = now - max(self._asked, self._generated)
            if late > self.answer_s:
                return (
                    f"it has generated nothing for {now - self._generated:.0f} s, also not for a request of one token"
                )
        return ""


log = structlog.get_logger("engine")

POLL_S, MOST_POLL_S = 0.005, 0.1  # between two polls of the events: at first, and while none come
STATS_S = 0.1  # between two polls of the statistics
JOIN_S = 1.0
MOST_FAILURES = 20  # polls of events in a row


class KvEvents(NamedTuple):
    """``lost``: events before them cannot be read."""

    events: Seq[Mapping[str, Any]]
    lost: bool = False


class Stats(NamedTuple):
    """Statistics of iterations, in order."""

    stats: Seq[Mapping[str, Any]]


class _Queue:
    """One of the engine's queues. A batch that cannot be read is lost; a connection that fails is an error."""

    def __init__(self, name: str, wanted: bool) -> None:
        self.wanted = wanted
        self._name = name
        self._failures = 0  # in a row

    def read(self, poll: Callable[..., Seq[Mapping[str, Any]]]) -> tuple[Seq[Mapping[str, Any]], bool]:
        """What has come, and whether something was lost before it.

        Raises:
            OSError: the engine's process cannot be reached.
        """
        try:
            found = poll(timeout=0)
        except (OSError, EOFError):
            raise
        except Exception as error:  # the serializer's, which takes the whole batch with it
            self._failures += 1
            self.wanted = self._failures < MOST_FAILURES
            log.warning("engine_queue_unreadable", queue=self._name, error=repr(error), read_on=self.wanted)
            return (), True
        self._failures = 0
        return found, False


class QueueReader:
    """Two threads, from ``start`` to ``close``. Queues are read from ``read`` on: an idle engine has no news.

    Args:
        emit: takes KvEvents and Stats.
        broken: takes the error that ends the engine.
        ask: have the engine generate one token, and call ``liveness.answered``; called in the watching thread.
        beat: have the event loop call ``liveness.looped``; called in the watching thread.
        watch_s: between two looks at ``liveness``.
    Attributes:
        events, stats: the queues; ``wanted`` says whether they are read.
    """

    def __init__(
        self,
        llm: Any,
        liveness: Liveness,
        emit: Callable[[KvEvents | Stats], None],
        broken: Callable[[BaseException], None],
        *,
        ask: Callable[[], object],
        beat: Callable[[], None],
        events: bool,
        stats: bool,
        watch_s: float = CHECK_S,
    ) -> None:
        self._llm = llm
        self._liveness = liveness
        self._emit = emit
        self._broken = broken
        self._ask, self._beat = ask, beat
        self.events, self.stats = _Queue("kv events", events), _Queue("statistics", stats)
        self.watch_s = watch_s
        self._ended = threading.Event()
        self._reading = False
        self._stats_at = float("-inf")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)  # a poll of a dead engine never returns
            for target, name in ((self._poll, "trtllm-polls"), (self._watch, "trtllm-watch"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def read(self) -> None:
        """A request comes: read events and statistics from now on."""
        self._reading = True

    def close(self) -> None:
        """End the threads; one whose poll does not return is left behind."""
        self._ended.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    # --- polls ---

    def _poll(self) -> None:
        wait_s = POLL_S
        if not callable(getattr(self._llm, "_check_health", None)):
            log.info("engine_health", source="polls and outputs only")
        while not self._ended.wait(wait_s):
            wait_s = min(2 * wait_s, MOST_POLL_S)
            try:
                self._check_health()
                if self._reading:
                    if self._read_events():
                        wait_s = POLL_S
                    self._read_stats()
            except Exception as error:
                self._fail(error)
                return
            self._liveness.polled(time.monotonic())

    def _check_health(self) -> None:
        check = getattr(self._llm, "_check_health", None)
        if callable(check) and check() is False:
            raise RuntimeError("TensorRT-LLM reports that it is unhealthy")

    def _read_events(self) -> bool:
        """Whether there were any."""
        if not self.events.wanted:
            return False
        found, lost = self.events.read(self._llm.get_kv_cache_events)
        if found or lost:
            self._emit(KvEvents(found, lost))
        return bool(found)

    def _read_stats(self) -> None:
        now = time.monotonic()
        if not self.stats.wanted or now - self._stats_at < STATS_S:
            return
        self._stats_at = now
        found, _ = self.stats.read(self._llm.get_stats)
        if found:
            self._emit(Stats(found))

    # --- the watch ---

    def _watch(self) -> None:
        while not self._ended.wait(self.watch_s):
            now = time.monotonic()
            reason = self._liveness.problem(now)
            if reason:
                self._fail(TimeoutError(f"TensorRT-LLM does not answer any more: {reason}"))
                return
            try:
                self._beat()
                if self._liveness.wants_token(now):
                    self._liveness.asked(now)
                    self._ask()
            except RuntimeError:  # the loop is closed
                return

    def _fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            log.error("engine_dead", error=repr(error))
            self._broken(error)


REPEATED_S = 60.0  # a diagnosis is repeated only after this


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

    def __init__(self, quiet_s: float = REPEATED_S) -> None:
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
