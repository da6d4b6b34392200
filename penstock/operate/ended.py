"""The requests that end while somebody looks: times and counts, from the headers of their records.

The bodies hold prompts and answers. Who may see how a deployment does need not be trusted with those.
"""

from collections import deque

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.wire_protocol import Frame, Headers
from penstock.schemas.summary import RequestSummary, of_headers


class Ended:
    """Follows the ends from ``open`` on.

    Args:
        most: ends that are kept until they are taken; of more, the newest.
    """

    def __init__(self, bus: Bus, most: int) -> None:
        self._bus = bus
        self._frames: deque[Frame] = deque(maxlen=most)
        self._opened = False

    async def open(self) -> None:
        """Follow, until the connection is closed; may be repeated."""
        if not self._opened:
            self._opened = True
            await self._bus.nc.subscribe_direct(self._bus.subjects.ended, self._frames.append)
            await self._bus.nc.flush()

    def take(self) -> list[RequestSummary]:
        """What has ended since the last call, in the order of the log."""
        frames = list(self._frames)
        self._frames.clear()
        found = (of_headers(frame.subject.decode(), Headers(frame.headers)) for frame in frames)
        return [summary for summary in found if summary is not None]
