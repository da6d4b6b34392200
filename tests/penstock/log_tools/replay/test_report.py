"""The report of a replay, as data and on the terminal."""

import io

import msgspec
from rich.console import Console

from penstock.log_tools.export.recording import RecordedRun
from penstock.log_tools.replay.comparison import Comparison, TextDifference, TokenDifference
from penstock.log_tools.replay.report import Replayed, ReplayReport, make_report, same_routes, show


def report(*comparisons: Comparison) -> ReplayReport:
    runs = [
        (RecordedRun(each.id, stored={0: [(0, 1), (5_000_000, 2)]}), RecordedRun("x", stored={}))
        for each in comparisons
    ]
    return make_report(
        Replayed("t", runs, comparisons, 2.0),
        source="<b>", settings={"speed": "max"}, skipped={"unfinished": 2}, tolerance=0.1,
    )  # fmt: skip


def one(name: str, outcome: str = "same", old: str = "a", new: str = "x", **more: object) -> Comparison:
    return Comparison(name, f"{name}-again", outcome, recorded_route=(old,), replayed_route=(new,), **more)  # type: ignore[arg-type]


def test_renamed_workers_have_not_moved_and_others_have() -> None:
    found = report(one("1"), one("2"), one("3", new="y"), one("4", old="b", new="y"))
    assert found.moved == 1
    assert same_routes({("a", "x"): 5, ("a", "a"): 1, ("b", "x"): 2}) == {"a": "a", "b": "x"}


def test_differences_come_first_and_are_counted() -> None:
    found = report(one("1"), one("2", "recovered"), one("3", "tokens"), one("4", "unanswered"), one("5", "error"))
    assert (found.requests, found.differences, found.errors, found.rate) == (5, 3, 2, 2.5)
    assert [each.id for each in found.comparisons] == ["3", "4", "5", "1", "2"]
    assert found.recorded.itl is not None
    assert (found.recorded.itl.count, found.recorded.itl.p50) == (5, 2.5)  # of each request, its mean
    assert found.replayed.itl is None


def test_the_terminal_shows_each_difference_and_what_users_wrote_as_it_is() -> None:
    difference = TokenDifference(0, 3, (1, 2), (3, 4), (5,), 0.01, "recorded")
    found = report(
        one("1", "tokens", difference=difference),
        one("2", "error", replayed_code="engine_error", message="[bold]alert[/]"),
        one("3"),
        one("4", "tokens", text_difference=TextDifference(0, 4, "<i>", "[red]", "")),
    )
    text = shown(found)
    assert "4 requests in 2.0 s (2/s): 1 same, 2 tokens, 1 error" in text
    assert "choice 0, first difference at token 3, margin 0.0100 (recorded)" in text
    assert "recorded: [1, 2] + [3, 4]" in text
    assert "engine_error: [bold]alert[/]" in text
    assert "recorded: '<i>' + '[red]'" in text
    texts = {"1": {"before": "a", "recorded": "b", "replayed": ""}}
    assert "recorded: 'a' + 'b'" in shown(msgspec.structs.replace(found, texts=texts))


def shown(found: ReplayReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]
