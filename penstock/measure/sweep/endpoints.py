"""The servers that a sweep loads, by name: their addresses, and their own metrics during the load.

Prometheus pages are read once a second. The names of Penstock, vLLM, SGLang, Dynamo and NVIDIA's DCGM exporter are
known. A figure that no page shows is None: it was absent, not zero.
"""

import asyncio
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from penstock.launch.state import DeploymentState, read_state
from penstock.measure.load_generator import BadTarget, HttpTarget, ask, parse_target

NAME = re.compile(r"[a-zA-Z0-9_-]+")
RESERVED = ("plots",)


class BadEndpoint(ValueError):
    """An endpoint that cannot be loaded; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A page of Prometheus metrics."""

    target: HttpTarget
    path: str


@dataclass(frozen=True, slots=True)
class SweptEndpoint:
    """A server under load. ``gpus`` 0: not given."""

    name: str
    target: HttpTarget
    pages: tuple[MetricsPage, ...]
    gpus: int = 0


def parse_endpoints(
    named: Sequence[str],
    metrics: Sequence[str] = (),
    gpus: Sequence[int] = (),
    *,
    api_key: str = "",
    insecure: bool = False,
) -> list[SweptEndpoint]:
    """Endpoints in the order given.

    Args:
        named: each ``NAME=URL``, or ``NAME=FILE`` with the ``state.json`` of ``penstock up``.
        metrics: further pages, each ``NAME=URL``; without a path the page is ``/metrics``.
        gpus: of each endpoint, or one number for all.

    Raises:
        BadEndpoint: a name or URL that cannot be used, or a name twice.
    """
    if len(gpus) not in (0, 1, len(named)):
        raise BadEndpoint(f"--gpus: {len(gpus)} numbers for {len(named)} endpoints; give one, or one for each")
    if unknown := {name_of(each, "--metrics") for each in metrics} - {name_of(each, "--endpoint") for each in named}:
        raise BadEndpoint(f"--metrics {sorted(unknown)[0]}: no endpoint has this name")
    endpoints: list[SweptEndpoint] = []
    for number, each in enumerate(named):
        name = name_of(each, "--endpoint")
        if any(name == other.name for other in endpoints):
            raise BadEndpoint(f"--endpoint {name}: named twice")
        more = [_page(value.partition("=")[2], "--metrics") for value in metrics if value.partition("=")[0] == name]
        try:
            target, pages = _located(each.partition("=")[2], api_key, insecure)
        except BadTarget as error:
            raise BadEndpoint(f"--endpoint {name}={error}") from None
        count = 0 if not gpus else gpus[0] if len(gpus) == 1 else gpus[number]
        endpoints.append(SweptEndpoint(name, target, (*pages, *more), count))
    return endpoints


def name_of(value: str, flag: str) -> str:
    """The name in ``NAME=…``.

    Raises:
        BadEndpoint: there is none, or it cannot be used as a folder's name.
    """
    name, mark, url = value.partition("=")
    if not mark or not url:
        raise BadEndpoint(f"{flag} {value}: expected NAME=URL")
    if not NAME.fullmatch(name):
        raise BadEndpoint(f"{flag} {value}: a name has letters, digits, '_' and '-' only")
    if name in RESERVED:
        raise BadEndpoint(f"{flag} {value}: the name {name!r} is reserved")
    return name


def _located(value: str, api_key: str, insecure: bool) -> tuple[HttpTarget, list[MetricsPage]]:
    if not value.endswith(".json") or "//" in value:
        target = parse_target(value, api_key=api_key, insecure=insecure)
        return target, [MetricsPage(target, "/metrics")]
    state = _state(value)
    target = parse_target(state.http_url, api_key=api_key)
    own = [process.metrics_url for process in state.processes if process.metrics_url]
    return target, [MetricsPage(target, "/metrics"), *(_page(url, value) for url in own)]


def _state(path: str) -> DeploymentState:
    try:
        return read_state(Path(path))
    except FileNotFoundError:
        raise BadTarget(f"{path}: no deployment runs there; start one with `penstock up`, or name a URL") from None
    except (OSError, msgspec.DecodeError) as error:
        raise BadTarget(f"{path}: {error}") from None


def _page(url: str, flag: str) -> MetricsPage:
    try:
        target = parse_target(url)
    except BadTarget as error:
        raise BadEndpoint(f"{flag}: {error}") from None
    path = urlsplit(url if "//" in url else f"//{url}").path or "/metrics"
    return MetricsPage(HttpTarget(target.host, target.port, "", target.tls), path)


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
