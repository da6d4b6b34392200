"""Deletes what the log holds of requests that have ended, and notes that they were deleted.

The note (``penstock.schemas.deletions``) is stored before the first message is erased. For half an hour routers erase
what comes back of the request (``penstock.router.service.deletion``), or was left because a replica is away, and gateways know
nothing of it.

Jobs go first, then requests, then records: a router that starts in between must not find a job without its end, which
it would place again. What was not deleted is found again, as long as the record or the note is there.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, read
from penstock.infra.bus.erase import Eraser
from penstock.infra.bus.jetstream import decode_publish_reply
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import deletions, wire
from penstock.schemas.deletions import Deletion
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.ids import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import HEADER_NO_STORE, request_of

log = structlog.get_logger("bus")

BATCH = 50  # the messages of a few seconds: with their prompts, many more are megabytes that nobody wants
NOTE_S = 5.0
FOLLOW_S = 3.0  # how long a process that starts waits for the notes
FOLLOW_AGAIN_S = 30.0  # between two tries, where there is no bucket for them
TTL_NS = deletions.TTL_S * 1_000_000_000


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        subject: of its record.
        ended_ns: Unix time.
        apart: made with no_store: its content and its tokens are in memory storage only.
    """

    id: str
    subject: str
    ended_ns: int
    apart: bool


async def find_ended(bus: Bus, request_id: str) -> Ended | None:
    """None: it has not ended, or the log no longer has it.

    Raises:
        ServingError: the log cannot be read.
    """
    last = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id), newest=True)
    if last is None:
        return None
    return Ended(request_id, last.subject, last.time_ns, HEADER_NO_STORE in last.headers)


class _Stored(NamedTuple):
    stream: str
    seq: int
    request: str


async def forget_messages(bus: Bus, ended: Sequence[Ended], eraser: Eraser) -> int:
    """Note that these requests are deleted, then delete their jobs, requests and records.

    Returns: how many messages that were.

    Raises:
        ReplicaAway: a replica would keep its copy; routers delete the rest.
        ServingError: a stream cannot be read, or a note was not stored: then nothing was deleted, but may be later. Or
            a message was not deleted: then routers delete the rest.
    """
    stored = await _find_content(bus, ended)
    stream = bus.subjects.stream("DONE")
    for each in ended:
        stored += [_Stored(stream, entry.seq, each.id) async for entry in read(bus, stream, each.subject)]
    notes = {each.id: Deletion(each.subject, {}) for each in ended}
    for message in stored:
        sequences = notes[message.request].messages
        sequences[message.stream] = (*sequences.get(message.stream, ()), message.seq)
    for request, deletion in notes.items():
        await _note(bus, request, deletion)
    for message in stored:
        await eraser.erase(message.stream, message.seq, everywhere=True)
    return len(stored)


async def _find_content(bus: Bus, ended: Sequence[Ended]) -> list[_Stored]:
    """Everything but records, in the order in which it is deleted."""
    ids = {each.id for each in ended}
    since_ns = min(time_of(each.id) for each in ended) - CLOCK_SKEW_NS
    ended_ns = max(each.ended_ns for each in ended)
    found = []
    for name, kind in (("WORK", "work"), ("REQUESTS", "request")):
        stream = bus.subjects.stream(name)
        subject = bus.subjects.all(kind)
        if kind == "request" and len(ended) == 1:
            subject = bus.subjects.shard_of(ended[0].id)
        async for entry in read(bus, stream, subject, since_ns=since_ns, batch=BATCH):
            if entry.time_ns > ended_ns + CLOCK_SKEW_NS:
                break
            if (request := request_of(entry.headers)) in ids:
                found.append(_Stored(stream, entry.seq, request))
    return found


async def _note(bus: Bus, request: str, deletion: Deletion) -> None:
    """Store that a request is deleted.

    Raises:
        ServingError: broker_unavailable: it was refused, or not confirmed in time.
    """
    bucket = bus.subjects.bucket("deleted")
    subject, headers = f"$KV.{bucket}.{request}", {"Nats-TTL": str(deletions.TTL_S)}
    try:
        reply = await bus.nc.request(subject, wire.encode(deletion), timeout=NOTE_S, headers=headers)
        error = decode_publish_reply(reply.data).error
        why = str(error or "")
    except NoRespondersError:
        why = "there is none: run `penstock streams apply`"
    except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as failure:
        why = f"{failure!r}; may this user publish to {subject}?"
    if not why:
        return
    raise ServingError(
        Code.broker_unavailable,
        f"bucket {bucket} did not take the note that {request} is deleted ({why}); delete it again",
        retry_after=5.0,
    )


class DeletedRequests:
    """The ids of the requests that were deleted in the last half hour, followed from their bucket.

    Where there is none, or this user may not read it, none are known.

    Attributes:
        followed: set once all that are noted are known.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.bucket("deleted")
        self._until: dict[str, int] = {}  # Unix time ns, the earliest first; the bucket's size bounds it
        self._following = contextlib.AsyncExitStack()
        self._tried = asyncio.Event()
        self.followed = asyncio.Event()

    def __contains__(self, request: object) -> bool:
        until_ns = self._until.get(request)  # type: ignore[call-overload]
        return until_ns is not None and until_ns > self._bus.clock.now_ns()

    def noted_s(self, request: str) -> float | None:
        """How long ago a request was noted, in seconds; None: it was not, or nobody can say."""
        until_ns = self._until.get(request)
        return None if until_ns is None else (self._bus.clock.now_ns() - until_ns + TTL_NS) / 1e9

    async def start(self, tasks: Tasks) -> None:
        """Follow the bucket; returns when it was read, or cannot be, or after ``FOLLOW_S``."""
        tasks.spawn(self._follow(), name="deleted-requests")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), FOLLOW_S)

    async def stop(self) -> None:
        await self._following.aclose()

    async def _follow(self) -> None:
        stream, keys = f"KV_{self._bucket}", f"$KV.{self._bucket}.>"
        while not self.followed.is_set():
            tail = LogTail(self._bus, stream, keys, self._bus.subjects.live(keys), self._on_entry)
            try:
                await self._following.enter_async_context(tail.following())
                self.followed.set()
            except (ServingError, NatsError, OSError, TimeoutError) as error:
                if not self._tried.is_set():
                    log.warning("deletions_unknown", error=str(error), action="run `penstock streams apply`")
            self._tried.set()
            if not self.followed.is_set():
                await asyncio.sleep(FOLLOW_AGAIN_S)

    def _on_entry(self, entry: Entry) -> None:
        request = entry.subject.rpartition(".")[2]
        self._until.pop(request, None)
        if not entry.data:  # it has expired
            return
        self._until[request] = entry.time_ns + TTL_NS
        now_ns = self._bus.clock.now_ns()
        while self._until and self._until[first := next(iter(self._until))] < now_ns:  # a marker may have been missed
            del self._until[first]

    async def read(self) -> list[tuple[str, Deletion]]:
        """All that are noted, with where their messages were. Notes that should have expired long ago are removed: a
        server that was killed may forget to (seen on 2.15.1), and a full bucket takes no more.

        Raises:
            ServingError: the bucket cannot be read.
        """
        found, over_ns = [], self._bus.clock.now_ns() - TTL_NS - 2 * CLOCK_SKEW_NS
        async for entry in read(self._bus, f"KV_{self._bucket}", f"$KV.{self._bucket}.>"):
            if not entry.data:
                continue
            if entry.time_ns < over_ns:
                await self._bus.nc.publish(entry.subject, b"", headers={"Nats-TTL": "1"})
                continue
            try:
                request = entry.subject.rpartition(".")[2]
                found.append((request, deletions.decode(entry.data)))
                self._until.setdefault(request, entry.time_ns + TTL_NS)  # it may not have been followed so far
            except msgspec.MsgspecError as error:  # of a later release
                log.warning("deletion_unreadable", subject=entry.subject, error=str(error))
        return found
