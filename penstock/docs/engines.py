"""The table of sampling options in docs/engines.md, from what the engines' adapters do."""

from pathlib import Path

from penstock.launch.recipes.command import markdown
from penstock.workers.engines.support import sampling_notes, sampling_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- made by `python -m penstock.docs`: sampling options -->", "<!-- end -->"


def page() -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no marks for the table of sampling options")
    notes = "\n".join(f"{number}. {note}" for number, note in enumerate(sampling_notes(), 1))
    return f"{before}{BEGIN}\n\n{markdown(sampling_table())}\n\n{notes}\n\n{END}{after}"
