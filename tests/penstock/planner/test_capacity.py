"""Predicted latencies against queueing theory, and the number of workers against what those latencies say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.capacity import BUSY, latency, needed
from penstock.schemas.plans import Demand
from tests.penstock.planner.engines import engine

TIMING = engine()
ROLES = st.sampled_from(["prefill", "decode", "aggregated"])
DEMANDS = st.builds(Demand, st.floats(0.1, 60), st.floats(100, 8000), st.floats(10, 600), st.floats(0, 0.9))


def test_one_prefill_worker_is_an_m_m_1_queue() -> None:
    found = latency("prefill", TIMING, Demand(rate=5, isl=1000, osl=10), 1)  # 100 ms each: busy for half its time
    assert found.busy == pytest.approx(0.5)
    assert found.ttft_ms == pytest.approx(200.0)
    assert math.isinf(latency("prefill", TIMING, Demand(rate=10, isl=1000, osl=10), 1).ttft_ms)


def test_two_prefill_workers_wait_less_than_two_queues_of_their_own() -> None:
    together = latency("prefill", TIMING, Demand(rate=10, isl=1000, osl=10), 2)
    # M/M/2 at 50 %: 1/3 of requests wait, 33.3 ms in the mean. Sakasegawa's approximation is near.
    assert together.ttft_ms == pytest.approx(133.3, rel=0.03)


def test_cached_tokens_are_not_computed() -> None:
    cold, warm = (latency("prefill", TIMING, Demand(5, 1000, 10, hit), 1).ttft_ms for hit in (0.0, 0.5))
    assert warm < cold / 2


def test_a_decode_workers_batch_and_time_per_token_are_a_fixed_point() -> None:
    demand = Demand(rate=4, isl=2000, osl=400)
    found = latency("decode", TIMING, demand, 2)
    everywhere = 4 * 400 * found.itl_ms / 1e3
    at_once = (everywhere + 1.64 * math.sqrt(everywhere)) / 2
    assert found.itl_ms == pytest.approx(10 + 0.1 * 2.2 * at_once, rel=1e-2)


def test_decode_that_does_not_fit_into_memory_has_no_latency() -> None:
    small = engine(kv_tokens=20_000)
    assert math.isinf(latency("decode", small, Demand(rate=20, isl=4000, osl=400), 1).itl_ms)


def test_prompts_stretch_the_time_per_token_of_aggregated_workers() -> None:
    demand = Demand(rate=3, isl=1000, osl=200)  # 30 % of the time
    alone, beside = (latency(role, TIMING, demand, 1).itl_ms for role in ("decode", "aggregated"))  # type: ignore[arg-type]
    assert beside > alone / 0.7 * 0.99


@given(ROLES, DEMANDS, st.integers(1, 40))
def test_a_further_worker_never_makes_it_slower(role: str, demand: Demand, workers: int) -> None:
    few, more = (latency(role, TIMING, demand, workers + extra) for extra in (0, 1))  # type: ignore[arg-type]
    assert more.ttft_ms <= few.ttft_ms * (1 + 1e-3)
    assert more.itl_ms <= few.itl_ms * (1 + 5e-3)


@given(ROLES, DEMANDS, st.floats(50, 3000), st.floats(10, 100))
def test_the_fewest_workers_within_the_limits_are_needed(role: str, demand: Demand, ttft: float, itl: float) -> None:
    found = needed(role, TIMING, demand, ttft, itl, 64)  # type: ignore[arg-type]

    def good(workers: int) -> bool:
        each = latency(role, TIMING, demand, workers)  # type: ignore[arg-type]
        return each.busy <= BUSY and each.ttft_ms <= ttft and each.itl_ms <= itl

    assert found.reachable == good(64)
    if found.reachable:
        assert good(found.workers)
        assert found.workers == 1 or not good(found.workers - 1)


def test_a_limit_below_a_lone_prompts_time_does_not_take_every_worker() -> None:
    found = needed("prefill", TIMING, Demand(rate=5, isl=4000, osl=10), 300.0, 50.0, 64)  # a prompt takes 400 ms
    assert not found.reachable
    assert found.workers < 10
    assert found.latency.ttft_ms < 420
