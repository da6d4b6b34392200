"""What was used is counted once, whatever is repeated, lost or interrupted."""

import datetime
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import usage
from penstock.schemas.done import Done, MadeWith, Outcome, Timings, Usage
from penstock.schemas.subjects import HEADER_RECORDED_TIME, HEADER_SUMMARY, Subjects
from penstock.schemas.summary import RequestSummary, header_of, of_headers
from penstock.schemas.tokens import File
from penstock.schemas.usage import (
    CountedEnd,
    UsageGap,
    UsagePart,
    UsageRow,
    UsageSum,
    UsageTable,
    count,
    following,
    grown,
    resumed,
)
from penstock.schemas.wire import encode, pack_tokens
from tests.schemas.samples import REQUEST

S = Subjects()
HOUR = usage.HOUR_NS
BEGAN = "2026-11-29T00:00:00Z"
REQUEST_OF_A_KEY = msgspec.structs.replace(
    REQUEST, lora="po et@60d54b94506689dd", api_key="pst-0a1b2c3d4e5f", n=1, endpoint="chat"
)


def counted(event: Done, request: object = REQUEST_OF_A_KEY, **headers: str) -> UsageRow | None:
    text = header_of(event, request)  # type: ignore[arg-type]
    subject = S.live(S.done("acme", "tiny", REQUEST.id))
    return count(7, 5 * HOUR + 1, headers, of_headers(subject, {HEADER_SUMMARY: text})).row


def ended(**fields: object) -> Done:
    whole: dict[str, object] = {
        "choices": (Outcome(pack_tokens([1, 2]), "stop"),),
        "usage": Usage(10, 2, 4),
        "submitted": encode(REQUEST_OF_A_KEY),
        "timings": Timings(made_with=MadeWith("r", "mock", "b")),
    } | fields
    return Done(REQUEST.id, "tiny", 1, "w-1", **whole)  # type: ignore[arg-type]


def test_the_headers_of_a_record_say_what_to_count() -> None:
    expected = UsageRow(5, "acme", "pst-0a1b2c3d4e5f", "tiny", "po et", 1, 10, 4, 2)
    assert counted(ended()) == expected


@pytest.mark.parametrize(
    ("event", "requests"),
    [
        (ended(code="worker_lost", choices=(), usage=Usage(10, 0, 0)), 0),
        (ended(code="cancelled", choices=(Outcome(b"", "cancelled"),), usage=Usage(10, 0, 0)), 0),
        (ended(code="cancelled", choices=(Outcome(b"1234", "cancelled"),), usage=Usage(10, 1, 0)), 1),
        (ended(code="engine_error", usage=Usage(10, 2, 0)), 1),
        (ended(choices=(Outcome(b"", "stop"),), usage=Usage(10, 0, 0)), 1),
    ],
)
def test_a_request_counts_with_its_answer_or_the_part_of_one_that_was_made(event: Done, requests: int) -> None:
    row = counted(event)
    assert (row.requests if row is not None else 0) == requests


def test_reasoning_is_a_part_of_the_completion_or_unknown() -> None:
    row, unknown = counted(ended(usage=Usage(10, 9, 4, 7))), counted(ended(usage=Usage(10, 9, 4, -1)))
    assert row is not None
    assert unknown is not None
    assert (row.completion, row.reasoning, row.reasoning_unknown) == (9, 7, 0)
    both = usage.added(row, unknown)
    assert (both.completion, both.reasoning, both.reasoning_unknown) == (18, 7, 1)


def test_vectors_and_pictures_have_no_completion_tokens() -> None:
    picture = ended(
        choices=(Outcome(pack_tokens([1] * 30), "stop", files=(File("a", "image/png", 9), File("b", "image/png", 9))),),
        usage=Usage(0, 30, 0),
    )
    row = counted(picture, msgspec.structs.replace(REQUEST_OF_A_KEY, endpoint="image"))
    assert row is not None
    assert (row.requests, row.prompt, row.completion, row.images) == (1, 0, 0, 2)
    vectors = counted(ended(usage=Usage(10, 0, 0)), msgspec.structs.replace(REQUEST_OF_A_KEY, endpoint="embedding"))
    assert vectors is not None
    assert (vectors.prompt, vectors.completion) == (10, 0)


def test_guests_of_another_cell_and_imported_records_do_not_count() -> None:
    assert counted(ended(), msgspec.structs.replace(REQUEST_OF_A_KEY, origin="another")) is None
    assert counted(ended(), **{HEADER_RECORDED_TIME: BEGAN}) is None
    assert count(1, 1, {}, None).row is None


def of(seq: int, hour: int, tenant: str = "acme", tokens: int = 1) -> CountedEnd:
    return CountedEnd(seq, hour * HOUR, UsageRow(hour, tenant, requests=1, prompt=tokens))


def test_a_part_is_closed_by_the_next_hour_and_has_no_hour_twice() -> None:
    part, left = grown(UsagePart(1), [of(1, 5), of(2, 5), CountedEnd(3, 6 * HOUR, None), of(4, 6), of(5, 6)])
    assert (part.last, part.closed, [row.requests for row in part.rows]) == (3, True, [2])
    assert [each.seq for each in left] == [4, 5]
    after, rest = grown(following(part), left)
    assert (after.number, after.last, after.closed, rest) == (2, 5, False, [])
    assert grown(part, left) == (part, left)


def test_a_part_with_many_rows_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_ROWS", 2)
    part, left = grown(UsagePart(1), [of(1, 5, "a"), of(2, 5, "b"), of(3, 5, "a"), of(4, 5, "c"), of(5, 5, "a")])
    assert (part.closed, part.last, [each.seq for each in left]) == (True, 3, [4, 5])


def test_the_count_continues_with_the_newest_part() -> None:
    open_, closed = UsagePart(3, 9, HOUR), UsagePart(3, 9, HOUR, closed=True)
    assert resumed(open_, 9, 1, 5) == (None, open_)
    assert resumed(open_, 9, 10, 5) == (None, open_)
    assert resumed(closed, 9, 10, 0) == (None, following(closed))
    assert resumed(None, 0, 1, 0) == (None, UsagePart(1))


def test_messages_that_are_gone_before_they_were_counted_are_a_gap() -> None:
    part = UsagePart(3, 9, HOUR, rows=(UsageRow(0, "acme", requests=1),))
    closed, after = resumed(part, 9, 15, 3 * HOUR)
    assert closed == msgspec.structs.replace(part, closed=True)
    assert after == UsagePart(4, 14, HOUR, gap=UsageGap(5, HOUR, 3 * HOUR))
    assert resumed(closed, 9, 15, 3 * HOUR) == (None, after)  # it was closed, and then somebody crashed
    assert resumed(None, 0, 4, HOUR) == (None, UsagePart(1, 3, gap=UsageGap(3, 0, HOUR)))


def test_a_log_that_was_recreated_or_lost_its_end_is_counted_from_there() -> None:
    part = UsagePart(3, 9, HOUR, closed=True)
    assert resumed(part, 0, 1, HOUR) == (None, UsagePart(4, 0, HOUR))
    assert resumed(part, 7, 1, HOUR) == (None, UsagePart(4, 7, HOUR))


TENANTS = st.sampled_from(["a", "b", "c"])


@given(
    st.lists(st.tuples(TENANTS, st.integers(0, 2), st.booleans()), max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.sampled_from(["stored", "lost", "unconfirmed"]))),
    st.integers(1, 4),
)
def test_any_repetition_and_any_crash_gives_the_same_sums(
    log: list[tuple[str, int, bool]], steps: list[tuple[int, int, str]], most_rows: int
) -> None:
    """Two routers fold the same log in turns. Each reads from some place on, and stores what it made of the newest part
    as it knows it; the broker refuses what was made of an older one. Whatever is lost is read again."""
    hour, messages = 5, list[CountedEnd]()
    for seq, (tenant, step, ends) in enumerate(log, 1):
        hour += step == 2
        messages.append(of(seq, hour, tenant, seq) if ends else CountedEnd(seq, hour * HOUR, None))
    kept, limit = usage.MAX_ROWS, most_rows
    usage.MAX_ROWS = limit
    stored: dict[int, UsagePart] = {}
    known: list[UsagePart | None] = [None, None]

    def newest() -> UsagePart | None:
        return stored[max(stored)] if stored else None

    def turn(router: int, count_: int, end: str) -> None:
        base = known[router]
        _, part = resumed(base, base.last if base is not None else 0, 1, 0)
        behind = max(0, part.last - 2)  # some that it has already
        part, _left = grown(part, messages[behind : part.last + count_])
        revision = stored.get(part.number)
        expected = base if base is not None and base.number == part.number else None
        if revision != expected or (expected is None and newest() is not None and newest() != base):
            known[router] = newest()  # refused
            return
        if end != "lost":
            stored[part.number] = part
        known[router] = part if end == "stored" else newest()

    try:
        for at, (place, count_, end) in enumerate(steps):
            turn((place + at) % 2, count_, end)
        for _ in range(2 * len(messages) + 2):
            known[0] = newest()
            turn(0, 12, "stored")
    finally:
        usage.MAX_ROWS = kept
    rows = [row for part in stored.values() for row in part.rows]
    expected = Counter[tuple[int, str]]()
    for message in messages:
        if message.row is not None:
            expected[message.row.hour, message.row.tenant] += message.row.prompt
    found = Counter[tuple[int, str]]()
    for row in rows:
        found[row.hour, row.tenant] += row.prompt
    assert found == expected
    assert not messages or stored[max(stored)].last == len(messages)


def sums(
    rows: list[UsageRow], by: tuple[str, ...] = (), every: str = "", *, since_ns: int = 0, until_ns: int = 0
) -> list[UsageSum]:
    table = UsageTable(by, every, since_ns=since_ns, until_ns=until_ns)
    for row in rows:
        table.add(UsagePart(1, rows=(row,)))
    return table.sums()


def test_sums_are_by_group_and_interval() -> None:
    day = 24 * 500
    rows = [UsageRow(day, "a", "k", "m", prompt=1), UsageRow(day + 1, "a", "k", "m", prompt=2)]
    rows += [UsageRow(day + 24, "b", "k", "m", prompt=4), UsageRow(day + 1, "b", "k", "n", prompt=8)]
    assert [(each.of, each.total.prompt) for each in sums(rows, ("tenant",))] == [(("a",), 3), (("b",), 12)]
    days = sums(rows, ("tenant",), "day")
    assert [(each.begin_s // 86_400, each.of, each.total.prompt) for each in days] == [
        (500, ("a",), 3),
        (500, ("b",), 8),
        (501, ("b",), 4),
    ]
    assert [each.total.prompt for each in sums(rows, (), "hour")] == [1, 10, 4]
    assert sums(rows, since_ns=(day + 1) * HOUR, until_ns=(day + 24) * HOUR)[0].total.prompt == 10
    own = UsageTable(of=lambda row: row.tenant == "b")
    own.add(UsagePart(1, rows=tuple(rows)))
    assert [each.total.prompt for each in own.sums()] == [12]


def test_a_table_has_the_gaps_of_its_time() -> None:
    gaps = [UsageGap(1, 0, 3 * HOUR), UsageGap(2, 3 * HOUR, 5 * HOUR), UsageGap(3, 9 * HOUR, 0)]
    table = UsageTable(since_ns=4 * HOUR, until_ns=6 * HOUR)
    for gap in gaps:
        table.add(UsagePart(1, gap=gap))
    assert table.gaps == gaps[1:2]


def test_months_begin_with_their_first_day() -> None:
    noon = datetime.datetime(2026, 12, 31, 12, tzinfo=datetime.UTC)
    begin, end = usage.month_of(int(noon.timestamp()) * 10**9)
    assert datetime.datetime.fromtimestamp(begin, datetime.UTC).isoformat() == "2026-12-01T00:00:00+00:00"
    assert datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat() == "2027-01-01T00:00:00+00:00"


def test_a_summary_in_the_old_form_names_no_key() -> None:
    text = header_of(ended(), REQUEST_OF_A_KEY)
    subject = S.live(S.done("acme", "tiny", REQUEST.id))
    older = of_headers(subject, {HEADER_SUMMARY: " ".join(text.split(" ")[:17])})
    assert isinstance(older, RequestSummary)
    assert (older.api_key, older.adapter, older.files, older.completion_tokens) == ("", "", 0, 2)
