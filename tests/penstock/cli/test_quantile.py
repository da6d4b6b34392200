from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.figures import quantile


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1), st.floats(min_value=0, max_value=1))
def test_a_quantile_is_one_of_the_values_with_enough_below_it(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share, None)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_of_nothing_there_is_what_the_caller_says() -> None:
    assert quantile([], 0.5, None) is None
    assert quantile([1.0, 2.0, 3.0, 4.0], 1.0, None) == 4.0
