"""Deletes what the log holds of requests that have ended, and notes that they were deleted.

The note (``schemas.deletions``) is stored before the first message is erased. For half an hour routers erase what comes
back of the request (``router.service.deletion``), or was left because a replica is away, and gateways know nothing of
it.

Jobs go first, then requests, then records: a router that starts in between must not find a job without its end, which
it would place again. What was not deleted is found again, as long as the record or the note is there.

Deletes single messages of a stream, and overwrites their bytes on the broker's disk.

That costs the broker a lot: it rewrites the message's block, 8 MB and 6 ms of CPU time in a stream like TOKENS (on
2.15.1), while others wait. So whoever has several to delete rests in between (``Eraser``).

A stream that discards a message by its limits, or because it was acknowledged, leaves its bytes in the file until the
file is rewritten or removed.

In a cluster, each replica overwrites its copy when it finds the deletion in the stream's replication log. One that was
away, and that the leader gives a snapshot because its log begins later by then, removes the message and keeps its
bytes, until the stream's limits remove their file. No later deletion overwrites them, because the replica no longer has
the message (seen on 2.15.1). So whoever can wait erases only while every replica has the newest entry of the log
(``everywhere``). What a replica's log itself has of the message goes with its next snapshot.

With a full disk the broker confirms a deletion that it cannot write: the message is gone from its memory, and back
after its restart. So whoever deletes has an entry stored before (``check_stores``).
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
from penstock.infra.bus.jetstream import ApiError, decode_publish_reply
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import deletions, wire
from penstock.schemas.deletions import Deletion
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import HEADER_NO_STORE, request_of

ERASE_S = 5.0
SHARE = 0.05  # of the time in which an ``Eraser`` has the broker overwrite something
MOST_REST_S = 2.0
KEEP_S = 120  # of an entry
AWAY_S = 600.0  # a replica that is away for longer is not waited for
NEWEST_S = 2.0  # within which a replica that is there has the newest entry of the log
LOOK_S = 0.02
AGAIN_S = 5.0  # a replica that was found away is looked for again
NO_SEQUENCE = 0  # of no message: a deletion of it changes nothing
# More than a block of a file system: on a full disk, smaller ones fit into the last blocks of their file.
ENTRY = bytes(4_608)
# No room for the account, the server or the stream's node. A refusal for another reason, as of a full bucket, says
# nothing of other streams.
NO_ROOM = frozenset({10002, 10023, 10047})
GONE = frozenset({10037, 10043, 10057})  # the stream has no message with this sequence (any more)


class _Reply(msgspec.Struct):
    success: bool = False
    error: ApiError | None = None


_decode = msgspec.json.Decoder(_Reply).decode


class ReplicaAway(ServingError):
    """Nothing was erased: a replica would keep the message's bytes."""

    def __init__(self, stream: str, servers: Sequence[str]) -> None:
        away = " and ".join(servers)
        super().__init__(
            Code.broker_unavailable,
            f"{stream} keeps what is to be erased until its replica on {away} is there again, or was away for "
            f"{AWAY_S / 60:g} minutes: it would keep a copy on its disk",
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
    """Whether the broker stores an entry, over the one before of the same ``name``.

    Raises:
        nats.errors.Error, TimeoutError, OSError, msgspec.MsgspecError: it did not answer in time.
    """
    subject = f"$KV.{bus.subjects.bucket('idempotency')}.written.{name}"
    message = await bus.nc.request(subject, ENTRY, timeout=timeout, headers={"Nats-TTL": str(KEEP_S)})
    error = decode_publish_reply(message.data).error
    return error is None or error.err_code not in NO_ROOM


async def check_stores(bus: Bus, name: str) -> None:
    """
    Args:
        name: of who deletes.
    Raises:
        ServingError: broker_unavailable: what would be deleted now could come back.
    """
    try:
        if await stores(bus, name, ERASE_S):
            return
        why = "is its disk full?"
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        why = f"is its disk full? {error!r}"
    raise ServingError(
        Code.broker_unavailable,
        f"nothing was deleted: the broker stores nothing at the moment ({why}), so that it could come back when the "
        "broker restarts; delete it again later",
        retry_after=5.0,
    )


async def erase(bus: Bus, stream: str, seq: int) -> bool:
    """Delete one message and overwrite its bytes; False: it was gone already.

    Raises:
        ServingError: broker_unavailable: it was not confirmed in time, or this user may not delete messages.
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
    body = json.dumps({"seq": seq}).encode()  # without "no_erase"
    return _decode((await bus.nc.request(subject, body, timeout=ERASE_S)).data)


async def replicas_away(bus: Bus, stream: str) -> list[str]:
    """The servers whose replica of a stream does not have the newest entry of its log, nor gets it in time, and was
    there within ``AWAY_S``.

    For a few seconds the leader takes a server that was killed for one that is there, as long as nothing is to be
    replicated. So an entry is added first, which changes nothing.

    Raises:
        ServingError: broker_unavailable: the broker does not say, or this user may not ask.
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
            f"{stream} does not say which of its replicas are there: {error!r}",
            retry_after=1.0,
        ) from None


async def _replicas(bus: Bus, stream: str) -> tuple[_Replica, ...]:
    info = _decode_info((await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=ERASE_S)).data)
    if info.error is not None:
        raise ServingError(Code.broker_unavailable, f"{stream}: {info.error}", retry_after=1.0)
    return info.cluster.replicas


class Eraser:
    """Erases one message at a time, and rests before the next for longer than that took: others hardly notice.

    Args:
        waiting: how many more may wait for their turn.
    """

    def __init__(self, bus: Bus, waiting: int = 1 << 30) -> None:
        self._bus = bus
        self._most = waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._rests_until = 0.0  # monotonic
        self._away: dict[str, tuple[float, list[str]]] = {}  # stream -> until when that is taken for granted, servers

    async def erase(self, stream: str, seq: int, *, everywhere: bool = False) -> bool:
        """Delete one message and overwrite its bytes, in turn; False: too many wait, so it was left.

        Args:
            everywhere: leave it while a replica of the stream is away.
        Raises:
            ReplicaAway: it was left.
            ServingError: as ``erase``.
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
        no_store: its content and its tokens are in memory storage only.
    """

    id: str
    subject: str
    ended_ns: int
    no_store: bool


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
        noted: called with each that is noted.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.subjects.bucket("deleted")
        self._until: dict[str, int] = {}  # Unix time ns, the earliest first; the bucket's size bounds it
        self._following = contextlib.AsyncExitStack()
        self._tried = asyncio.Event()
        self.followed = asyncio.Event()
        self.noted: Callable[[str], None] = lambda request: None

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
        self.noted(request)
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
