"""How long records are kept at the present rate: DONE promises days, but discards the oldest earlier at ``max_bytes``.

No unfinished request is lost that way, so none is refused; the operator is warned while there is time to enlarge it.
"""

import asyncio
import time

import structlog
from nats.errors import Error as NatsError

from penstock.gateway.base.metrics import Metrics
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get
from penstock.infra.bus.stream_fill import WARN
from penstock.schemas.errors import ServingError

log = structlog.get_logger("gateway")

LOOK_S = 30.0
DAY = 86_400.0


def retention_s(*, age_s: float, size: int, max_bytes: int, max_age_s: float) -> float:
    """How long a record will be kept if records keep arriving at the same rate.

    Args:
        age_s: of the oldest one.
    """
    if not size or max_bytes <= 0:
        return max_age_s
    projected = age_s * max_bytes / size
    return min(projected, max_age_s) if max_age_s else projected


class Retention:
    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._warned = False

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Warn once, when the stream is half full, if records will be kept for less than promised."""
        stream = self._bus.subjects.stream("DONE")
        try:
            info = await self._bus.js.stream_info(stream)
            state, max_age_s = info.state, info.config.max_age or 0.0
            first = await get(self._bus, stream, state.first_seq) if state.messages else None
        except (NatsError, TimeoutError, ServingError) as error:
            log.debug("retention_unknown", error=repr(error))
            return
        max_bytes = max(0, info.config.max_bytes or 0)
        age_s = max(0.0, time.time() - first.time_ns / 1e9) if first is not None else 0.0
        size = state.bytes if first is not None else 0
        kept_s = retention_s(age_s=age_s, size=size, max_bytes=max_bytes, max_age_s=max_age_s)
        self._metrics.retention.set(kept_s)
        short = bool(max_bytes) and size >= WARN * max_bytes and kept_s < max_age_s
        if short and not self._warned:
            log.warning(
                "records_kept_shorter",
                stream=stream,
                days=round(kept_s / DAY, 2),
                promised_days=round(max_age_s / DAY, 2),
                max_bytes=max_bytes,
                action=f"enlarge it: nats stream edit {stream} --max-bytes (a record takes about 110 bytes of the "
                "broker's memory besides)",
            )
        self._warned = short
