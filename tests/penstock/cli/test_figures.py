import datetime

import pytest

from penstock.cli.figures import clock, duration_ns, moment_ns, span

NOW = 1_800_000_000_000_000_000


@pytest.mark.parametrize(("text", "ns"), [("300ms", 3e8), ("90s", 9e10), ("1.5h", 5400e9), ("2d", 172800e9)])
def test_durations_have_a_unit(text: str, ns: float) -> None:
    assert duration_ns(text) == int(ns)
    assert moment_ns(text, NOW) == NOW - int(ns)


@pytest.mark.parametrize("text", ["", "15", "h", "-3h", "1w", "2026-13-01", "0001-01-01"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="15m"):
        duration_ns(text)
    with pytest.raises(ValueError, match="15m"):
        moment_ns(text, NOW)


def test_times_with_a_zone_are_absolute_and_without_one_local() -> None:
    assert moment_ns("2027-01-15T08:00:00+00:00", NOW) == NOW
    local = datetime.datetime.fromtimestamp(NOW / 1e9).isoformat()
    assert moment_ns(local, 0) == NOW


def test_times_without_a_zone_are_of_the_one_that_is_named() -> None:
    east = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    assert moment_ns("2027-01-15T08:00:00", 0, datetime.UTC) == NOW
    assert moment_ns("2027-01-15T13:30:00", 0, east) == NOW
    assert moment_ns("2027-01-15T08:00:00+00:00", 0, east) == NOW
    assert moment_ns("08:00:00", NOW, datetime.UTC) == NOW
    assert moment_ns("13:30:00", NOW, east) == NOW
    assert moment_ns("08:00:01", NOW, datetime.UTC) == NOW - 86_399 * 10**9


def test_only_other_days_are_written_with_their_date() -> None:
    assert len(clock(NOW, NOW)) == len("08:00:00.000")
    assert clock(NOW - 3 * 86400 * 10**9, NOW).startswith("2027-01-1")


def test_spans_are_rounded_to_what_matters() -> None:
    assert [span(ms) for ms in (None, 3.14159, 2500, 125_000)] == ["", "3.1 ms", "2.50 s", "2 min 5 s"]


def test_a_time_of_day_as_it_is_printed_is_the_last_such_moment() -> None:
    for ago_ns in (0, 3_600 * 10**9, 23 * 3_600 * 10**9):
        at_ns = NOW - ago_ns
        printed = clock(at_ns, at_ns)  # without its date
        assert moment_ns(printed, NOW) == at_ns // 10**6 * 10**6
