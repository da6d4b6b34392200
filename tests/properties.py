"""How many examples property tests draw, in two profiles of hypothesis, and which parameters `make test` leaves out.

``default`` is for every run: ``make test`` draws the same examples everywhere, so that a failure comes from the change
under test, can be repeated, and costs a known time. New examples are the purpose of ``long`` (``make test-long``): 50
times as many, different in every run. It prints how to repeat a failure; keep that one as an ``@example``.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = 100  # of a test that names no number
DEFAULT = 40  # of them
LONG = 50  # times the examples of "default"


def register() -> None:
    """Register the profiles, and load the one that ``HYPOTHESIS_PROFILE`` names."""
    settings.register_profile("default", max_examples=DEFAULT, deadline=None, derandomize=True)
    settings.register_profile("long", max_examples=LONG * DEFAULT, deadline=None, derandomize=False, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def examples(count: int, *, stateful_step_count: int = 50) -> settings:
    """For a test whose examples are dearer or rarer than usual: their number in "default", in proportion elsewhere."""
    scaled = max(1, count * settings.default.max_examples // EXAMPLES)
    return settings(max_examples=scaled, stateful_step_count=stateful_step_count)


def some(every: Iterable[Any], *shown: Any) -> list[Any]:
    """All parameters of a test, of which `make test` has those ``shown``, and `make test-slow` the others."""
    made = list(every)
    assert all(each in made for each in shown), "such a parameter is not there"
    return [
        each if each in shown else pytest.param(*(each if isinstance(each, tuple) else [each]), marks=pytest.mark.slow)
        for each in made
    ]
