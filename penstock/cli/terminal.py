"""What commands print: text, questions, tables that fit the terminal, and errors without their numbers.

Where there is no room for all columns of a table, those that matter least are left out.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import rich.markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress

ELSEWHERE = 150  # columns in a file or a pipe, where rich would take 80
LEAST_TEXT = 30  # columns beside a head; below it where there are fewer


def stdout() -> Console:
    """As wide as the terminal; wide enough for our tables where there is none."""
    console = Console(emoji=False)  # ":ok:" in what clients sent stays; and the table of emoji takes 5 ms to load
    return console if console.is_terminal else Console(width=ELSEWHERE, emoji=False)


def visible(text: str) -> str:
    """What a client or an engine wrote, without characters that move the cursor or reorder the line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


def escape(text: str) -> str:
    """The same within rich's markup."""
    return rich.markup.escape(visible(text))


def reason(error: Exception) -> str:
    """An error as a user wants to read it: of a file, without "[Errno 2]" and the name, which the caller has."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def print_hanging(console: Console, head: str, text: str) -> None:
    """A line in rich's markup. On a terminal that it does not fit, ``text`` continues below itself, broken at words.

    Elsewhere it stays one line, for programs that read lines.
    """
    head_width, text_width = (Text.from_markup(each).cell_len for each in (head, text))
    if not console.is_terminal or head_width + text_width <= console.width:
        console.print(head + text, highlight=False, soft_wrap=True)
        return
    indent = head_width if head_width + LEAST_TEXT <= console.width else 4
    if indent < head_width:
        console.print(head.rstrip(), highlight=False, soft_wrap=True)
        console.print(Padding(text, (0, 0, 0, indent)), highlight=False)
        return
    grid = Table.grid()
    grid.add_column(width=head_width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, text)
    console.print(grid, highlight=False)


def progress_bar() -> "Progress":
    """A bar on standard error, where that is a terminal. Each task has a text ``state``.

    It has no thread, which would take time from what is measured: call ``update`` with ``refresh``.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # few commands wait for it

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        disable=not sys.stderr.isatty(),
    )


def write_json(console: Console, value: object) -> None:
    """A line of JSON, for programs that read lines."""
    console.file.write(msgspec.json.encode(value).decode() + "\n")


def fail(command: str, *errors: object, status: int = 1) -> int:
    """Say on standard error why a command has failed, a line for each reason. Returns the exit status."""
    for error in errors:
        if isinstance(error, PermissionError) and error.filename:
            error = f"{error.filename}: permission denied; run as its owner"
        print(f"penstock {command}: {error}", file=sys.stderr)
    return status


def confirmed(question: str) -> bool:
    """Ask at the terminal; False where there is none, and unless the answer is yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


GAP = 2


class Column(NamedTuple):
    """
    Attributes:
        leaves: the column with the highest number is left out first; 0: it stays, and is cut if it must be.
    """

    name: str
    leaves: int = 0
    right: bool = False


def fitting_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A table without lines.

    Args:
        rows: cells in rich's markup, one for each column.
        width: of the terminal.
    """
    widths = [max(map(_width, (column.name, *(row[at] for row in rows)))) + GAP for at, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while sum(widths[at] for at in shown) - GAP > width:
        at = max(shown, key=lambda at: columns[at].leaves)
        if not columns[at].leaves:
            break
        shown.remove(at)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at in shown:
        table.add_column(columns[at].name, justify="right" if columns[at].right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _width(markup: str) -> int:
    return max(line.cell_len for line in Text.from_markup(markup).split() or [Text()])


_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(start: int, end: int, whole: int, width: int) -> str:
    """A bar for the part ``start`` .. ``end`` of ``whole``: blanks, then blocks, in eighths of a column.

    The bar has at least one mark and at most ``width`` columns.
    """
    first = max(0, min(width * 8 - 1, start * width * 8 // whole))
    length = max(1, min(width * 8 - first, (end - start) * width * 8 // whole))
    column, part = divmod(first, 8)
    if part and length < 8:
        return " " * column + "▐"
    blocks, rest = divmod(length + (part if part else 0), 8)
    return " " * column + ("█" * blocks + (_EIGHTHS[rest] if rest else "") or "▏")
