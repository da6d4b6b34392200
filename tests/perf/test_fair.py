"""What a flood costs another tenant is judged by medians."""

import pytest

from tests.perf.fair import BAR, rise


def test_a_median_that_is_higher_than_the_bar_allows_is_seen() -> None:
    assert rise([100, 200, 900], [150, 210, 2000]) == pytest.approx(0.05)
    assert rise([100, 100], [121, 125]) > BAR
