"""Tables that come from the code, in pages that are written by hand.

docs/engines.md: sampling options, from what the engines' adapters do. docs/parsers.md: model families, from the rows by
which answers are read. docs/roles.md: what each user of the broker may do. configs/recipes/README.md: the recipes.
"""

from collections.abc import Callable
from pathlib import Path

from penstock.infra.broker.roles import table
from penstock.infra.text.parsers.families import PACKAGED, Calls, Family, read_rows
from penstock.launch.recipes.catalogue import FOLDER, load, members
from penstock.launch.recipes.command import markdown, refreshed
from penstock.schemas.subjects import Subjects
from penstock.workers.engines.support import sampling_notes, sampling_table

DOCS = Path(__file__).resolve().parents[2] / "docs"
END = "<!-- end -->"
_HEAD = ("name", "models", "reasoning", "tool calls", "aliases", "checked against")


def engines(page: str) -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    notes = "\n".join(f"{number}. {note}" for number, note in enumerate(sampling_notes(), 1))
    return _between(page, "sampling options", f"{markdown(sampling_table())}\n\n{notes}")


def parsers(page: str) -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    rows = sorted(read_rows(PACKAGED), key=lambda row: row.name)
    return _between(page, "model families", markdown((_HEAD, *map(_row, rows))))


def roles(page: str) -> str:
    """The page with its table as it must be; what stands before the table is kept."""
    head, _, _ = page.partition("| role |")
    return head + table(Subjects())


def recipes(page: str) -> str:
    return refreshed(page, load(), members())


PAGES: dict[Path, Callable[[str], str]] = {
    DOCS / "engines.md": engines,
    DOCS / "parsers.md": parsers,
    DOCS / "roles.md": roles,
    FOLDER / "README.md": recipes,
}


def _between(page: str, what: str, text: str) -> str:
    mark = f"<!-- made by `python -m penstock.docs`: {what} -->"
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks for the table of {what}: {mark} and {END}")
    return f"{before}{mark}\n\n{text}\n\n{END}{after}"


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
