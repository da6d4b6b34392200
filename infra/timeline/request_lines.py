"""A list of requests as lines of text, as wide as the terminal: 100,000 of them in a second. Pure."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from infra.timeline.moments import clock, span
from schemas.summary import RequestSummary

_COLOURS = {"finished": "32", "failed": "31", "cancelled": "33", "running": "36", "waiting": "35"}  # ANSI
_GAP = "  "


class RequestLine(NamedTuple):
    """``match``: what --grep found, with its surroundings."""

    summary: RequestSummary
    match: str = ""


class _Column(NamedTuple):
    """A column of the list. Least ``width``: rows that --follow adds later stand below the first ones."""

    name: str
    width: int
    cell: Callable[[RequestSummary, int], str]
    from_width: int = 0  # of the terminal: a narrower one does not show it
    number: bool = False


def lines(
    found: Sequence[RequestLine], *, width: int, now_ns: int, header: str = "", colours: bool = False
) -> Iterator[str]:
    """
    Args:
        width: of the terminal, in columns.
        header: name of the last column, above the list; "": no line of names.
        colours: as ANSI escape sequences.
    """
    columns = [column for column in _COLUMNS if width >= column.from_width]
    rows = [[column.cell(each.summary, now_ns) for column in columns] for each in found]
    by_column = zip(columns, zip(*rows, strict=True), strict=True)
    widths = [max(column.width, *map(len, cells)) for column, cells in by_column]
    left = max(8, width - sum(widths) - len(_GAP) * len(columns))
    forms = [f"{{:{'>' if column.number else '<'}{size}}}" for column, size in zip(columns, widths, strict=True)]
    form = _GAP.join(forms).format
    if header:
        yield _bold(f"{form(*(column.name for column in columns))}{_GAP}{header}", colours)
    place = next(n for n, column in enumerate(columns) if column.name == "state")
    for (summary, match), cells in zip(found, rows, strict=True):
        if colours:
            cells[place] = f"\x1b[{_COLOURS[summary.state]}m{cells[place]:<{widths[place]}}\x1b[0m"
        text = match or summary.message
        if text:
            text = _line(" ".join(text.split()))
            text = text if len(text) <= left else text[: left - 1] + "…"
        yield f"{form(*cells)}{_GAP}{text}".rstrip()


def _bold(text: str, colours: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colours else text


@lru_cache(maxsize=4096)
def _second(seconds: int, now_ns: int) -> str:
    return clock(seconds * 1_000_000_000, now_ns)[:-4]


def _clock(at_ns: int, now_ns: int) -> str:
    seconds, rest = divmod(at_ns, 1_000_000_000)
    return f"{_second(seconds, now_ns)}.{rest // 1_000_000:03d}"


def _line(text: str) -> str:
    """What a client wrote, without what would move the cursor."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)


_COLUMNS = (
    _Column("accepted", 12, lambda found, now_ns: _clock(found.created_ns, now_ns)),
    _Column("id", 36, lambda found, _: found.id),
    _Column("state", 9, lambda found, _: found.code or found.state),
    _Column("model", 6, lambda found, _: _line(found.model), 130),
    _Column("worker", 17, lambda found, _: _line(found.worker), 105),
    _Column("prompt", 6, lambda found, _: str(found.prompt_tokens), 90, number=True),
    _Column("cached", 6, lambda found, _: str(found.cached_tokens), 130, number=True),
    _Column("out", 5, lambda found, _: str(found.completion_tokens), number=True),
    _Column("ttft", 9, lambda found, _: span(found.ttft_ms), 120, number=True),
    _Column("duration", 9, lambda found, _: span(found.duration_ms), number=True),
)
