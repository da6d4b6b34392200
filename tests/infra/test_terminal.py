from infra.terminal import escape, visible
from infra.timeline.request_lines import RequestLine, lines
from schemas.summary import RequestSummary


def test_what_clients_wrote_moves_no_cursor() -> None:
    assert visible("日本 a\nb\tc") == "日本 a\nb\tc"
    assert visible("\x1b[2J\x07\u202e") == "\ufffd[2J\ufffd\ufffd"
    assert escape("[red]\x1b") == "\\[red]\ufffd"


def test_text_that_was_found_moves_no_cursor() -> None:
    found = RequestLine(RequestSummary(id="a", model="m", state="finished", created_ns=1), "red \x1b]0;owned\x07")
    (line,) = lines([found], width=200, now_ns=1)
    assert line.endswith("red \ufffd]0;owned\ufffd")
