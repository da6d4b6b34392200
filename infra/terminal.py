"""Where commands print their tables."""

from rich.console import Console

ELSEWHERE = 150  # columns in a file or a pipe, where rich would take 80


def stdout() -> Console:
    """As wide as the terminal; wide enough for our tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=ELSEWHERE)
