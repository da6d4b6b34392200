"""The waterfall, and the flags of the command."""

import io

import pytest
from rich.console import Console

from penstock.cli.terminal import bar
from penstock.configs.settings import TraceSettings
from penstock.log.traces.command import WIDTH, BadUse, check, show
from penstock.log.traces.span import Span
from penstock.log.traces.spans import spans
from penstock.schemas.trace import Trace
from tests.penstock.log.traces.samples import PARENT, split


def shown(spans: list[Span], width: int = 200) -> list[str]:
    out = io.StringIO()
    show(spans, Console(file=out, width=width, no_color=True))
    return out.getvalue().splitlines()


def test_a_line_per_span_indented_below_its_parent_in_order_of_time() -> None:
    title, head, *lines = shown(spans(split(Trace(PARENT), stamped=True)))
    assert PARENT[3:35] in title
    assert PARENT[36:52] in title
    assert "0 … 50.0 ms" in head
    names = ["chat tiny", "  route", "  prefill", "    wait", "    prompt"]
    names += ["  decode", "    transfer", "    wait", "    first token", "    generate"]
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(name + " ")
    assert "kv → p-1, overlap 2/3" in lines[1]
    assert "4 blocks, 0.00 MiB, over nixl" in lines[6]
    assert "100 in, 32 cached, 2 out, length" in lines[0]


@pytest.mark.parametrize("width", [80, 100, 130])
def test_on_a_narrow_terminal_only_the_last_column_is_broken_into_lines(width: int) -> None:
    _, _, *lines = shown(spans(split(Trace(PARENT), stamped=True)), width)
    assert all(len(line) <= width for line in lines)
    for name in ("chat tiny", "route", "prefill", "decode", "transfer", "first token", "generate"):
        assert any(line.lstrip().startswith(f"{name} ") and " ms" in line for line in lines), name


@pytest.mark.parametrize(("start", "end"), [(0, 100), (0, 0), (99, 100), (100, 100), (50, 51), (37, 63), (1, 1)])
def test_a_bar_is_never_empty_and_never_too_long(start: int, end: int) -> None:
    drawn = bar(start, end, 100, WIDTH)
    assert drawn.strip()
    assert len(drawn) <= WIDTH
    assert abs(len(drawn) - len(drawn.lstrip()) - start * WIDTH / 100) <= 1


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"request": "a", "otlp_endpoint": "http://b"},
        {"otlp_endpoint": "localhost:4317"},
        {"otlp_endpoint": "http://b", "since": "yesterday"},
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(BadUse):
        check(TraceSettings(**flags))
