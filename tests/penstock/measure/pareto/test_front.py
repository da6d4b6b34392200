"""Fronts and gains: known points, and the definition as a plain model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.pareto.records import at, front, gain_at, largest_gain

Points = list[tuple[float, float]]
POINTS = st.lists(st.tuples(st.integers(1, 12).map(float), st.integers(1, 12).map(float)), min_size=1, max_size=20)


def itself(point: tuple[float, float]) -> tuple[float, float]:
    return point


def test_known_points_have_the_known_front() -> None:
    points = [(10.0, 900.0), (50.0, 400.0), (30.0, 350.0), (100.0, 50.0), (10.0, 700.0), (50.0, 400.0), (90.0, 50.0)]
    assert front(points, itself) == [(10.0, 900.0), (50.0, 400.0), (100.0, 50.0)]


@given(POINTS)
def test_the_front_is_what_no_point_dominates(points: Points) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points)

    assert front(points, itself) == sorted({point for point in points if not beaten(point)})


@given(POINTS, st.randoms(use_true_random=False))
def test_order_and_dominated_points_change_no_front(points: Points, rng: object) -> None:
    line = front(points, itself)
    shuffled = sorted(points, key=lambda _: rng.random())  # type: ignore[attr-defined]
    assert front(shuffled, itself) == front(line, itself) == line


@given(POINTS)
def test_a_front_goes_through_its_points_and_is_above_all_others(points: Points) -> None:
    line = front(points, itself)
    for x, y in points:
        height = at(line, x)
        assert height is not None
        assert height == y if (x, y) in line else height >= y - 1e-9
    assert at(line, line[-1][0] + 1) is None
    assert at(line, 0.0) == line[0][1]


def test_the_largest_gain_of_known_fronts_is_found_between_their_points() -> None:
    theirs = [(20.0, 100.0), (60.0, 20.0)]
    gain = largest_gain([(10.0, 120.0), (50.0, 100.0), (80.0, 10.0)], theirs)
    assert gain is not None
    assert (gain.x, gain.ours, gain.theirs, gain.ratio) == (60.0, 70.0, 20.0, 3.5)
    assert largest_gain(theirs, []) is None


@given(POINTS, POINTS, st.floats(0.1, 12.0))
def test_no_pace_has_more_than_the_largest_gain(ours: Points, theirs: Points, x: float) -> None:
    mine, other = front(ours, itself), front(theirs, itself)
    best, here = largest_gain(mine, other), gain_at(mine, other, x)
    assert best is not None
    assert (here is None) == (x > min(mine[-1][0], other[-1][0]))
    if here is not None:
        assert here.ratio <= best.ratio * (1 + 1e-9)


@given(POINTS, st.integers(2, 5))
def test_a_front_so_many_times_as_high_gains_so_much(points: Points, times: int) -> None:
    line = front(points, itself)
    gain = largest_gain([(x, times * y) for x, y in line], line)
    assert gain is not None
    assert gain.ratio == pytest.approx(times)
