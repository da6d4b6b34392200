"""Looking things up in a stream: batch direct get, without a consumer (ADR-31)."""

import asyncio
import datetime
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from configs.bus.connection import Bus
from schemas.errors import Code, ServingError

BATCH = 500
BATCH_BYTES = 4 << 20
STALL_S = 5.0


class Entry(NamedTuple):
    """One stored message. ``previous``: sequence of the message before it on the same subject."""

    subject: str
    seq: int
    data: bytes
    headers: dict[str, str]
    previous: int = 0

    @property
    def time_ns(self) -> int:
        """When the server stored it, Unix time."""
        return parse_time(self.headers.get("Nats-Time-Stamp", ""))


def parse_time(text: str) -> int:
    """Unix nanoseconds of an RFC 3339 time stamp with up to nine decimals; 0 if there is none."""
    if not text:
        return 0
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
    return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)


def format_time(time_ns: int) -> str:
    """RFC 3339 with nanoseconds, UTC."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


async def read(
    bus: Bus,
    stream: str,
    subject: str,
    *,
    after: int = 0,
    since_ns: int = 0,
    until_seq: int | None = None,
) -> AsyncIterator[Entry]:
    """Stored messages of ``subject`` (wildcards allowed) in stream order, up to the present end.

    Args:
        after: start behind this sequence.
        since_ns: start at the first message stored at or after this Unix time, if ``after`` is 0.
        until_seq: stop behind this sequence.
    Raises:
        ServingError: the stream did not answer within a few seconds.
    """
    while True:
        query: dict[str, Any] = {"batch": BATCH, "max_bytes": BATCH_BYTES, "next_by_subj": subject}
        if after or not since_ns:
            query["seq"] = after + 1
        else:
            query["start_time"] = format_time(since_ns)
        entries, pending = await _batch(bus, stream, query)
        for entry in entries:
            if until_seq is not None and entry.seq > until_seq:
                return
            yield entry
        if not entries or not pending:
            return
        after = entries[-1].seq


async def _batch(bus: Bus, stream: str, query: dict[str, Any]) -> tuple[list[Entry], int]:
    """One request: its messages, and how many more there are."""
    inbox = bus.nc.new_inbox()
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def arrived(message: Any) -> None:
        queue.put_nowait(message)

    sub = await bus.nc.subscribe(inbox, cb=arrived)
    entries: list[Entry] = []
    pending = 0
    try:
        await bus.nc.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode(), reply=inbox)
        while True:
            message = await asyncio.wait_for(queue.get(), STALL_S)
            headers = message.headers or {}
            status = headers.get("Status")
            if status == "204":
                return entries, int(headers.get("Nats-Num-Pending", "0"))
            if status == "404":
                return entries, 0
            if status is not None:
                raise ServingError(
                    Code.broker_unavailable,
                    f"stream {stream} cannot be read ({status} {headers.get('Description', '')}); "
                    "check 'penstock streams apply' and the user's permissions",
                )
            pending = int(headers.get("Nats-Num-Pending", "0"))
            entries.append(
                Entry(
                    headers["Nats-Subject"],
                    int(headers["Nats-Sequence"]),
                    message.data,
                    headers,
                    int(headers.get("Nats-Last-Sequence", "0")),
                )
            )
    except TimeoutError:
        if entries:  # the link broke in the middle; what came is good, and more is to come
            return entries, max(pending, 1)
        raise ServingError(Code.broker_unavailable, f"stream {stream} did not answer within {STALL_S:g} s") from None
    finally:
        if not bus.nc.is_closed:
            await sub.unsubscribe()
