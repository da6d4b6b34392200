"""Erases a request at once when a gateway asks for it: what its owner deletes.

Gateways, which clients reach, may not delete anything. Any router answers, and replies once everything is gone.
"""

import asyncio
import contextlib
from typing import Any

import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.erase import erase
from infra.bus.forget import find_ended, forget_messages
from infra.bus.tasks import Tasks
from schemas import control
from schemas.errors import ServingError
from schemas.wire import encode

log = structlog.get_logger("router")

AT_ONCE = 4
WAITING = 64  # beyond these, a gateway has to ask again


class ErasureOnDemand:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def start(self, tasks: Tasks) -> None:
        async def asked(message: Any) -> None:
            tasks.spawn(self._answer(message), name="erase")

        await self._bus.nc.subscribe(self._bus.subjects.erase, queue="router", cb=asked)

    async def _answer(self, message: Any) -> None:
        error = await self._erase(message.data.decode("ascii", "replace"))
        with contextlib.suppress(NatsError, OSError):  # the gateway asks again
            await self._bus.nc.publish(message.reply, encode(control.Ok(error)))

    async def _erase(self, request_id: str) -> str:
        """Returns: why it was not erased; "": it was, or there is nothing of it."""
        if self._waiting >= WAITING:
            return f"{WAITING} deletions wait already; try again"
        self._waiting += 1
        try:
            async with self._slots:
                ended = await find_ended(self._bus, request_id)
                if ended is not None:
                    await forget_messages(self._bus, [ended], erase)
                    log.info("request_deleted", request=request_id)
                return ""
        except ValueError as error:  # no id of a request
            return str(error)
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.warning("request_not_deleted", request=request_id, error=str(error))
            return str(error) or repr(error)
        finally:
            self._waiting -= 1
