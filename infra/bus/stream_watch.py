"""How full a stream is from its oldest unfinished message on: sampled periodically, never per request."""

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.stream_fill import FULL, WARN, Alarm, StreamFill, StreamSample

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
