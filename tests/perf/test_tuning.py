"""Measurements of what tuning constants buy run, and show it where it is large."""

import pytest

from tests.perf.tuning import MEASURES


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_compares_the_same_work_with_a_constant_and_without(name: str) -> None:
    for figure in MEASURES[name](2):
        assert figure.with_it > 0
        assert figure.without > 0


def test_batches_of_texts_that_are_about_as_long_compute_less_padding() -> None:
    for figure in MEASURES["padding"](2):
        assert figure.with_it < figure.without
