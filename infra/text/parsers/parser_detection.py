"""Which reasoning and tool-call parsers a model needs, detected from its chat template."""

from pathlib import Path
from typing import Literal

from penstock.infra.text.parsers.families import TABLE, Table, UnknownFamily, read_rows
from penstock.schemas.parser_names import AUTO, NONE


def reasoning_parser(requested: str, template: str) -> str:
    """The parser that a worker registers: the requested one, or the detected one; "": none, or not certain.

    Raises:
        UnknownFamily: no row of the table has the requested name.
    """
    return _resolved(requested, template, "thoughts")


def tool_call_parser(requested: str, template: str) -> str:
    """As ``reasoning_parser``, for tool calls."""
    return _resolved(requested, template, "calls")


def prepare(families: str, reasoning: str = AUTO, tool_calls: str = AUTO, table: Table = TABLE) -> None:
    """Take in a user's file of families, and check the names that were asked for. Once, when a process starts.

    Args:
        table: of this process; another one, if they are only to be checked.
    Raises:
        ValueError: the file or a name is wrong; the text says which flag.
    """
    try:
        table.add(read_rows(Path(families)) if families else ())
    except ValueError as error:
        raise ValueError(f"--parser-families {error}") from None
    named: tuple[tuple[str, str, Literal["thoughts", "calls"]], ...] = (
        ("--reasoning-parser", reasoning, "thoughts"),
        ("--tool-call-parser", tool_calls, "calls"),
    )
    for flag, name, part in named:
        try:
            if name not in (AUTO, NONE):
                table.canonical(name, part)
        except UnknownFamily as error:
            raise ValueError(f"{flag} {error}") from None


def _resolved(requested: str, template: str, part: Literal["thoughts", "calls"]) -> str:
    if requested == AUTO:
        return TABLE.detected(template, part)
    return "" if requested == NONE else TABLE.canonical(requested, part)
