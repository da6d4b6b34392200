"""Publishes requests as a gateway does, and waits for their ends in the log."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last_of
from penstock.infra.bus.message import Message
from penstock.infra.bus.publisher import Publisher
from penstock.schemas import control, wire
from penstock.schemas.errors import ServingError
from penstock.schemas.ids import new_request_id
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import HEADER_MSG_ID

CHECK_S = 1.0  # an end that was missed live is looked up
CHECKED = 200
MAX_OPEN = 20_000  # at the recorded pace


class Planned(NamedTuple):
    """A request to send, ``at_s`` seconds after the first one. All 0: each as soon as there is room."""

    recorded: str
    at_s: float
    make: Callable[[str, int], GenerateRequest]  # of its id and the time, Unix ns


class Sent(NamedTuple):
    """What was sent.

    Attributes:
        ids: the new request's id, by the recorded one.
        refused: why it could not be published, by the recorded id.
        seconds: from the first to the last end.
    """

    ids: dict[str, str]
    refused: dict[str, str]
    seconds: float


class NatsSender:
    """
    Args:
        concurrency: requests at a time.
        timeout_s: a request without an end so long after it was sent is cancelled.
    """

    def __init__(self, bus: Bus, publisher: Publisher, *, concurrency: int, timeout_s: float) -> None:
        self._bus = bus
        self._publisher = publisher
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(concurrency)
        self._open: dict[str, tuple[str, float]] = {}  # by new id: the subject of its end, when it was sent
        self._idle = asyncio.Event()

    async def send(self, planned: Sequence[Planned]) -> Sent:
        """Send all requests and wait for their ends. If this is cancelled, the open requests are cancelled, too.

        Raises:
            ServingError: the broker is unreachable for too long.
        """
        subjects = self._bus.subjects
        live = await self._bus.nc.subscribe(subjects.live(subjects.all("done")), cb=self._ended)
        check = asyncio.create_task(self._check(), name="replay-check")
        ids: dict[str, str] = {}
        refused: dict[str, str] = {}
        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for each in planned:
                    if each.at_s:
                        await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
                    await self._room.acquire()
                    group.create_task(self._publish(each, ids, refused))
            while self._open:
                self._idle.clear()
                await self._idle.wait()
            return Sent(ids, refused, time.perf_counter() - began)
        finally:
            check.cancel()
            await asyncio.wait([check])
            with contextlib.suppress(ServingError):
                for name in list(self._open):
                    await self._cancel(name)
            if not self._bus.nc.is_closed:
                await live.unsubscribe()

    async def _publish(self, each: Planned, ids: dict[str, str], refused: dict[str, str]) -> None:
        now_ns = time.time_ns()
        request = each.make(new_request_id(now_ns), now_ns)
        subjects = self._bus.subjects
        self._open[request.id] = subjects.done(request.tenant, request.model, request.id), time.monotonic()
        try:
            subject = subjects.request(request.model, request.priority.value, request.id)
            await self._publisher.publish(subject, wire.encode(request), request.id, timeout=self._timeout_s)
            ids[each.recorded] = request.id
        except ServingError as error:
            refused[each.recorded] = str(error)
            self._over(request.id)

    async def _ended(self, message: Message) -> None:
        self._over((message.headers or {}).get(HEADER_MSG_ID, ""))

    def _over(self, name: str) -> None:
        if self._open.pop(name, None) is not None:
            self._room.release()
            if not self._open:
                self._idle.set()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            old = [(name, subject) for name, (subject, sent) in self._open.items() if now - sent > CHECK_S]
            stream = self._bus.subjects.stream("DONE")
            for start in range(0, len(old), CHECKED):
                with contextlib.suppress(ServingError):  # asked again a second later
                    part = [subject for _, subject in old[start : start + CHECKED]]
                    for entry in await get_last_of(self._bus, stream, part):
                        self._over(entry.headers.get(HEADER_MSG_ID, ""))
            for name, _ in old:
                if name in self._open and now - self._open[name][1] > self._timeout_s:
                    with contextlib.suppress(ServingError):
                        await self._cancel(name)
                    self._over(name)

    async def _cancel(self, name: str) -> None:
        if self._bus.connected:
            await self._bus.nc.publish(self._bus.subjects.cancel, wire.encode(control.Cancel(name, "replay ended")))
