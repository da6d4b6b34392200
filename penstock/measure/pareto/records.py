"""One record for each level of each deployment: speed per user, throughput per GPU, and cost. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from penstock.measure.pareto import front
from penstock.measure.pareto.cost import BadPrices, Cost, Prices, cost, gpu_of
from penstock.measure.pareto.deployment import BadDeployment, Deployment
from penstock.measure.sweep.results import Result, Series, mean


class Record(Struct, frozen=True, kw_only=True):
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


def records(series: Series, deployment: Deployment, prices: Prices | None = None) -> list[Record]:
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


def _record(name: str, result: Result, deployment: Deployment, gpus: int) -> Record | None:
    throughput = mean(result, "output_tokens_per_s")
    pace = mean(result, "tokens_per_s_per_user")
    if not throughput or not pace:
        return None
    level = result.level
    return Record(
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


def efficiency(record: Record) -> tuple[float, float]:
    """Tokens/s per user and tokens/s per GPU, the two goals of a front."""
    return record.output_tokens_per_s_per_user, record.output_tokens_per_s_per_gpu


def kinds(measured: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each kind, in the order in which the kinds come."""
    by_kind: dict[str, list[Record]] = {}
    for each in measured:
        by_kind.setdefault(each.kind, []).append(each)
    return by_kind


def fronts(measured: Iterable[Record]) -> dict[str, list[Record]]:
    """For each kind, the records on its front, by tokens/s per user ascending."""
    return {kind: front.front(of_kind, efficiency) for kind, of_kind in kinds(measured).items()}


def marked(measured: Sequence[Record]) -> list[Record]:
    """The same records, with ``on_front`` set."""
    best = {id(each) for line in fronts(measured).values() for each in line}
    return [msgspec.structs.replace(each, on_front=id(each) in best) for each in measured]


def gains(lines: Mapping[str, Sequence[Record]], baseline: str, pace: float = 0.0) -> dict[str, front.Gain]:
    """How much higher the front of each other kind is than that of ``baseline``.

    Args:
        pace: tokens/s per user at which they are compared; 0: where the ratio is largest. A kind for which, or
            for whose baseline, it is too high is left out.
    """
    theirs = [efficiency(each) for each in lines[baseline]]
    result = {}
    for kind, line in lines.items():
        ours = [efficiency(each) for each in line]
        gain = front.gain_at(ours, theirs, pace) if pace else front.largest_gain(ours, theirs)
        if kind != baseline and gain:
            result[kind] = gain
    return result
