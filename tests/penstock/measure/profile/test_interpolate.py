"""Figures between the points of a profile: exact where the engine is linear, and never beyond what was measured."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.measure.profile.data import Decode, DecodePoint, DecodeSurface, Prefill, between, ttft_at

values = st.floats(0.1, 1e4)


@given(st.dictionaries(st.integers(0, 10_000), values, min_size=1, max_size=12), st.floats(-100, 10_100))
def test_a_value_between_points_is_between_theirs_and_outside_there_is_none(points: dict[int, float], x: float) -> None:
    at = sorted(points)
    found = between(x, at, [points[each] for each in at])
    if not at[0] <= x <= at[-1]:
        assert found is None
        return
    assert found is not None
    below, above = max(each for each in at if each <= x), min(each for each in at if each >= x)
    low, high = sorted((points[below], points[above]))
    assert low - 1e-6 <= found <= high + 1e-6
    if below == above:
        assert found == points[below]


def surface(a: float, b: float, contexts: list[int], levels: list[int]) -> DecodeSurface:
    """An engine whose step takes ``a`` ms and ``b`` more for each thousand tokens of all contexts."""
    data = Decode(max_kv_tokens=10**6)
    for context in contexts:
        for level in levels:
            itl = a + b * context * level / 1e3
            data = data.added(
                DecodePoint(
                    isl=context, concurrency=level, kv_usage=0.0, context=context, itl_ms=itl, throughput=level / itl
                )
            )
    return DecodeSurface(data)


grids = st.lists(st.integers(100, 9000), min_size=2, max_size=5, unique=True)
batches = st.lists(st.integers(1, 256), min_size=2, max_size=5, unique=True)


@given(st.floats(1, 20), st.floats(0, 0.1), grids, batches, st.floats(0, 1), st.floats(0, 1))
def test_an_engine_whose_steps_grow_with_batch_and_context_is_met_exactly(
    a: float, b: float, contexts: list[int], levels: list[int], x: float, y: float
) -> None:
    context = min(contexts) + x * (max(contexts) - min(contexts))
    level = min(levels) + y * (max(levels) - min(levels))
    assume(context <= max(contexts) and level <= max(levels))
    found = surface(a, b, contexts, levels)
    assert found.itl(context, level) == pytest.approx(a + b * context * level / 1e3)
    assert found.levels(context) == (min(levels), max(levels))


def test_nothing_is_guessed() -> None:
    assert ttft_at(Prefill(), 100) is None
    assert ttft_at(Prefill((100, 300), (10.0, 30.0), (1.0, 1.0)), 200) == 20.0
    assert ttft_at(Prefill((100, 300), (10.0, 30.0), (1.0, 1.0)), 301) is None
    found = surface(5.0, 0.1, [100, 300], [2, 8])
    assert [found.itl(*at) for at in ((99, 4), (301, 4), (200, 1), (200, 9))] == [None] * 4
    assert found.levels(301) == (0, 0)
    assert DecodeSurface(Decode()).levels(100) == (0, 0)
