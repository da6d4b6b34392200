import io

import pytest
from rich.console import Console

from penstock.cli.terminal import bar, escape, fail, print_hanging, visible
from penstock.log_tools.requests.list_requests import RequestLine, lines
from penstock.schemas.summary import RequestSummary


def test_what_clients_wrote_moves_no_cursor() -> None:
    assert visible("日本 a\nb\tc") == "日本 a\nb\tc"
    assert visible("\x1b[2J\x07\u202e") == "\ufffd[2J\ufffd\ufffd"
    assert escape("[red]\x1b") == "\\[red]\ufffd"


def test_text_that_was_found_moves_no_cursor() -> None:
    found = RequestLine(RequestSummary(id="a", model="m", state="done", created_ns=1), "red \x1b]0;owned\x07")
    (line,) = lines([found], width=200, now_ns=1)
    assert line.endswith("red \ufffd]0;owned\ufffd")


def test_a_long_line_continues_below_itself_on_a_terminal_and_stays_one_line_elsewhere() -> None:
    def shown(width: int, *, terminal: bool) -> list[str]:
        text = io.StringIO()
        console = Console(file=text, width=width, force_terminal=terminal, color_system=None)
        print_hanging(console, "[dim]12:00 job[/]  ", "one two three four five six seven eight nine ten eleven twelve")
        return [line.rstrip() for line in text.getvalue().splitlines()]

    whole = ["12:00 job  one two three four five six seven eight nine ten eleven twelve"]
    assert shown(40, terminal=False) == shown(100, terminal=True) == whole
    beside, below = shown(45, terminal=True), shown(38, terminal=True)
    assert beside[1].startswith(" " * 11 + "eight")
    assert below[:2] == ["12:00 job", "    one two three four five six seven"]
    assert [" ".join(" ".join(each).split()) for each in (beside, below)] == [" ".join(whole[0].split())] * 2


@pytest.mark.parametrize(("start", "end"), [(0, 100), (0, 0), (99, 100), (100, 100), (50, 51), (37, 63), (1, 1)])
def test_a_bar_is_never_empty_and_never_too_long(start: int, end: int) -> None:
    drawn = bar(start, end, 100, 48)
    assert drawn.strip()
    assert len(drawn) <= 48
    assert abs(len(drawn) - len(drawn.lstrip()) - start * 48 / 100) <= 1


def test_a_file_of_another_user_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("doctor", PermissionError(13, "Permission denied", "/srv/other/nats"), ValueError("no")) == 1
    said = "penstock doctor: /srv/other/nats: permission denied; run as its owner\npenstock doctor: no\n"
    assert capsys.readouterr().err == said
