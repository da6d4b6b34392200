"""Reads an engine's events, statistics and health in a thread of its own, and notices in another if it is dead.

TensorRT-LLM's calls for them go to its processes and wait for their answers, without a timeout. The asynchronous ones
do so as well, and take at least 0.1 s on an empty queue: in the event loop they delay every token. So the synchronous
ones are used, which return at once with ``timeout=0``, and not in the loop.

Whether an engine is alive. Pure: times are arguments, in seconds of one clock.

An engine whose processes hang answers nothing and reports nothing: its calls have no timeout, and its health check may
still say yes. Three signs are therefore watched: that polls of its queues return, that the event loop which submits
requests runs, and that it generates. Where nothing was generated for ``QUIET_S``, idle or not, one token is asked for.

How long to wait before polling an empty queue again: twice as long each time, up to a cap.
"""

import threading
import time
from collections.abc import Callable, Mapping
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

        What a check comes too late by is no sign of the engine: this process had no processor, or was stopped.
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


class Backoff:
    """Durations are in seconds. Pure: it does not wait itself."""

    def __init__(self, first: float = 0.001, cap: float = 0.1) -> None:
        if not 0 < first <= cap:
            raise ValueError(f"the first wait must be above 0 and at most the cap of {cap} s, not {first}")
        self._first = first
        self._cap = cap
        self._next = first

    def next(self) -> float:
        """The wait after one more empty poll."""
        wait, self._next = self._next, min(2 * self._next, self._cap)
        return wait

    def reset(self) -> None:
        """Start again with the first wait: the queue had items."""
        self._next = self._first


log = structlog.get_logger("engine")

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
        backoff = Backoff(first=0.005, cap=0.1)
        if not callable(getattr(self._llm, "_check_health", None)):
            log.info("engine_health", source="polls and outputs only")
        while not self._ended.wait(backoff.next()):
            try:
                self._check_health()
                if self._reading:
                    if self._read_events():
                        backoff.reset()
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
