"""Usage by tenants, API keys, models and adapters: hourly sums of ended requests. Pure.

The ledger of a cell is the stream USAGE on its broker. Its messages, called parts, cover consecutive ranges of DONE's
messages. A part has its sums and the last sequence that it counts, so that both are stored in one write. It grows, by
being replaced, until it is closed; then the next part begins. A write that is based on another part than the newest is
refused, so no message is counted twice.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.schemas.fleet import adapter_name
from penstock.schemas.subjects import HEADER_RECORDED_TIME
from penstock.schemas.summary import DONE, NOT_SAMPLED, RequestSummary
from penstock.schemas.wire import decoder

HOUR_NS = 3_600_000_000_000
MAX_ROWS = 2_000  # of a part, which is stored again whenever it grows


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The usage of requests that ended within one hour.

    Attributes:
        hour: of their ends by the broker's clock, in hours since 1970, UTC.
        key: the public part of an API key, such as "pst-0a1b2c3d4e5f"; "": without a key, or over NATS.
        adapter: the name of a LoRA adapter, whatever its weights; "": none.
        requests: number of requests with an answer, or part of one.
        cached: tokens of ``prompt`` from a cache.
        images: images and videos.
        reasoning: tokens of ``completion`` that are reasoning or its marks.
        reasoning_unknown: requests whose reasoning is not counted, since its marks are not single tokens.
    """

    hour: int
    tenant: str
    key: str = ""
    model: str = ""
    adapter: str = ""
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    images: int = 0
    reasoning: int = 0
    reasoning_unknown: int = 0

    @property
    def group(self) -> tuple[int, str, str, str, str]:
        """The fields that rows must share to be added."""
        return self.hour, self.tenant, self.key, self.model, self.adapter

    @property
    def tokens(self) -> int:
        """The tokens that count against a budget."""
        return self.prompt + self.completion


class UsageGap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Messages that DONE had discarded before they were counted.

    Attributes:
        messages: upper limit of their number; it includes messages that do not end a request.
        since_ns, until_ns: Unix time between which they were stored; 0: unknown.
    """

    messages: int
    since_ns: int = 0
    until_ns: int = 0


class UsagePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the ledger.

    Attributes:
        last: sequence in DONE up to which everything was counted, in this or an earlier part.
        counted_ns: Unix time at which that message was stored; in a recreated stream it differs.
        closed: it no longer grows.
        gap: the gap before its first message.
    """

    number: int
    last: int = 0
    counted_ns: int = 0
    rows: tuple[UsageRow, ...] = ()
    closed: bool = False
    gap: UsageGap | None = None


decode = decoder(UsagePart)


class CountedEnd(NamedTuple):
    """One message of DONE. ``time_ns``: Unix time at which it was stored; ``row``: its usage, None: nothing."""

    seq: int
    time_ns: int
    row: UsageRow | None


def count(seq: int, time_ns: int, headers: Mapping[str, str], summary: RequestSummary | None) -> CountedEnd:
    """The usage of a record.

    A request counts with its whole or partial answer, but not if it failed without a token. If it ran in another cell,
    only the record in its own cell counts. Imported records do not count.

    Args:
        summary: the record's; None: the message is not a record.
    """
    if summary is None or summary.origin or HEADER_RECORDED_TIME in headers:
        return CountedEnd(seq, time_ns, None)
    sampled = summary.endpoint not in NOT_SAMPLED  # others stream vectors, or steps of a picture
    completion = summary.completion_tokens if sampled else 0
    if summary.state != DONE and not completion:
        return CountedEnd(seq, time_ns, None)
    row = UsageRow(
        time_ns // HOUR_NS,
        summary.tenant,
        summary.api_key,
        summary.model,
        adapter_name(summary.adapter),
        1,
        summary.prompt_tokens,
        summary.cached_tokens,
        completion,
        summary.files,
        max(0, summary.reasoning_tokens),
        int(summary.reasoning_tokens < 0),
    )
    return CountedEnd(seq, time_ns, row)


def grown(part: UsagePart, counted: Iterable[CountedEnd]) -> tuple[UsagePart, list[CountedEnd]]:
    """The part with further messages of the log, and the messages left for the next part; if any, this one is closed.

    Args:
        counted: in the log's order. Messages that the part has already are skipped.
    """
    if part.closed:
        return part, [each for each in counted if each.seq > part.last]
    rows = {row.group: row for row in part.rows}
    last, counted_ns = part.last, part.counted_ns
    left: list[CountedEnd] = []
    closed = False
    for each in counted:
        if each.seq <= last:
            continue
        if not closed and each.row is not None and rows:
            closed = each.row.hour > next(iter(rows.values())).hour or (
                len(rows) >= MAX_ROWS and each.row.group not in rows
            )
        if closed:
            left.append(each)
            continue
        if each.row is not None:
            before = rows.get(each.row.group)
            rows[each.row.group] = each.row if before is None else added(before, each.row)
        last, counted_ns = each.seq, each.time_ns
    part = msgspec.structs.replace(part, last=last, counted_ns=counted_ns, rows=tuple(rows.values()), closed=closed)
    return part, left


def added(one: UsageRow, other: UsageRow) -> UsageRow:
    """The sum of two rows, in the group of the first."""
    return msgspec.structs.replace(
        one,
        requests=one.requests + other.requests,
        prompt=one.prompt + other.prompt,
        cached=one.cached + other.cached,
        completion=one.completion + other.completion,
        images=one.images + other.images,
        reasoning=one.reasoning + other.reasoning,
        reasoning_unknown=one.reasoning_unknown + other.reasoning_unknown,
    )


def following(part: UsagePart) -> UsagePart:
    """The empty part after a closed one."""
    return UsagePart(part.number + 1, part.last, part.counted_ns)


def resumed(part: UsagePart | None, position: int, first: int, first_ns: int) -> tuple[UsagePart | None, UsagePart]:
    """Where counting continues: the part to close first, and the part that grows from then on.

    That is the newest part, unless DONE has discarded the messages after it, which are then a gap before the next part.
    If DONE was recreated, or has lost its end, its messages from there on are counted.

    Args:
        part: the newest; None: there is none, so counting begins with DONE's first message.
        position: the last counted sequence that DONE still has.
        first: DONE's first sequence; if it is empty, the next one.
        first_ns: Unix time at which its first message was stored; 0: it has none.
    """
    if part is None:
        part = UsagePart(0, closed=True)
    lost = max(0, first - 1 - position)
    if not lost and position == part.last:
        return None, following(part) if part.closed else part
    gap = UsageGap(lost, part.counted_ns, first_ns) if lost else None
    after = UsagePart(part.number + 1, position + lost, part.counted_ns, gap=gap)
    return None if part.closed else msgspec.structs.replace(part, closed=True), after


# --- what was used, from all parts ---


BY: dict[str, Callable[[UsageRow], str]] = {
    "tenant": lambda row: row.tenant,
    "key": lambda row: row.key,
    "model": lambda row: row.model,
    "adapter": lambda row: row.adapter,
}
EVERY = ("hour", "day", "month")


class UsageSum(NamedTuple):
    """The usage of one group in one interval. ``begin_s``, ``end_s``: Unix time; 0: there is no interval."""

    begin_s: int
    end_s: int
    of: tuple[str, ...]
    total: UsageRow


def interval(hour: int, every: str) -> tuple[int, int]:
    """The hour, day or month of an hour, as Unix time. Days and months are those of UTC. "": (0, 0)."""
    if not every:
        return 0, 0
    begin = datetime.datetime.fromtimestamp(hour * 3600, datetime.UTC)
    if every == "hour":
        return hour * 3600, hour * 3600 + 3600
    begin = begin.replace(hour=0)
    if every == "month":
        begin = begin.replace(day=1)
        end = (begin + datetime.timedelta(days=32)).replace(day=1)
    else:
        end = begin + datetime.timedelta(days=1)
    return int(begin.timestamp()), int(end.timestamp())


class UsageTable:
    """Adds rows by interval and group.

    Args:
        by: names of ``BY``.
        every: of ``EVERY``; "": all in one.
        since_ns, until_ns: Unix time; hours that lie between them, also in part. 0: there is no such limit.
        of: which rows count.

    Attributes:
        begin_ns: when the first of these hours began, Unix time: no part with a row of them was stored before.
    """

    def __init__(
        self,
        by: Iterable[str] = (),
        every: str = "",
        *,
        since_ns: int = 0,
        until_ns: int = 0,
        of: Callable[[UsageRow], bool] = lambda row: True,
    ) -> None:
        self._by = [BY[name] for name in by]
        self._every = every
        self._first = since_ns // HOUR_NS
        self.begin_ns = self._first * HOUR_NS
        self._end = -(-until_ns // HOUR_NS) if until_ns else 1 << 62
        self._of = of
        self._found: dict[tuple[int, int, tuple[str, ...]], UsageRow] = {}
        self.gaps: list[UsageGap] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, part: UsagePart) -> None:
        gap, end_ns = part.gap, self._end * HOUR_NS
        if gap is not None and gap.since_ns < end_ns and not 0 < gap.until_ns < self.begin_ns:
            self.gaps.append(gap)
        for row in part.rows:
            if self._first <= row.hour < self._end and self._of(row):
                at = (*interval(row.hour, self._every), tuple(each(row) for each in self._by))
                before = self._found.get(at)
                self._found[at] = row if before is None else added(before, row)

    def sums(self) -> list[UsageSum]:
        """The oldest interval first."""
        return [UsageSum(*at, total) for at, total in sorted(self._found.items(), key=lambda each: each[0])]


def month_of(now_ns: int) -> tuple[int, int]:
    """The month of a time, as Unix time in seconds."""
    return interval(now_ns // HOUR_NS, "month")
