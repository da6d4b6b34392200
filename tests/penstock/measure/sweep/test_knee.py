"""The knee of a server whose knee is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.sweep.results import MeasuredPoint, find_knee, next_level


def measured(slots: int, level: float, seconds: float = 0.5) -> MeasuredPoint:
    """A server of so many slots: beyond them, requests wait their turn."""
    waits = max(0.0, level / slots - 1) * seconds
    return MeasuredPoint(level, 100 * min(level, slots) / seconds, (seconds / 10 + waits) * 1e3)


@given(st.integers(2, 400))
def test_the_search_finds_the_knee_in_few_levels(slots: int) -> None:
    points: list[MeasuredPoint] = []
    while (level := next_level(points, 1024)) is not None:
        assert level not in [point.level for point in points]
        points.append(measured(slots, level))
    found = find_knee(points)
    assert found is not None
    assert 0.94 * slots <= found.level <= 1.1 * slots + 1
    assert found.saturated
    assert len(points) <= 16
    assert found.tail_leaves is not None
    assert found.tail_leaves > found.level * 0.9


def test_a_server_that_still_grows_has_no_knee_yet() -> None:
    points = [measured(1000, level) for level in (1, 2, 4, 8)]
    found = find_knee(points)
    assert found is not None
    assert (found.saturated, found.tail_leaves) == (False, None)
    assert next_level(points, 8) is None
    assert next_level(points, 12) == 12


@pytest.mark.parametrize("points", [[], [MeasuredPoint(1, 10, 1)], [MeasuredPoint(1, 0, 0), MeasuredPoint(2, 0, 0)]])
def test_one_level_has_no_knee(points: list[MeasuredPoint]) -> None:
    assert find_knee(points) is None


def test_levels_that_were_given_show_the_knee_too() -> None:
    found = find_knee(measured(48, level) for level in (250, 1, 10, 100, 2, 50, 5))
    assert found is not None
    assert (found.level, found.tail_leaves) == (50, 100)
