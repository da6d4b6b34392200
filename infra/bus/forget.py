"""Deletes what the log holds of requests that have ended.

Jobs go first, then requests, then records: a router that starts in between must not find a job without its end, which
it would place again. What was not deleted is found again, as long as the record is there.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

from infra.bus.connection import Bus
from infra.bus.direct_get import get_last, read
from schemas.ids import time_of
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import HEADER_NO_STORE, request_of

BATCH = 50  # the messages of a few seconds: with their prompts, many more are megabytes that nobody wants

Delete = Callable[[str, int], Awaitable[object]]  # (stream, sequence)


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        subject: of its record.
        ended_ns: Unix time.
        apart: made with no_store: it has no content, or, of an older build, tokens in messages of their own.
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


async def forget_messages(bus: Bus, ended: Sequence[Ended], delete: Delete, *, records: bool = True) -> int:
    """Delete the jobs, requests and records of these requests; returns how many messages that were.

    Args:
        records: False: leave the records.
    Raises:
        ServingError: a stream cannot be read. ``delete`` may raise others.
    """
    ids = {each.id for each in ended}
    since_ns = min(time_of(each.id) for each in ended) - CLOCK_SKEW_NS
    ended_ns = max(each.ended_ns for each in ended)
    messages = 0
    for name, kind in (("WORK", "work"), ("REQUESTS", "request")):
        stream = bus.subjects.stream(name)
        subject = bus.subjects.all(kind)
        if kind == "request" and len(ended) == 1 and not ended[0].apart:
            subject = bus.subjects.shard_of(ended[0].id)
        async for entry in read(bus, stream, subject, since_ns=since_ns, batch=BATCH):
            if entry.time_ns > ended_ns + CLOCK_SKEW_NS:
                break
            if entry.subject == bus.subjects.erased:
                continue
            if request_of(entry.headers) in ids:
                await delete(stream, entry.seq)
                messages += 1
    messages += await _forget_unstored(bus, ids, since_ns, delete)
    stream = bus.subjects.stream("DONE")
    for each in ended if records else ():
        async for entry in read(bus, stream, each.subject):
            await delete(stream, entry.seq)
            messages += 1
    return messages


async def _forget_unstored(bus: Bus, ids: Collection[str], since_ns: int, delete: Delete) -> int:
    """What older builds stored of requests with ``no_store``: tokens apart, after their erasure an entry for lists."""
    entries = []
    stream = bus.subjects.stream("TOKENS")
    for each in ids:
        entries += [(stream, entry.seq) async for entry in read(bus, stream, bus.subjects.tokens_of(each))]
    stream = bus.subjects.stream("REQUESTS")
    async for entry in read(bus, stream, bus.subjects.erased, since_ns=since_ns):
        if request_of(entry.headers) in ids:
            entries.append((stream, entry.seq))
    for name, seq in entries:
        await delete(name, seq)
    return len(entries)
