"""Deletes what the log holds of requests: those that gateways ask for, and what older builds stored of no_store.

Gateways, which clients reach, may not delete anything of the pipeline's own streams. Any router answers, and replies
once everything is gone. Overwriting is expensive for the broker, so a router rests in between (``Eraser``).
"""

import asyncio
import contextlib
import random
from typing import Any

import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import read
from infra.bus.erase import Eraser
from infra.bus.forget import find_ended, forget_messages
from infra.bus.tasks import Tasks
from schemas import control
from schemas.errors import ServingError
from schemas.subjects import request_of
from schemas.wire import encode

log = structlog.get_logger("router")

WAITING = 32  # beyond these, a gateway has to ask again
EARLIER_S = 60.0  # between two looks for what older builds stored, while there is something


class Deletion:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._eraser = Eraser(bus)
        self._waiting = 0

    async def start(self, tasks: Tasks) -> None:
        async def asked(message: Any) -> None:
            tasks.spawn(self._answer(message), name="delete")

        await self._bus.nc.subscribe(self._bus.subjects.erase, queue="router", cb=asked)
        tasks.spawn(self._delete_earlier_until_gone(), name="delete-earlier")

    async def _answer(self, message: Any) -> None:
        error = await self._delete(message.data.decode("ascii", "replace"))
        with contextlib.suppress(NatsError, OSError):  # the gateway asks again
            await self._bus.nc.publish(message.reply, encode(control.Ok(error)))

    async def _delete(self, request_id: str) -> str:
        """Returns: why it was not deleted; "": it was, or there is nothing of it."""
        if self._waiting >= WAITING:
            return f"{WAITING} deletions wait already; try again"
        self._waiting += 1
        try:
            ended = await find_ended(self._bus, request_id)
            if ended is not None:
                await forget_messages(self._bus, [ended], self._eraser.erase)
                log.info("request_deleted", request=request_id)
            return ""
        except ValueError as error:  # no id of a request
            return str(error)
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.warning("request_not_deleted", request=request_id, error=str(error))
            return str(error) or repr(error)
        finally:
            self._waiting -= 1

    # --- requests with no_store of builds that stored them in the clear, and erased them after their end ---

    async def _delete_earlier_until_gone(self) -> None:
        while True:
            try:
                if not await self.delete_earlier():
                    return
            except (ServingError, NatsError, OSError, TimeoutError) as error:
                log.warning("earlier_requests_not_deleted", error=str(error) or repr(error))
            await asyncio.sleep(EARLIER_S * random.uniform(0.5, 1.0))  # all routers look

    async def delete_earlier(self) -> int:
        """Erase those that have ended; returns how many are left.

        Raises:
            ServingError: the log cannot be read, or a message was not erased.
        """
        bus, subjects = self._bus, self._bus.subjects
        stored = read(bus, subjects.stream("REQUESTS"), subjects.to_be_erased)
        names = {request_of(entry.headers) async for entry in stored}
        media = f"OBJ_{subjects.bucket('media')}"
        if names:
            async for entry in read(bus, media, f"$O.{subjects.bucket('media')}.C.private.>"):
                await self._eraser.erase(media, entry.seq)
        left = 0
        for name in sorted(names):
            ended = await find_ended(bus, name)
            if ended is None:
                left += 1
            else:
                await forget_messages(bus, [ended], self._eraser.erase, records=False)
                log.info("earlier_request_deleted", request=name)
        return left
