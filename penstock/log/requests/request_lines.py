"""Formats a list of requests as lines of text, as wide as the terminal; 100,000 take a second. Pure."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.cli.figures import clock, span
from penstock.schemas.summary import RequestSummary

_COLOURS = {"done": "32", "failed": "31", "cancelled": "33", "running": "36", "queued": "35"}  # ANSI
_GAP = "  "
_NONE, _ERROR, _MATCH = -len(_GAP), 16, 24  # columns for nothing, for an error, for what --grep found
_LEAST = 8


class RequestLine(NamedTuple):
    """``match``: what --grep found, with its surroundings."""

    summary: RequestSummary
    match: str = ""


class _Column(NamedTuple):
    """A column of the list. Least ``width``: rows that --follow adds later stand below the first ones."""

    name: str
    width: int
    cell: Callable[[RequestSummary, int], str]
    leaves: int = 0  # the highest is left out first where there is no room; 0: it stays
    number: bool = False


def lines(
    requests: Sequence[RequestLine], *, width: int, now_ns: int, header: str = "", colours: bool = False
) -> Iterator[str]:
    """
    Args:
        width: of the terminal, in columns.
        header: name of the last column, above the list; "": no line of names.
        colours: as ANSI escape sequences.
    """
    table = {column: [column.cell(each.summary, now_ns) for each in requests] for column in _COLUMNS}
    sizes = {column: max(column.width, *map(len, cells)) for column, cells in table.items()}
    if not any(table[_CODE]):
        del sizes[_CODE]
    left = _drop(sizes, width, _wanted(requests))
    cut = _CODE if _CODE in sizes else _STATE
    sizes[cut] += min(0, left - _NONE)  # what stays is wider than the terminal
    columns, widths = list(sizes), list(sizes.values())
    rows = zip(*(table[column] for column in columns), strict=True)
    forms = [f"{{:{'>' if column.number else '<'}{size}}}" for column, size in zip(columns, widths, strict=True)]
    form = _GAP.join(forms).format
    if header:
        name = f"{_GAP}{header}" if left >= _LEAST else ""
        yield _bold(f"{form(*(column.name for column in columns))}{name}", colours)
    state, place = columns.index(_STATE), columns.index(cut)
    for (summary, match), row in zip(requests, rows, strict=True):
        cells = list(row)
        cells[place] = _cut(cells[place], widths[place])
        if colours:
            cells[state] = f"\x1b[{_COLOURS[summary.state]}m{cells[state]:<{widths[state]}}\x1b[0m"
        text = match or summary.message if left >= _LEAST else ""
        if text:
            text = _cut(_line(" ".join(text.split())), left)
        yield f"{form(*cells)}{_GAP}{text}".rstrip()


def _wanted(requests: Sequence[RequestLine]) -> int:
    if any(each.match for each in requests):
        return _MATCH
    return _ERROR if any(each.summary.message for each in requests) else _NONE


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _drop(sizes: dict[_Column, int], width: int, text: int) -> int:
    """Remove columns until the others and ``text`` characters of text fit. Returns the width left for text."""
    for column in sorted(sizes, key=lambda column: column.leaves, reverse=True):
        left = width - sum(sizes.values()) - len(_GAP) * len(sizes)
        if column.leaves <= _OVER_ERRORS and text == _ERROR:
            text = _NONE
        if left >= text or not column.leaves:
            break
        del sizes[column]
    return left


def _bold(text: str, colours: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colours else text


@lru_cache(maxsize=4096)
def _second(seconds: int, now_ns: int) -> str:
    return clock(seconds * 1_000_000_000, now_ns)[:-4]


def _clock(at_ns: int, now_ns: int) -> str:
    seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
    return f"{_second(seconds, now_ns)}.{nanoseconds // 1_000_000:03d}"


def _line(text: str) -> str:
    """A client's text, without control characters that would move the cursor."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)


_OVER_ERRORS = 4  # columns up to here matter more than the text of errors, whose code has a column
_STATE = _Column("state", 9, lambda request, _: request.state)
_CODE = _Column("code", 4, lambda request, _: request.code if request.code != request.state else "", 1)
_COLUMNS = (
    _Column("accepted", 12, lambda request, now_ns: _clock(request.created_ns, now_ns), 3),
    _Column("id", 36, lambda request, _: request.id),
    _STATE,
    _CODE,
    _Column("model", 6, lambda request, _: _line(request.model), 7),
    _Column("worker", 17, lambda request, _: _line(request.worker), 5),
    _Column("prompt", 6, lambda request, _: str(request.prompt_tokens), 6, number=True),
    _Column("cached", 6, lambda request, _: str(request.cached_tokens), 9, number=True),
    _Column("out", 5, lambda request, _: str(request.completion_tokens), 4, number=True),
    _Column("ttft", 9, lambda request, _: span(request.ttft_ms), 8, number=True),
    _Column("duration", 9, lambda request, _: span(request.duration_ms), 2, number=True),
)
