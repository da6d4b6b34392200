"""Predicted rates: on a ramp, on a constant, and never absurd."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.worker_counts import predict

RAMP = [float(value) for value in range(10, 30)]


def test_holt_sees_a_ramp_coming_and_the_others_lag_behind() -> None:
    ahead = {kind: predict(kind, RAMP, 2) for kind in ("constant", "moving_average", "holt")}  # type: ignore[arg-type]
    assert ahead["moving_average"] < ahead["constant"] == 29
    assert 30 < ahead["holt"] < 31.5  # 31, less what the damping takes


@pytest.mark.parametrize("kind", ["constant", "moving_average", "holt"])
def test_a_constant_rate_is_predicted_to_stay(kind: str) -> None:
    assert predict(kind, [7.0] * 20, 3) == pytest.approx(7.0)  # type: ignore[arg-type]
    assert predict(kind, [], 3) == 0.0  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=40), st.floats(0, 20))
def test_a_prediction_is_not_negative_nor_above_twice_the_largest(history: list[float], ahead: float) -> None:
    assert 0 <= predict("holt", history, ahead) <= 2 * max(history)
