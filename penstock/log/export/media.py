"""The images of recorded requests: writes them to an export, and copies them to the deployment of a replay.

Requests name images by digest; their bytes are objects of the media bucket, which keeps them for about two hours. In an
export they are messages of the stream ``MEDIA``: the chunks of each object, then its entry.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.log.export.recording import Run
from penstock.log.sources.log_copy import MEDIA
from penstock.log.sources.log_line import LogLine
from penstock.schemas import done, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Media

BUCKET = "media"
LARGEST = 256 << 20  # bytes of one object
_FIELD = b"\xa5media"  # in the encoding of a request that has some


class Exported(NamedTuple):
    """How many objects were written, their bytes, and how many are not in the bucket or did not fit."""

    objects: int
    size: int
    gone: int
    too_large: int


def media_of(record: LogLine) -> tuple[Media, ...]:
    """The media of a message of REQUESTS or DONE. Pure."""
    if _FIELD not in record.data:
        return ()
    try:
        if record.stream == "REQUESTS":
            return requests.decode(record.data).media
        event = done.decode(record.data) if record.stream == "DONE" else None
        request = done.request_of(event) if isinstance(event, done.Done) else None
        return request.media if request is not None else ()
    except msgspec.MsgspecError:
        return ()


async def export_media(bus: Bus, digests: Iterable[bytes], limit: int, write: Callable[[LogLine], None]) -> Exported:
    """Pass the messages of these objects to ``write``, until they exceed ``limit`` bytes together.

    Raises:
        ServingError: the bucket cannot be read.
    """
    objects = size = gone = too_large = seq = 0
    for digest in digests:
        try:
            entries = await object_store.messages(bus, BUCKET, digest.hex(), limit=limit - size)
        except ServingError as error:
            if error.code not in (Code.request_not_found, Code.body_too_large):
                raise
            gone += error.code is Code.request_not_found
            too_large += error.code is Code.body_too_large
            continue
        objects += 1
        size += sum(len(entry.data) for entry in entries[:-1])
        for entry in entries:
            seq += 1
            write(LogLine(MEDIA, seq, entry.headers["Nats-Time-Stamp"], entry.subject, {}, entry.data))
    return Exported(objects, size, gone, too_large)


async def move_media(source: Bus, target: Bus, runs: Collection[Run], keep_s: float) -> set[str]:
    """Copy the media of requests to the target, unless it has them.

    Args:
        keep_s: seconds for which they will be needed.
    Returns: the requests some of whose media neither deployment has.
    Raises:
        ServingError: a bucket cannot be read or written.
    """
    there: dict[bytes, bool] = {}
    missing = set()
    for run in runs:
        for medium in run.request.media if run.request is not None else ():
            if medium.digest not in there:
                there[medium.digest] = await _move(source, target, medium.digest, keep_s)
            if not there[medium.digest]:
                missing.add(run.id)
    return missing


async def _move(source: Bus, target: Bus, digest: bytes, keep_s: float) -> bool:
    for bus in (source,) if source is target else (source, target):
        try:
            data = await object_store.get(bus, BUCKET, digest.hex(), limit=LARGEST)
        except ServingError as error:
            if error.code is not Code.request_not_found:
                raise
            continue
        if blake3(data).digest() == digest:
            await object_store.put(target, BUCKET, digest.hex(), data, keep_s=keep_s)
            return True
    return False
