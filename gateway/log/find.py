"""Finds accepted requests in the log by their ids.

An id has a time, and so about the place of its request in the stream, and determines its shard: one round trip finds
it. The time is by a gateway's clock, the place by the broker's: what is not found is looked for in the minutes around
it.
"""

import asyncio
from contextlib import aclosing

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, read
from penstock.schemas import requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.ids import time_of
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import request_of

WINDOW_NS = 16_000_000_000  # behind an id's time: by then its request is stored, or was given up
FAR_NS = 1_200_000_000_000  # either side of it, if the clock that made the id is wrong by minutes
BATCH = 100
FEW = 8  # requests of one shard lie far apart
MAX_FAR = 3  # at once


class RequestFinder:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._far = asyncio.Semaphore(MAX_FAR)  # each unknown id reads minutes of its shard

    async def find(self, request_id: str) -> GenerateRequest:
        """An accepted request.

        Raises:
            ServingError: request_not_found; the log cannot be read.
        """
        try:
            made_ns = time_of(request_id)
        except ValueError:
            raise unknown(request_id) from None
        request = await self._in_shard(request_id, (made_ns - CLOCK_SKEW_NS, made_ns + WINDOW_NS), FEW)
        if request is None:
            async with self._far:
                request = await self._in_shard(request_id, (made_ns - FAR_NS, made_ns + FAR_NS), BATCH)
        if request is None:
            raise unknown(request_id)
        return request

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


def _accepted(entry: Entry) -> GenerateRequest:
    """A stored request, created not long after the broker stored it.

    Its tokens are read from about its creation on: by the clock of a gateway that was ahead, the first ones would be
    missed. The small differences of all clocks stay: the answer shows the time, and is the same from every gateway.
    """
    request = requests.decode(entry.data)
    if request.created_ns > entry.time_ns + CLOCK_SKEW_NS:
        return msgspec.structs.replace(request, created_ns=entry.time_ns)
    return request


def erased(request_id: str) -> ServingError:
    return ServingError(
        Code.request_erased,
        f"request {request_id} was made with no_store: its prompt and its answer were in memory only, and were deleted "
        "after its end",
    )


def unknown(request_id: str) -> ServingError:
    return ServingError(Code.request_not_found, f"no request {request_id[:80]!r} in the log; ids look like UUIDv7")
