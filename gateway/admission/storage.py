"""Whether there is room to store new requests, and how long what is stored is kept.

``MemoryCheck`` decides whether requests with ``no_store`` are accepted: memory storage must have room for them.

``LogCapacity`` decides whether the log has room: requests that wait must not be discarded by those that come after
them. REQUESTS discards its oldest messages when it is full. From ``FULL`` of it after its oldest unplaced request on,
new requests are refused; from ``FAIR`` on, those of tenants that use more than their share.

``Retention`` estimates how long records and prompts are kept at the present rate. DONE and REQUESTS promise days, but
discard their oldest messages earlier at ``max_bytes``. No unfinished request is lost that way, so none is refused; the
operator is warned while there is time to enlarge the stream.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog
from nats.errors import Error as NatsError

from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get, get_next
from penstock.infra.bus.memory_storage import Fill, MemoryStreams
from penstock.infra.bus.stream_fill import FAIR, FULL, WARN, StreamWatch, beyond_share
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import PACKED, PROMPTS

MEMORY_LOOK_S = 0.5  # how old sizes may be before some request looks again
TRUST_S = 1.0  # and while it looks, for the others
MEMORY_FULL = 0.9  # of a stream, together with what is still to come of this gateway's open requests
# What a token takes at most: a separate batch, with its headers and the server's own bytes. Few are alone in one.
TOKEN_BYTES = 200
LOGPROB_BYTES = 16
MOST_RESERVED = 1 << 20  # for one request: most end long before their limit


class _Room(NamedTuple):
    fill: Fill
    room: float  # bytes that may still be stored; infinite: there is no limit


def _room(fill: Fill) -> _Room:
    return _Room(fill, MEMORY_FULL * fill.limit - fill.used if fill.limit else math.inf)


class MemoryCheck:
    """Looks at sizes twice a second at most, and only for requests with ``no_store``.

    Args:
        open_: this gateway's open requests with ``no_store``.
    """

    def __init__(self, bus: Bus, streams: MemoryStreams, open_: Callable[[], Iterable[InflightRequest]]) -> None:
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
        if age >= (TRUST_S if self._looking.locked() else MEMORY_LOOK_S):
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
            if self._looked >= asked - MEMORY_LOOK_S:
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
    """Bytes as people read them; less than a unit is not shown as 0."""
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


log = structlog.get_logger("gateway")

MESSAGE_BYTES = 1_000  # of a request beside its prompt, about


class LogCapacity:
    """Call ``refresh`` periodically; ``check`` uses the figures of the last call.

    Attributes:
        packs: whether prompts are packed, see ``penstock.schemas.streams.PROMPTS``.
    """

    def __init__(self, bus: Bus, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._requests = StreamWatch(bus, bus.subjects.stream("REQUESTS"))
        self._firsts: dict[str, tuple[int, int]] = {}  # consumer -> its floor, and the first message after it
        self._over_share: frozenset[str] = frozenset()
        self.packs = False

    def check(self, tenant: str | None = None) -> None:
        """
        Args:
            tenant: None: not known yet.
        Raises:
            ServingError: queue_full.
        """
        watch = self._requests
        if watch.full or (tenant is not None and tenant in self._over_share):
            raise ServingError(Code.queue_full, self._refusal(None if watch.full else tenant), retry_after=5.0)

    def _refusal(self, tenant: str | None) -> str:
        watch = self._requests
        size = f"{watch.level:.0%} of its {watch.max_bytes >> 20} MiB"
        if tenant is not None:
            return (
                f"stream {watch.stream} holds {size} of waiting requests, and tenant {tenant!r} has more than its "
                "share of them; try again later"
            )
        return (
            f"stream {watch.stream} holds {size} of waiting requests, and the limit is {FULL:.0%}; try again later, "
            f"add workers, or {watch.enlarge}"
        )

    async def refresh(self, consumers: Iterable[Any], unended: Iterable[tuple[str, int]]) -> None:
        """
        Args:
            consumers: the routers' consumers of REQUESTS, as the server described them just now.
            unended: this gateway's open requests: tenant and bytes of the prompt. Read only when room is scarce.
        """
        watch = self._requests
        try:
            await watch.look()
            self.packs = watch.metadata.get(PROMPTS) == PACKED
            level = 0.0
            for consumer in consumers:
                level = max(level, await self._share(consumer))
        except (NatsError, TimeoutError, ServingError) as error:
            log.debug("log_capacity_unknown", error=repr(error))
            return
        watch.update(level)
        self._metrics.unfinished.labels(watch.stream).set(level)
        if level < FAIR:
            self._over_share = frozenset()
            return
        used: dict[str, int] = {}
        for tenant, size in unended:
            used[tenant] = used.get(tenant, 0) + size + MESSAGE_BYTES
        self._over_share = beyond_share(used, round(FAIR * watch.max_bytes))

    async def _share(self, consumer: Any) -> float:
        """Of REQUESTS, from a consumer's oldest unplaced request on."""
        if not (consumer.num_pending or consumer.num_ack_pending):
            return 0.0
        watch, floor = self._requests, consumer.ack_floor.stream_seq if consumer.ack_floor else 0
        share = watch.share_from(floor + 1)
        if share < WARN:
            return share
        # Most of these may be of other classes: find the first one of this class.
        floor_seq, first = self._firsts.get(consumer.name, (-1, 0))
        if floor_seq != floor:
            config = consumer.config
            subjects = config.filter_subjects or [config.filter_subject]
            oldest = [await get_next(self._bus, watch.stream, subject, floor) for subject in subjects]
            first = min((entry.seq for entry in oldest if entry is not None), default=watch.last + 1)
            self._firsts[consumer.name] = (floor, first)
        return watch.share_from(first)


RETENTION_LOOK_S = 30.0
DAY = 86_400.0


def retention_s(*, age_s: float, size: int, max_bytes: int, max_age_s: float) -> float:
    """How long a record will be kept if records keep arriving at the same rate.

    Args:
        age_s: of the oldest one.
    """
    if not size or max_bytes <= 0:
        return max_age_s
    projected = age_s * max_bytes / size
    return min(projected, max_age_s) if max_age_s else projected


class Retention:
    """
    Attributes:
        kept_s: how long records will be kept at the present rate.
    """

    def __init__(self, bus: Bus, looked: Callable[[], None]) -> None:
        self.kept_s = math.inf
        self._bus = bus
        self._looked = looked
        self._warned: set[str] = set()

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(RETENTION_LOOK_S)

    async def look(self) -> None:
        """Warn once of each stream, when it is half full, if messages will be kept in it for less than promised."""
        kept_s = await self._reach("records_kept_shorter", "DONE")
        if kept_s is not None:
            self.kept_s = kept_s
            self._looked()
        await self._reach("prompts_kept_shorter", "REQUESTS")

    async def _reach(self, event: str, name: str) -> float | None:
        """How long messages will be kept; None: it is unknown."""
        stream = self._bus.subjects.stream(name)
        try:
            info = await self._bus.js.stream_info(stream)
            state, max_age_s = info.state, info.config.max_age or 0.0
            first = await get(self._bus, stream, state.first_seq) if state.messages else None
        except (NatsError, TimeoutError, ServingError) as error:
            log.debug("retention_unknown", stream=stream, error=repr(error))
            return None
        max_bytes = max(0, info.config.max_bytes or 0)
        age_s = max(0, self._bus.clock.now_ns() - first.time_ns) / 1e9 if first is not None else 0.0
        size = state.bytes if first is not None else 0
        kept_s = retention_s(age_s=age_s, size=size, max_bytes=max_bytes, max_age_s=max_age_s)
        short = bool(max_bytes) and size >= WARN * max_bytes and kept_s < max_age_s
        if short and name not in self._warned:
            log.warning(
                event,
                stream=stream,
                days=round(kept_s / DAY, 2),
                promised_days=round(max_age_s / DAY, 2),
                max_bytes=max_bytes,
                action=f"enlarge it: penstock streams set {name} --max-bytes (a message takes about 110 bytes of the "
                "broker's memory besides)",
            )
        (self._warned.add if short else self._warned.discard)(name)
        return kept_s
