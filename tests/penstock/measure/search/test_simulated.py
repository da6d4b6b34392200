"""Sizes by percentiles: what is chosen keeps them, and less would not."""

import math

import msgspec
import pytest

from penstock.measure.search.answer import hosts
from penstock.measure.search.candidates import Configuration, PoolSize, Scope, SizedDeployment, Sla, candidates
from penstock.measure.search.simulated import Percentile, Pools, SimulatedLoad, measure, search
from tests.penstock.planner.engines import engine

SLA = Sla(ttft_ms=300.0, itl_ms=14.0, isl=2000, osl=50)
ONE = Configuration("one", engine(prefill_ms=50, step_ms=8, growth_ms=0.1))


def load(
    percentile: Percentile, rate: float = 0.0, *, gpus: int = 16, sigma: float = 0.0, sla: Sla = SLA
) -> SimulatedLoad:
    scope = Scope(total_gpus=gpus, rate=rate)
    return SimulatedLoad(sla=sla, scope=scope, percentile=percentile, sigma=sigma, requests=300)


def found(wanted: SimulatedLoad, *, show: int = 4) -> list[SizedDeployment]:
    return search(candidates([ONE], wanted.sla, wanted.scope), [ONE], wanted, show, lambda what: None)


def pools(candidate: SizedDeployment) -> Pools:
    return [(pool.role, ONE, pool.workers) for pool in candidate.pools]


def test_a_fleet_that_keeps_the_mean_and_not_the_percentile_grows_until_it_does() -> None:
    wanted = load("p95", rate=8.0)
    by_mean = candidates([ONE], SLA, wanted.scope)
    aggregated = next(each for each in by_mean if len(each.pools) == 1)
    seen = measure(pools(aggregated), 8.0, wanted)
    assert seen.ttft_ms > SLA.ttft_ms or seen.itl_ms > SLA.itl_ms
    (better,) = search([aggregated], [ONE], wanted, 1, lambda what: None)
    assert better.gpus > aggregated.gpus
    assert (better.ttft_ms, better.itl_ms) <= (SLA.ttft_ms, SLA.itl_ms)
    again = measure(pools(better), 8.0, wanted)
    assert (again.ttft_ms, again.itl_ms) == (better.ttft_ms, better.itl_ms)
    fewer = [(role, each, workers - 1) for role, each, workers in pools(better)]
    less = measure(fewer, 8.0, wanted)
    assert less.ttft_ms > SLA.ttft_ms or less.itl_ms > SLA.itl_ms


def test_the_best_has_the_fewest_gpus_and_a_higher_percentile_needs_no_fewer() -> None:
    sizes = [found(load(percentile, rate=6.0, sigma=0.5))[0].gpus for percentile in ("p50", "p90", "p95")]
    assert sizes == sorted(sizes)
    kept = found(load("p95", rate=6.0))
    assert [each.gpus for each in kept] == sorted(each.gpus for each in kept)


def test_without_a_rate_the_one_of_the_means_falls_until_the_percentile_is_kept() -> None:
    wanted = load("p95", gpus=4, sigma=0.6)
    by_mean = candidates([ONE], SLA, wanted.scope)[0]
    best = found(wanted, show=1)[0]
    assert best.pools[0].workers == by_mean.pools[0].workers
    assert 0 < best.requests_per_s < by_mean.requests_per_s
    assert best.itl_ms <= SLA.itl_ms
    assert best.ttft_ms <= SLA.ttft_ms
    seen = measure(pools(best), by_mean.requests_per_s, wanted)
    assert seen.ttft_ms > SLA.ttft_ms or seen.itl_ms > SLA.itl_ms


def test_nothing_is_found_where_no_number_of_gpus_is_enough() -> None:
    tight = msgspec.structs.replace(SLA, ttft_ms=99.0)  # a lone prompt takes 100 ms
    wanted = load("p95", rate=2.0, sla=tight, gpus=4)
    few = SizedDeployment(pools=(PoolSize("aggregated", "one", 1, 1),), ttft_ms=0.0, itl_ms=0.0, requests_per_s=2.0)
    assert search([few], [ONE], wanted, 1, lambda what: None) == []


def test_requests_that_are_left_over_keep_no_limit() -> None:
    tiny = Configuration("tiny", engine(kv_tokens=1024))
    seen = measure([("aggregated", tiny, 1)], 1.0, load("p50"))
    assert math.isinf(seen.ttft_ms)


@pytest.mark.parametrize(
    ("sizes", "gpus", "expected"),
    [
        ({"aggregated": (20, 1)}, 8, [(2, {"aggregated": 8}), (1, {"aggregated": 4})]),
        ({"prefill": (119, 1), "decode": (3, 4)}, 8,
         [(14, {"prefill": 8}), (1, {"decode": 2}), (1, {"decode": 1, "prefill": 4}), (1, {"prefill": 3})]),
        ({"aggregated": (4, 3)}, 8, [(2, {"aggregated": 2})]),
    ],
)  # fmt: skip
def test_machines_are_filled_with_workers_of_one_role_and_share_what_is_left(
    sizes: dict[str, tuple[int, int]], gpus: int, expected: list[tuple[int, dict[str, int]]]
) -> None:
    made = tuple(PoolSize(role, "c", count, count * each) for role, (count, each) in sizes.items())  # type: ignore[arg-type]
    found = hosts(SizedDeployment(pools=made, ttft_ms=0, itl_ms=0, requests_per_s=1), gpus)
    assert found == expected
    for role, (count, _) in sizes.items():
        assert sum(number * workers.get(role, 0) for number, workers in found) == count
    for _, workers in found:
        assert sum(sizes[role][1] * count for role, count in workers.items()) <= gpus
