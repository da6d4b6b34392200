"""The server's own metrics during the load: its Prometheus pages, read once a second.

The names of Penstock, vLLM, SGLang, Dynamo and NVIDIA's DCGM exporter are known. A figure that no page shows is None:
it was absent, not zero.
"""

import asyncio
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from penstock.measure.generator.target import ask
from penstock.measure.sweep.endpoints import MetricsPage

_MIB = 1 << 20
_TIMEOUT_S = 5.0
# Of each figure the metrics that show it, and what one unit of theirs is.
RUNNING = {"penstock_worker_running": 1, "vllm:num_requests_running": 1, "sglang:num_running_reqs": 1}
WAITING = {
    "penstock_worker_waiting": 1,
    "penstock_gateway_queued_requests": 1,
    "vllm:num_requests_waiting": 1,
    "sglang:num_queue_reqs": 1,
    "dynamo_frontend_queued_requests": 1,
}
KV_USAGE = {
    "vllm:kv_cache_usage_perc": 1,
    "vllm:gpu_cache_usage_perc": 1,
    "sglang:token_usage": 1,
    "dynamo_component_kvstats_gpu_cache_usage_percent": 1,
    "trtllm_kv_cache_utilization": 1,
}
KV_USED, KV_CACHED, KV_FREE = ({f"penstock_worker_kv_{state}_blocks": 1} for state in ("used", "cached", "free"))
HITS = {"penstock_worker_prefix_hit_tokens": 1, "vllm:prefix_cache_hits": 1, "vllm:gpu_prefix_cache_hits": 1}
QUERIES = {"penstock_worker_prompt_tokens": 1, "vllm:prefix_cache_queries": 1, "vllm:gpu_prefix_cache_queries": 1}
GPU_MEMORY = {"penstock_worker_gpu_memory_used_bytes": 1, "DCGM_FI_DEV_FB_USED": _MIB}
GPU_UTILISATION = {"penstock_worker_gpu_utilization_ratio": 1, "DCGM_FI_DEV_GPU_UTIL": 0.01}
_ALL = (RUNNING, WAITING, KV_USAGE, KV_USED, KV_CACHED, KV_FREE, HITS, QUERIES, GPU_MEMORY, GPU_UTILISATION)
_PREFIXES = tuple(name for names in _ALL for name in names)


class GaugeLevel(Struct, frozen=True):
    """A gauge over a run."""

    mean: float
    max: float


class ServerFigures(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        pages: how many answered; ``samples`` of them were taken.
        running: sequences in the batches of all engines; ``batch`` in that of one, where it had any.
        waiting: requests in queues.
        kv_usage: share of the KV cache that sequences hold, mean over the engines.
        kv_hit_rate: prompt tokens found in the KV cache, of those looked up during the run.
        gpu_memory_bytes: of all GPUs that are shown; ``gpu_utilisation``: their mean, 0 to 1.
    """

    pages: int = 0
    samples: int = 0
    running: GaugeLevel | None = None
    batch: GaugeLevel | None = None
    waiting: GaugeLevel | None = None
    kv_usage: GaugeLevel | None = None
    kv_hit_rate: float | None = None
    gpu_memory_bytes: GaugeLevel | None = None
    gpu_utilisation: GaugeLevel | None = None


Values = Mapping[str, Sequence[float]]  # of one page, by metric


def read_page(text: str) -> dict[str, list[float]]:
    """The values of known metrics on a page, by name; counters without ``_total``."""
    lines = [line for line in text.splitlines() if line.startswith(_PREFIXES)]
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples.setdefault(sample.name.removesuffix("_total"), []).append(sample.value)
    return samples


def _values(page: Values, names: Mapping[str, float]) -> list[float]:
    return [value * unit for name, unit in names.items() for value in page.get(name, ())]


def summarise(rounds: Sequence[Mapping[int, Values]]) -> ServerFigures:
    """The figures of a run.

    Args:
        rounds: in order of time, each page that answered by its number.
    """
    pages = {number for each in rounds for number in each}
    hits, queries = (sum(_growth(rounds, number, names) for number in pages) for names in (HITS, QUERIES))
    return ServerFigures(
        pages=len(pages),
        samples=sum(map(len, rounds)),
        running=_level(_totals(rounds, RUNNING)),
        batch=_level([value for each in rounds for page in each.values() for value in _values(page, RUNNING) if value]),
        waiting=_level(_totals(rounds, WAITING)),
        kv_usage=_level(map(_usage, rounds)),
        kv_hit_rate=min(1.0, hits / queries) if queries > 0 else None,
        gpu_memory_bytes=_level(_totals(rounds, GPU_MEMORY)),
        gpu_utilisation=_level(
            statistics.fmean(values)
            for each in rounds
            if (values := [value for page in each.values() for value in _values(page, GPU_UTILISATION)])
        ),
    )


def _totals(rounds: Iterable[Mapping[int, Values]], names: Mapping[str, float]) -> list[float]:
    """A metric's total over the pages of each round. Rounds without it are left out."""
    totals = []
    for each in rounds:
        values = [value for page in each.values() for value in _values(page, names)]
        if values:
            totals.append(sum(values))
    return totals


def _usage(pages: Mapping[int, Values]) -> float | None:
    shares = [value for page in pages.values() for value in _values(page, KV_USAGE)]
    for page in pages.values():
        used, cached, free = (sum(_values(page, names)) for names in (KV_USED, KV_CACHED, KV_FREE))
        if used + cached + free:
            shares.append(used / (used + cached + free))
    return statistics.fmean(shares) if shares else None


def _growth(rounds: Sequence[Mapping[int, Values]], page: int, names: Mapping[str, float]) -> float:
    """The growth of a counter during the run. One that was reset counts from 0."""
    series = [sum(_values(each[page], names)) for each in rounds if page in each]
    return sum(max(0.0, after - before) if after >= before else after for before, after in itertools.pairwise(series))


def _level(values: Iterable[float | None]) -> GaugeLevel | None:
    measured = [value for value in values if value is not None]
    return GaugeLevel(statistics.fmean(measured), max(measured)) if measured else None


@dataclass(slots=True)
class Scraper:
    """A context manager that reads the pages until it is left, at start and end too. Failed reads count as absent."""

    pages: Sequence[MetricsPage]
    every_s: float
    rounds: list[dict[int, str]] = field(default_factory=list)
    _task: "asyncio.Task[None] | None" = None

    async def __aenter__(self) -> "Scraper":
        await self._read()
        self._task = asyncio.create_task(self._watch(), name="scraper")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._read()

    def figures(self) -> ServerFigures:
        """The figures of the run. Pages are parsed only now, so that this takes no time from the load."""
        return summarise([{number: read_page(text) for number, text in each.items()} for each in self.rounds])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            await self._read()

    async def _read(self) -> None:
        answers = await asyncio.gather(*(ask(each.target, each.path, timeout_s=_TIMEOUT_S) for each in self.pages))
        self.rounds.append({number: _kept(body) for number, (status, body) in enumerate(answers) if status == 200})


def _kept(body: bytes) -> str:
    """Keep the lines of known metrics; a page may have thousands of others."""
    return "\n".join(line for line in body.decode(errors="replace").splitlines() if line.startswith(_PREFIXES))
