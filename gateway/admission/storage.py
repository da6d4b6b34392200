"""Whether requests with ``no_store`` can be taken: memory storage has room for them."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.gateway.log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory import Fill, MemoryStreams
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

LOOK_S = 0.5  # how old sizes may be before some request looks again
TRUST_S = 1.0  # and while it looks, for the others
FULL = 0.9  # of a stream, together with what is still to come of this gateway's open requests
# What a token takes at most: a batch of its own, with its headers and the server's own bytes. Few are alone in one.
TOKEN_BYTES = 200
LOGPROB_BYTES = 16
MOST_RESERVED = 1 << 20  # for one request: most end long before their limit


class _Room(NamedTuple):
    fill: Fill
    room: float  # bytes that may still be stored; infinite: there is no limit


def _room(fill: Fill) -> _Room:
    return _Room(fill, FULL * fill.limit - fill.used if fill.limit else math.inf)


class MemoryCheck:
    """Looks at sizes twice a second at most, and only for requests with ``no_store``.

    Args:
        open_: this gateway's open requests with ``no_store``.
    """

    def __init__(
        self,
        bus: Bus,
        streams: MemoryStreams,
        open_: Callable[[], Iterable[InflightRequest]],
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._open = open_
        self._looking = asyncio.Lock()
        self._looked = -math.inf  # monotonic
        self._failed: tuple[float, BaseException] | None = None  # at the last look, and when
        self._reserved = 0  # bytes of MEMORY_TOKENS that open requests may still need
        self._taken = 0  # bytes of MEMORY_CONTENTS since the last look
        self._contents = self._tokens = _room(Fill(0, 0))

    async def check(self, request: GenerateRequest, size: int) -> None:
        """
        Args:
            size: bytes of its content.
        Raises:
            ServingError: broker_unavailable, also if memory storage has no room for it; unsupported: there is none.
        """
        age = time.monotonic() - self._looked
        if age >= (TRUST_S if self._looking.locked() else LOOK_S):
            await self._look()
        wanted = reserved_bytes(request)
        if self._taken + 2 * size > self._contents.room:
            raise self._full("MEMORY_CONTENTS", self._contents, self._taken + 2 * size)
        if self._reserved + wanted > self._tokens.room:
            raise self._full("MEMORY_TOKENS", self._tokens, self._reserved + wanted)
        self._reserved += wanted
        self._taken += size

    async def _look(self) -> None:
        """One request asks the broker, for all that wait meanwhile."""
        asked = time.monotonic()
        async with self._looking:
            if self._failed is not None and self._failed[0] >= asked:
                raise self._failed[1].with_traceback(None)
            if self._looked >= asked - LOOK_S:
                return
            began = time.monotonic()
            try:
                self._contents, self._tokens = map(_room, await self._streams.fill())
            except Exception as error:
                self._failed = time.monotonic(), error
                raise
            self._reserved = sum(reserved_bytes(each.request) for each in self._open())
            self._taken = 0
            self._looked = began

    def _full(self, stream: str, room: _Room, more: int) -> ServingError:
        name, fill = self._bus.subjects.stream(stream), room.fill
        return ServingError(
            Code.broker_unavailable,
            f"memory storage for requests with no_store is full: stream {name} holds {_size(fill.used)} of its "
            f"{_size(fill.limit)}, of which a tenth stays free, and open requests need {_size(more)}; try again "
            "later, or enlarge it: penstock streams set",
            retry_after=1.0,
        )


def _size(count: int) -> str:
    """Bytes as people read them; less than a unit is no 0."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def reserved_bytes(request: GenerateRequest) -> int:
    """What the rest of a request's output may take, within bounds."""
    sampling = request.sampling
    token = TOKEN_BYTES + (0 if sampling.logprobs is None else LOGPROB_BYTES * (2 + sampling.logprobs))
    scored = 0 if sampling.prompt_logprobs is None else LOGPROB_BYTES * (2 + sampling.prompt_logprobs)
    return min(request.n * request.stop.max_tokens * token + request.prompt_tokens * scored, MOST_RESERVED)
