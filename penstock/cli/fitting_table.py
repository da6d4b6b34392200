"""Tables that fit a terminal: where there is no room for all columns, those that matter least are left out."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

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
