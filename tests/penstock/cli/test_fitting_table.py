import io

import pytest
from rich.console import Console

from penstock.cli.terminal import Column, fitting_table

COLUMNS = (Column("name"), Column("size", 1, right=True), Column("what it is", 2))
ROWS = [("[bold]requests[/]", "3.5 MiB", "accepted requests"), ("work", "12 B", "jobs")]


def shown(width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(fitting_table(COLUMNS, ROWS, width))
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "columns"), [(80, 3), (36, 3), (35, 2), (17, 2), (16, 1), (8, 1)])
def test_columns_that_matter_least_leave_first_and_nothing_is_cut(width: int, columns: int) -> None:
    lines = shown(width)
    assert len(lines) == 3
    assert [column.name in lines[0] for column in COLUMNS] == [number < columns for number in range(3)]
    assert not any("…" in line for line in lines)


def test_what_must_stay_is_cut_where_there_is_no_room() -> None:
    assert shown(5)[1] == "requ…"
