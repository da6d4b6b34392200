"""The files of a sweep: ``<out>/<name>/c<N>/result.json``, and beside it one ``records-<run>.jsonl`` for each run.

A result is written whole, or not at all, after each run: finished runs survive Ctrl-C and are not repeated.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from penstock.measure.sweep.endpoints import RESERVED, ServerFigures
from penstock.measure.sweep.figures import RequestRecord, RunFigures
from penstock.measure.sweep.smoke import Api
from penstock.measure.sweep.workload import LoadLevel, Workload

_GROWS = 1.1  # from doubling the level; less is no growth
_FULL = 0.95  # share of the best throughput that counts as saturated
_BEYOND = 1.5  # times the knee, that must have been measured to call it one
_TAIL_LEAVES = 3.0  # times the lowest tail of lower levels
_CLOSE = 0.1  # share of a level: no further bisection


class MeasuredPoint(NamedTuple):
    """One measured level.

    Attributes:
        level: concurrency or rate.
        throughput: output tokens per second.
        tail: p99 of TTFT, or of the latency where nothing is streamed, ms.
    """

    level: float
    throughput: float
    tail: float


class Knee(Struct, frozen=True):
    """
    Attributes:
        level: the lowest one with 95 % of the best throughput.
        throughput: at that level; ``best`` is the highest at any level.
        tail_leaves: the lowest level whose tail is three times the lowest before it; None: there is none.
        saturated: half as much load again brought no more throughput; False: it may still grow.
    """

    level: float
    throughput: float
    best: float
    tail: float
    tail_leaves: float | None
    saturated: bool


def find_knee(points: Iterable[MeasuredPoint]) -> Knee | None:
    """Find the knee. None: fewer than two levels have throughput."""
    ordered = [point for point in sorted(points) if point.throughput > 0]
    if len(ordered) < 2:
        return None
    best = max(point.throughput for point in ordered)
    at = _first_full(ordered)
    return Knee(
        ordered[at].level,
        ordered[at].throughput,
        best,
        ordered[at].tail,
        _tail_leaves(ordered),
        ordered[-1].level >= _BEYOND * ordered[at].level,
    )


def _first_full(ordered: Sequence[MeasuredPoint]) -> int:
    best = max(point.throughput for point in ordered)
    return next(at for at, point in enumerate(ordered) if point.throughput >= _FULL * best)


def _tail_leaves(ordered: Sequence[MeasuredPoint]) -> float | None:
    lowest = ordered[0].tail
    for point in ordered[1:]:
        if point.tail > _TAIL_LEAVES * lowest > 0:
            return point.level
        lowest = min(lowest, point.tail)
    return None


def next_level(points: Iterable[MeasuredPoint], highest: int) -> int | None:
    """The concurrency to measure next: doubling while throughput grows, then bisecting; None: the knee is known."""
    ordered = sorted(points)
    if not ordered:
        return 1
    last = ordered[-1]
    grows = len(ordered) < 2 or last.throughput >= _GROWS * ordered[-2].throughput
    if grows:
        return min(highest, int(last.level) * 2) if last.level < highest else None
    at = _first_full(ordered)
    below = int(ordered[at - 1].level) if at else 0
    above = int(ordered[at].level)
    if above - below <= max(1, round(_CLOSE * above)):
        return None
    return (below + above) // 2


SCHEMA = 1


class BadResults(Exception):
    """A result tree that cannot be used; the text names the file."""


class ClientFigures(Struct, frozen=True, kw_only=True):
    """Whether the load generator was the limit.

    Attributes:
        cpu_share: of one core.
        loop_late_p99_ms: how late its event loop ran.
        sent_late_p99_ms: how late requests with a due time were sent; None: they had none.
    """

    cpu_share: float = 0.0
    loop_late_p99_ms: float = 0.0
    sent_late_p99_ms: float | None = None
    warnings: tuple[str, ...] = ()


class LevelRun(Struct, frozen=True, kw_only=True):
    """One run of a level.

    Attributes:
        number: 1 for the first; runs of the same number at several endpoints sent the same requests.
        began: UTC, ISO 8601.
        aborted: why it ended early; "": it did not.
    """

    number: int
    began: str
    figures: RunFigures
    server: ServerFigures = ServerFigures()
    client: ClientFigures = ClientFigures()
    aborted: str = ""


class LevelResult(Struct, frozen=True, kw_only=True):
    """``result.json``: a level at an endpoint, with all its runs.

    Attributes:
        endpoint: its name.
        gpus: number of its GPUs; 0: unknown.
        generator: what sent the load: "penstock", or the tool whose results were converted.
        trace: name of the trace that was sent instead of ``workload``; "": none.
        warnings: limitations of the server that the smoke request showed.
        fingerprint: of its model and build, as its answers have it; "": they have none.
    """

    endpoint: str
    url: str
    model: str
    api: Api
    level: LoadLevel
    workload: Workload
    seed: int
    gpus: int = 0
    generator: str = "penstock"
    trace: str = ""
    stream: bool = True
    warnings: tuple[str, ...] = ()
    runs: tuple[LevelRun, ...] = ()
    schema: int = SCHEMA
    fingerprint: str = ""

    def same_load(self, other: "LevelResult") -> bool:
        """Whether the runs of both belong into one file."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("model", "api", "level", "workload", "seed", "generator", "trace", "stream", "schema")
        )

    @property
    def complete(self) -> tuple[LevelRun, ...]:
        """The runs that were not aborted."""
        return tuple(run for run in self.runs if not run.aborted and run.figures.requests)


def level_folder(out: Path, endpoint: str, level: LoadLevel) -> Path:
    return out / endpoint / level.folder


def load(folder: Path) -> LevelResult | None:
    """Load the result in the folder of a level. None: there is none.

    Raises:
        BadResults: the file is damaged or of a later schema.
    """
    path = folder / "result.json"
    try:
        result = msgspec.json.decode(path.read_bytes(), type=LevelResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadResults(f"{path}: {error}") from None
    if result.schema > SCHEMA:
        raise BadResults(f"{path}: schema {result.schema}; this version reads up to {SCHEMA}")
    return result


def save(folder: Path, result: LevelResult) -> None:
    _write(folder / "result.json", msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def save_records(folder: Path, run: int, records: Sequence[RequestRecord]) -> None:
    _write(folder / f"records-{run}.jsonl", b"".join(msgspec.json.encode(each) + b"\n" for each in records))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


class EndpointSeries(Struct, frozen=True):
    """All levels of one endpoint of one tree, in ascending order."""

    name: str
    folder: Path
    results: tuple[LevelResult, ...]


def read_series(folders: Sequence[Path]) -> list[EndpointSeries]:
    """The endpoints in these folders, each the ``--out`` of a sweep or one endpoint's folder in it.

    Raises:
        BadResults: a folder has no results.
    """
    series: list[EndpointSeries] = []
    for folder in folders:
        here = [each for each in (_series(path) for path in _candidates(folder)) if each]
        if not here:
            raise BadResults(f"{folder}: no results of `penstock bench sweep`")
        series += here
    names = [each.name for each in series]
    return [
        msgspec.structs.replace(each, name=f"{each.folder.parent.name}/{each.name}")
        if names.count(each.name) > 1
        else each
        for each in series
    ]


def _candidates(folder: Path) -> Iterator[Path]:
    yield folder
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in RESERVED)


def _series(folder: Path) -> EndpointSeries | None:
    levels = sorted(path.parent for path in folder.glob("*/result.json"))
    results = [result for path in levels if (result := load(path)) is not None and result.complete]
    if not results:
        return None
    results.sort(key=lambda result: (result.level.kind, result.level.value))
    return EndpointSeries(results[0].endpoint, folder, tuple(results))


def mean(result: LevelResult, figure: str, part: str = "") -> float | None:
    """A figure of a level, averaged over its runs; None: a run has none.

    Args:
        figure: a field of ``RunFigures``.
        part: of a ``Distribution``, such as "p99".
    """
    values = values_of(result, figure, part)
    return sum(values) / len(values) if values else None


def values_of(result: LevelResult, figure: str, part: str = "") -> list[float]:
    """A figure of each complete run, in order; empty if a run has none."""
    values = []
    for run in result.complete:
        value = getattr(run.figures, figure)
        if value is not None and part:
            value = getattr(value, part)
        if value is None:
            return []
        values.append(float(value))
    return values


def point(result: LevelResult) -> MeasuredPoint:
    """A level as a point for the search of the knee."""
    tail = mean(result, "ttft_ms", "p99")
    if tail is None:
        tail = mean(result, "latency_ms", "p99")
    return MeasuredPoint(result.level.value, mean(result, "output_tokens_per_s") or 0.0, tail or 0.0)
