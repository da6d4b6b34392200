"""The report of a replay, and its HTML."""

from html.parser import HTMLParser

import msgspec

from penstock.log.export.recording import Run
from penstock.log.replay.comparison import Comparison, Difference, TextDifference, Timing
from penstock.log.replay.html_report import distribution, duration, html
from penstock.log.replay.report import Replayed, Report, make_report, same_routes, series

VOID = ("meta", "br", "line", "circle", "polyline", "i", "path")


class Checker(HTMLParser):
    """Raises for elements that are not closed in order, and remembers what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(*comparisons: Comparison) -> Report:
    runs = [(Run(each.id, stored={0: [(0, 1), (5_000_000, 2)]}), Run("x", stored={})) for each in comparisons]
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
    assert (found.recorded.itl.count, found.recorded.itl.p50) == (10, 2.5)
    assert found.replayed.itl is None


def test_the_page_is_well_formed_loads_nothing_and_escapes_what_users_wrote() -> None:
    difference = Difference(0, 3, (1, 2), (3, 4), (5,), 0.01, "recorded")
    timing = Timing(1.0, 2.0, 3000.0)
    found = report(
        one("1", "tokens", difference=difference, recorded_timing=timing),
        one("2", "error", replayed_code="engine_error", message="<script>alert(1)</script>"),
        one("3"),
        one("4", "tokens", text_difference=TextDifference(0, 4, "<i>", "<u>", "")),
    )
    texts = {"1": {"before": "<b>", "recorded": "<i>", "replayed": ""}}
    for each in (found, msgspec.structs.replace(found, texts=texts)):
        page = html(each)
        checker = Checker()
        checker.feed(page)
        assert (checker.open, checker.loaded) == ([], [])
        assert "<script" not in page
        assert "3 of 4 answers differ; 1 got no answer" in page
        assert "a near tie" in page


def test_a_plot_stays_within_its_frame() -> None:
    assert distribution("x", None, None) == ""
    for values in ([1.0], [0.0, 0.0], [0.5, 1, 2, 10_000], [3.0] * 900 + [4.0]):
        text = distribution("x", series(values), series([7.0]))
        points = [pair.split(",") for part in text.split('points="')[1:] for pair in part.split('"')[0].split()]
        assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 230 for x, y in points)
    assert [duration(value) for value in (0, 0.25, 12, 1500)] == ["0", "250 µs", "12 ms", "1.5 s"]
