"""Reading a stream by direct get, without a consumer (ADR-31).

In a cluster any replica answers a direct get, including one that has not caught up. What it returns was stored, but an
end or a "not found" holds for that replica only. So each is confirmed by the stream's leader before it is returned, and
messages that the replica lacked are read from the leader. A single server is its own leader: nothing is asked twice.

A leader that was stopped for longer than an election (4 s and more) may still answer in the moment it resumes. Where
two processes must not both conclude "there is none", the conclusion is a write with an expected last sequence, which
the stream refuses to one of them.
"""

import abc
import asyncio
import base64
import datetime
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from penstock.infra.bus.jetstream import NO_MESSAGE_FOUND, ApiError, Message
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_RECORDED_TIME, Subjects

if TYPE_CHECKING:  # a stopped deployment is read without the client, which loads slowly
    from penstock.infra.bus.connection import Bus

BATCH = 500
BATCH_BYTES = 4 << 20
STALL_S = 5.0
LEADER_S = 15.0  # to find the leader: an election takes up to 9 s
ASK_S = 2.0
AGAIN_S = 0.1


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One stored message.

    ``previous``: sequence of the message before it on the same subject; ``stored_ns``: when the server stored it, if
    that is not in the headers.
    """

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str]
    previous: int = 0
    stored_ns: int = 0

    @property
    def time_ns(self) -> int:
        """When the server stored it, Unix time; of an imported message, when it was recorded."""
        headers = self.headers
        recorded = headers.get(HEADER_RECORDED_TIME)
        if recorded or not self.stored_ns:
            return parse_time(recorded or headers.get("Nats-Time-Stamp", ""))
        return self.stored_ns


class StreamState(NamedTuple):
    """``created``: when the stream was made, RFC 3339; "": there is none. ``deleted``: sequences without a message."""

    created: str
    messages: int
    first_seq: int
    last_seq: int
    deleted: list[int]
    max_age_s: float = 0.0
    max_bytes: int = -1


class LogFiles(abc.ABC):
    """Streams whose broker does not run, read from its files (``penstock.log_tools.sources``). The methods are the
    functions below.
    """

    subjects: Subjects
    clustered: bool

    @abc.abstractmethod
    def read(
        self, stream: str, subject: str, *, after: int, since_ns: int, until_seq: int | None
    ) -> Iterator[Entry]: ...

    @abc.abstractmethod
    def read_backwards(self, stream: str, subject: str, *, before: int) -> Iterator[Entry]: ...

    @abc.abstractmethod
    def get_last(self, stream: str, subject: str) -> Entry | None: ...

    @abc.abstractmethod
    def get_last_of(self, stream: str, subjects: Sequence[str]) -> list[Entry]: ...

    @abc.abstractmethod
    def get_next(self, stream: str, subject: str, after: int) -> Entry | None: ...

    @abc.abstractmethod
    def state(self, stream: str) -> StreamState: ...


Readable: TypeAlias = "Bus | LogFiles"  # what has a log to read


def parse_time(text: str) -> int:
    """Unix nanoseconds of an RFC 3339 time stamp with up to nine decimals; 0 if there is none."""
    if not text:
        return 0
    date, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC).timestamp()
    return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)


def format_time(time_ns: int) -> str:
    """RFC 3339 with nanoseconds, UTC."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


async def read(
    bus: Readable,
    stream: str,
    subject: str,
    *,
    after: int = 0,
    since_ns: int = 0,
    until_seq: int | None = None,
    batch: int = BATCH,
) -> AsyncGenerator[Entry, None]:
    """Stored messages of ``subject`` (wildcards allowed) in stream order: at least all stored before the call.

    Args:
        after: start after this sequence.
        since_ns: start at the first message stored at or after this Unix time, if ``after`` is 0.
        until_seq: stop after this sequence.
        batch: messages per request.
    Raises:
        ServingError: the stream did not answer within a few seconds (in a cluster: or had no leader for longer).
    """
    if isinstance(bus, LogFiles):
        for entry in bus.read(stream, subject, after=after, since_ns=since_ns, until_seq=until_seq):
            yield entry
        return
    too_early = bool(since_ns) and not after
    if too_early:
        after = await before_time(bus, stream, since_ns)
    while True:
        query: dict[str, Any] = {"batch": batch, "max_bytes": BATCH_BYTES, "next_by_subj": subject, "seq": after + 1}
        entries, pending = await _batch(bus, stream, query)
        for entry in entries:
            if until_seq is not None and entry.seq > until_seq:
                return
            if too_early and server_ns(entry) < since_ns:
                continue  # a replica that lagged behind knew no better place to start
            too_early = False
            yield entry
        if entries:
            after = entries[-1].seq
            if pending:
                continue
        if not bus.clustered or after == until_seq:
            return
        missed = await _ask_leader(bus, stream, {"next_by_subj": subject, "seq": after + 1}, LEADER_S)
        if missed is None or (until_seq is not None and missed.seq > until_seq):
            return
        yield missed
        after = missed.seq


async def get_since(bus: "Bus", stream: str, since_ns: int) -> Entry | None:
    """Find the first message stored at or after a Unix time, with the broker's own search (see ``before_time``).

    Raises:
        ServingError: the stream did not answer in time.
    """
    return await _at_or_after(bus, stream, {"start_time": format_time(since_ns)})


async def _at_or_after(bus: "Bus", stream: str, query: dict[str, Any]) -> Entry | None:
    entries, _ = await _batch(bus, stream, {"batch": 1, "max_bytes": BATCH_BYTES, "next_by_subj": ">"} | query)
    return entries[0] if entries else None


async def before_time(bus: "Bus", stream: str, since_ns: int) -> int:
    """The sequence of the last message stored before a time, or one from there to the first message stored later.

    Once nats-server 2.15.1 was killed and has started again, its search by time (``start_time``) passes over each block
    of the stream's file whose last message had been erased, and thousands of messages with it. So what it finds is
    checked, and looked for by sequences where that is wrong.

    Args:
        since_ns: Unix time.
    Raises:
        ServingError: the stream did not answer in time.
    """

    found = await get_since(bus, stream, since_ns)
    if found is not None:
        if found.seq == 1:
            return 0
        before = await _at_or_after(bus, stream, {"seq": found.seq - 1})
        if before is not None and before.seq < found.seq and server_ns(before) < since_ns:
            return before.seq
    end = found.seq - 1 if found is not None else (await stream_end(bus, stream))[0]
    # Backwards in growing steps, since the time is mostly near the end: for each place that is looked at, the broker
    # keeps a whole block of the file (8 MiB) in memory for ten seconds.
    early, late, step = 0, end + 1, 1  # a message before that time, and where the messages that follow ``end`` are late
    while not early:
        at = max(1, end + 1 - step)
        entry = await _at_or_after(bus, stream, {"seq": at})
        if entry is not None and entry.seq < late and server_ns(entry) < since_ns:
            early = entry.seq
        elif at == 1:
            return entry.seq - 1 if entry is not None else 0
        else:
            late, step = at, 2 * step
    while early + 1 < late:
        middle = (early + late) // 2
        entry = await _at_or_after(bus, stream, {"seq": middle})
        if entry is None or entry.seq >= late or server_ns(entry) >= since_ns:
            late = middle
        else:
            early = entry.seq
    return early


async def read_backwards(
    bus: Readable, stream: str, subject: str, *, before: int = 0, window: int = BATCH
) -> AsyncGenerator[Entry, None]:
    """Stored messages of ``subject`` (wildcards allowed), newest first.

    Args:
        before: start before this sequence; 0: at the end of the stream.
        window: sequences that are read at a time. They may contain other subjects, and gaps.
    Raises:
        ServingError: as for ``read``.
    """
    if isinstance(bus, LogFiles):
        for entry in bus.read_backwards(stream, subject, before=before):
            yield entry
        return
    if not before:
        last = await get_last(bus, stream, subject, newest=True)
        if last is None:
            return
        before = last.seq + 1
    first = await get_next(bus, stream, subject, 0)
    while first is not None and before > first.seq:
        start = max(first.seq, before - window)
        entries = [each async for each in read(bus, stream, subject, after=start - 1, until_seq=before - 1)]
        for entry in reversed(entries):
            yield entry
        before = start


async def get_last(
    bus: Readable, stream: str, subject: str, *, newest: bool = False, within_s: float = LEADER_S
) -> Entry | None:
    """The last message of ``subject`` (wildcards allowed); None: the stream has none, confirmed by its leader.

    Args:
        subject: not ">", of which the broker finds none if the stream's last message was deleted.
        newest: ask the leader. Without it the answer may, in a cluster, have been replaced a moment ago: enough for
            subjects that only ever have one message.
    Raises:
        ServingError: the stream did not answer in time.
    """
    if isinstance(bus, LogFiles):
        return bus.get_last(stream, subject)
    return await _get_of(bus, stream, subject, lambda of: {"last_by_subj": of}, replica=not newest, within_s=within_s)


async def get_last_of(bus: Readable, stream: str, subjects: Sequence[str]) -> list[Entry]:
    """The last message of each of these subjects (a few hundred at most) that has one on some replica.

    For callers that repeat the call: a subject without a message is not confirmed by the leader.

    Raises:
        ServingError: the stream did not answer.
    """
    if isinstance(bus, LogFiles):
        return bus.get_last_of(stream, subjects)
    query = {"multi_last": list(subjects), "batch": len(subjects), "max_bytes": BATCH_BYTES}
    return (await _batch(bus, stream, query))[0] if subjects else []


class _State(msgspec.Struct):
    first_seq: int = 0
    last_seq: int = 0
    deleted: list[int] | None = None


class _StreamInfo(msgspec.Struct):
    created: str = ""
    state: _State = msgspec.field(default_factory=_State)
    error: ApiError | None = None


_decode_info = msgspec.json.Decoder(_StreamInfo).decode


async def stream_end(bus: "Bus", stream: str) -> tuple[int, str]:
    """The last sequence of a stream, and when the stream was made (RFC 3339).

    Raises:
        ServingError: there is no such stream, or the broker did not answer.
    """
    info = await _info(bus, stream)
    return info.state.last_seq, info.created


async def _info(bus: "Bus", stream: str, query: bytes = b"") -> _StreamInfo:
    from nats.errors import Error as NatsError

    try:
        info = _decode_info((await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", query, timeout=STALL_S)).data)
    except (NatsError, OSError, TimeoutError) as error:
        raise _unreadable(stream, f"the broker does not say where it ends: {error!r}") from None
    if info.error is not None:
        raise _unreadable(stream, str(info.error))
    return info


async def is_replaced(bus: "Bus", stream: str, entry: Entry) -> bool:
    """Whether the broker has lost this message, and has stored another in its place or before it.

    Raises:
        ServingError: the stream cannot be read.
    """
    found = await get(bus, stream, entry.seq)
    if found is None:  # it or its replacement was deleted; clocks of a cluster's leaders differ
        found = await get_since(bus, stream, server_ns(entry) + 1 + (CLOCK_SKEW_NS if bus.clustered else 0))
    return found is not None and found.seq <= entry.seq and server_ns(found) > server_ns(entry)


async def find_lost(bus: "Bus", stream: str, stored: Collection[tuple[int, str]]) -> set[tuple[int, str]]:
    """Which of these messages the broker has lost since it stored them.

    A message damaged on disk leaves a gap. After a power failure, the stream ends earlier, and new messages may reuse
    the lost sequences. Messages are therefore compared from the last one back to the first that is still there.

    Args:
        stored: sequence and prefix of the message id of each. At most one of several with the same sequence exists. All
            must date from before the same loss: an intact later message would hide the loss of earlier ones.
    Raises:
        ServingError: the stream cannot be read.
    """
    if not stored:
        return set()
    state = (await _info(bus, stream, b'{"deleted_details": true}')).state
    gone = set(state.deleted or ())
    of: dict[int, list[str]] = {}
    for seq, name in stored:
        of.setdefault(seq, []).append(name)
    lost = {(seq, name) for seq, name in stored if seq in gone or seq > state.last_seq}
    for seq in sorted((seq for seq in of if seq not in gone and seq <= state.last_seq), reverse=True):
        if seq < state.first_seq:
            break
        entry = await get(bus, stream, seq)
        found = [name for name in of[seq] if entry is not None and _id_of(entry).startswith(name)]
        lost.update((seq, name) for name in of[seq] if name not in found)
        if found:
            break
    return lost


def _id_of(entry: Entry) -> str:
    return str(entry.headers.get(HEADER_MSG_ID, ""))


class Lifetime(NamedTuple):
    """Where a stream ends, and when it was made (Unix time): what tells positions in it from those in a lost one.

    A broker that lost its store has another stream of the same name, whose sequences begin again.

    Attributes:
        first: sequence of the first message; of a stream without messages, after ``end``.
    """

    end: int
    created_ns: int
    first: int = 1

    def has(self, seq: int, stored_ns: int) -> bool:
        """Whether the message that was stored then at that sequence was stored in this stream."""
        return seq <= self.end and stored_ns >= self.created_ns


async def lifetime(bus: "Bus", stream: str) -> Lifetime:
    """
    Raises:
        ServingError: as ``stream_end``.
    """
    info = await _info(bus, stream)
    return Lifetime(info.state.last_seq, parse_time(info.created), max(1, info.state.first_seq))


async def get(bus: Readable, stream: str, seq: int, *, within_s: float = LEADER_S) -> Entry | None:
    """The message at ``seq``; None: the stream does not have it, confirmed by its leader.

    Raises:
        ServingError: the stream did not answer in time.
    """
    if isinstance(bus, LogFiles):
        found = bus.get_next(stream, ">", seq - 1)
        return found if found is not None and found.seq == seq else None
    return await _get(bus, stream, {"seq": seq}, replica=True, within_s=within_s)


async def get_next(bus: Readable, stream: str, subject: str, after: int, *, within_s: float = LEADER_S) -> Entry | None:
    """The first message of ``subject`` (wildcards allowed) after a sequence; None and errors as for ``get``."""
    if isinstance(bus, LogFiles):
        return bus.get_next(stream, subject, after)
    return await _get_of(
        bus, stream, subject, lambda of: {"seq": after + 1, "next_by_subj": of}, replica=True, within_s=within_s
    )


async def _get_of(
    bus: "Bus", stream: str, subject: str, query: Callable[[str], dict[str, Any]], *, replica: bool, within_s: float
) -> Entry | None:
    """What a query finds of a subject.

    For the first or the last message of a wildcard the broker looks through all subjects of the stream: 5 ms of CPU
    time for 35,000 records. Mostly the first or last message of all is one of them. It has no last message of all if
    that was deleted, though there are others.
    """
    if subject.endswith(".>"):
        found = await _get(bus, stream, query(">"), replica=replica, within_s=within_s)
        if found is not None and found.subject.startswith(subject[:-1]):
            return found
    return await _get(bus, stream, query(subject), replica=replica, within_s=within_s)


async def _get(bus: "Bus", stream: str, query: dict[str, Any], *, replica: bool, within_s: float) -> Entry | None:
    until = time.monotonic() + (within_s if bus.clustered else min(within_s, STALL_S))
    if replica or not bus.clustered:
        message = await _request(bus, f"$JS.API.DIRECT.GET.{stream}", query, until)
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            return _entry(message)
        if status != "404":
            raise _unreadable(stream, f"{status} {headers.get('Description', '')}")
        if not bus.clustered:
            return None
    return await _ask_leader(bus, stream, query, max(0.0, until - time.monotonic()))


async def _ask_leader(bus: "Bus", stream: str, query: dict[str, Any], within_s: float) -> Entry | None:
    """One message as the stream's leader has it; None: it has none."""
    until = time.monotonic() + within_s
    while True:
        reply = _decode((await _request(bus, f"$JS.API.STREAM.MSG.GET.{stream}", query, until, patient=True)).data)
        if reply.message is not None:
            return _stored(reply.message)
        assert reply.error is not None
        if reply.error.err_code == NO_MESSAGE_FOUND:
            return None
        if reply.error.code != 503:  # no leader for the moment
            raise _unreadable(stream, str(reply.error))
        await asyncio.sleep(AGAIN_S)


async def _request(bus: "Bus", subject: str, query: dict[str, Any], until: float, *, patient: bool = False) -> Message:
    """Ask, and repeat while the broker is away. ``patient``: also while no server answers (during an election)."""
    from nats.errors import Error as NatsError

    body = json.dumps(query).encode()
    while (left := until - time.monotonic()) > 0:
        try:
            if bus.connected:
                message: Message = await bus.nc.request(subject, body, timeout=min(ASK_S, left))
                if not patient or message.data:
                    return message
        except (NatsError, OSError, TimeoutError):
            pass
        await asyncio.sleep(AGAIN_S)
    raise ServingError(
        Code.broker_unavailable,
        f"the broker did not answer {subject} in time; check that it runs, has its streams ('penstock streams apply') "
        "and, in a cluster, a majority of its nodes",
        retry_after=1.0,
    )


class _Message(msgspec.Struct):
    subject: str
    seq: int
    time: str = ""
    hdrs: str = ""  # base64
    data: str = ""  # base64


class _Reply(msgspec.Struct):
    message: _Message | None = None
    error: ApiError | None = None


_decode = msgspec.json.Decoder(_Reply).decode


def _stored(message: _Message) -> Entry:
    """The leader's answer in the form of a direct get."""
    headers: dict[str, str] = {}
    for line in base64.b64decode(message.hdrs).decode().split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    headers |= {"Nats-Subject": message.subject, "Nats-Sequence": str(message.seq), "Nats-Time-Stamp": message.time}
    return Entry(message.subject, message.seq, base64.b64decode(message.data), headers)


def _entry(message: Message) -> Entry:
    headers = message.headers or {}
    return Entry(
        headers["Nats-Subject"],
        int(headers["Nats-Sequence"]),
        message.data,
        headers,
        int(headers.get("Nats-Last-Sequence", "0")),
    )


def server_ns(entry: Entry) -> int:
    """When the server stored it, Unix time; also if it was imported."""
    return parse_time(entry.headers["Nats-Time-Stamp"])


def _unreadable(stream: str, reason: str) -> ServingError:
    return ServingError(
        Code.broker_unavailable,
        f"stream {stream} cannot be read ({reason}); check 'penstock streams apply' and the user's permissions",
    )


async def _batch(bus: "Bus", stream: str, query: dict[str, Any]) -> tuple[list[Entry], int]:
    """One request: its messages, and how many more there are. In a cluster it is repeated once, to another replica."""
    if bus.clustered:
        try:
            return await _batch_once(bus, stream, query, ASK_S)
        except ServingError:
            pass
    return await _batch_once(bus, stream, query, STALL_S)


async def _batch_once(bus: "Bus", stream: str, query: dict[str, Any], stall_s: float) -> tuple[list[Entry], int]:
    inbox = bus.nc.new_inbox()
    entries: list[Entry] = []
    ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def arrived(message: Message) -> None:
        if (message.headers or {}).get("Status") is None:
            entries.append(_entry(message))
        elif not ended.done():
            ended.set_result(message)

    sub = await bus.nc.subscribe(inbox, cb=arrived)
    try:
        await bus.nc.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode(), reply=inbox)
        while not ended.done():
            before = len(entries)
            await asyncio.wait((ended,), timeout=stall_s)
            if len(entries) == before and not ended.done():
                if entries:  # the link broke halfway; return what came, and read on
                    return entries, max(_pending(entries[-1].headers), 1)
                raise ServingError(
                    Code.broker_unavailable,
                    f"stream {stream} did not answer within {stall_s:g} s; check that the broker runs and that the "
                    "user of --nats-url has the permissions of this role",
                )
        headers = ended.result().headers or {}
        match headers.get("Status"):
            case "204":
                return entries, _pending(headers)
            case "404":
                return entries, 0
            case status:
                raise _unreadable(stream, f"{status} {headers.get('Description', '')}")
    finally:
        if not bus.nc.is_closed:
            await sub.unsubscribe()


def _pending(headers: Mapping[str, str]) -> int:
    """Messages that are left after one."""
    return int(headers.get("Nats-Num-Pending", "0"))
