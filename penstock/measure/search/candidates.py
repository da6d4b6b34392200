"""Deployments by configuration and size, and how many requests each serves within the SLA.

A configuration's times come from measured profiles, the mock's model or a roofline. A deployment is a pool of
aggregated workers, or one of prefill and one of decode workers. Its rate is the highest one whose mean latencies,
queueing included (``penstock.planner.capacity``), are within the SLA while workers are busy for at most a share of
their time. Of the sizes of one pair of configurations, the smallest is kept that serves nearly as much per GPU as the
best.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as Map
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table

from penstock.cli.terminal import Column, fitting_table
from penstock.infra.engine_args.memory_estimate import Shape
from penstock.measure.pareto.records import Prices, cost, gpu_of
from penstock.measure.profile.data import BadProfile, DecodeSurface, Profile, load, mock_profile, ttft_at
from penstock.measure.profile.roofline import GPUS, RooflineEngine, fits, mappings, roofline_profile
from penstock.planner.capacity import EngineTiming, latency
from penstock.schemas.plans import Demand, Latency, Role

NEARLY = 0.95
_LARGEST = 8  # workers of a pool, unless a rate is asked for
_STEPS = 24

# Requests per second that this many workers of the configuration with a number serve.
Rate = Callable[[Role, int, int], float]


class Sla(Struct, frozen=True, kw_only=True):
    """Mean latencies that must not be exceeded, for prompts of ``isl`` and answers of ``osl`` tokens."""

    ttft_ms: float
    itl_ms: float
    isl: int
    osl: int


class Configuration(Struct, frozen=True):
    """One worker.

    Attributes:
        handoff_ms: to move the KV of a prompt to another pool.
    """

    name: str
    timing: EngineTiming
    handoff_ms: float = 0.0

    @property
    def gpus(self) -> int:
        return self.timing.gpus


class PoolSize(Struct, frozen=True):
    """``concurrency``: requests that decode at a worker at once, at the rate of the deployment."""

    role: Role
    configuration: str
    workers: int
    gpus: int
    concurrency: int = 0


class SizedDeployment(Struct, frozen=True, kw_only=True):
    """A deployment at the highest rate within the SLA, or at the rate that was asked for."""

    pools: tuple[PoolSize, ...]
    ttft_ms: float
    itl_ms: float
    requests_per_s: float

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    @property
    def per_gpu(self) -> float:
        """Requests per second."""
        return self.requests_per_s / self.gpus

    @property
    def name(self) -> str:
        short = {"aggregated": "", "prefill": "prefill ", "decode": "decode "}
        return " + ".join(f"{short[pool.role]}{pool.workers} × {pool.configuration}" for pool in self.pools)


class Scope(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        total_gpus: of the deployment, at most.
        rate: requests per second that it has to serve; 0: as many as it can.
        utilization: share of its time that a worker computes prompts, and of its memory that decodes, at most.
        hit_rate: prompt tokens that are found in a cache.
    """

    total_gpus: int
    rate: float = 0.0
    utilization: float = 0.8
    hit_rate: float = 0.0


def candidates(found: Sequence[Configuration], sla: Sla, scope: Scope) -> list[SizedDeployment]:
    """The best size of each configuration and of each pair, the best first."""

    @cache
    def rate_of(role: Role, number: int, workers: int) -> float:
        return highest_rate(role, found[number], workers, sla, scope)

    best = [
        each
        for sizes in (*_aggregated(found, sla, scope, rate_of), *_split(found, sla, scope, rate_of))
        if (each := _kept(sizes, scope)) is not None
    ]
    if scope.rate:
        return sorted(best, key=lambda each: (each.gpus, len(each.pools), each.ttft_ms))
    # Within a hundredth they are the same, and the smaller or the quicker one is first.
    return sorted(best, key=lambda each: (-round(100 * math.log(each.per_gpu)), each.gpus, each.itl_ms))


def why_not(configuration: Configuration, sla: Sla) -> str:
    """Which limit a lone request already breaks in a configuration; "": none."""
    timing = configuration.timing
    ttft, itl = timing.prefill_ms(sla.isl), timing.itl_ms(sla.isl + sla.osl / 2, 1)
    slow = [f"TTFT {ttft:.1f} ms"] * (ttft > sla.ttft_ms) + [f"ITL {itl:.2f} ms"] * (itl > sla.itl_ms)
    return ", ".join(slow) + " of a lone request" if slow else ""


def highest_rate(role: Role, configuration: Configuration, workers: int, sla: Sla, scope: Scope) -> float:
    """Within the SLA; 0.0: not even a lone request is."""

    def good(rate: float) -> bool:
        seen = _at(role, configuration, workers, rate, sla, scope)
        return seen.busy <= scope.utilization and seen.ttft_ms <= sla.ttft_ms and seen.itl_ms <= sla.itl_ms

    low, high = 0.0, 1 / 64
    if not good(high):
        return 0.0
    while good(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _at(role: Role, configuration: Configuration, workers: int, rate: float, sla: Sla, scope: Scope) -> Latency:
    demand = Demand(rate, sla.isl, sla.osl, scope.hit_rate)
    seen = latency(role, configuration.timing, demand, workers)
    handoff = configuration.handoff_ms if role == "prefill" else 0.0
    return Latency(seen.ttft_ms + handoff, seen.itl_ms, seen.busy)


def _aggregated(
    found: Sequence[Configuration], sla: Sla, scope: Scope, rate_of: Rate
) -> Iterator[list[SizedDeployment]]:
    """Of each configuration, its sizes."""
    for number, each in enumerate(found):
        sizes = range(1, _most(scope, each.gpus, 0) + 1)
        rates = [(size, rate_of("aggregated", number, size)) for size in sizes]
        yield [_candidate([("aggregated", each, size)], rate, sla, scope) for size, rate in rates]


def _split(found: Sequence[Configuration], sla: Sla, scope: Scope, rate_of: Rate) -> Iterator[list[SizedDeployment]]:
    """Of each pair of configurations, its sizes."""
    for first, prefill in enumerate(found):
        for second, decode in enumerate(found):
            yield list(_pairs(first, prefill, second, decode, sla, scope, rate_of))


def _pairs(
    first: int, prefill: Configuration, second: int, decode: Configuration, sla: Sla, scope: Scope, rate_of: Rate
) -> Iterator[SizedDeployment]:
    """All sizes of a prefill and a decode pool."""
    for many in range(1, _most(scope, prefill.gpus, decode.gpus) + 1):
        for more in range(1, _most(scope, decode.gpus, many * prefill.gpus) + 1):
            rate = min(rate_of("prefill", first, many), rate_of("decode", second, more))
            yield _candidate([("prefill", prefill, many), ("decode", decode, more)], rate, sla, scope)
            if rate < rate_of("decode", second, more):
                break  # further decode workers would idle


def _most(scope: Scope, gpus: int, others: int) -> int:
    most = (scope.total_gpus - others) // gpus
    return most if scope.rate else min(most, _LARGEST)


def _candidate(
    pools: Sequence[tuple[Role, Configuration, int]], rate: float, sla: Sla, scope: Scope
) -> SizedDeployment:
    served = min(rate, scope.rate) if scope.rate else rate
    seen = [_at(role, configuration, size, served, sla, scope) for role, configuration, size in pools]
    sizes = tuple(
        PoolSize(
            role,
            configuration.name,
            size,
            size * configuration.gpus,
            0 if role == "prefill" else round(served * sla.osl * found.itl_ms / 1e3 / size),
        )
        for (role, configuration, size), found in zip(pools, seen, strict=True)
    )
    return SizedDeployment(
        pools=sizes,
        ttft_ms=sum(each.ttft_ms for each in seen),
        itl_ms=max(each.itl_ms for each in seen),
        requests_per_s=rate,
    )


def _kept(sizes: list[SizedDeployment], scope: Scope) -> SizedDeployment | None:
    """The smallest that serves the rate, or nearly as much per GPU as the best; None: none does."""
    if scope.rate:
        enough = [each for each in sizes if each.requests_per_s >= scope.rate]
        return min(enough, key=lambda each: (each.gpus, each.ttft_ms), default=None)
    served = [each for each in sizes if each.requests_per_s > 0]
    if not served:
        return None
    best = max(each.per_gpu for each in served)
    return min((each for each in served if each.per_gpu >= NEARLY * best), key=lambda each: (each.gpus, -each.per_gpu))


def table(
    found: Sequence[SizedDeployment],
    sla: Sla,
    width: int,
    *,
    limited: str,
    rate: float,
    gpu: str,
    prices: Prices | None,
) -> Table:
    """A row a deployment, the best first.

    Args:
        width: of the terminal.
        limited: "mean", or a percentile.
        rate: requests per second that are served; 0: as many as each can.
        gpu: kind of GPU, for the prices.
    """
    what = "" if limited == "mean" else f" {limited}"
    headings = ["GPUs", f"TTFT{what} ms", f"ITL{what} ms", "at once", "req/s", "req/s per GPU"]
    headings += [f"{prices.currency} per 10⁶ tokens"] if prices else []
    leaves = {"at once": 2, "req/s": 1}
    columns = [Column("deployment"), *(Column(each, leaves.get(each, 0), right=True) for each in headings)]
    rows = []
    for each in found:
        served = min(rate, each.requests_per_s) if rate else each.requests_per_s
        row = [
            each.name,
            str(each.gpus),
            f"{each.ttft_ms:.0f}",
            f"{each.itl_ms:.1f}",
            str(each.pools[-1].concurrency),
            f"{each.requests_per_s:.3g}",
            f"{each.per_gpu:.3g}",
        ]
        if prices:
            tokens = served * sla.osl / each.gpus
            row.append(f"{cost(prices, gpu_of(prices, gpu), tokens).total:.3f}")
        rows.append(row)
    return fitting_table(columns, rows, width)


def lines(best: SizedDeployment, sla: Sla, basis: str, utilization: float, limited: str) -> list[str]:
    """The best one, for a terminal.

    Args:
        basis: where the times come from.
        limited: "mean", or a percentile.
    """
    return [
        f"for {limited} TTFT ≤ {sla.ttft_ms:g} ms and {limited} ITL ≤ {sla.itl_ms:g} ms, prompts of {sla.isl} tokens "
        f"and answers of {sla.osl}, {basis}:",
        f"  {best.name}: {best.gpus} GPUs, {best.requests_per_s:.3g} requests/s with at most "
        f"{utilization:.0%} of the workers' capacity",
    ]


class Choices(Struct, frozen=True):
    """
    Attributes:
        up: flags of `penstock up` for each configuration.
        engines: of those that were estimated.
        left_out: why each other configuration cannot be used.
    """

    configurations: tuple[Configuration, ...]
    up: dict[str, str]
    engines: dict[str, RooflineEngine]
    left_out: dict[str, str]


def measured(folders: Sequence[str], sla: Sla) -> Choices:
    """Profiles of `penstock profile endpoint`, named after their folders. Nothing beyond their points is guessed.

    Raises:
        BadProfile: one cannot be read, two have one name, or they are of different models.
    """
    profiles: dict[str, Profile] = {}
    for each in folders:
        path = Path(each)
        name = path.resolve().name
        if name in profiles:
            raise BadProfile(f"two folders are named {name}: their name is the configuration's; rename one")
        profiles[name] = load(path)
    if len(models := {profile.setup.model for profile in profiles.values()}) > 1:
        raise BadProfile(f"the profiles are of different models: {', '.join(sorted(models))}")
    left_out = {name: reason for name, profile in profiles.items() if (reason := unmeasured(profile, sla))}
    usable = {name: _capped(profile, sla) for name, profile in profiles.items() if name not in left_out}
    return _choices(usable, sla, left_out)


def mock(speedups: Sequence[float], sla: Sla) -> Choices:
    """Mock workers by their speed-up, from the timing model."""
    longest = max(131_072, 2 * (sla.isl + sla.osl))
    profiles = {
        f"mock x{speedup:g}": mock_profile(slowness=1 / speedup, max_context=longest, osl=sla.osl)
        for speedup in speedups
    }
    for name, speedup in zip(profiles, speedups, strict=True):
        flags = "--engine mock" + (f" --mock-speedup {speedup:g}" if speedup != 1 else "")
        profiles[name] = _with_flags(profiles[name], flags)
    return _choices(profiles, sla, {})


def roofline(shape: Shape, gpu: str, sla: Sla, *, most_gpus: int, stages: int) -> Choices:
    """Mappings of a model onto up to ``most_gpus`` GPUs of a kind each, estimated.

    Raises:
        UnknownShape: config.json lacks what the estimate needs.
    """
    length = sla.isl + sla.osl
    if shape.max_len and length > shape.max_len:
        return Choices((), {}, {}, {"all": f"prompt and answer have {length} tokens, the model takes {shape.max_len}"})
    engines = {each.name: RooflineEngine(shape, GPUS[gpu], each) for each in mappings(shape, most_gpus, stages=stages)}
    left_out = {name: reason for name, engine in engines.items() if (reason := fits(engine, length))}
    profiles = {
        name: roofline_profile(engine, isl=sla.isl, osl=sla.osl)
        for name, engine in engines.items()
        if name not in left_out
    }
    handoffs = {name: engines[name].handoff_ms(sla.isl) for name in profiles}
    found = _choices(profiles, sla, left_out, handoffs)
    return msgspec.structs.replace(found, engines=engines)


def unmeasured(profile: Profile, sla: Sla) -> str:
    """What of the SLA lies outside of a profile's points; "": nothing."""
    setup, surface = profile.setup, DecodeSurface(profile.decode)
    lengths = profile.prefill.prefill_isl
    context = sla.isl + sla.osl / 2
    if not lengths:
        return "prefill was not measured"
    if not surface.contexts:
        return "decode was not measured"
    if ttft_at(profile.prefill, sla.isl) is None:
        return f"prompts from {lengths[0]} to {lengths[-1]} tokens were measured, not {sla.isl}"
    low, high = surface.levels(context)
    if not high:
        return (
            f"contexts from {surface.contexts[0]:g} to {surface.contexts[-1]:g} tokens were measured, not {context:g} "
            "(prompt and half the answer)"
        )
    if setup.max_kv_tokens < low * (sla.isl + sla.osl):
        return f"{low} requests of {sla.isl + sla.osl} tokens do not fit into the KV cache of {setup.max_kv_tokens}"
    return ""


def _capped(profile: Profile, sla: Sla) -> Profile:
    """With no more requests at once than were measured."""
    _, high = DecodeSurface(profile.decode).levels(sla.isl + sla.osl / 2)
    most = min(high, profile.setup.max_batch or high)
    return msgspec.structs.replace(profile, setup=msgspec.structs.replace(profile.setup, max_batch=most))


def _with_flags(profile: Profile, up: str) -> Profile:
    return msgspec.structs.replace(profile, setup=msgspec.structs.replace(profile.setup, up=up))


def _choices(
    profiles: Map[str, Profile], sla: Sla, left_out: dict[str, str], handoffs: Map[str, float] | None = None
) -> Choices:
    found = []
    for name, profile in profiles.items():
        configuration = Configuration(name, EngineTiming(profile), (handoffs or {}).get(name, 0.0))
        reason = why_not(configuration, sla)
        if reason:
            left_out[name] = reason
        else:
            found.append(configuration)
    return Choices(tuple(found), {name: each.setup.up for name, each in profiles.items()}, {}, left_out)
