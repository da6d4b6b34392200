"""Deletes what the log holds of ended requests, overwrites it on disk, and notes that it was deleted.

The note (``schemas.deletions``) is stored before the first message is erased. It lasts half an hour. In that time,
gateways treat the request as unknown, and routers (``router.service.deletion``) erase whatever reappears or was left
because a replica was away. The deletion order is jobs, requests, records: a router that starts in between must not find
a job without its end, because it would place the request again. What a failed deletion leaves behind is found again
through the record or the note.

Overwriting a message is expensive. The broker rewrites the message's whole block, which in a stream like TOKENS is 8 MB
and 6 ms of CPU time (measured with 2.15.1), and others wait meanwhile. ``Eraser`` therefore rests between two messages.
A message that a stream discards itself, by a limit or an acknowledgement, stays in its file until that is rewritten.

In a cluster, each replica overwrites its copy when it reads the deletion from the replication log. A replica that was
away may instead receive a snapshot, if the log no longer reaches back far enough. It then drops the message but keeps
the bytes until the stream's limits remove the file, and no later deletion overwrites them (seen with 2.15.1). Callers
that can wait therefore erase only while every replica is up to date (``everywhere``). What the replication log itself
has of the message goes with its next snapshot.

On a full disk, the broker confirms a deletion that it cannot write, and the message is back after a restart. Callers
therefore store an entry first, to see whether the broker can write (``check_stores``).
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, read
from penstock.infra.bus.jetstream import BUSY, PAUSE_S, ApiError, decode_publish_reply
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import deletions, done, usage, wire
from penstock.schemas.deletions import Deletion
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import HEADER_NO_STORE, request_of

ERASE_S = 5.0
SHARE = 0.05  # of the time that an ``Eraser`` keeps the broker overwriting
MOST_REST_S = 2.0
KEEP_S = 120  # lifetime of the entry that tests whether the broker can write
AWAY_S = 600.0  # a replica that is away for longer is not waited for
NEWEST_S = 2.0  # a replica that is there receives the newest log entry within this time
LOOK_S = 0.02
AGAIN_S = 5.0  # until a replica that was found away is checked again
NO_SEQUENCE = 0  # no message has it, so deleting it changes nothing
# Larger than a block of the file system. A smaller entry may still fit into the last block of its file on a full disk.
ENTRY = bytes(4_608)
# Refusals for lack of room in the account, the server or the stream's node. Others, such as a full bucket, say nothing
# about other streams.
NO_ROOM = frozenset({10002, 10023, 10047})
GONE = frozenset({10037, 10043, 10057})  # the stream no longer has a message with this sequence


class _Reply(msgspec.Struct):
    success: bool = False
    error: ApiError | None = None


_decode = msgspec.json.Decoder(_Reply).decode


class ReplicaAway(ServingError):
    """Nothing was erased, because a replica would keep the message's bytes."""

    def __init__(self, stream: str, servers: Sequence[str]) -> None:
        away = " and ".join(servers)
        super().__init__(
            Code.broker_unavailable,
            f"the messages stay in {stream} for now: its replica on {away} is away and would keep a copy on its disk; "
            f"they are erased when it is back, or has been away for {AWAY_S / 60:g} minutes",
            retry_after=AGAIN_S,
        )
        self.servers = list(servers)


class _Replica(msgspec.Struct):
    name: str
    current: bool = False
    active: int = 0  # ns since it answered the leader


class _Cluster(msgspec.Struct):
    replicas: tuple[_Replica, ...] = ()


class _Info(msgspec.Struct):
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)
    error: ApiError | None = None


_decode_info = msgspec.json.Decoder(_Info).decode


async def stores(bus: Bus, name: str, timeout: float) -> bool:
    """Whether the broker can store an entry, which replaces the previous one of the same ``name``.

    Raises:
        nats.errors.Error, TimeoutError, OSError, msgspec.MsgspecError: it did not answer in time.
    """
    subject = f"$KV.{bus.subjects.bucket('idempotency')}.written.{name}"
    message = await bus.nc.request(subject, ENTRY, timeout=timeout, headers={"Nats-TTL": str(KEEP_S)})
    error = decode_publish_reply(message.data).error
    return error is None or error.err_code not in NO_ROOM


async def check_stores(bus: Bus, name: str) -> None:
    """Check that the broker can write, before something is deleted.

    Args:
        name: identifies the caller.
    Raises:
        ServingError: broker_unavailable, because what is deleted now could come back.
    """
    try:
        if await stores(bus, name, ERASE_S):
            return
        why = "is its disk full?"
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        why = f"is its disk full? {error!r}"
    raise ServingError(
        Code.broker_unavailable,
        f"nothing was deleted: the broker cannot store anything at the moment ({why}), and what it deletes now could "
        "come back when it restarts; delete it again later",
        retry_after=5.0,
    )


async def erase(bus: Bus, stream: str, seq: int) -> bool:
    """Delete one message and overwrite its bytes. False if it was already gone.

    Raises:
        ServingError: broker_unavailable, if it was not confirmed in time or this user may not delete messages.
    """
    subject = f"$JS.API.STREAM.MSG.DELETE.{stream}"
    try:
        reply = await _delete(bus, subject, seq)
    except (NatsError, OSError, TimeoutError) as error:
        raise _failed(stream, seq, f"{error!r}; may this user publish to {subject}?") from None
    if reply.error is None:
        return True
    if reply.error.err_code in GONE:
        return False
    raise _failed(stream, seq, str(reply.error))


async def _delete(bus: Bus, subject: str, seq: int) -> _Reply:
    """The broker's answer; while a stream's leader is elected, it is asked again."""
    body = json.dumps({"seq": seq}).encode()  # without "no_erase"
    until = time.monotonic() + ERASE_S
    while True:
        reply = _decode((await bus.nc.request(subject, body, timeout=max(PAUSE_S, until - time.monotonic()))).data)
        if reply.error is None or reply.error.err_code not in BUSY or time.monotonic() + PAUSE_S > until:
            return reply
        await asyncio.sleep(PAUSE_S)


async def replicas_away(bus: Bus, stream: str) -> list[str]:
    """The servers whose replica of a stream does not receive the newest log entry in time.

    Servers that have been away for longer than ``AWAY_S`` are left out. A leader that has nothing to replicate takes
    seconds to notice that a server was killed, so this first adds an entry that changes nothing.

    Raises:
        ServingError: broker_unavailable, if the broker does not answer or this user may not ask.
    """
    try:
        replicas = await _replicas(bus, stream)
        if not replicas:
            return []
        await _delete(bus, f"$JS.API.STREAM.MSG.DELETE.{stream}", NO_SEQUENCE)
        missing = {replica.name for replica in replicas}
        until = time.monotonic() + NEWEST_S
        while True:
            for replica in await _replicas(bus, stream):
                if replica.current or replica.active > AWAY_S * 1e9:
                    missing.discard(replica.name)
            if not missing or time.monotonic() > until:
                return sorted(missing)
            await asyncio.sleep(LOOK_S)
    except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise ServingError(
            Code.broker_unavailable,
            f"the broker does not say which replicas of {stream} are there: {error!r}",
            retry_after=1.0,
        ) from None


async def _replicas(bus: Bus, stream: str) -> tuple[_Replica, ...]:
    info = _decode_info((await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=ERASE_S)).data)
    if info.error is not None:
        raise ServingError(Code.broker_unavailable, f"{stream}: {info.error}", retry_after=1.0)
    return info.cluster.replicas


class Eraser:
    """Erases one message at a time, and rests longer than that took, so that other clients hardly notice.

    Args:
        waiting: how many callers may wait for their turn.
    """

    def __init__(self, bus: Bus, waiting: int = 1 << 30) -> None:
        self._bus = bus
        self._most = waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._rests_until = 0.0  # monotonic
        self._away: dict[str, tuple[float, list[str]]] = {}  # stream -> how long the finding holds, servers

    async def erase(self, stream: str, seq: int, *, everywhere: bool = False) -> bool:
        """Delete one message and overwrite its bytes, in turn. False if it was left because too many wait.

        Args:
            everywhere: leave the message while a replica of the stream is away.
        Raises:
            ReplicaAway: the message was left.
            ServingError: as for ``erase``.
        """
        if self._waiting > self._most:
            return False
        self._waiting += 1
        try:
            async with self._turn:
                if everywhere and self._bus.clustered:
                    self._known_away(stream)
                began = time.monotonic()
                if began < self._rests_until:
                    await asyncio.sleep(self._rests_until - began)
                if everywhere and self._bus.clustered:
                    await self._all_there(stream)
                began = time.monotonic()
                try:
                    await erase(self._bus, stream, seq)
                finally:
                    now = time.monotonic()
                    self._rests_until = now + min(MOST_REST_S, (now - began) * (1 / SHARE - 1))
        finally:
            self._waiting -= 1
        return True

    async def _all_there(self, stream: str) -> None:
        if servers := await replicas_away(self._bus, stream):
            self._away[stream] = time.monotonic() + AGAIN_S, servers
            raise ReplicaAway(stream, servers)

    def _known_away(self, stream: str) -> None:
        until, servers = self._away.get(stream, (0.0, []))
        if time.monotonic() < until:
            raise ReplicaAway(stream, servers)


def _failed(stream: str, seq: int, why: str) -> ServingError:
    return ServingError(Code.broker_unavailable, f"message {seq} of {stream} was not erased: {why}", retry_after=1.0)


log = structlog.get_logger("bus")

BATCH = 50  # the messages of a few seconds; they include prompts, so more would be megabytes that are not read
AHEAD_NS = 1_200_000_000_000  # by which the clock that made an id may have been ahead of the broker's
NOTE_S = 5.0
COUNTED_S = 5.0  # for the router that counts what requests used
FOLLOW_S = 3.0  # how long a starting process waits for the notes
FOLLOW_AGAIN_S = 30.0  # between two attempts while there is no bucket for them
TTL_NS = deletions.TTL_S * 1_000_000_000


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        subject: where its record is stored.
        ended_ns: Unix time.
        no_store: its content and tokens are in memory storage only.
        guests: its ids in other cells that had it; (): none had, or that was not looked up.
    """

    id: str
    subject: str
    ended_ns: int
    no_store: bool
    guests: tuple[str, ...] = ()


async def find_ended(bus: Bus, request_id: str) -> Ended | None:
    """Look up the end of a request. None if it has not ended, or the log no longer has it.

    Raises:
        ServingError: the log cannot be read.
    """
    last = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id), newest=True)
    if last is None:
        return None
    guests: tuple[str, ...] = ()
    with contextlib.suppress(msgspec.MsgspecError):  # of a later release: nothing of it can be read
        event = done.decode(last.data)
        guests = done.guests_of(event) if isinstance(event, done.Done) else ()
    return Ended(request_id, last.subject, last.time_ns, HEADER_NO_STORE in last.headers, guests)


class _Stored(NamedTuple):
    stream: str
    seq: int
    request: str


async def forget_messages(bus: Bus, ended: Sequence[Ended], eraser: Eraser) -> int:
    """Note that these requests are deleted, then delete their jobs, requests and records.

    Returns: the number of messages.

    Raises:
        ReplicaAway: a replica would keep its copy. Routers delete the rest.
        ServingError: a stream cannot be read or a note cannot be stored, and nothing was deleted yet; or a message was
            not deleted, and routers delete the rest.
    """
    stored = await _find_content(bus, ended)
    stream = bus.subjects.stream("DONE")
    for each in ended:
        stored += [_Stored(stream, entry.seq, each.id) async for entry in read(bus, stream, each.subject)]
    await _counted(bus, max((each.seq for each in stored if each.stream == stream), default=0))
    notes = {each.id: Deletion(each.subject, {}) for each in ended}
    for message in stored:
        sequences = notes[message.request].messages
        sequences[message.stream] = (*sequences.get(message.stream, ()), message.seq)
    for request, deletion in notes.items():
        await _note(bus, request, deletion)
    for message in stored:
        await eraser.erase(message.stream, message.seq, everywhere=True)
    return len(stored)


async def _counted(bus: Bus, seq: int) -> None:
    """Wait until the ledger of usage counts a record, for ``COUNTED_S`` at most. Without a ledger there is no wait."""
    until = time.monotonic() + COUNTED_S
    with contextlib.suppress(ServingError, msgspec.MsgspecError):
        while True:
            newest = await get_last(
                bus, bus.subjects.stream("USAGE"), bus.subjects.all("usage"), newest=True, within_s=COUNTED_S
            )
            if newest is None or usage.decode(newest.data).last >= seq:
                return
            if time.monotonic() > until:
                log.warning("usage_not_counted", error=f"message {seq} of DONE was deleted uncounted")
                return
            await asyncio.sleep(LOOK_S)


async def _find_content(bus: Bus, ended: Sequence[Ended]) -> list[_Stored]:
    """All messages except records, in deletion order."""
    ids = {each.id for each in ended}
    since_ns = min(time_of(each.id) for each in ended) - CLOCK_SKEW_NS
    until_ns = max(each.ended_ns for each in ended) + CLOCK_SKEW_NS

    async def found(name: str, subject: str, since_ns: int) -> list[tuple[_Stored, int]]:
        stream = bus.subjects.stream(name)
        messages = []
        async for entry in read(bus, stream, subject, since_ns=since_ns, batch=BATCH):
            if entry.time_ns > until_ns:
                break
            if (request := request_of(entry.headers)) in ids:
                messages.append((_Stored(stream, entry.seq, request), entry.time_ns))
        return messages

    every = bus.subjects.shard_of(ended[0].id) if len(ended) == 1 else bus.subjects.all("request")
    requests = await found("REQUESTS", every, since_ns)
    if ids - {message.request for message, _ in requests}:
        # The clock that made an id may have been ahead: of a gateway that had not compared it with the broker's yet.
        requests = await found("REQUESTS", every, since_ns - AHEAD_NS)
    first_ns = min((time_ns for _, time_ns in requests), default=since_ns)
    jobs = await found("WORK", bus.subjects.all("work"), min(since_ns, first_ns))
    return [message for message, _ in (*jobs, *requests)]


async def _note(bus: Bus, request: str, deletion: Deletion) -> None:
    """Store the note that a request is deleted."""
    bucket = bus.subjects.bucket("deleted")
    subject, headers = f"$KV.{bucket}.{request}", {"Nats-TTL": str(deletions.TTL_S)}
    try:
        reply = await bus.nc.request(subject, wire.encode(deletion), timeout=NOTE_S, headers=headers)
        error = decode_publish_reply(reply.data).error
        why = str(error or "")
    except NoRespondersError:
        why = "there is no such bucket: run `penstock streams apply`"
    except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as failure:
        why = f"{failure!r}; may this user publish to {subject}?"
    if not why:
        return
    raise ServingError(
        Code.broker_unavailable,
        f"bucket {bucket} did not store the note that {request} is deleted ({why}); delete it again",
        retry_after=5.0,
    )


class DeletedRequests:
    """The ids of the requests that were deleted in the last half hour, followed from the bucket of notes.

    It stays empty if there is no bucket, or this user may not read it.

    Attributes:
        until: by id until when that is so, Unix time in ns, earliest first; bounded by the bucket's size.
        followed: set once all existing notes were read.
        noted: called with the id of each request that is noted.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.bucket("deleted")
        self.until: dict[str, int] = {}
        self._following = contextlib.AsyncExitStack()
        self._tried = asyncio.Event()
        self.followed = asyncio.Event()
        self.noted: Callable[[str], None] = lambda request: None

    def __contains__(self, request: object) -> bool:
        until_ns = self.until.get(request)  # type: ignore[call-overload]
        return until_ns is not None and until_ns > self._bus.clock.now_ns()

    def noted_s(self, request: str) -> float | None:
        """How long ago a request was noted, in seconds. None if it was not, or that is unknown."""
        until_ns = self.until.get(request)
        return None if until_ns is None else (self._bus.clock.now_ns() - until_ns + TTL_NS) / 1e9

    async def start(self, tasks: Tasks) -> None:
        """Follow the bucket. Returns once it was read or proved unreadable, and after ``FOLLOW_S`` at the latest."""
        tasks.spawn(self._follow(), name="deleted-requests")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), FOLLOW_S)

    async def stop(self) -> None:
        await self._following.aclose()

    async def _follow(self) -> None:
        while not self.followed.is_set():
            tail = LogTail.of_bucket(self._bus, "deleted", self._on_entry)
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
        self.until.pop(request, None)
        if not entry.data:  # the note has expired
            return
        self.until[request] = entry.time_ns + TTL_NS
        self.noted(request)
        now_ns = self._bus.clock.now_ns()
        while self.until and self.until[first := next(iter(self.until))] < now_ns:  # an expiry may be missed
            del self.until[first]

    async def read(self) -> list[tuple[str, Deletion]]:
        """All notes, with the places of the deleted messages.

        Notes that should have expired long ago are removed. A server that was killed may forget to do that (seen with
        2.15.1), and a full bucket takes no more notes.

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
                self.until.setdefault(request, entry.time_ns + TTL_NS)  # it may not have been read while following
            except msgspec.MsgspecError as error:  # a later release wrote it
                log.warning("deletion_unreadable", subject=entry.subject, error=str(error))
        return found
