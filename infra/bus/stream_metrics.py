"""How much the broker holds of each stream, as metrics of a process."""

import asyncio

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.metrics.scope import MetricScope

log = structlog.get_logger("bus")

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
