"""What commands print: tables, and errors without their numbers."""

import sys

import rich.markup
from rich.console import Console

ELSEWHERE = 150  # columns in a file or a pipe, where rich would take 80


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


def confirmed(question: str) -> bool:
    """Ask at the terminal; False where there is none, and unless the answer is yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
