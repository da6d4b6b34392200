"""Tables in pages that are written by hand say what the code does."""

from pathlib import Path

import pytest

from penstock.infra.text.parsers.families import PACKAGED, read_rows
from tests.generated.tables import DOCS, PAGES, engines


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_that_the_code_makes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert PAGES[path](text) == text, "run: python -m tests.generated"


def test_the_page_of_parsers_has_every_row_with_what_it_was_checked_against() -> None:
    page = (DOCS / "parsers.md").read_text(encoding="utf-8")
    for row in read_rows(PACKAGED):
        assert f"| `{row.name}` | {row.models} |" in page
        assert row.checked


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="sampling options"):
        engines("# Engines\n")
