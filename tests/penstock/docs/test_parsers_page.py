"""The page of model families says what the table of rows does."""

from penstock.docs import parsers
from penstock.infra.text.parsers.families import PACKAGED, read_rows


def test_the_page_has_every_row_with_what_it_was_checked_against() -> None:
    page = parsers.PAGE.read_text(encoding="utf-8")
    assert page == parsers.page(), "run python -m penstock.docs"
    for row in read_rows(PACKAGED):
        assert f"| `{row.name}` | {row.models} |" in page
        assert row.checked
