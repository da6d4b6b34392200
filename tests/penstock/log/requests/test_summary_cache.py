"""Listing from cached summaries: the same as from the log, whatever was cached, deleted or damaged."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.infra.broker.server import EmbeddedNats
from penstock.infra.bus.connection import Bus
from penstock.log.requests import summary_cache
from penstock.log.requests.find_requests import ended
from penstock.log.requests.list_requests import RequestLine, lines
from penstock.log.requests.summary_cache import cache_folder, summaries
from penstock.schemas.subjects import Subjects
from penstock.schemas.summary import Criteria, RequestSummary
from tests.infra.bus.support import opened
from tests.penstock.log.requests.support import accept, end

ALL = Criteria()


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    monkeypatch.setattr(summary_cache, "SEGMENT", 5)
    async with opened(broker, subjects) as bus:
        yield bus


async def listed(bus: Bus, folder: Path, criteria: Criteria = ALL) -> list[RequestSummary]:
    found = [RequestSummary(**as_fields(each)) async for each in summaries(bus, criteria, folder)]
    assert found == [each.summary async for _, each in ended(bus, criteria)]
    return found


def as_fields(summary: RequestSummary) -> dict[str, object]:
    return {name: getattr(summary, name) for name in RequestSummary.__struct_fields__}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def record(bus: Bus, count: int) -> None:
    for number in range(count):
        await end(bus, await accept(bus, user=f"user-{number % 3}"), 1, code="" if number % 4 else "internal")


async def test_a_list_is_the_same_with_and_without_its_cache(bus: Bus, tmp_path: Path) -> None:
    for count in (3, 0, 1, 1, 9, 0):
        await record(bus, count)
        for criteria in (ALL, Criteria(code="any"), Criteria(user="user-1")):
            await listed(bus, tmp_path, criteria)
    assert len(files(tmp_path)) == 2
    assert {path.stat().st_mode & 0o077 for path in files(tmp_path)} == {0}


async def test_only_what_is_not_cached_is_read_from_the_log(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(bus, 12)
    before = await listed(bus, tmp_path)

    async def fails(*_: object) -> None:
        raise AssertionError("read from the log")

    monkeypatch.setattr(summary_cache, "_read_segment", fails)
    assert await listed(bus, tmp_path) == before


async def test_what_was_deleted_in_the_log_leaves_the_cache_too(bus: Bus, tmp_path: Path) -> None:
    await record(bus, 12)
    first, *_ = reversed(await listed(bus, tmp_path))
    stream = bus.subjects.stream("DONE")
    await bus.js.delete_msg(stream, 4)
    assert len(await listed(bus, tmp_path)) == 11
    await bus.js.purge_stream(stream, seq=3)
    assert len(await listed(bus, tmp_path)) == 9
    assert not any(first.id.encode() in path.read_bytes() for path in files(tmp_path))


async def test_a_damaged_cache_or_none_at_all_costs_nothing_but_time(bus: Bus, tmp_path: Path) -> None:
    await record(bus, 12)
    before = await listed(bus, tmp_path)
    for path in files(tmp_path):
        path.write_bytes(b"\xc1 damaged")
    assert await listed(bus, tmp_path) == before
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    assert await listed(bus, in_the_way) == before


async def test_the_cache_is_bounded(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_cache, "MOST_SEGMENTS", 2)
    await record(bus, 27)
    await listed(bus, tmp_path)
    await listed(bus, tmp_path)
    assert len(files(tmp_path)) == 2


def test_the_cache_lies_in_the_data_folder_or_in_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(tmp_path) == tmp_path / "cache" / "requests"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for missing in (None, tmp_path / "none"):
        assert cache_folder(missing) == tmp_path / "xdg" / "penstock" / "requests"


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
def test_lines_have_columns_that_fit_and_cut_only_the_last(width: int) -> None:
    made = [
        RequestSummary(f"id-{n:033}", "m" * n, state, 10**18, worker="w", code=code, message="too\nlong " * 40)
        for n, (state, code) in enumerate((("failed", "deadline_exceeded"), ("done", ""), ("queued", "")))
    ]
    found = [RequestLine(each) for each in made]
    plain = list(lines(found, width=width, now_ns=10**18, header="error"))
    assert len(plain) == 4
    places = {line.index("id-") for line in plain[1:]}
    assert len(places) == 1
    assert all(len(line) <= width for line in plain)
    assert ("accepted" in plain[0], "worker" in plain[0], "cached" in plain[0]) == (
        width > 80,
        width > 120,
        width > 120,
    )
    errors = [line.endswith("…") and "  too" in line for line in plain[1:]]
    assert errors == [width == 60 or width >= 120] * 3
    assert all(("deadline_exceeded" in line) == (width > 60) for line in plain[1:2])
    import re

    coloured = lines(found, width=width, now_ns=10**18, header="error", colours=True)
    assert [re.sub("\x1b\\[[0-9;]*m", "", line).rstrip() for line in coloured] == [line.rstrip() for line in plain]
