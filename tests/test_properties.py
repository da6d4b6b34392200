"""The profile decides how many examples a property test draws, and no test decides it alone."""

import re
from pathlib import Path

import pytest
from hypothesis import settings

from tests.properties import LONG, examples

ROOT = Path(__file__).parent


@pytest.fixture
def loaded() -> str:
    return settings.get_current_profile_name()


def test_the_long_profile_draws_more_of_every_test(loaded: str) -> None:
    try:
        settings.load_profile("default")
        few = examples(60)
        settings.load_profile("long")
        many = examples(60)
    finally:
        settings.load_profile(loaded)
    assert (few.max_examples, few.derandomize) == (24, True)
    assert (many.max_examples, many.derandomize) == (LONG * 24, False)


def test_no_test_sets_its_own_number() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.name not in ("properties.py", Path(__file__).name)
        and re.search(
            r"from hypothesis import [^\n]*\bsettings\b|hypothesis\.settings", path.read_text(encoding="utf-8")
        )
    ]
    assert wrong == []
