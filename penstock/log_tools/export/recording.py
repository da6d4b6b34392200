"""Recorded requests with their results, times and workers (a fold of the log, pure), and their images.

Requests name images by digest; their bytes are objects of the media bucket, which keeps them for about two hours. In an
export they are messages of the stream ``MEDIA``: the chunks of each object, then its entry. A replay copies them to its
deployment.
"""

from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

import msgspec
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import parse_time
from penstock.log_tools.sources.data_folder import MEDIA
from penstock.log_tools.sources.log_line import LogLine
from penstock.schemas import done, jobs, requests, tokens
from penstock.schemas.done import Done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import Job, Revoke
from penstock.schemas.requests import GenerateRequest, Media
from penstock.schemas.subjects import KEPT

MS = 1e6


class RecordedRun(msgspec.Struct):
    """One request, which may still be running.

    Attributes:
        done: its record; None: it has not ended.
        attempts: routing decisions.
        route: the workers of the last attempt, one per stage.
        revision: of the model that it last ran on; "": unknown.
        stored: when its token items were stored (broker clock, Unix ns) and how many tokens each has, by choice.
    """

    id: str
    request: GenerateRequest | None = None
    done: Done | None = None
    attempts: int = 0
    route: tuple[str, ...] = ()
    stored: dict[int, list[tuple[int, int]]] = {}
    revision: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """From acceptance to the first token; None: there was none."""
        times = self.done.timings if self.done is not None else None
        first = times.client_first_token_ns if times is not None else 0
        return (first - times.created_ns) / MS if times is not None and first else None

    @property
    def e2e_ms(self) -> float | None:
        """From acceptance to the end; None: unknown."""
        times = self.done.timings if self.done is not None else None
        return (times.ended_ns - times.created_ns) / MS if times is not None and times.ended_ns else None

    def itl_ms(self) -> "array[float]":
        """Times between tokens. Tokens that were stored together share the time since those before them."""
        times: array[float] = array("d")
        for items in self.stored.values():
            items.sort()
            for (before, _), (at, count) in pairwise(items):
                times.extend([(at - before) / MS / count] * count)
        return times

    @property
    def cached_tokens(self) -> int:
        return self.done.usage.cached if self.done is not None else 0


class Recording:
    """Runs by request id, in the order of their first message. Streams may be added in any order."""

    def __init__(self) -> None:
        self.runs: dict[str, RecordedRun] = {}

    def add(self, record: LogLine) -> None:
        """Add one message. A message that cannot be decoded, or is about no request, changes nothing."""
        try:
            if record.stream == "REQUESTS":
                request = requests.decode(record.data)
                self._run(request.id).request = request
            elif record.stream == "WORK":
                self._add_work(record)
            elif record.stream == "TOKENS":
                self._add_tokens(record)
            elif record.stream == "DONE":
                self._add_end(record)
        except msgspec.MsgspecError:
            return

    def _run(self, request: str) -> RecordedRun:
        run = self.runs.get(request)
        if run is None:
            run = self.runs[request] = RecordedRun(request, stored={})
        return run

    def _add_work(self, record: LogLine) -> None:
        if KEPT in record.subject.split("."):
            return
        message = jobs.decode(record.data)
        if isinstance(message, Revoke) or not isinstance(message, Job):
            return
        request = requests.decode(message.request)
        run = self._run(request.id)
        run.request = run.request or request
        if message.attempt < run.attempts:
            return
        run.attempts = message.attempt
        run.revision = message.decision.revision
        run.route = tuple(stage.worker for stage in message.decision.route) or (message.decision.chosen,)

    def _add_tokens(self, record: LogLine) -> None:
        at = parse_time(record.time)
        for item in tokens.decode(record.data).items:
            if item.choice >= 0 and item.tokens:
                self._run(item.request).stored.setdefault(item.choice, []).append((at, len(item.tokens) >> 2))

    def _add_end(self, record: LogLine) -> None:
        event = done.decode(record.data)
        if not isinstance(event, Done):
            return
        run = self._run(event.request)
        ran = event.timings.made_with
        run.revision = run.revision or (ran.revision if ran is not None else "")
        if run.done is None:
            run.done = event
            if run.request is None or not run.request.prompt:
                run.request = done.request_of(event) or run.request


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


async def move_media(source: Bus, target: Bus, runs: Collection[RecordedRun], keep_s: float) -> set[str]:
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
