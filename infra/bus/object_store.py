"""Large immutable values by name, in a bucket of the object store: put once, read by anyone until it is too old.

The layout is that of every NATS client (ADR-20), so ``nats object`` shows and reads what is stored here. The
transport is ours: nats-py sends one chunk at a time and reads with an ordered consumer, for which it copies all it
has at every chunk, waits without bound and needs more rights.

A name says what the value is (its digest), so whoever is first stores it. Chunks of one upload have a subject of
their own, and the entry that names them is written last and only over the entry that was seen: an upload that comes
second takes its chunks back, and nothing that a reader may have found is ever removed before its age.
"""

import asyncio
import base64
import hashlib
import json
import time
from typing import Any, NamedTuple

import msgspec
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import format_time, get_last, read
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.streams import topology
from schemas.subjects import HEADER_MSG_ID

CHUNK = 512 * 1024
IN_FLIGHT = 8
PUT_S = 20.0
GET_S = 20.0
REQUEST_S = 2.0
PAUSE_S = 0.05
LARGE = 256 * 1024  # bytes from which hashing leaves the event loop
MARGIN_S = 60.0  # of an object's age: its first chunk is older than its entry, and clocks differ

_MOVED = 10071  # the entry is not the one that was seen
_BUSY = frozenset({10008, 10167})


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


class _Found(NamedTuple):
    info: _Info
    seq: int
    stored_ns: int


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    error: _Error | None = None


class _Moved(Exception):
    """Somebody else wrote the entry."""


class _Interrupted(Exception):
    """An upload has to begin anew."""


_info = msgspec.json.Decoder(_Info).decode
_reply = msgspec.json.Decoder(_Reply).decode


async def put(bus: Bus, bucket: str, name: str, data: bytes, *, keep_s: float = 0.0, timeout: float = PUT_S) -> float:
    """Store ``data`` under ``name``, unless it is there and young enough.

    Args:
        bucket: "media", ...; as in schemas.streams.
        keep_s: how long it is going to be needed. An object is stored again when it would not live as long, or when
            half of its life is over.
    Returns: seconds that it will live at least.
    Raises:
        ServingError: broker_unavailable: not confirmed within ``timeout`` seconds, or the bucket is full or missing.
    """
    full = bus.subjects.bucket(bucket)
    age_s = next(spec.max_age_s for spec in topology(bus.subjects).objects if spec.name == full)
    needed_s = min(max(age_s / 2, keep_s), age_s - 2 * MARGIN_S)
    until = time.monotonic() + timeout
    found = await _find(bus, full, name, until)
    if found is not None and not found.info.deleted and (left_s := _left_s(found, age_s)) >= needed_s:
        return left_s
    digest = await asyncio.to_thread(_sha256, data) if len(data) > LARGE else _sha256(data)
    while True:
        nuid = new_request_id(time.time_ns()).replace("-", "")
        chunks = f"$O.{full}.C.{nuid}"
        try:
            await _send_chunks(bus, chunks, data, until)
            break
        except _Interrupted:  # what is stored may not be all, or not in order
            await _take_back(bus, full, chunks)
    count = -(-len(data) // CHUNK)
    info = _Info(name, full, nuid, len(data), count, digest, format_time(time.time_ns()), options=_Options())
    headers = {
        HEADER_MSG_ID: nuid,
        "Nats-Rollup": "sub",
        "Nats-Expected-Last-Subject-Sequence": str(found.seq if found else 0),
    }
    try:
        await _store_entry(bus, _entry(full, name), msgspec.json.encode(info), headers, until)
    except _Moved:
        found = await _find(bus, full, name, until)
        if found is not None and found.info.nuid != nuid:  # ours, if only its confirmation was lost
            await _take_back(bus, full, chunks)
            return _left_s(found, age_s)
    return age_s - MARGIN_S


async def get(bus: Bus, bucket: str, name: str, *, limit: int, timeout: float = GET_S) -> bytes:
    """The object called ``name``. Whoever relies on its content checks the digest.

    Args:
        limit: bytes; a larger object is not read.
    Raises:
        ServingError: request_not_found: never stored, or too old; body_too_large; broker_unavailable: the broker did
            not answer within ``timeout`` seconds.
    """
    full, until = bus.subjects.bucket(bucket), time.monotonic() + timeout
    try:
        async with asyncio.timeout(timeout):
            found = await _find(bus, full, name, until)
            if found is not None and not found.info.deleted:
                data = await _read(bus, full, found.info, limit)
                if data is not None:
                    return data
    except TimeoutError:
        raise _silent(full, timeout) from None
    raise ServingError(
        Code.request_not_found, f"bucket {full} has no whole object {name[:80]!r}: it was never stored, or is too old"
    )


async def _read(bus: Bus, full: str, info: _Info, limit: int) -> bytes | None:
    """None: not all of it is there."""
    if info.size > limit:
        raise ServingError(
            Code.body_too_large, f"object {info.name[:80]!r} has {info.size} bytes, and the limit is {limit}"
        )
    parts, size = [], 0
    async for entry in read(bus, f"OBJ_{full}", f"$O.{full}.C.{info.nuid}"):
        parts.append(entry.data or b"")
        size += len(parts[-1])
        if size >= info.size:
            break
    return b"".join(parts) if size == info.size else None


async def _send_chunks(bus: Bus, subject: str, data: bytes, until: float) -> None:
    """All chunks, in order: a few are on their way at once, and one connection keeps their order.

    Raises:
        ServingError: the bucket is full.
        _Interrupted: one was not confirmed. Sent again it would stand behind its successors.
    """
    view = memoryview(data)
    for start in range(0, len(data), CHUNK * IN_FLIGHT):
        burst = range(start, min(start + CHUNK * IN_FLIGHT, len(data)), CHUNK)
        sent = (_request(bus, subject, bytes(view[at : at + CHUNK]), None, until, again=False) for at in burst)
        for reply in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply
            if _refused(reply, subject):
                raise _Interrupted


async def _store_entry(bus: Bus, subject: str, payload: bytes, headers: dict[str, str], until: float) -> None:
    """Publish until it is confirmed; its message id makes that safe.

    Raises:
        ServingError: not in time, or refused.
        _Moved: its expected sequence was wrong.
    """
    while True:  # ends at ``until``
        if not _refused(await _request(bus, subject, payload, headers, until), subject):
            return
        await asyncio.sleep(PAUSE_S)


def _refused(reply: Any, subject: str) -> bool:
    """Whether to try again.

    Raises:
        ServingError: refused for good.
        _Moved: its expected sequence was wrong.
    """
    error = _reply(reply.data).error
    if error is None:
        return False
    if error.err_code == _MOVED:
        raise _Moved
    if error.err_code in _BUSY:
        return True
    raise ServingError(
        Code.broker_unavailable,
        f"the object store refused {subject}: {error.description} ({error.err_code}); check the bucket's max_bytes "
        "and the free disk space",
    )


async def _find(bus: Bus, full: str, name: str, until: float) -> _Found | None:
    """The newest entry of a name.

    Raises:
        ServingError: the bucket cannot be read.
    """
    entry = await get_last(bus, f"OBJ_{full}", _entry(full, name), within_s=until - time.monotonic())
    if entry is None:
        return None
    try:
        info = _info(entry.data)
    except msgspec.MsgspecError as error:
        raise ServingError(Code.broker_unavailable, f"object {name[:80]!r} of {full} is unreadable: {error}") from None
    return _Found(info, entry.seq, entry.time_ns)


async def _request(
    bus: Bus, subject: str, payload: bytes, headers: dict[str, str] | None, until: float, again: bool = True
) -> Any:
    """A request, made again while the broker is away (no stream answers for a moment after its restart).

    Raises:
        ServingError: no answer until then.
        _Interrupted: none at the first time, and not ``again``.
    """
    began = time.monotonic()
    while (left := until - time.monotonic()) > 0:
        try:
            if bus.connected:
                return await bus.nc.request(subject, payload, timeout=min(REQUEST_S, left), headers=headers)
        except (NatsError, OSError, TimeoutError):
            pass
        await asyncio.sleep(PAUSE_S)
        if not again:
            raise _Interrupted
    raise _silent(subject, time.monotonic() - began)


async def _take_back(bus: Bus, full: str, subject: str) -> None:
    """Chunks that nobody knows of. What is missed here goes by its age."""
    try:
        request = json.dumps({"filter": subject}).encode()
        await bus.nc.request(f"$JS.API.STREAM.PURGE.OBJ_{full}", request, timeout=REQUEST_S)
    except (NatsError, OSError, TimeoutError):
        pass


def _entry(full: str, name: str) -> str:
    return f"$O.{full}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _left_s(found: _Found, age_s: float) -> float:
    return age_s - MARGIN_S - (time.time_ns() - found.stored_ns) / 1e9


def _sha256(data: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def _silent(what: str, seconds: float) -> ServingError:
    return ServingError(
        Code.broker_unavailable,
        f"the broker did not answer for {what} within {seconds:.0f} s; check that it runs and has its streams "
        "('penstock streams apply')",
        retry_after=1.0,
    )
