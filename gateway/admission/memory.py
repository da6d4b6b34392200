"""Whether requests with ``no_store`` can be taken: every router and worker knows memory storage, and it has room."""

import time
from collections.abc import Callable, Iterable

import msgspec

from gateway.log.inflight import InflightRequest
from infra.bus.connection import Bus
from infra.bus.direct_get import read
from infra.bus.memory import Fill, MemoryStreams
from schemas import routers
from schemas.errors import Code, ServingError
from schemas.fleet import Registration
from schemas.requests import GenerateRequest
from schemas.routers import LEASE_S

TRUST_S = 1.0  # how long an answer of the bucket is used
FILL_S = 0.5  # and how long the sizes of the streams
FULL = 0.9  # of a stream, together with what is still to come of this gateway's open requests
# What a token takes at most: a batch of its own, with its headers and the server's own bytes. Few are alone in one.
TOKEN_BYTES = 200
LOGPROB_BYTES = 16
MOST_RESERVED = 1 << 20  # for one request: most end long before their limit


class MemoryCheck:
    """Looks at leases and sizes at most once or twice a second, and only for requests with ``no_store``.

    Args:
        workers: all that are registered.
        open_: this gateway's open requests with ``no_store``.
    """

    def __init__(
        self,
        bus: Bus,
        streams: MemoryStreams,
        workers: Callable[[], Iterable[Registration]],
        open_: Callable[[], Iterable[InflightRequest]],
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._workers = workers
        self._open = open_
        self._checked = -TRUST_S
        self._filled = -FILL_S
        self._reserved = 0
        self._contents, self._tokens = Fill(0, 0), Fill(0, 0)

    async def check(self, request: GenerateRequest, size: int) -> None:
        """
        Args:
            size: bytes of its content.
        Raises:
            ServingError: unsupported: a process or the broker is of an earlier release; broker_unavailable, also if
                memory storage has no room for it.
        """
        now = time.monotonic()
        if now - self._checked >= TRUST_S:
            await self._check_support()
            self._checked = now
        if now - self._filled >= FILL_S:
            self._contents, self._tokens = await self._streams.fill()
            self._reserved = sum(reserved_bytes(each.request) for each in self._open())
            self._filled = now
        self._check_room("MEMORY_CONTENTS", self._contents, 2 * size)
        wanted = reserved_bytes(request)
        self._check_room("MEMORY_TOKENS", self._tokens, self._reserved + wanted)
        self._reserved += wanted
        self._contents = self._contents._replace(used=self._contents.used + size)

    def _check_room(self, stream: str, fill: Fill, more: int) -> None:
        if fill.limit and fill.used + more > FULL * fill.limit:
            name = self._bus.subjects.stream(stream)
            raise ServingError(
                Code.broker_unavailable,
                f"memory storage for requests with no_store is full: stream {name} holds {fill.used >> 20} of its "
                f"{fill.limit >> 20} MiB, and open requests need {more >> 20} MiB; try again later, or enlarge it: "
                f"penstock streams set",
                retry_after=1.0,
            )

    async def _check_support(self) -> None:
        for registration in self._workers():
            if not registration.memory:
                raise _unsupported(f"worker {registration.worker} is of an earlier release; update it first")
        bucket = self._bus.subjects.bucket("routers")
        oldest_ns = self._bus.clock.now_ns() - int((LEASE_S + TRUST_S) * 1e9)
        async for entry in read(self._bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
            if not entry.data or "KV-Operation" in entry.headers or entry.time_ns < oldest_ns:
                continue
            try:
                supported = routers.decode(entry.data).memory
            except msgspec.MsgspecError:
                supported = False
            if not supported:
                name = entry.subject.rpartition(".")[2]
                raise _unsupported(f"router {name} is of an earlier release; update it first")


def reserved_bytes(request: GenerateRequest) -> int:
    """What the rest of a request's output may take, within bounds."""
    sampling = request.sampling
    token = TOKEN_BYTES + (0 if sampling.logprobs is None else LOGPROB_BYTES * (2 + sampling.logprobs))
    scored = 0 if sampling.prompt_logprobs is None else LOGPROB_BYTES * (2 + sampling.prompt_logprobs)
    return min(request.n * request.stop.max_tokens * token + request.prompt_tokens * scored, MOST_RESERVED)


def _unsupported(why: str) -> ServingError:
    return ServingError(Code.unsupported, f"no_store cannot be kept: {why}", param="no_store")
