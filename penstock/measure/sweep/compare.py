"""``penstock bench compare``: two sweeps of the same load, level by level, with confidence intervals."""

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.cli.terminal import fail, stdout
from penstock.configs.flags import Parser
from penstock.measure.sweep.results import BadResults, EndpointSeries, LevelResult, read_series, values_of

# Two-sided 95 % quantiles of Student's t by degrees of freedom; the last one holds beyond.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12)
_T95_BEYOND = 1.96


class Interval(Struct, frozen=True):
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """By what share ``ours`` is larger than ``theirs``, over runs with the same seeds.

    The interval is Student's over the paired differences of logarithms. With one seed it is unbounded.
    """
    if any(value <= 0 for value in (*ours, *theirs)):
        return Interval(math.nan, math.nan, math.nan)
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.expm1(mean), -1.0, math.inf)
    return _interval(mean, statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def unpaired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The same for independent runs: Welch's interval for the difference of the mean logarithms."""
    if any(value <= 0 for value in (*ours, *theirs)) or not ours or not theirs:
        return Interval(math.nan, math.nan, math.nan)
    a, b = [math.log(value) for value in ours], [math.log(value) for value in theirs]
    mean = statistics.fmean(a) - statistics.fmean(b)
    if len(a) < 2 or len(b) < 2:
        return Interval(math.expm1(mean), -1.0, math.inf)
    parts = [statistics.variance(each) / len(each) for each in (a, b)]
    if not sum(parts):
        return _interval(mean, 0.0, 1)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    return _interval(mean, math.sqrt(sum(parts)), int(freedom))


def _interval(mean: float, error: float, freedom: int) -> Interval:
    """Convert a mean of logarithms and its margin into shares."""
    at = max(1, freedom) - 1
    half = (_T95[at] if at < len(_T95) else _T95_BEYOND) * error
    return Interval(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


Verdict = Literal["faster", "slower", "within noise", "unknown"]


class Metric(NamedTuple):
    """A metric to compare. ``better``: 1 if more of it is better, -1 if less is."""

    title: str
    figure: str
    part: str
    better: int


METRICS = (
    Metric("requests/s", "requests_per_s", "", 1),
    Metric("output tokens/s", "output_tokens_per_s", "", 1),
    Metric("tokens/s per user", "tokens_per_s_per_user", "", 1),
    Metric("TTFT mean", "ttft_ms", "mean", -1),
    Metric("TTFT p50", "ttft_ms", "p50", -1),
    Metric("TTFT p99", "ttft_ms", "p99", -1),
    Metric("ITL mean", "itl_ms", "mean", -1),
    Metric("ITL p99", "itl_ms", "p99", -1),
    Metric("latency mean", "latency_ms", "mean", -1),
    Metric("latency p99", "latency_ms", "p99", -1),
)


class LevelDifference(Struct, frozen=True):
    """The difference between B and A in one metric at one level.

    Attributes:
        change: of B against A, as a share; 0.1 is 10 % more.
        pairs: runs of the same number were compared with each other; otherwise all runs of each side.
    """

    level: str
    metric: str
    a: float
    b: float
    runs_a: int
    runs_b: int
    change: Interval
    pairs: bool
    verdict: Verdict


def compare(a: Sequence[LevelResult], b: Sequence[LevelResult], least: float = 0.0) -> list[LevelDifference]:
    """The differences at the common levels, by level and metric.

    Args:
        least: smallest change that counts, as a share, however sure it is.
    """
    others = {result.level.folder: result for result in b}
    return [
        difference
        for result in a
        if (other := others.get(result.level.folder)) is not None
        for metric in METRICS
        if (difference := _difference(result, other, metric, least)) is not None
    ]


def _difference(a: LevelResult, b: LevelResult, metric: Metric, least: float) -> LevelDifference | None:
    ours, theirs = values_of(b, metric.figure, metric.part), values_of(a, metric.figure, metric.part)
    if not ours or not theirs:
        return None
    pairs = can_pair(a, b)
    change = paired(ours, theirs) if pairs else unpaired(ours, theirs)
    return LevelDifference(
        a.level.title,
        metric.title,
        sum(theirs) / len(theirs),
        sum(ours) / len(ours),
        len(theirs),
        len(ours),
        change,
        pairs,
        verdict(change, metric.better, least),
    )


def can_pair(a: LevelResult, b: LevelResult) -> bool:
    """Whether runs with the same number sent the same requests to both."""
    numbers = [[run.number for run in result.complete] for result in (a, b)]
    return numbers[0] == numbers[1] and all(
        getattr(a, name) == getattr(b, name) for name in ("workload", "level", "seed", "trace", "generator")
    )


def verdict(change: Interval, better: int, least: float) -> Verdict:
    """ "unknown" of a single run, which shows no noise, and of a metric that was 0."""
    if not (change.low == change.low and change.low > -1.0):
        return "unknown"
    if change.low <= 0.0 <= change.high or abs(change.mean) < least:
        return "within noise"
    return "faster" if (change.mean > 0) == (better > 0) else "slower"


SLOWER = 3
_STYLES = {"faster": "green", "slower": "red", "within noise": "dim", "unknown": "yellow"}


def run(argv: Sequence[str]) -> int:
    """Print one table per level. Returns 1 if there is nothing to compare, 3 if B is slower with --fail-if-slower."""
    parser = Parser(
        prog="penstock bench compare",
        description="say where B is faster or slower than A, and where the difference is within noise",
        epilog="run the sweeps with --repeat 5: single runs show no noise",
    )
    parser.add_argument("a", metavar="A", help="folder of an endpoint, such as bench-results/before")
    parser.add_argument("b", metavar="B", help="folder of the other one")
    parser.add_argument("--least", metavar="SHARE", type=float, default=0.0, help="smallest change that counts: 0.02")
    parser.add_argument("--json", metavar="FILE", default="", help="file for the differences")
    parser.add_argument("--fail-if-slower", action="store_true", help="exit with status 3 if B is slower in any metric")
    args = parser.parse_args(argv)
    try:
        a, b = (_one(Path(folder)) for folder in (args.a, args.b))
    except BadResults as error:
        return fail("bench compare", error)
    differences = compare(a.results, b.results, args.least)
    if not differences:
        print("penstock bench compare: A and B have no level in common", file=sys.stderr)
        return 1
    for change in what_changed(a, b):
        print(change)
    for level in dict.fromkeys(each.level for each in differences):
        stdout().print(table(level, [each for each in differences if each.level == level]))
    if note := _note(a, b, differences):
        print(note)
    slower = sorted({each.level for each in differences if each.verdict == "slower"})
    counts = {verdict: sum(each.verdict == verdict for each in differences) for verdict in _STYLES}
    print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items() if count))
    if args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(differences), indent=2) + b"\n")
    return SLOWER if slower and args.fail_if_slower else 0


def table(level: str, differences: Sequence[LevelDifference]) -> Table:
    shown = Table(title=level, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("metric")
    for heading in ("A", "B", "B against A", "95 % interval"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("B is")
    for each in differences:
        shown.add_row(
            each.metric,
            f"{each.a:,.1f}",
            f"{each.b:,.1f}",
            f"{each.change.mean:+.1%}",
            bounds(each.change),
            each.verdict,
            style=_STYLES[each.verdict],
        )
    return shown


def bounds(change: Interval) -> str:
    """The bounds of an interval as text; empty for a single run."""
    return f"{change.low:+.1%} … {change.high:+.1%}" if change.low > -1.0 else ""


def what_changed(a: EndpointSeries, b: EndpointSeries) -> list[str]:
    """What else than speed differs between two sweeps, as text: their model, and what was asked of it."""
    one, other = a.results[0], b.results[0]
    changes = [
        f"the {name} changed from {old or 'none'} to {new or 'none'}"
        for name in ("model", "api", "stream", "generator", "trace", "seed", "gpus")
        if (old := getattr(one, name)) != (new := getattr(other, name))
    ]
    if one.fingerprint and other.fingerprint and one.fingerprint != other.fingerprint:
        changes.insert(0, f"the revision or the build changed: {one.fingerprint} in A, {other.fingerprint} in B")
    if one.workload != other.workload:
        fields = (name for name in one.workload.__struct_fields__)
        pairs = ((name, getattr(one.workload, name), getattr(other.workload, name)) for name in fields)
        changes += [f"{name} differs: {old:g} in A, {new:g} in B" for name, old, new in pairs if old != new]
    return changes


def _one(folder: Path) -> EndpointSeries:
    series = read_series([folder])
    if len(series) > 1:
        names = ", ".join(str(each.folder) for each in series)
        raise BadResults(f"{folder} has several endpoints; name one of {names}")
    return series[0]


def _note(a: EndpointSeries, b: EndpointSeries, differences: Sequence[LevelDifference]) -> str:
    notes = []
    if any(min(each.runs_a, each.runs_b) < 2 for each in differences):
        notes.append("A single run shows no noise: repeat both sweeps with --repeat 5.")
    elif not all(each.pairs for each in differences):
        notes.append("The runs are not pairs (other requests, or another number of runs): intervals are wider.")
    here, there = ({result.level.folder for result in each.results} for each in (a, b))
    if odd := sorted(here ^ there):
        notes.append(f"Only in one of them, and not compared: {', '.join(odd)}.")
    return " ".join(notes)
