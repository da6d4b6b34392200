"""The deployment that is chosen, against engines whose best one is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.search.candidates import Configuration, Scope, SizedDeployment, Sla, candidates, why_not
from penstock.planner.capacity import latency
from penstock.schemas.plans import Demand
from tests.penstock.planner.engines import engine
from tests.properties import examples

SLA = Sla(ttft_ms=500.0, itl_ms=25.0, isl=2000, osl=200)
FAST = Configuration("fast", engine(prefill_ms=40, step_ms=8, growth_ms=0.05, gpus=2))
CHEAP = Configuration("cheap", engine(prefill_ms=100, step_ms=10, growth_ms=0.1))
SLOW = Configuration("slow", engine(prefill_ms=400, step_ms=10, growth_ms=0.1))
WIDE = Configuration("wide", engine(prefill_ms=100, step_ms=10, growth_ms=0.02))  # decodes more at once


def best(found: list[Configuration], sla: Sla = SLA, **scope: float) -> SizedDeployment:
    return candidates(found, sla, Scope(total_gpus=16, **scope))[0]  # type: ignore[arg-type]


def test_the_engine_that_serves_most_per_gpu_is_chosen() -> None:
    twice = Configuration("twice", engine(prefill_ms=50, step_ms=5, growth_ms=0.05))
    assert {pool.configuration for pool in best([CHEAP, twice]).pools} == {"twice"}


def test_prefill_and_decode_may_have_configurations_of_their_own() -> None:
    """One computes prompts four times as fast, the other decodes four times as many."""
    prompts = Configuration("prompts", engine(prefill_ms=25, step_ms=24, growth_ms=0.4))
    answers = Configuration("answers", engine(prefill_ms=200, step_ms=8, growth_ms=0.02))
    chosen = best([prompts, answers])
    assert [(pool.role, pool.configuration) for pool in chosen.pools] == [("prefill", "prompts"), ("decode", "answers")]


def test_a_short_ttft_takes_the_faster_configuration() -> None:
    assert why_not(SLOW, SLA) == "TTFT 800.0 ms of a lone request"
    short = Sla(ttft_ms=150.0, itl_ms=25.0, isl=2000, osl=200)
    assert why_not(CHEAP, short) == "TTFT 200.0 ms of a lone request"
    assert {pool.configuration for pool in best([FAST], short).pools} == {"fast"}


def test_a_rate_is_served_with_the_fewest_gpus() -> None:
    chosen = best([CHEAP, FAST], rate=9.0)
    assert chosen.requests_per_s >= 9.0
    smaller = candidates([CHEAP, FAST], SLA, Scope(total_gpus=chosen.gpus - 1, rate=9.0))
    assert smaller == []


def test_the_handoff_counts_towards_ttft() -> None:
    late = Configuration("late", CHEAP.timing, handoff_ms=250.0)

    def split(configuration: Configuration) -> SizedDeployment:
        return next(each for each in candidates([configuration], SLA, Scope(total_gpus=4)) if len(each.pools) == 2)

    assert split(late).ttft_ms >= 450.0
    assert split(late).requests_per_s < split(CHEAP).requests_per_s  # less of the TTFT is left for queues


@examples(25)
@given(st.sampled_from([CHEAP, FAST, WIDE]), st.floats(250, 2000), st.floats(15, 60), st.integers(2, 12))
def test_every_candidate_is_within_the_sla_and_a_tenth_more_load_is_not(
    configuration: Configuration, ttft: float, itl: float, gpus: int
) -> None:
    sla = Sla(ttft_ms=ttft, itl_ms=itl, isl=2000, osl=200)
    for each in candidates([configuration], sla, Scope(total_gpus=gpus)):
        assert each.gpus <= gpus
        assert each.ttft_ms <= ttft
        assert each.itl_ms <= itl
        over = [
            latency(pool.role, configuration.timing, Demand(1.1 * each.requests_per_s, 2000, 200), pool.workers)
            for pool in each.pools
        ]
        assert any(one.busy > 0.8 or one.ttft_ms > ttft or one.itl_ms > itl for one in over)


def test_nothing_is_found_where_even_a_lone_request_is_too_slow() -> None:
    assert candidates([CHEAP], Sla(ttft_ms=10, itl_ms=25, isl=2000, osl=200), Scope(total_gpus=16)) == []
    assert best([CHEAP]).per_gpu == pytest.approx(best([CHEAP]).requests_per_s / best([CHEAP]).gpus)
