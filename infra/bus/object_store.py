"""Large values by name, in buckets of the object store. The only client of the object store in Penstock.

The layout is that of every NATS client (ADR-20), so ``nats object`` lists and reads what is stored here. nats-py's
client is not used: it sends one chunk at a time, copies everything it has at every chunk that it reads, waits without
bound and needs more permissions.

``put`` stores an immutable value whose name is its digest, so the first upload wins. ``replace`` stores the newest
state under a fixed name. The chunks of one upload have a subject of their own. The entry that names them is written
last, and only over the entry that was read before: an upload that comes second deletes its own chunks.
"""

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, format_time, get_last, read
from penstock.infra.bus.jetstream import BUSY, WRONG_LAST_SEQUENCE, Message, decode_publish_reply
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT, HEADER_MSG_ID

CHUNK = 512 * 1024
IN_FLIGHT = 8
PUT_S = 20.0
GET_S = 20.0
REQUEST_S = 2.0
PAUSE_S = 0.05
# Bytes from which hashing leaves the event loop: they hold it for 0.12 ms, and a thread costs 25 µs of CPU
# (``python -m tests.perf.tuning threads``). 10 MB would hold it for 5 ms.
LARGE = 256 * 1024
MARGIN_S = 60.0  # of an object's age: its first chunk is older than its entry, and clocks differ


class _Options(msgspec.Struct):
    max_chunk_size: int = CHUNK


class _Info(msgspec.Struct):
    """An object's entry, as all clients write it."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str = ""
    mtime: str = ""
    deleted: bool = False
    options: _Options | None = None


class _StoredObject(NamedTuple):
    info: _Info
    entry: Entry


class Until(NamedTuple):
    """The end of a call's time, and how much it had, in seconds."""

    end: float
    timeout: float

    @classmethod
    def after(cls, timeout: float) -> "Until":
        return cls(time.monotonic() + timeout, timeout)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class _Moved(Exception):
    """Another upload wrote the entry."""


class _Interrupted(Exception):
    """An upload has to start over."""


_info = msgspec.json.Decoder(_Info).decode


async def put(bus: Bus, bucket: str, name: str, data: bytes, *, keep_s: float = 0.0, timeout: float = PUT_S) -> float:
    """Store an immutable value, unless the bucket has it and keeps it for long enough.

    Args:
        bucket: without the namespace, as in ``penstock.schemas.streams`` ("media", ...).
        name: unique to the content, such as its digest.
        keep_s: seconds for which it will be needed. An object is stored again when it would be discarded earlier, or
            when half of its age limit is over.
    Returns: seconds for which the object is kept at least.
    Raises:
        ServingError: broker_unavailable: not confirmed within ``timeout`` seconds, or the bucket is full or missing.
    """
    full = bus.subjects.bucket(bucket)
    age_s = next(spec.max_age_s for spec in topology(bus.subjects).objects if spec.name == full)
    needed_s = min(max(age_s / 2, keep_s), age_s - 2 * MARGIN_S)
    until = Until.after(timeout)
    stored = await _find(bus, full, name, until)
    if stored is not None and not stored.info.deleted and (left_s := _left_s(bus, stored, age_s)) >= needed_s:
        return left_s
    winner = await _upload(bus, full, name, data, stored, until)
    return age_s - MARGIN_S if winner is None else _left_s(bus, winner, age_s)


async def replace(bus: Bus, bucket: str, name: str, data: bytes | Sequence[bytes], *, timeout: float = PUT_S) -> None:
    """Store the newest value of ``name`` and delete the chunks of the value before it.

    For one writer per name. Of two at once one wins, and the other's value is lost without an error.

    Args:
        data: in parts, each is stored as one chunk: to join large ones would block the event loop.
    Raises:
        ServingError: as ``put``.
    """
    full, until = bus.subjects.bucket(bucket), Until.after(timeout)
    stored = await _find(bus, full, name, until, newest=True)
    winner = await _upload(bus, full, name, data, stored, until)
    if winner is None and stored is not None:
        await _purge(bus, full, _chunks(full, stored.info.nuid))


async def _upload(
    bus: Bus, full: str, name: str, data: bytes | Sequence[bytes], previous: _StoredObject | None, until: Until
) -> _StoredObject | None:
    """Store chunks, then an entry over ``previous``. Returns the entry of another upload that came first, if any."""
    chunks = (
        [memoryview(data)[at : at + CHUNK] for at in range(0, len(data), CHUNK)] if isinstance(data, bytes) else data
    )
    size = sum(map(len, chunks))
    digest = await asyncio.to_thread(_sha256, chunks) if size > LARGE else _sha256(chunks)
    while True:
        nuid = new_request_id(bus.clock.now_ns()).replace("-", "")
        try:
            await _send_chunks(bus, _chunks(full, nuid), chunks, until)
            break
        except _Interrupted:  # what is stored may be incomplete or out of order
            await _purge(bus, full, _chunks(full, nuid))
    stored = format_time(bus.clock.now_ns())
    info = _Info(name, full, nuid, size, len(chunks), digest, stored, options=_Options())
    headers = {
        HEADER_MSG_ID: nuid,
        "Nats-Rollup": "sub",
        HEADER_LAST_ON_SUBJECT: str(previous.entry.seq if previous else 0),
    }
    try:
        await _store_entry(bus, _entry(full, name), msgspec.json.encode(info), headers, until)
    except _Moved:
        winner = await _find(bus, full, name, until)
        if winner is not None and winner.info.nuid != nuid:  # ours, if only its confirmation was lost
            await _purge(bus, full, _chunks(full, nuid))
            return winner
    return None


async def get(bus: Bus, bucket: str, name: str, *, limit: int, newest: bool = False, timeout: float = GET_S) -> bytes:
    """The object called ``name``. A caller that relies on its content checks the digest.

    Args:
        limit: bytes; a larger object is not read.
        newest: for names that are replaced: in a cluster, ask the stream's leader for the entry.
    Raises:
        ServingError: request_not_found: never stored, or too old; body_too_large; broker_unavailable: the broker did
            not answer within ``timeout`` seconds.
    """
    chunks, _ = await _whole(bus, bucket, name, limit, timeout, newest=newest)
    return b"".join(each.data for each in chunks)


async def delete(bus: Bus, bucket: str, name: str, *, timeout: float = PUT_S) -> None:
    """Delete an object, if it is there. What cannot be deleted expires by its age.

    Raises:
        ServingError: broker_unavailable: the broker did not answer within ``timeout`` seconds.
    """
    full = bus.subjects.bucket(bucket)
    stored = await _find(bus, full, name, Until.after(timeout), newest=True)
    if stored is not None:
        await _purge(bus, full, _entry(full, name))
        await _purge(bus, full, _chunks(full, stored.info.nuid))


async def messages(bus: Bus, bucket: str, name: str, *, limit: int, timeout: float = GET_S) -> list[Entry]:
    """An object as it is stored: its chunks, then its entry. The arguments and errors are those of ``get``."""
    chunks, entry = await _whole(bus, bucket, name, limit, timeout)
    return [*chunks, entry]


async def _whole(
    bus: Bus, bucket: str, name: str, limit: int, timeout: float, *, newest: bool = False
) -> tuple[list[Entry], Entry]:
    full, until = bus.subjects.bucket(bucket), Until.after(timeout)
    try:
        async with asyncio.timeout(timeout):
            stored = await _find(bus, full, name, until, newest=newest)
            if stored is not None and not stored.info.deleted:
                chunks = await _read(bus, full, stored.info, limit)
                if chunks is not None:
                    return chunks, stored.entry
    except TimeoutError:
        raise _silent(full, timeout) from None
    raise ServingError(
        Code.request_not_found, f"bucket {full} has no whole object {name[:80]!r}: it was never stored, or is too old"
    )


async def _read(bus: Bus, full: str, info: _Info, limit: int) -> list[Entry] | None:
    """The object's chunks; None: some of them are missing."""
    if info.size > limit:
        raise ServingError(
            Code.body_too_large, f"object {info.name[:80]!r} has {info.size} bytes, and the limit is {limit}"
        )
    chunks, size = [], 0
    async for entry in read(bus, f"OBJ_{full}", _chunks(full, info.nuid)):
        chunks.append(entry)
        size += len(entry.data)
        if size >= info.size:
            break
    return chunks if size == info.size else None


async def _send_chunks(bus: Bus, subject: str, chunks: Sequence[bytes | memoryview], until: Until) -> None:
    """Send all chunks, a few at a time; one connection keeps their order.

    Raises:
        ServingError: the bucket is full.
        _Interrupted: one was not confirmed. Resent, it would come after its successors.
    """
    for start in range(0, len(chunks), IN_FLIGHT):
        burst = chunks[start : start + IN_FLIGHT]
        sent = (_request(bus, subject, bytes(chunk), None, until, again=False) for chunk in burst)
        for reply in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply
            if _refused(reply, subject):
                raise _Interrupted


async def _store_entry(bus: Bus, subject: str, payload: bytes, headers: dict[str, str], until: Until) -> None:
    """Publish until it is confirmed; the message id makes that safe.

    Raises:
        ServingError: not in time, or refused.
        _Moved: its expected sequence was wrong.
    """
    while True:  # ends at ``until``
        if not _refused(await _request(bus, subject, payload, headers, until), subject):
            return
        await asyncio.sleep(PAUSE_S)


def _refused(reply: Message, subject: str) -> bool:
    """Whether a publish was refused for a moment only, and should be repeated."""
    error = decode_publish_reply(reply.data).error
    if error is None:
        return False
    if error.err_code == WRONG_LAST_SEQUENCE:
        raise _Moved
    if error.err_code in BUSY:
        return True
    raise ServingError(
        Code.broker_unavailable,
        f"the object store refused {subject}: {error}; check the bucket's max_bytes and the free disk space",
    )


async def _find(bus: Bus, full: str, name: str, until: Until, *, newest: bool = False) -> _StoredObject | None:
    """The entry of a name."""
    entry = await get_last(bus, f"OBJ_{full}", _entry(full, name), newest=newest, within_s=until.left)
    if entry is None:
        return None
    try:
        info = _info(entry.data)
    except msgspec.MsgspecError as error:
        raise ServingError(Code.broker_unavailable, f"object {name[:80]!r} of {full} is unreadable: {error}") from None
    return _StoredObject(info, entry)


async def _request(
    bus: Bus, subject: str, payload: bytes, headers: dict[str, str] | None, until: Until, again: bool = True
) -> Message:
    """A request, repeated while the broker is away (no stream answers for a moment after its restart).

    Raises:
        ServingError: no answer until then.
        _Interrupted: the first try was not answered, and ``again`` is False.
    """
    while (left := until.left) > 0:
        try:
            if bus.connected:
                reply: Message = await bus.nc.request(subject, payload, timeout=min(REQUEST_S, left), headers=headers)
                return reply
        except (NatsError, OSError, TimeoutError):
            pass
        await asyncio.sleep(PAUSE_S)
        if not again:
            raise _Interrupted
    raise _silent(subject, until.timeout)


async def _purge(bus: Bus, full: str, subject: str) -> None:
    """Purge chunks that no entry names, or an entry. What remains expires by its age."""
    try:
        request = json.dumps({"filter": subject}).encode()
        await bus.nc.request(f"$JS.API.STREAM.PURGE.OBJ_{full}", request, timeout=REQUEST_S)
    except (NatsError, OSError, TimeoutError):
        pass


def _chunks(full: str, nuid: str) -> str:
    return f"$O.{full}.C.{nuid}"


def _entry(full: str, name: str) -> str:
    return f"$O.{full}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _left_s(bus: Bus, stored: _StoredObject, age_s: float) -> float:
    return age_s - MARGIN_S - (bus.clock.now_ns() - stored.entry.time_ns) / 1e9


def _sha256(chunks: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return "SHA-256=" + base64.urlsafe_b64encode(digest.digest()).decode()


def _silent(operation: str, seconds: float) -> ServingError:
    return ServingError(
        Code.broker_unavailable,
        f"the broker did not answer for {operation} within {seconds:g} s; check that it runs and has its streams "
        "('penstock streams apply')",
        retry_after=1.0,
    )
