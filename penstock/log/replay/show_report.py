"""A replay's report on the terminal."""

from rich.console import Console
from rich.table import Table

from penstock.cli.counts import counted
from penstock.cli.terminal import escape
from penstock.log.replay.comparison import SAME, Comparison
from penstock.log.replay.report import Measured, Report, Series

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


def show(report: Report, console: Console) -> None:
    """Print outcomes, times, routes and the first differences."""
    parts = [f"[{_STYLES[name]}]{count} {name}[/]" for name, count in report.outcomes.items() if count or name == SAME]
    console.print(
        f"{counted(report.requests, 'request')} in {report.seconds:.1f} s ({report.rate:.0f}/s): {', '.join(parts)}; "
        f"{counted(report.compared_tokens, 'equal token')}",
        highlight=False,
    )
    for reason, count in report.skipped.items():
        console.print(f"not run again: {count} {reason}", highlight=False)
    console.print(_times(report))
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
        console.print(f"… and {report.differences - DIFFERENCES} more; --json and --html show them", highlight=False)


def _times(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for name in ("p50", "p90", "p99", "max", "mean", "count"):
        table.add_column(name, justify="right")
    for name in ("ttft", "itl", "e2e"):
        for label, measured in (("recorded", report.recorded), ("replayed", report.replayed)):
            series: Series | None = getattr(measured, name)
            if series is None:
                table.add_row(f"{name.upper()} {label}", *(["–"] * 6))
                continue
            values = (series.p50, series.p90, series.p99, series.max, series.mean)
            table.add_row(f"{name.upper()} {label}", *(f"{value:.2f}" for value in values), str(series.count))
    return table


def _routes(report: Report, console: Console) -> None:
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


def _hit_rate(measured: Measured) -> float:
    return measured.cached_tokens / measured.prompt_tokens if measured.prompt_tokens else 0.0


def _difference(report: Report, each: Comparison, console: Console) -> None:
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
