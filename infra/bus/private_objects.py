"""Objects of one request with ``no_store``: stored for it alone, and erased with it.

Objects in ``infra.bus.object_store`` are shared by all requests that name the same content, and expire by their age,
which leaves their bytes on the disk. These have subjects of their own in the same bucket, without an entry: whoever
knows a request's id finds all that is stored for it, also parts of an upload that was interrupted.
"""

import asyncio

import msgspec
from blake3 import blake3

from infra.bus.connection import Bus
from infra.bus.direct_get import read
from infra.bus.object_store import CHUNK, GET_S, PAUSE_S, PUT_S, Until, _refused, _request
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest
from schemas.subjects import HEADER_MSG_ID

_NAME_BYTES = 16
INFO_S = 5.0


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct):
    state: _State = msgspec.field(default_factory=_State)
    error: object = None


_decode_info = msgspec.json.Decoder(_Info).decode


async def put_private(bus: Bus, bucket: str, request: str, digest: bytes, data: bytes) -> None:
    """Store a value for one request. To store it again changes nothing.

    Raises:
        ServingError: broker_unavailable: not confirmed in time, or the bucket is full or missing.
    """
    subject, until = _subject(bus, bucket, request, digest), Until.after(PUT_S)
    for number, at in enumerate(range(0, len(data), CHUNK)):
        # One at a time: a chunk that is sent again is dropped by its id, and never comes behind its successors.
        headers = {HEADER_MSG_ID: f"{subject}.{number}"}
        while True:  # ends at ``until``
            reply = await _request(bus, subject, data[at : at + CHUNK], headers, until)
            if not _refused(reply, subject):
                break
            await asyncio.sleep(PAUSE_S)


async def get_private(bus: Bus, bucket: str, request: str, digest: bytes, *, size: int) -> bytes:
    """A value of ``size`` bytes that was stored for a request. The caller checks the digest.

    Raises:
        ServingError: request_not_found: it is not stored, or not any more; broker_unavailable.
    """
    full = bus.subjects.bucket(bucket)
    parts, received = [], 0
    try:
        async with asyncio.timeout(GET_S):
            async for entry in read(bus, f"OBJ_{full}", _subject(bus, bucket, request, digest)):
                parts.append(entry.data)
                received += len(entry.data)
                if received >= size:
                    break
    except TimeoutError:
        raise ServingError(Code.broker_unavailable, f"bucket {full} was not read within {GET_S:g} s") from None
    if received != size:
        raise ServingError(Code.request_not_found, f"bucket {full} no longer has an image of request {request}")
    return b"".join(parts)


def media_owners(request: GenerateRequest) -> frozenset[str]:
    """Under which ids its media are stored: another than its own, if it took the id of an idempotency key's claim."""
    owners = (medium.private for medium in request.media if medium.private)
    return frozenset((request.id, *owners)) if request.media else frozenset()


async def private_sequences(bus: Bus, bucket: str, request: str) -> list[int]:
    """The sequences of everything that is stored for a request.

    Raises:
        ServingError: the bucket cannot be read.
    """
    full = bus.subjects.bucket(bucket)
    return [entry.seq async for entry in read(bus, f"OBJ_{full}", f"{_prefix(full)}.{request}.*")]


async def private_owners(bus: Bus, bucket: str) -> set[str]:
    """The ids of all requests for which something is stored.

    Raises:
        NatsError, TimeoutError: the broker did not answer.
        ServingError: the bucket cannot be read.
    """
    full = bus.subjects.bucket(bucket)
    wanted = msgspec.json.encode({"subjects_filter": f"{_prefix(full)}.>"})
    reply = await bus.nc.request(f"$JS.API.STREAM.INFO.OBJ_{full}", wanted, timeout=INFO_S)
    info = _decode_info(reply.data)
    if info.error is not None:
        raise ServingError(Code.broker_unavailable, f"bucket {full} cannot be read: {info.error}")
    return {subject.split(".")[-2] for subject in info.state.subjects or {}}


def _prefix(full: str) -> str:
    return f"$O.{full}.C.private"


def _subject(bus: Bus, bucket: str, request: str, digest: bytes) -> str:
    """The name is made of both, so that equal images of two requests cannot be told from their names."""
    name = blake3(request.encode() + digest).hexdigest(_NAME_BYTES)
    return f"{_prefix(bus.subjects.bucket(bucket))}.{request}.{name}"
