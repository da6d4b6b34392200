"""The broker's time: one clock for a deployment whose machines disagree.

A request's id, creation and deadline are compared with the broker's storage times, and on other machines. With a
gateway's clock that is ahead, look-ups by time would miss a request; with a worker's, its deadline would be over before
it begins. Small differences are not corrected: they are within ``CLOCK_SKEW_NS``, and time stays smooth.
"""

import asyncio
import datetime
import json
import time
from collections.abc import Callable

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.client import BusClient
from penstock.infra.bus.tasks import Tasks

log = structlog.get_logger("bus")

TOLERATED_NS = 1_000_000_000  # half of CLOCK_SKEW_NS, which two processes may use up together
EVERY_S = 20.0
ASK_S = 2.0
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


_RUNNING: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # they count while the machine sleeps, too
_STARTED_NS = time.time_ns() - time.clock_gettime_ns(_RUNNING)


def steady_ns() -> int:
    """Unix time by this machine's clock as it was when this process started, which nobody sets.

    By a clock that is set by an hour, the deadlines of all open requests would pass.
    """
    return _STARTED_NS + time.clock_gettime_ns(_RUNNING)


class BrokerClock:
    """``now_ns`` is Unix time at the broker, as far as this machine's clock is off by more than a second.

    Args:
        local: this machine's clock.
    """

    def __init__(self, local: Callable[[], int] = steady_ns) -> None:
        self._local = local
        self.offset_ns = 0

    def now_ns(self) -> int:
        return self._local() + self.offset_ns

    def note(self, broker_ns: int, asked_ns: int, answered_ns: int) -> None:
        """Take the broker's time, which it said between two times of this machine's clock.

        An answer that took so long that the difference may be its delay says nothing.
        """
        if not 0 <= answered_ns - asked_ns < TOLERATED_NS:
            return
        offset_ns = broker_ns - (asked_ns + answered_ns) // 2
        before, self.offset_ns = self.offset_ns, offset_ns if abs(offset_ns) > TOLERATED_NS else 0
        if (self.offset_ns != 0) != (before != 0) or abs(self.offset_ns - before) > TOLERATED_NS:
            log.warning("clock_differs", broker_ahead_s=round(offset_ns / 1e9, 3), used="the broker's")

    async def follow(self, nc: BusClient, tasks: Tasks, stream: str) -> None:
        """Ask once, then from time to time. Without an answer, the last one holds.

        Args:
            stream: one that this user may see: the server's description of it says when it was made.
        """
        await self.ask(nc, stream)
        tasks.spawn(self._keep_asking(nc, stream), name="clock")

    async def _keep_asking(self, nc: BusClient, stream: str) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.ask(nc, stream)

    async def ask(self, nc: BusClient, stream: str) -> None:
        """Ask once, as ``follow`` does. Without an answer within 2 s, the last one holds."""
        asked_ns = self._local()
        try:
            reply = await nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=ASK_S)
            stamp = json.loads(reply.data).get("ts", "")
            if stamp:
                self.note(unix_ns(stamp), asked_ns, self._local())
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            log.debug("clock_not_known", error=repr(error))


def unix_ns(text: str) -> int:
    """Of a time in RFC 3339, to the microsecond.

    Raises:
        ValueError: it is none.
    """
    return (datetime.datetime.fromisoformat(text) - _EPOCH) // datetime.timedelta(microseconds=1) * 1000
