"""Messages of the log as records, from a broker or from files."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.infra.bus.direct_get import Entry, Readable, format_time, read
from penstock.log_tools.sources.data_folder import StoredLog
from penstock.log_tools.sources.log_line import LogLine, Selection
from penstock.log_tools.sources.open_log import Log
from penstock.log_tools.sources.store_files import message, parse_headers
from penstock.log_tools.timeline.read import stored_at
from penstock.schemas.requests import GenerateRequest, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S

BATCH = 1_000
FEW = 50  # requests, of which each one's place in the log is looked up
NS = 1_000_000_000
_SERVERS_HEADERS = "Nats-"
_KEPT_HEADERS = ("Nats-Msg-Id",)


async def copy_messages(
    log: Log, stream: str, until_seq: int, spans: Sequence[tuple[int, int]], add: Callable[[LogLine], None]
) -> None:
    """Pass the messages of a stream that were stored in these times (see ``Places``) to ``add``.

    Raises:
        ServingError: the stream cannot be read.
    """
    name = log.reader.subjects.stream(stream)
    for since, until in spans if stream != "KV" else [(0, spans[-1][1])]:  # routers know KV from its beginning on
        if log.files is not None:
            for record in records_of(log.files, stream, since_ns=since, until_seq=until_seq, until_ns=until):
                add(record)
            continue
        before = format_time(until) if until else ""
        stored = read(log.bus, name, ">", since_ns=since, until_seq=until_seq, batch=BATCH)
        async with contextlib.aclosing(stored) as entries:
            async for entry in entries:
                record = of_entry_as_record(stream, entry)
                if before and record.time > before:
                    break
                add(record)


class Places(NamedTuple):
    """Where the log has the selected requests.

    Attributes:
        spans: when their messages were stored: times that ascend and do not overlap (Unix, ns). A 0 is an open end.
        requests: themselves, if they were looked up: of a few, each has its own time.
    """

    spans: list[tuple[int, int]]
    requests: list[GenerateRequest] | None = None


async def places_of(reader: Readable, chosen: Selection) -> Places:
    """
    Raises:
        ServingError: a stream cannot be read.
    """
    if not 0 < len(chosen.ids) <= FEW:
        return Places([span(chosen)])
    spans: list[tuple[int, int]] = []
    found = [await stored_at(reader, each) for each in chosen.ids]
    for since, until in sorted((each.since_ns, each.until_ns) for each in found):
        if spans and since <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], until)
        else:
            spans.append((since, until))
    return Places(spans, [each.request for each in found if each.request is not None])


def records_of(
    log: StoredLog, stream: str, *, since_ns: int = 0, until_seq: int = 0, until_ns: int = 0
) -> Iterator[LogLine]:
    """The messages of a stopped deployment's stream (without the namespace), between two times and up to a sequence."""
    stored = log.stream(log.subjects.stream(stream))
    for data, places in stored.by_block(since_ns=since_ns, until_ns=until_ns) if stored is not None else ():
        for seq, time_ns, at in places:
            if (until_seq and seq > until_seq) or (until_ns and time_ns > until_ns):
                return
            yield record_of(stream, data, seq, time_ns, at)


def record_of(stream: str, block: bytes, seq: int, time_ns: int, at: int) -> LogLine:
    """The message at a place of a block."""
    stored = message(block, at)
    headers = parse_headers(stored.headers) if stored.headers else {}
    return LogLine(stream, seq, format_time(time_ns), stored.subject, headers, stored.data)


def of_entry_as_record(stream: str, entry: Entry) -> LogLine:
    headers = {
        name: value
        for name, value in entry.headers.items()
        if name in _KEPT_HEADERS or not name.startswith(_SERVERS_HEADERS)
    }
    return LogLine(stream, entry.seq, entry.headers["Nats-Time-Stamp"], entry.subject, headers, entry.data)


def span(chosen: Selection) -> tuple[int, int]:
    """When the messages of the selected requests were stored, at the earliest and at the latest; 0: open."""
    first = min(map(time_of, chosen.ids), default=0) or chosen.since_ns
    last = max(map(time_of, chosen.ids), default=0) or chosen.until_ns
    longest = int(LONGEST_DEADLINE_S * NS) + CLOCK_SKEW_NS
    return max(0, first - CLOCK_SKEW_NS), last + longest if last else 0
