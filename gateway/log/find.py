"""Finds accepted requests in the log by their ids.

An id has a time, and so about the place of its request in the stream, and determines its shard: one round trip finds
it. The time is by a gateway's clock, the place by the broker's: what is not found is looked for in the minutes around
it. Requests that releases up to 0.1 accepted have no shard; concurrent look-ups of those share one forward read.
"""

import asyncio
from contextlib import aclosing

import msgspec

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get_last, read
from infra.bus.tasks import Tasks, as_serving_error
from schemas import requests
from schemas.errors import Code, ServingError
from schemas.ids import time_of
from schemas.requests import GenerateRequest
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import HEADER_MSG_ID, request_of

WINDOW_NS = 16_000_000_000  # behind an id's time: by then its request is stored, or was given up
EARLIER_NS = 50_000_000  # before it: the clocks of two machines differ
FAR_NS = 1_200_000_000_000  # either side of it, if the clock that made the id is wrong by minutes
JUMP_NS = 1_000_000_000  # a gap between two ids from which it is cheaper to begin a new read
BATCH = 100
FEW = 8  # requests of one shard lie far apart
MAX_RUNS = 3  # at once

_Wanted = dict[str, "asyncio.Future[GenerateRequest]"]


class RequestFinder:
    def __init__(self, bus: Bus, tasks: Tasks) -> None:
        self._bus = bus
        self._tasks = tasks.group("find")
        self._wanted: _Wanted = {}
        self._running = 0
        self._far = asyncio.Semaphore(MAX_RUNS)  # each unknown id reads minutes of its shard

    async def close(self) -> None:
        await self._tasks.aclose()

    async def find(self, request_id: str) -> GenerateRequest:
        """An accepted request.

        Raises:
            ServingError: request_not_found; the log cannot be read.
        """
        try:
            made_ns = time_of(request_id)
        except ValueError:
            raise unknown(request_id) from None
        subjects = self._bus.subjects
        request = await self._in_shard(request_id, (made_ns - CLOCK_SKEW_NS, made_ns + WINDOW_NS), FEW)
        if request is None:
            async with self._far:
                request = await self._in_shard(request_id, (made_ns - FAR_NS, made_ns + FAR_NS), BATCH)
        if request is not None:
            return request
        if await get_last(self._bus, subjects.stream("REQUESTS"), subjects.unsharded) is None:
            raise unknown(request_id)
        future = self._wanted.get(request_id)
        if future is None:
            future = self._wanted[request_id] = asyncio.get_running_loop().create_future()
            if self._running < MAX_RUNS:
                self._running += 1
                self._tasks.spawn(self._run(), name="find")
        return await asyncio.shield(future)

    async def _in_shard(self, request_id: str, span: tuple[int, int], batch: int) -> GenerateRequest | None:
        since, until = max(1, span[0]), span[1]
        subjects = self._bus.subjects
        stored = read(
            self._bus, subjects.stream("REQUESTS"), subjects.shard_of(request_id), since_ns=since, batch=batch
        )
        async with aclosing(stored) as entries:
            async for entry in entries:
                if request_of(entry.headers) == request_id:
                    return _accepted(entry)
                if entry.time_ns > until:
                    return None
        return None

    async def _run(self) -> None:
        try:
            while self._wanted:
                pending, self._wanted = self._wanted, {}
                try:
                    for earlier in (EARLIER_NS, CLOCK_SKEW_NS):
                        await self._scan(pending, earlier)
                    for request_id, future in pending.items():
                        _fail(future, unknown(request_id))
                except Exception as error:
                    for future in pending.values():
                        _fail(future, as_serving_error(error, "reading the request log"))
                finally:
                    for future in pending.values():
                        future.cancel()
        finally:
            self._running -= 1

    async def _scan(self, pending: _Wanted, earlier_ns: int) -> None:
        """Read forward from the earliest id's time, and remove each request that is found from ``pending``."""
        times = sorted((time_of(request_id), request_id) for request_id in pending)
        while times:
            since = times[0][0] - earlier_ns
            if not await self._read_from(since, pending, times, earlier_ns):
                return

    async def _read_from(self, since_ns: int, pending: _Wanted, times: list[tuple[int, str]], earlier_ns: int) -> bool:
        """One read; True: it is worth a new one, further on."""
        subjects = self._bus.subjects
        stored = read(self._bus, subjects.stream("REQUESTS"), subjects.unsharded, since_ns=since_ns, batch=BATCH)
        async with aclosing(stored) as entries:
            async for entry in entries:
                request_id = entry.headers.get(HEADER_MSG_ID, "")
                future = pending.pop(request_id, None)
                if future is not None and not future.done():
                    future.set_result(_accepted(entry))
                now_ns = entry.time_ns
                while times and (times[0][1] not in pending or now_ns > times[0][0] + WINDOW_NS):
                    times.pop(0)
                if not times:
                    return False
                if times[0][0] - earlier_ns > now_ns + JUMP_NS:
                    return True
        return False


def _accepted(entry: Entry) -> GenerateRequest:
    """A stored request, created not long after the broker stored it.

    Its tokens are read from about its creation on: by the clock of a gateway that was ahead, the first ones would be
    missed. The small differences of all clocks stay: the answer shows the time, and is the same from every gateway.
    """
    request = requests.decode(entry.data)
    if request.created_ns > entry.time_ns + CLOCK_SKEW_NS:
        return msgspec.structs.replace(request, created_ns=entry.time_ns)
    return request


def _fail(future: "asyncio.Future[GenerateRequest]", error: ServingError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved here: the waiter may have been cancelled


def erased(request_id: str) -> ServingError:
    return ServingError(
        Code.request_erased,
        f"request {request_id} was made with no_store: its prompt and its answer were in memory only, and were deleted "
        "after its end",
    )


def unknown(request_id: str) -> ServingError:
    return ServingError(Code.request_not_found, f"no request {request_id[:80]!r} in the log; ids look like UUIDv7")
