"""Deletes the messages of requests from the log, when gateways ask for it.

Gateways, which clients reach, may not delete anything of the pipeline's own streams. Any router answers, and replies
once everything is gone. Overwriting is expensive for the broker, so a router rests in between (``Eraser``).

While a replica of a stream is away, nothing is erased there, for ``AWAY_S`` at most: the replica would keep its copy
(``penstock.infra.bus.forget``). The request is noted, so it is no longer shown, and routers check every few seconds.

Messages of a deleted request that reappear are erased again by each router that sees them: immediately if a process
stores them again (``came_back``); and those of a server once a router starts, or finds a new or restarted server.
"""

import asyncio
import contextlib
import random
from typing import Any

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get, get_last
from penstock.infra.bus.forget import AWAY_S, DeletedRequests, Eraser, ReplicaAway, find_ended, forget_messages
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import control
from penstock.schemas.deletions import Deletion
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import request_of
from penstock.schemas.wire import encode

log = structlog.get_logger("router")

WAITING = 32  # beyond these, a gateway has to ask again
MOST_BACK = 10_000  # messages that wait to be erased again; beyond these, all notes are looked at
TOGETHER_S = 0.5  # within which routers begin to erase the same message; those that come later find it gone
ERASE_AGAIN_S = 5.0  # after a failure, or while a replica is away


class RequestDeleter:
    """
    Attributes:
        deleted: the requests that were deleted lately.
        eraser: overwrites their messages.
        clean_server: id of the broker's server at which everything of them was gone; "": none yet.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.eraser = Eraser(bus)
        self._waiting = 0
        self.deleted = DeletedRequests(bus)
        self._back: dict[tuple[str, int], str] = {}  # (stream, sequence) -> request
        self._all_due = True  # look for messages of all that were deleted lately
        self._due = asyncio.Event()
        self.clean_server = ""  # at which everything of them was gone

    async def open(self, tasks: Tasks) -> None:
        """Learn which requests were deleted. Before the log is read, or their jobs would be placed again."""
        await self.deleted.start(tasks)

    async def start(self, tasks: Tasks) -> None:
        async def asked(message: Any) -> None:
            tasks.spawn(self._answer(message), name="delete")

        await self._bus.nc.subscribe(self._bus.subjects.erase, queue="router", cb=asked)
        self._bus.on_reconnect.append(self._reconnected)
        tasks.spawn(self._erase_again_forever(), name="erase-again")

    async def stop(self) -> None:
        if self._reconnected in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._reconnected)
        await self.deleted.stop()

    async def _answer(self, message: Any) -> None:
        error = await self._delete(message.data.decode("ascii", "replace"))
        with contextlib.suppress(NatsError, OSError):  # the gateway asks again
            await self._bus.nc.publish(message.reply, encode(control.Ok(error)))

    async def _delete(self, request_id: str) -> str:
        """Returns: why it was not deleted; "": it was, or will be, or there is nothing of it."""
        if self._waiting >= WAITING:
            return f"{WAITING} deletions wait already; try again"
        self._waiting += 1
        try:
            ended = await find_ended(self._bus, request_id)
            if ended is not None:
                await forget_messages(self._bus, [ended], self.eraser)
                log.info("request_deleted", request=request_id)
            return ""
        except ReplicaAway as away:
            log.warning("deletion_waits", request=request_id, error=str(away))
            self._look_at_all()
            return ""
        except ValueError as error:  # no id of a request
            return str(error)
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.warning("request_not_deleted", request=request_id, error=str(error))
            self._look_at_all()  # perhaps it was noted
            return str(error) or repr(error)
        finally:
            self._waiting -= 1

    # --- what comes back of deleted requests ---

    def came_back(self, stream: str, seq: int, request: str) -> None:
        """A message of a deleted request was stored: erase it, soon."""
        if len(self._back) < MOST_BACK:
            self._back[stream, seq] = request
            self._due.set()
        else:
            self._look_at_all()

    def _look_at_all(self) -> None:
        self._all_due = True
        self._due.set()

    async def _reconnected(self) -> None:
        if self._bus.server != self.clean_server:
            self._look_at_all()

    async def _erase_again_forever(self) -> None:
        await self.deleted.followed.wait()
        self._due.set()
        while True:
            await self._due.wait()
            self._due.clear()
            await asyncio.sleep(random.uniform(0, TOGETHER_S))
            try:
                left = await self._erase_back()
                if self._all_due:
                    left |= await self._erase_all()
                if left:
                    await asyncio.sleep(ERASE_AGAIN_S)
                    self._due.set()
            except (ServingError, NatsError, OSError, TimeoutError) as error:
                log.warning("deleted_requests_not_erased", error=str(error) or repr(error))
                await asyncio.sleep(ERASE_AGAIN_S)
                self._due.set()

    async def _erase_all(self) -> bool:
        """Erase what is there of all requests that were deleted lately; True: some is left, as a replica is away."""
        server, self._all_due = self._bus.server, False
        left = False
        try:
            for request, note in await self.deleted.read():
                try:
                    await self._erase_noted(request, note)
                except ReplicaAway:
                    left = True  # others may have been noted so long ago that they wait no longer
                left |= await self._erase_back()
        except BaseException:
            self._all_due = True
            raise
        if left:
            self._all_due = True
        else:
            self.clean_server = server
        return left

    async def _erase_noted(self, request: str, note: Deletion) -> None:
        bus, subjects = self._bus, self._bus.subjects
        for stream, sequences in note.messages.items():
            for seq in sequences:
                await self._erase_if_there(stream, seq, request)
        records = subjects.stream("DONE")
        record = await get_last(bus, records, note.record)
        if record is not None:
            await self._erase_found(records, record.seq, request)

    async def _erase_back(self) -> bool:
        """Erase what was stored again; True: some is left, as a replica is away."""
        left = False
        for (stream, seq), request in list(self._back.items()):
            try:
                await self._erase_if_there(stream, seq, request)
            except ReplicaAway:
                left = True
            else:
                self._back.pop((stream, seq), None)
        return left

    async def _erase_if_there(self, stream: str, seq: int, request: str) -> None:
        """A stream that lost its end may have another message there."""
        entry = await get(self._bus, stream, seq)
        if entry is not None and request_of(entry.headers) == request:
            await self._erase_found(stream, seq, request)

    async def _erase_found(self, stream: str, seq: int, request: str) -> None:
        noted_s = self.deleted.noted_s(request)
        await self.eraser.erase(stream, seq, everywhere=noted_s is not None and noted_s < AWAY_S)
        log.info("deleted_request_erased_again", request=request, stream=stream, seq=seq)
