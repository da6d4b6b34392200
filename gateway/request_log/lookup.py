"""Finds a request by its id, if the caller may see it: its record once it has ended, its message while it runs.

A few round trips, however much the log holds. Who may see a request is decided here and nowhere else.

An id contains a time, and so about the place of its request in the stream, and determines its shard: one round trip
finds it. The time is by a gateway's clock, the place by the broker's, so a request that is not found is searched for in
the minutes around it. Records are found by their subject, without a scan.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec
import structlog

from penstock.gateway.access.authentication import ALL, Sight
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, get_last_of, get_next, read
from penstock.infra.bus.forget import DeletedRequests
from penstock.infra.bus.memory_storage import ABSENT_S, MemoryStreams, answers, find_request, lost
from penstock.schemas import done, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import request_of

WINDOW_NS = 16_000_000_000  # after an id's time: by then its request is stored, or was given up
FAR_NS = 1_200_000_000_000  # either side of it, if the clock that made the id is wrong by minutes
LONGEST_NS = int(LONGEST_DEADLINE_S * 1e9) + CLOCK_SKEW_NS  # after it: a router copies what waits before it is lost
BATCH = 100
FEW = 8  # requests of one shard lie far apart
MAX_FAR = 3  # at a time


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
                if request is None and await self._has_lost(made_ns):
                    request = await self._in_shard(request_id, (made_ns + FAR_NS, made_ns + LONGEST_NS), BATCH)
        if request is None:
            raise unknown(request_id)
        return request

    async def is_stored(self, request_id: str, until_ns: int) -> bool:
        """Whether the log has a request of this id that was stored until then.

        Raises:
            ServingError: the log cannot be read.
        """
        made_ns = time_of(request_id)
        return await self._in_shard(request_id, (made_ns - CLOCK_SKEW_NS, until_ns), FEW) is not None

    async def _has_lost(self, made_ns: int) -> bool:
        """Whether the log no longer has what it stored at a time: of a request, only a copy may be left."""
        first = await get_next(self._bus, self._bus.subjects.stream("REQUESTS"), ">", 0)
        return first is not None and first.time_ns > made_ns

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


def prompt_gone(request_id: str) -> ServingError:
    return ServingError(
        Code.request_erased,
        f"the answer to request {request_id} shows its prompt, which the log no longer has: REQUESTS keeps prompts "
        "until it is full (penstock streams set REQUESTS --max-bytes); send the request again",
    )


def unknown(request_id: str) -> ServingError:
    return ServingError(Code.request_not_found, f"no request {request_id[:80]!r} in the log; ids look like UUIDv7")


log = structlog.get_logger("gateway")


class Records:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream("DONE")

    async def find(self, request_id: str) -> done.Done | None:
        """The terminal event; None: there is none (yet).

        Raises:
            ServingError: the log did not answer.
        """
        entry = await get_last(self._bus, self._stream, self._bus.subjects.done_of(request_id))
        return _decoded(entry.data) if entry is not None else None

    async def ended_ns(self, request_id: str) -> int:
        """When a request has ended, Unix time; 0: it has not (yet).

        Raises:
            ServingError: the log did not answer.
        """
        entry = await get_last(self._bus, self._stream, self._bus.subjects.done_of(request_id))
        return entry.time_ns if entry is not None else 0

    async def ends(self, requests: Sequence[GenerateRequest]) -> list[done.Done]:
        """Of these requests, a few hundred at most, those that are over. Replicas may lag behind: ask again.

        Raises:
            ServingError: the log did not answer.
        """
        subjects = [self._bus.subjects.done(r.tenant, r.recorded_under, r.id) for r in requests]
        events = [_decoded(entry.data) for entry in await get_last_of(self._bus, self._stream, subjects)]
        return [event for event in events if event is not None]


def has_output(record: done.Done) -> bool:
    """Whether the record has the output's tokens."""
    return "tokens" not in record.left_out


def is_whole(record: done.Done) -> bool:
    """Whether everything that the answer shows is in the record."""
    return bool(record.submitted) and not {"tokens", "logprobs", "scores", "message"} & set(record.left_out)


def request_of_record(record: done.Done) -> GenerateRequest | None:
    """The recorded request, if it is there and this release can read it."""
    try:
        return done.request_of(record)
    except msgspec.MsgspecError as error:
        log.warning("recorded_request_unreadable", request=record.request, error=str(error))
        return None


def _lacks_prompt(record: done.Done, request: GenerateRequest) -> bool:
    """Whether the answer shows the prompt, which only REQUESTS has, or else its text, if it was too large a record."""
    return "prompt" in record.left_out and (_shows_prompt(request) or request.prompt_length == 0)


def _shows_prompt(request: GenerateRequest) -> bool:
    return request.echo or request.shown.token_ids or request.sampling.prompt_logprobs is not None


def _decoded(data: bytes) -> done.Done | None:
    try:
        event = done.decode(data)
    except msgspec.MsgspecError as error:  # of a later release
        log.warning("terminal_event_unreadable", error=str(error))
        return None
    return event if isinstance(event, done.Done) else None


def _as_run(request: GenerateRequest, record: done.Done | None) -> GenerateRequest:
    """A stored request as the model has it that answered it.

    Raises:
        ServingError: internal: this build cannot read that.
    """
    number = done.fallback_of(record) if record is not None else 0
    if number <= request.fallback or record is None:
        return request
    try:
        return requests.fallen_back(request, number, record.attempt)
    except (msgspec.MsgspecError, IndexError) as error:
        what = f"request {request.id} was answered by another model, which this gateway cannot read"
        raise ServingError(Code.internal, what) from error


class StoredRequest(NamedTuple):
    """``record``: None while the request runs."""

    request: GenerateRequest
    record: done.Done | None


class RequestLookup:
    """
    Args:
        grace_s: how long the content of a request with ``no_store`` is kept after its end.
        streams: after a broker without a cluster has restarted, gateways put back what was in them.
    Attributes:
        deleted: requests of which something may be in the log yet, or again; known from its ``start`` on.
    """

    def __init__(
        self, bus: Bus, records: Records, finder: RequestFinder, grace_s: float, streams: MemoryStreams
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._records = records
        self._finder = finder
        self._grace_ns = int(grace_s * 1e9)
        self.deleted = DeletedRequests(bus)

    async def find(self, request_id: str, sight: Sight = ALL, *, deleted: bool = False) -> StoredRequest:
        """
        Args:
            sight: what the caller may read.
            deleted: find it though it was deleted, if something of it is there.
        Raises:
            ServingError: request_not_found, also if the caller may not read it; request_erased; content_lost;
                broker_unavailable.
        """
        try:
            time_of(request_id)
        except ValueError:
            raise unknown(request_id) from None
        if request_id in self.deleted and not deleted:
            raise unknown(request_id)
        stored = await self._find(request_id, sight, deleted=deleted)
        if not sight.includes(stored.request):
            raise unknown(request_id)
        return stored

    async def _find(self, request_id: str, sight: Sight, *, deleted: bool) -> StoredRequest:
        record = await self._records.find(request_id)
        request = request_of_record(record) if record is not None else None
        if request is not None and not sight.includes(request):
            raise unknown(request_id)
        if record is not None and request is not None and is_whole(record) and not _lacks_prompt(record, request):
            return StoredRequest(request, record)
        if request is not None and request.no_store:
            return StoredRequest(await self._with_content(request, record), record)
        # The rest is read from the log, where the stored request says from when on.
        try:
            whole = await self._finder.find(request_id)
        except ServingError as error:
            if error.code is not Code.request_not_found or record is None or request is None:
                raise
            if not deleted and _lacks_prompt(record, request) and _shows_prompt(request):
                raise prompt_gone(request_id) from None
            if "prompt" in record.left_out:  # only its length is recorded
                request = msgspec.structs.replace(request, prompt=bytes(4 * record.usage.prompt))
            return StoredRequest(request, record)
        if whole.no_store:
            return StoredRequest(await self._with_content(whole, record), record)
        return StoredRequest(_as_run(whole, record), record)

    async def _with_content(self, request: GenerateRequest, record: done.Done | None) -> GenerateRequest:
        """
        Raises:
            ServingError: request_erased, content_lost, broker_unavailable.
        """
        whole = await find_request(self._bus, request)
        if whole is not None:
            return _as_run(whole, record)
        if record is not None and record.code == Code.content_lost:
            raise lost(request.id)
        if record is not None:
            left_ns = await self._records.ended_ns(request.id) + self._grace_ns - self._bus.clock.now_ns()
            if left_ns <= 0:
                raise erased(request.id)  # it is not deleted before its grace period is over
        # As long as workers wait for it, its gateway may be reconnecting. Later, the grace period would be over.
        soon = self._streams.since_renewed_s < ABSENT_S
        if soon or (record is None and await answers(self._bus, request.gateway, request.id)):
            message = f"the broker has lost what was in memory of request {request.id}; its gateway puts it back"
            raise ServingError(Code.broker_unavailable, f"{message}: ask again", retry_after=1.0)
        raise lost(request.id)
