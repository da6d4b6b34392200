"""Output that must not be lost but is too much to be acknowledged one by one: tokens and KV events.

Published plainly, with a message id, and kept for a few seconds. After a reconnect everything kept is sent again
in order; the stream stores each message once. While the gate is shut (disconnected, or the worker's lease is in
doubt) messages are only kept.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from configs.bus.connection import Bus
from schemas.subjects import HEADER_MSG_ID

KEEP_S = 5.0
LIMIT_BYTES = 64 << 20


class Outbox:
    """``send`` waits when ``LIMIT_BYTES`` could not be sent: the engine then waits too."""

    def __init__(self, bus: Bus, trusted: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._trusted = trusted
        self._clock = clock
        self._kept: deque[list[object]] = deque()  # [sent at (inf: not yet), subject, payload, message id]
        self._unsent_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    async def send(self, subject: str, payload: bytes, msg_id: str) -> None:
        now = self._clock()
        kept = self._kept
        while kept and kept[0][0] < now - KEEP_S:  # type: ignore[operator]
            kept.popleft()
        if self._bus.connected and not self._unsent_bytes and self._trusted():
            kept.append([now, subject, payload, msg_id])
            await self._bus.nc.publish(subject, payload, headers={HEADER_MSG_ID: msg_id})
            return
        kept.append([float("inf"), subject, payload, msg_id])
        self._unsent_bytes += len(payload)
        if self._unsent_bytes > LIMIT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def resend(self) -> None:
        """The gate is open again: send everything kept, in order."""
        self._unsent_bytes = 0
        self._room.set()
        for entry in list(self._kept):
            _, subject, payload, msg_id = entry
            entry[0] = self._clock()
            await self._bus.nc.publish(subject, payload, headers={HEADER_MSG_ID: msg_id})  # type: ignore[arg-type, dict-item]

    def drop(self) -> None:
        """The lease was lost: nothing of this is ours to say any more."""
        self._kept.clear()
        self._unsent_bytes = 0
        self._room.set()
