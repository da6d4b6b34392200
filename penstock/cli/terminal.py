"""What commands print: tables, and errors without their numbers."""

import sys

import rich.markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

ELSEWHERE = 150  # columns in a file or a pipe, where rich would take 80
LEAST_TEXT = 30  # columns beside a head; below it where there are fewer


def stdout() -> Console:
    """As wide as the terminal; wide enough for our tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=ELSEWHERE)


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


def confirmed(question: str) -> bool:
    """Ask at the terminal; False where there is none, and unless the answer is yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
