"""One record for each level of each deployment: speed per user, throughput per GPU, and cost. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.measure.sweep.results import EndpointSeries, LevelResult, mean

_Amount = Annotated[float, Meta(ge=0)]
_HOUR_S = 3600
_MILLION = 1e6


class BadPrices(ValueError):
    """A price file that cannot be used, or that lacks a type of GPU."""


class GpuCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU with its share of the host.

    Attributes:
        price_per_hour: rent, or purchase and upkeep spread over the years of use; without separately paid energy.
        watts: power under load.
        idle_watts: power without load; None: the same as under load.
    """

    price_per_hour: _Amount
    watts: _Amount = 0.0
    idle_watts: _Amount | None = None


class Prices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Attributes:
        gpus: by type.
        energy_price_per_kwh: 0 if the rent includes it.
        pue: power usage effectiveness: energy of the whole data centre for each unit of the machines'.
        utilisation: share of the hours that the deployment spends at the measured load; idle hours are paid, too.
    """

    gpus: dict[str, GpuCost]
    currency: str = "USD"
    energy_price_per_kwh: _Amount = 0.0
    pue: Annotated[float, Meta(ge=1)] = 1.0
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Cost(Struct, frozen=True):
    """The cost of a million output tokens: both parts in the file's currency, the energy also in kWh."""

    hardware: float
    energy: float
    energy_kwh: float

    @property
    def total(self) -> float:
        return self.hardware + self.energy


def read_prices(text: str) -> Prices:
    """
    Args:
        text: YAML.

    Raises:
        BadPrices: it is none, or has unknown or impossible values.
    """
    import yaml

    try:
        prices = msgspec.convert(yaml.safe_load(text), Prices)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise BadPrices(str(error)) from None
    if not prices.gpus:
        raise BadPrices("no GPU has a price: add one under `gpus`")
    return prices


def gpu_of(prices: Prices, name: str) -> GpuCost:
    """The prices of a type of GPU; "" stands for the only one.

    Raises:
        BadPrices: the file has no such type, or several and none was named.
    """
    if not name and len(prices.gpus) == 1:
        return next(iter(prices.gpus.values()))
    if name not in prices.gpus:
        names = ", ".join(sorted(prices.gpus))
        raise BadPrices(f"GPU type {name or 'unknown'}; the price file has {names}")
    return prices.gpus[name]


def cost(prices: Prices, gpu: GpuCost, tokens_per_s_per_gpu: float) -> Cost:
    """The cost of a million output tokens at a throughput above 0."""
    busy = prices.utilisation
    idle_watts = gpu.watts if gpu.idle_watts is None else gpu.idle_watts
    kwh_per_hour = (busy * gpu.watts + (1 - busy) * idle_watts) / 1e3 * prices.pue
    hours = _MILLION / (tokens_per_s_per_gpu * _HOUR_S * busy)
    kwh = kwh_per_hour * hours
    return Cost(gpu.price_per_hour * hours, kwh * prices.energy_price_per_kwh, kwh)


FILE = "deployment.json"
_Count = Annotated[int, Meta(ge=0)]


class BadDeployment(ValueError):
    """A description that cannot be used; the text names the file or the flag."""


class MeasuredDeployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Attributes:
        kind: deployments of one kind share a line, such as "aggregated"; "": the endpoint's name.
        model: "": the sweep's.
        total_gpus: that it uses; 0: as the sweep says.
        gpu: its type, as the price file calls it; "": unknown.
        workers: aggregated workers, which prefill and decode; 0: none, or unknown.
        settings: further differences from other deployments, such as a batch size.
    """

    kind: str = ""
    model: str = ""
    total_gpus: _Count = 0
    gpu: str = ""
    workers: _Count = 0
    prefill_workers: _Count = 0
    decode_workers: _Count = 0
    settings: dict[str, str | int | float | bool] = {}


_FIELDS = tuple(field for field in MeasuredDeployment.__struct_fields__ if field != "settings")


def deployment_of(folder: Path) -> MeasuredDeployment:
    """Read the description in the endpoint's folder or the one above it. Without either it is empty.

    Raises:
        BadDeployment: the file is damaged.
    """
    for path in (folder / FILE, folder.parent / FILE):
        try:
            return msgspec.json.decode(path.read_bytes(), type=MeasuredDeployment)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise BadDeployment(f"{path}: {error}") from None
    return MeasuredDeployment()


def parse_deployment(flags: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse the fields that flags give, by endpoint.

    Args:
        flags: each ``NAME:FIELD=VALUE,…``; a field that no deployment has becomes one of its settings.

    Raises:
        BadDeployment: a flag has another form.
    """
    values: dict[str, dict[str, str]] = {}
    for flag in flags:
        name, colon, path = flag.rpartition(":")
        pairs = [pair.partition("=") for pair in path.split(",")]
        if not colon or not name or not all(key and equals and value for key, equals, value in pairs):
            raise BadDeployment(f"--deployment {flag}: expected NAME:FIELD=VALUE,… such as pd:kind=disaggregated")
        values.setdefault(name, {}).update((key, value) for key, _, value in pairs)
    return values


def overridden(deployment: MeasuredDeployment, fields: dict[str, str]) -> MeasuredDeployment:
    """Return the deployment with ``fields`` replaced.

    Raises:
        BadDeployment: a number is none, or negative.
    """
    own = {key: value for key, value in fields.items() if key in _FIELDS}
    other = {key: value for key, value in fields.items() if key not in _FIELDS}
    merged = msgspec.structs.asdict(deployment) | own | {"settings": deployment.settings | other}
    try:
        return msgspec.convert(merged, MeasuredDeployment, strict=False)
    except msgspec.ValidationError as error:
        raise BadDeployment(f"--deployment: {error}") from None


T = TypeVar("T")
Line = Sequence[tuple[float, float]]  # x ascending, y descending


class Gain(NamedTuple):
    """The heights of two fronts at ``x``."""

    x: float
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def front(points: Iterable[T], goals: Callable[[T], tuple[float, float]]) -> list[T]:
    """The points that no other one dominates, the first goal ascending (and so the second descending).

    A point dominates another if it is at least as good in both goals and better in one. Of equal points the first
    is kept.

    Args:
        goals: both to be maximised; negate what should be small.
    """
    kept: list[T] = []
    best: float | None = None
    for point in sorted(points, key=goals, reverse=True):
        second = goals(point)[1]
        if best is None or second > best:
            kept.append(point)
            best = second
    return kept[::-1]


def at(line: Line, x: float) -> float | None:
    """The height of a front at ``x``, linear between its points; None: ``x`` is beyond its last point.

    Left of the first point the front is as high as there: reaching a larger ``x`` implies reaching a smaller one.
    """
    if not line or x > line[-1][0]:
        return None
    if x <= line[0][0]:
        return line[0][1]
    for (left, high), (right, low) in pairwise(line):
        if x <= right:
            share = (x - left) / (right - left)
            return high + share * (low - high)
    raise AssertionError("x lies between the first and the last point")


def gain_at(ours: Line, theirs: Line, x: float) -> Gain | None:
    """The gain at ``x``; None: one of the fronts does not reach so far."""
    mine, other = at(ours, x), at(theirs, x)
    return Gain(x, mine, other) if mine is not None and other else None


def largest_gain(ours: Line, theirs: Line) -> Gain | None:
    """Where the first front is highest in proportion to the second, in the range that both reach; None: one is empty.

    Between two corners of the lines their ratio is monotonic, so that its maximum is at a corner of either.
    """
    gains = (gain_at(ours, theirs, x) for x in sorted({x for x, _ in (*ours, *theirs)}))
    return max((gain for gain in gains if gain), key=lambda gain: gain.ratio, default=None)


class ParetoRecord(Struct, frozen=True, kw_only=True):
    """A level of a deployment, averaged over its runs. Throughput is of output, in tokens/s; times are in ms.

    Attributes:
        name: of the endpoint.
        kind: deployments of one kind share a line.
        load: "concurrency", "rate" or "speed", at ``level``.
        concurrency: None: another kind of load.
        failed: requests, over all runs.
        on_front: no record of its kind has both more throughput per GPU and more per user.
        cost: of a million output tokens; None: there were no prices.
    """

    name: str
    kind: str
    model: str
    load: str
    level: float
    concurrency: int | None
    runs: int
    requests: int
    failed: int
    output_tokens_per_s: float
    output_tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    latency_p50_ms: float
    latency_p99_ms: float
    total_gpus: int
    gpu: str
    workers: int
    prefill_workers: int
    decode_workers: int
    settings: dict[str, str | int | float | bool]
    on_front: bool = False
    cost: Cost | None = None


def records(series: EndpointSeries, deployment: MeasuredDeployment, prices: Prices | None = None) -> list[ParetoRecord]:
    """The records of one endpoint. Levels without throughput, or without streaming, are left out.

    Raises:
        BadDeployment: the number of its GPUs is not given.
        BadPrices: the price of its GPUs is unknown.
    """
    measured = []
    for result in series.results:
        gpus = deployment.total_gpus or result.gpus
        if not gpus:
            raise BadDeployment(
                f"{series.name}: number of GPUs unknown; sweep with --gpus, "
                f"or give --deployment {series.name}:total_gpus=N"
            )
        each = _record(series.name, result, deployment, gpus)
        if each is not None:
            measured.append(each)
    if prices is None:
        return measured
    try:
        gpu = gpu_of(prices, deployment.gpu)
    except BadPrices as error:
        raise BadPrices(f"{series.name}: {error}; give --deployment {series.name}:gpu=TYPE") from None
    return [
        msgspec.structs.replace(each, cost=cost(prices, gpu, each.output_tokens_per_s_per_gpu)) for each in measured
    ]


def _record(name: str, result: LevelResult, deployment: MeasuredDeployment, gpus: int) -> ParetoRecord | None:
    throughput = mean(result, "output_tokens_per_s")
    pace = mean(result, "tokens_per_s_per_user")
    if not throughput or not pace:
        return None
    level = result.level
    return ParetoRecord(
        name=name,
        kind=deployment.kind or name,
        model=deployment.model or result.model,
        load=level.kind,
        level=level.value,
        concurrency=int(level.value) if level.kind == "concurrency" else None,
        runs=len(result.complete),
        requests=sum(run.figures.requests for run in result.complete),
        failed=sum(run.figures.failed for run in result.runs),
        output_tokens_per_s=throughput,
        output_tokens_per_s_per_user=pace,
        output_tokens_per_s_per_gpu=throughput / gpus,
        ttft_p50_ms=mean(result, "ttft_ms", "p50"),
        ttft_p99_ms=mean(result, "ttft_ms", "p99"),
        itl_p50_ms=mean(result, "itl_ms", "p50"),
        itl_p99_ms=mean(result, "itl_ms", "p99"),
        latency_p50_ms=mean(result, "latency_ms", "p50") or 0.0,
        latency_p99_ms=mean(result, "latency_ms", "p99") or 0.0,
        total_gpus=gpus,
        gpu=deployment.gpu,
        workers=deployment.workers,
        prefill_workers=deployment.prefill_workers,
        decode_workers=deployment.decode_workers,
        settings=deployment.settings,
    )


def efficiency(record: ParetoRecord) -> tuple[float, float]:
    """Tokens/s per user and tokens/s per GPU, the two goals of a front."""
    return record.output_tokens_per_s_per_user, record.output_tokens_per_s_per_gpu


def kinds(measured: Iterable[ParetoRecord]) -> dict[str, list[ParetoRecord]]:
    """The records of each kind, in the order in which the kinds come."""
    by_kind: dict[str, list[ParetoRecord]] = {}
    for each in measured:
        by_kind.setdefault(each.kind, []).append(each)
    return by_kind


def fronts(measured: Iterable[ParetoRecord]) -> dict[str, list[ParetoRecord]]:
    """For each kind, the records on its front, by tokens/s per user ascending."""
    return {kind: front(of_kind, efficiency) for kind, of_kind in kinds(measured).items()}


def marked(measured: Sequence[ParetoRecord]) -> list[ParetoRecord]:
    """The same records, with ``on_front`` set."""
    best = {id(each) for line in fronts(measured).values() for each in line}
    return [msgspec.structs.replace(each, on_front=id(each) in best) for each in measured]


def gains(lines: Mapping[str, Sequence[ParetoRecord]], baseline: str, pace: float = 0.0) -> dict[str, Gain]:
    """How much higher the front of each other kind is than that of ``baseline``.

    Args:
        pace: tokens/s per user at which they are compared; 0: where the ratio is largest. A kind for which, or
            for whose baseline, it is too high is left out.
    """
    theirs = [efficiency(each) for each in lines[baseline]]
    result = {}
    for kind, line in lines.items():
        ours = [efficiency(each) for each in line]
        gain = gain_at(ours, theirs, pace) if pace else largest_gain(ours, theirs)
        if kind != baseline and gain:
            result[kind] = gain
    return result
