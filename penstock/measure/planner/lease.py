"""The lease of a model's planner: one at a time, by a key of the broker that expires when it is not renewed.

The broker decides: a key is made only where there is none, and renewed only by the one who wrote it last. A planner
that cannot renew in time stops deciding before its key expires.
"""

import time

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE
from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT

log = structlog.get_logger("plan")

TTL_S = 10
RENEW_S = 2.5
STORE_S = 2.0


class Lease:
    """
    Args:
        planner: its id.
    """

    def __init__(self, bus: Bus, model: str, planner: str) -> None:
        self._bus = bus
        self._subject = bus.subjects.planner(model)
        self._stream = f"KV_{bus.subjects.bucket('planners')}"
        self._planner = planner
        self._revision = 0
        self._until = 0.0  # monotonic; the key lasts at least so long

    @property
    def held(self) -> bool:
        return time.monotonic() < self._until

    async def take(self) -> str:
        """Take the lease, or renew it.

        Returns: "": it is held. Else the planner that holds it, or "?" if that is not known.

        Raises:
            ServingError: the bucket cannot be read.
            NatsError, TimeoutError: the broker does not answer.
        """
        if not self._revision:
            last = await get_last(self._bus, self._stream, self._subject)
            if last is not None and last.data and last.data.decode() != self._planner:
                return last.data.decode(errors="replace")
            self._revision = last.seq if last is not None else 0
        began = time.monotonic()
        headers = {HEADER_LAST_ON_SUBJECT: str(self._revision), "Nats-TTL": str(TTL_S)}
        try:
            ack = await self._bus.js.publish(
                self._subject, self._planner.encode(), timeout=STORE_S, headers=headers, stream=self._stream
            )
        except APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
            self._revision, self._until = 0, 0.0  # it expired, and somebody else may have taken it
            return "?"
        self._revision, self._until = ack.seq, began + TTL_S - RENEW_S
        return ""

    async def give_up(self) -> None:
        """Let another planner take over at once."""
        if not self._revision or not self._bus.connected:
            return
        self._until = 0.0
        headers = {
            "KV-Operation": "PURGE",
            "Nats-Rollup": "sub",
            "Nats-TTL": "5",
            HEADER_LAST_ON_SUBJECT: str(self._revision),
        }
        try:
            await self._bus.js.publish(self._subject, b"", timeout=STORE_S, headers=headers, stream=self._stream)
        except (NatsError, TimeoutError) as error:
            log.debug("lease_not_given_up", error=repr(error))
