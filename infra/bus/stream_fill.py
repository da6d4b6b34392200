"""How full a stream is from its oldest unfinished message on, and how soon it discards such messages.

A full stream discards its oldest messages. What must not be discarded begins at the oldest unfinished message; the
share of ``max_bytes`` from there to the stream's end is how full the stream is for us. The server reports counts and
bytes of the whole stream only, so bytes from a sequence on are estimated between samples (``StreamFill``, pure).
``StreamWatch`` takes the samples periodically, never per request.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.metrics.scope import MetricScope

WARN = 0.5  # of max_bytes
FULL = 0.8  # no new work beyond; the rest is for requests under way
FAIR = 0.6  # beyond, tenants that use more than their share are refused first
CALM = 0.9  # share of a threshold below which its alarm ends
MOST_SAMPLES = 512


class StreamSample(NamedTuple):
    """A stream's state at one time."""

    first: int
    last: int
    bytes: int


class StreamFill:
    """Bytes stored from a sequence to a stream's end.

    Exact at the end of each sample. Between two samples messages count as equally large, so the error is at most what
    was stored between them.
    """

    def __init__(self) -> None:
        self._seqs: list[int] = []  # ends of samples
        self._written: list[float] = []  # bytes up to there, from an arbitrary zero
        self._first = 0

    @property
    def last(self) -> int:
        return self._seqs[-1] if self._seqs else 0

    def add(self, sample: StreamSample) -> None:
        if not self._seqs or sample.last < self._seqs[-1] or sample.first > self._seqs[-1] + 1:
            # The first sample, a stream that was recreated, or nothing is left of the earlier samples.
            self._seqs, self._written = [sample.first - 1, sample.last], [0.0, float(sample.bytes)]
            self._first = sample.first
            return
        end = max(self._at(sample.first - 1) + sample.bytes, self._written[-1])
        if sample.last > self._seqs[-1]:
            self._seqs.append(sample.last)
            self._written.append(end)
        self._written[-1] = end
        self._begin(sample.first, end - sample.bytes)
        if len(self._seqs) > MOST_SAMPLES:
            del self._seqs[1:-2:2], self._written[1:-2:2]

    def bytes_from(self, seq: int) -> int:
        """Bytes from the message at ``seq`` (included) to the end, of those that the stream still has."""
        if not self._seqs or seq > self._seqs[-1]:
            return 0
        return round(self._written[-1] - self._at(max(seq, self._first) - 1))

    def _at(self, seq: int) -> float:
        """Bytes up to the message at ``seq`` (included)."""
        right = bisect_right(self._seqs, seq)
        if right == 0:
            return self._written[0]
        if right == len(self._seqs):
            return self._written[-1]
        low, high = self._seqs[right - 1], self._seqs[right]
        share = (seq - low) / (high - low)
        return self._written[right - 1] + share * (self._written[right] - self._written[right - 1])

    def _begin(self, first: int, before: float) -> None:
        """Drop samples before the stream's first message, before which ``before`` bytes were stored, exactly."""
        behind = bisect_right(self._seqs, first - 1)
        self._first = first
        self._seqs[:behind], self._written[:behind] = [first - 1], [before]
        for index in range(1, len(self._written)):
            if self._written[index] >= before:
                break
            self._written[index] = before


class Alarm:
    """A threshold with hysteresis: it fires once, until the level has clearly fallen."""

    def __init__(self, at: float) -> None:
        self._at = at
        self.on = False

    def update(self, level: float) -> bool:
        """Set the level; returns whether the alarm fired just now."""
        was = self.on
        self.on = level >= (self._at * CALM if was else self._at)
        return self.on and not was


def beyond_share(used: dict[str, int], limit: int) -> frozenset[str]:
    """The users of more than an equal share of ``limit`` bytes. A single user may use all of it."""
    if len(used) < 2:
        return frozenset()
    share = limit / len(used)
    return frozenset(name for name, size in used.items() if size > share)


log = structlog.get_logger("bus")


class StreamWatch:
    """One stream's level: the share of ``max_bytes`` from its oldest unfinished message to its end."""

    def __init__(self, bus: Bus, stream: str) -> None:
        self._bus = bus
        self._fill = StreamFill()
        self._warning, self._alarm = Alarm(WARN), Alarm(FULL)
        self.stream = stream
        self.max_bytes = 0  # 0: no limit, or not sampled yet
        self.level = 0.0
        self.metadata: Mapping[str, str] = {}
        self._average = 0.0  # bytes per message

    @property
    def full(self) -> bool:
        """New work should be refused: the room that is left is for requests under way."""
        return self._alarm.on

    @property
    def last(self) -> int:
        """The stream's last sequence, as of the latest sample."""
        return self._fill.last

    async def look(self) -> None:
        """Take a sample.

        Raises:
            nats.errors.Error, TimeoutError: the server did not answer; earlier samples are kept.
        """
        info = await self._bus.js.stream_info(self.stream)
        self._fill.add(StreamSample(info.state.first_seq, info.state.last_seq, info.state.bytes))
        self.max_bytes = max(0, info.config.max_bytes or 0)
        self.metadata = info.config.metadata or {}
        self._average = info.state.bytes / info.state.messages if info.state.messages else 0.0

    def share_from(self, seq: int) -> float:
        """The share of ``max_bytes`` from the message at ``seq`` to the end."""
        return self._fill.bytes_from(seq) / self.max_bytes if self.max_bytes else 0.0

    def share_of(self, count: int) -> float:
        """About the share of ``max_bytes`` that this many messages take."""
        return count * self._average / self.max_bytes if self.max_bytes else 0.0

    def update(self, level: float) -> None:
        """Set the level; a threshold that it passes is logged once."""
        self.level = level
        fields = {"stream": self.stream, "share": round(level, 2), "max_bytes": self.max_bytes}
        if self._alarm.update(level):
            self._warning.update(level)
            log.error("stream_full", **fields, action=f"no new work; add workers, or {self.enlarge}")
        elif self._warning.update(level):
            log.warning("stream_filling", **fields, action=f"new work is refused from {FULL:.0%} on; {self.enlarge}")

    @property
    def enlarge(self) -> str:
        """What an operator can do, for messages."""
        return f"enlarge it: nats stream edit {self.stream} --max-bytes"


EVERY_S = 10.0
STREAMS = ("REQUESTS", "WORK", "TOKENS", "KV", "DONE")


class StreamMetrics:
    """Ask the broker for each stream's state, every ``EVERY_S``. Run ``run`` in the background.

    Args:
        scope: of the broker's metrics.
    """

    def __init__(self, bus: Bus, scope: MetricScope) -> None:
        self._bus = bus
        self._streams = tuple(bus.subjects.stream(name) for name in STREAMS)
        self._bytes = scope.gauge("stream_bytes", "size of a stream", ["stream"])
        self._limit = scope.gauge("stream_max_bytes", "its limit; 0: none", ["stream"])
        self._messages = scope.gauge("stream_messages", "messages in it", ["stream"])
        self._consumers = scope.gauge("stream_consumers", "its consumers", ["stream"])

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Read the state of all streams. Those that cannot be read keep their last values."""
        for stream in self._streams:
            try:
                info = await self._bus.js.stream_info(stream)
            except (NatsError, TimeoutError) as error:
                log.debug("stream_unknown", stream=stream, error=repr(error))
                continue
            self._bytes.labels(stream).set(info.state.bytes)
            self._limit.labels(stream).set(max(0, info.config.max_bytes or 0))
            self._messages.labels(stream).set(info.state.messages)
            self._consumers.labels(stream).set(info.state.consumer_count)
