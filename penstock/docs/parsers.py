"""The table of model families in docs/parsers.md, from the rows by which answers are read."""

from pathlib import Path

from penstock.infra.text.parsers.families import PACKAGED, Calls, Family, read_rows
from penstock.launch.recipes.command import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parsers.md"
BEGIN, END = "<!-- made by `python -m penstock.docs`: model families -->", "<!-- end -->"
_HEAD = ("name", "models", "reasoning", "tool calls", "aliases", "checked against")


def page() -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no marks for the table of model families")
    rows = sorted(read_rows(PACKAGED), key=lambda row: row.name)
    return f"{before}{BEGIN}\n\n{markdown((_HEAD, *map(_row, rows)))}\n\n{END}{after}"


def _row(row: Family) -> tuple[str, ...]:
    thoughts = row.thoughts
    if thoughts is None:
        reasoning = ""
    elif thoughts.channels:
        reasoning = "in channels"
    else:
        reasoning = f"{_code(thoughts.opening[0])} … {_code(thoughts.closing[0])}"
        reasoning += ", begun by the prompt" if thoughts.implied else ""
    aliases = ", ".join(_code(name) for name in row.aliases)
    return _code(row.name), row.models, reasoning, _calls(row.calls), aliases, row.checked


def _calls(form: Calls | None) -> str:
    if form is None:
        return ""
    if form.reader == "channels":
        return "in channels"
    opener = _code(form.openers[0]) if form.openers else ""
    begins = [f"an answer that begins with {_code(form.starts)}"] if form.starts else []
    return f"{form.reader}: {' or '.join(filter(None, (*begins, opener)))}"


def _code(text: str) -> str:
    """A text as code."""
    shown = text.strip().replace("\n", " ")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"
