"""Whether the broker still stores messages: one with a full disk keeps its connections, and answers nothing.

The tokens of a running answer are stored without an acknowledgement that a gateway would see, so a request whose
tokens cannot be stored looks like one that is slow. While some open request is quiet, a small entry is written to a
bucket of this gateway's, over the one before: if that is not confirmed, neither is anything else.
"""

import asyncio

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.forget import stores
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.errors import Code, ServingError

QUIET_S = 2.5  # without a new item of a request, before it is asked whether items can be stored
EVERY_S = 1.0  # between two entries
FAILING_S = 11.0  # an entry is not confirmed: longer than an election in a cluster (4 to 9 s)
CONFIRM_S = 2.0  # then it is sent again
AGAIN_S = 0.5  # after a refusal


class StoreCheck:
    """Call ``look`` several times a second.

    Args:
        gateway: its id.
    """

    def __init__(self, bus: Bus, gateway: str, tasks: Tasks) -> None:
        self._bus = bus
        self._gateway = gateway
        self._tasks = tasks
        self._writing: asyncio.Task[None] | None = None  # ends with the confirmation
        self._began = 0.0  # monotonic
        self._confirmed = 0.0
        self._position = -1
        self.failing = False

    def look(self, now: float, *, quiet: bool, position: int) -> None:
        """
        Args:
            now: monotonic.
            quiet: some open request has had no item for ``QUIET_S``.
            position: of this gateway's tokens in the log: when it grows, they are stored.
        """
        moved, self._position = position != self._position, position
        writing = self._writing
        if moved or not self._bus.connected or (writing is not None and writing.done()):
            if writing is not None:  # while the broker is away nothing is known, and everyone waits for it
                writing.cancel()
            self._writing, self._confirmed, self.failing = None, now, False
        elif writing is not None:
            self.failing = now - self._began >= FAILING_S
        elif quiet and now - self._confirmed >= EVERY_S:
            self._began = now
            self._writing = self._tasks.spawn(self._write(), name="store-check")

    def check(self) -> None:
        """
        Raises:
            ServingError: broker_unavailable: nothing is stored.
        """
        if self.failing:
            raise ServingError(
                Code.broker_unavailable, f"{_WHY}; the request was not accepted, try again later", retry_after=5.0
            )

    async def _write(self) -> None:
        """Return when the entry is stored, or refused for a reason of its own."""
        while True:
            try:
                if await stores(self._bus, self._gateway, CONFIRM_S):
                    return
            except (NatsError, TimeoutError, OSError, msgspec.MsgspecError):
                pass
            await asyncio.sleep(AGAIN_S)


_WHY = "the broker stores nothing at the moment (is its disk full?)"


def unstored(request_id: str) -> ServingError:
    """The end of the wait for an accepted request's answer; whether it has an end of its own is not known yet."""
    return ServingError(
        Code.broker_unavailable,
        f"{_WHY}, so no more of this answer comes; request {request_id} was accepted and may have an end: ask for it "
        f"later (GET /v1/requests/{request_id}, or ps.read)",
        retry_after=5.0,
    )
