"""The report of a replay, as data. Pure."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.figures import counted
from penstock.cli.terminal import Column, escape, fitting_table
from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve
from penstock.log_tools.export.recording import RecordedRun
from penstock.log_tools.replay.comparison import ERROR, OUTCOMES, RECOVERED, SAME, UNANSWERED, Comparison, what_changed

SHOWN = 500  # comparisons in a report, those that differ first
QUANTILES = (0.5, 0.9, 0.99)


class ReplaySeries(msgspec.Struct, frozen=True):
    """A distribution, milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class MeasuredPair(msgspec.Struct, frozen=True):
    """A figure of the recorded and of the replayed requests. None: not recorded."""

    ttft: ReplaySeries | None
    itl: ReplaySeries | None
    e2e: ReplaySeries | None
    cached_tokens: int
    prompt_tokens: int


class Replayed(NamedTuple):
    """The replayed requests.

    Attributes:
        target: where they ran, as text.
        runs: recorded and replayed, those of ``comparisons``.
        seconds: from the first request to the last end.
    """

    target: str
    runs: Sequence[tuple[RecordedRun, RecordedRun]]
    comparisons: Sequence[Comparison]
    seconds: float


class ReplayReport(msgspec.Struct, frozen=True):
    """The report of one replay.

    Attributes:
        source, target: where requests were recorded, and where they were replayed.
        settings: changes and pace, as text.
        skipped: requests that were not run again, by reason.
        outcomes: how many, by outcome.
        seconds: the replay took; ``rate``: requests per second.
        moved: requests that ran on other workers; ``routes``: number of requests by (recorded, replayed) worker.
        logprob_gap: the largest; None: not recorded.
        comparisons: those that differ, then others, at most ``SHOWN``.
    """

    source: str
    target: str
    settings: dict[str, str]
    requests: int
    skipped: dict[str, int]
    outcomes: dict[str, int]
    compared_tokens: int
    seconds: float
    rate: float
    recorded: MeasuredPair
    replayed: MeasuredPair
    moved: int
    routes: tuple[tuple[str, str, int], ...]
    logprob_gap: float | None
    logprob_differences: int
    comparisons: tuple[Comparison, ...]
    changed: dict[str, int] = {}  # what differs of the requests and their model, with the number of requests
    texts: dict[str, dict[str, str]] = {}  # of differences, by recorded id: "before", "recorded", "replayed"

    @property
    def differences(self) -> int:
        """The requests whose answers differ."""
        return sum(count for name, count in self.outcomes.items() if name not in (SAME, RECOVERED))

    @property
    def errors(self) -> int:
        return self.outcomes[ERROR] + self.outcomes[UNANSWERED]


def make_report(
    replayed: Replayed, *, source: str, settings: Mapping[str, str], skipped: Mapping[str, int], tolerance: float
) -> ReplayReport:
    """
    Args:
        tolerance: of log-probabilities; what differs by more is counted.
    """
    comparisons, seconds = replayed.comparisons, replayed.seconds
    counted = Counter(each.outcome for each in comparisons)
    gaps = [each.logprob_gap for each in comparisons if each.logprob_gap is not None]
    routes = Counter(
        (" → ".join(each.recorded_route), " → ".join(each.replayed_route))
        for each in comparisons
        if each.recorded_route and each.replayed_route
    )
    names = same_routes(routes)
    moved = sum(count for (old, new), count in routes.items() if names.get(old) != new)
    differing = [each for each in comparisons if each.outcome not in (SAME, RECOVERED)]
    rest = [each for each in comparisons if each.outcome in (SAME, RECOVERED)]
    return ReplayReport(
        source,
        replayed.target,
        dict(settings),
        len(comparisons),
        dict(skipped),
        {name: counted[name] for name in OUTCOMES},
        sum(each.compared for each in comparisons),
        seconds,
        len(comparisons) / seconds if seconds else 0.0,
        measured([old for old, _ in replayed.runs]),
        measured([new for _, new in replayed.runs]),
        moved,
        tuple((old, new, count) for (old, new), count in routes.most_common()),
        max(gaps, default=None),
        sum(gap > tolerance for gap in gaps),
        tuple((differing + rest)[:SHOWN]),
        dict(Counter(each for old, new in replayed.runs for each in what_changed(old, new)).most_common()),
    )


def same_routes(routes: Mapping[tuple[str, str], int]) -> dict[str, str]:
    """Map routes of the replay to recorded ones: an equal route if there is one, otherwise the most frequent.

    Workers get new ids at each start. A route whose requests stay together has not moved.
    """
    same: dict[str, str] = {old: new for old, new in routes if old == new}
    taken = set(same.values())
    for (old, new), _ in sorted(routes.items(), key=lambda item: -item[1]):
        if old not in same and new not in taken:
            same[old] = new
            taken.add(new)
    return same


def measured(runs: Sequence[RecordedRun]) -> MeasuredPair:
    itl = [sum(gaps) / len(gaps) for run in runs if (gaps := run.itl_ms())]
    return MeasuredPair(
        series([value for run in runs if (value := run.ttft_ms) is not None]),
        series(itl),
        series([value for run in runs if (value := run.e2e_ms) is not None]),
        sum(run.cached_tokens for run in runs),
        sum(len(run.request.prompt) // 4 for run in runs if run.request is not None),
    )


def series(values: Sequence[float]) -> ReplaySeries | None:
    if not values:
        return None
    ordered = sorted(values)
    count = len(ordered)
    p50, p90, p99 = (ordered[min(count - 1, int(share * count))] for share in QUANTILES)
    return ReplaySeries(count, sum(ordered) / count, p50, p90, p99, ordered[-1])


DIFFERENCES = 10
ROUTES = 8
_STYLES = {
    "same": "green",
    "tokens": "red",
    "finish": "red",
    "error": "red",
    "unanswered": "red",
    "recovered": "yellow",
}


def show(report: ReplayReport, console: Console) -> None:
    """Print outcomes, times, routes and the first differences."""
    for text, count in list(report.changed.items())[:DIFFERENCES]:
        of = "" if count == report.requests else f" ({count:,} of {report.requests:,} requests)"
        console.print(f"[yellow]{escape(text)}[/]{of}", highlight=False)
    parts = [f"[{_STYLES[name]}]{count} {name}[/]" for name, count in report.outcomes.items() if count or name == SAME]
    console.print(
        f"{counted(report.requests, 'request')} in {report.seconds:.1f} s ({report.rate:.0f}/s): {', '.join(parts)}; "
        f"{counted(report.compared_tokens, 'equal token')}",
        highlight=False,
    )
    for reason, count in report.skipped.items():
        console.print(f"not run again: {count} {reason}", highlight=False)
    console.print(_times(report, console.width))
    _routes(report, console)
    if report.logprob_gap is not None:
        console.print(
            f"log-probabilities differ by at most {report.logprob_gap:.2g}; "
            f"{counted(report.logprob_differences, 'request')} by more than the tolerance",
            highlight=False,
        )
    shown = [each for each in report.comparisons if each.outcome not in (SAME, "recovered")]
    for each in shown[:DIFFERENCES]:
        _difference(report, each, console)
    if report.differences > DIFFERENCES:
        console.print(f"… and {report.differences - DIFFERENCES} more; --json shows them", highlight=False)


def _times(report: ReplayReport, width: int) -> Table:
    columns = [Column("ms"), *(Column(name, right=True) for name in ("p50", "p90", "p99", "max", "mean", "count"))]
    rows = []
    for name in ("ttft", "itl", "e2e"):
        for label, measured in (("recorded", report.recorded), ("replayed", report.replayed)):
            series: ReplaySeries | None = getattr(measured, name)
            if series is None:
                rows.append([f"{name.upper()} {label}", *(["–"] * 6)])
                continue
            values = (series.p50, series.p90, series.p99, series.max, series.mean)
            rows.append([f"{name.upper()} {label}", *(f"{value:.2f}" for value in values), str(series.count)])
    return fitting_table(columns, rows, width)


def _routes(report: ReplayReport, console: Console) -> None:
    hits = [
        f"{label} {_hit_rate(measured):.1%}"
        for label, measured in (("recorded", report.recorded), ("replayed", report.replayed))
    ]
    console.print(f"prompt tokens from the cache: {', '.join(hits)}", highlight=False)
    total = sum(count for _, _, count in report.routes)
    if not total:
        console.print("routes: not recorded", highlight=False)
        return
    console.print(f"routed elsewhere: {report.moved} of {total}", highlight=False)
    for old, new, count in report.routes[:ROUTES] if report.moved else ():
        console.print(f"  {count:>6}  {escape(old)}  ⇒  {escape(new)}", highlight=False)


def _hit_rate(measured: MeasuredPair) -> float:
    return measured.cached_tokens / measured.prompt_tokens if measured.prompt_tokens else 0.0


def _difference(report: ReplayReport, each: Comparison, console: Console) -> None:
    console.print(f"\n[red]{each.outcome}[/] {each.id} ⇒ {each.replay_id}", highlight=False)
    if each.replayed_code or each.outcome == "unanswered":
        console.print(f"  {each.replayed_code or 'no answer'}: {escape(each.message)}", highlight=False)
    text_difference = each.text_difference
    if text_difference is not None:
        console.print(f"  choice {text_difference.choice}, character {text_difference.position}", highlight=False)
        for label in ("recorded", "replayed"):
            shown = f"{text_difference.before!r} + {getattr(text_difference, label)!r}"
            console.print(f"  {label}: {escape(shown)}", highlight=False, soft_wrap=True)
        return
    one = each.difference
    if one is None:
        if each.outcome == "finish":
            console.print(f"  ended with {each.recorded_finish}, now {each.replayed_finish}", highlight=False)
        return
    margin = f", margin {one.margin:.4f} ({one.margin_of})" if one.margin is not None else ""
    console.print(f"  choice {one.choice}, first difference at token {one.position}{margin}", highlight=False)
    text = report.texts.get(each.id)
    for label, tokens in (("recorded", one.recorded), ("replayed", one.replayed)):
        shown = f"{text['before']!r} + {text[label]!r}" if text else f"{list(one.before[-4:])} + {list(tokens)}"
        console.print(f"  {label}: {escape(shown)}", highlight=False, soft_wrap=True)


def with_texts(report: ReplayReport, model: str = "") -> ReplayReport:
    """Add the texts around first differences to a report; without the tokenizer it stays unchanged."""
    differing = [each for each in report.comparisons if each.difference is not None]
    if not differing or not model:
        return report
    with contextlib.suppress(ModelError, OSError):
        tokenizer = load_tokenizer(resolve(model))

        def text(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        texts = {}
        for each in differing:
            one = each.difference
            assert one is not None
            texts[each.id] = {
                "before": text(one.before),
                "recorded": text(one.recorded),
                "replayed": text(one.replayed),
            }
        return msgspec.structs.replace(report, texts=texts)
    return report
