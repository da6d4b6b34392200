"""Routing policies on simulated fleets."""

from itertools import product

import pytest

from penstock.measure.simulation.fleet import Simulation, simulate
from penstock.measure.simulation.policy import Placement, SimulatedFleet, WorkerSpec
from penstock.measure.simulation.trace import Request
from penstock.router.placement import cost
from penstock.router.placement.routing import Weights
from tests.perf.comparison import POLICIES, SimulationFigures, TableCell, figures, run, runs, summaries
from tests.perf.policies import CellsPolicy, DynamoPolicy, RulePolicy, least_requests, round_robin
from tests.perf.workloads import WORKLOADS, generate

FOUR = SimulatedFleet((WorkerSpec(blocks=4096),) * 4)


def request(index: int, prompt: int = 640, keys: list[int] | None = None) -> Request:
    return Request(
        index, 0, prompt, 3, list(range(index * 1000, index * 1000 + prompt // 64)) if keys is None else keys
    )


def test_dynamos_cost_of_a_first_request_counts_its_prompt_twice() -> None:
    """As in its log: 40,160 tokens in blocks of 64 cost 627.5 + 627 on an idle worker."""
    policy = DynamoPolicy()
    policy.start(SimulatedFleet((WorkerSpec(), WorkerSpec())), [])
    costs: list[list[float]] = []
    policy._lowest = lambda given: (costs.append(list(given)), 0)[1]  # type: ignore[method-assign, func-returns-value]
    policy.arrive(request(0, 40_160), 0)
    assert costs == [[1254.5, 1254.5]]


def test_dynamo_goes_where_the_prefix_is_cached() -> None:
    policy = DynamoPolicy()
    policy.start(FOUR, [])
    policy.events((2, 0), [(list(range(8)), None)], [], 0)
    assert policy.arrive(request(0, 640, list(range(10))), 0) == Placement((2, 0))
    policy.finished(request(0, 640, list(range(10))), 1)
    policy.events((2, 0), [], list(range(8)), 1)
    policy.events((1, 0), [([0], None)], [], 1)
    assert policy.arrive(request(1, 640, list(range(10))), 1) == Placement((1, 0))


def test_round_robin_takes_turns_and_least_loaded_avoids_the_busy_one() -> None:
    turns = RulePolicy(round_robin)
    turns.start(FOUR, [])
    assert [turns.arrive(request(n), 0).target[0] for n in range(5)] == [0, 1, 2, 3, 0]
    least = RulePolicy(least_requests)
    least.start(FOUR, [])
    assert sorted(least.arrive(request(n), 0).target[0] for n in range(4)) == [0, 1, 2, 3]
    least.finished(request(2), 1)
    freed = least.arrive(request(5), 1).target
    assert least.arrive(request(6), 1).target != freed


FLEETS = {
    "workers": FOUR,
    "ranks": SimulatedFleet((WorkerSpec(blocks=4096, ranks=2),) * 2),
    "pairs": SimulatedFleet((WorkerSpec("prefill", 4096),) * 2 + (WorkerSpec("decode", 4096),) * 2),
    "encoders": SimulatedFleet((WorkerSpec(blocks=4096),) * 2, encoders=2),
}


@pytest.mark.parametrize(("policy", "fleet"), sorted(product(POLICIES, FLEETS)))
def test_a_policy_serves_every_request_of_a_workload(policy: str, fleet: str) -> None:
    for name in ("images", "hot"):
        found = run(TableCell(FLEETS[fleet], 1.0, name, None, 60), policy, 1)
        assert (found.figures.requests, found.figures.unfinished) == (60, 0)


def test_a_policy_that_knows_caches_reuses_more_than_round_robin() -> None:
    cell = TableCell(FOUR, 0.7, "agents", None, 300)
    hits = {policy: run(cell, policy, 0).figures.hit_rate for policy in ("kv", "dynamo", "round_robin")}
    assert min(hits["kv"], hits["dynamo"]) > 1.2 * hits["round_robin"]


def test_in_overload_prompts_that_begin_alike_are_held_in_one_cell() -> None:
    cell = TableCell(FOUR, 6.0, "documents", None, 300, cells=2)
    whole, divided = (run(cell, policy, 0).figures for policy in ("kv", "kv_cells"))
    assert divided.hit_rate > 0.9 * whole.hit_rate, "half of that if only what is cached counted"
    assert divided.ttft_mean < 1.05 * whole.ttft_mean


def test_in_overload_a_cell_with_room_takes_what_another_one_holds() -> None:
    """All requests enter one cell, as those do that came before the other had workers."""
    requests = generate("unique", 0, 200, 40.0).requests(64)
    taken, kept = (CellsPolicy(cells=2, taking=taking) for taking in (True, False))
    times = []
    for policy in (taken, kept):
        simulation = Simulation(FOUR, requests, policy)
        for choice in policy._choices:
            choice.choose = lambda *_: 0  # type: ignore[method-assign]
        times.append(figures(FOUR, simulation.run()))
    assert (times[0].unfinished, times[1].unfinished) == (0, 0)
    assert (taken.moved > 20, kept.moved) == (True, 0)
    assert times[0].ttft_mean < 0.7 * times[1].ttft_mean


def test_a_hot_system_prompt_does_not_keep_its_traffic_at_the_first_worker() -> None:
    """At light load, where its prefix alone would decide."""
    fleet = SimulatedFleet((WorkerSpec(),) * 4)
    kv, least = (run(TableCell(fleet, 0.1, "hot", None, 600), policy, 0).figures for policy in ("kv", "least_loaded"))
    assert kv.served < 1.2
    assert kv.hit_rate > least.hit_rate
    assert kv.ttft_p99 <= least.ttft_p99


def test_decode_workers_that_compute_no_prompts_keep_their_sequences_faster() -> None:
    fleet = SimulatedFleet((WorkerSpec("prefill"),) * 2 + (WorkerSpec("decode"),) * 2)
    gaps = [
        run(
            TableCell(fleet, 0.6, "chat", None, 300, weights=Weights(local_prefill_tokens=tokens)), "kv", 0
        ).figures.itl_mean
        for tokens in (1000, 0)
    ]
    assert gaps[1] < gaps[0]


def test_decode_workers_compute_prompts_only_while_prefill_workers_are_behind() -> None:
    fleet = SimulatedFleet((WorkerSpec("prefill"),) * 2 + (WorkerSpec("decode"),) * 4)

    def simulated(workload: str, load: float, tokens: int) -> SimulationFigures:
        weights = Weights(local_prefill_tokens=0, prefill_queue_tokens=tokens)
        return run(TableCell(fleet, load, workload, None, 300, weights=weights), "kv", 0).figures

    never, default = (simulated("documents", 0.5, tokens) for tokens in (0, Weights().prefill_queue_tokens))
    assert default.ttft_mean < 0.9 * never.ttft_mean
    assert default.ttft_p99 < never.ttft_p99
    assert default.e2e_mean < 1.02 * never.e2e_mean
    assert simulated("chat", 0.2, Weights().prefill_queue_tokens) == simulated("chat", 0.2, 0)  # they keep up


def test_equal_seeds_give_equal_runs() -> None:
    cell = TableCell(FOUR, 1.2, "chat", None, 150)
    for policy in ("kv", "dynamo", "random"):
        assert run(cell, policy, 3) == run(cell, policy, 3)
    assert run(cell, "random", 3) != run(cell, "random", 4)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_comes_at_its_rate_with_prompts_that_its_ids_cover(name: str) -> None:
    trace = generate(name, 5, 400, 20.0)
    assert len(trace.rows) == 400
    assert 0.4 * 20_000 < trace.rows[-1].timestamp < 1.1 * 20_000
    for row in trace.rows:
        assert len(row.hash_ids) * 64 >= row.input_length // 64 * 64
        assert len(set(row.hash_ids)) == len(row.hash_ids)
    assert trace == generate(name, 5, 400, 20.0)
    assert trace != generate(name, 6, 400, 20.0)


def test_a_turn_repeats_its_conversation_up_to_the_last_full_block() -> None:
    rows = generate("chat", 1, 500, 5.0).rows
    full = {row.hash_ids[: row.input_length // 64] for row in rows if row.input_length > 4100}  # beyond system prompts
    continued = sum(any(row.hash_ids[:length] in full for length in range(64, len(row.hash_ids) - 1)) for row in rows)
    assert continued > 100


@pytest.mark.parametrize(("workload", "load", "group"), [("classes", 3.0, "interactive"), ("tenants", 1.5, "b")])
def test_who_asks_little_waits_less_where_classes_and_tenants_decide(
    monkeypatch: pytest.MonkeyPatch, workload: str, load: float, group: str
) -> None:
    """They would wait in the workers' queues, if requests were sent there up to the size of the KV cache. A worker's
    queue knows tenants, but not how long prompts are, nor which class goes first."""
    cell = TableCell(FOUR, load, workload, None, 500)
    means = []
    for most in (cost.MOST_UNCOMPUTED, 1 << 40):
        monkeypatch.setattr(cost, "MOST_UNCOMPUTED", most)
        means.append(run(cell, "kv", 0).figures.groups[group].ttft_mean)
    assert means[0] < (0.8 if workload == "tenants" else 0.5) * means[1]


def test_the_others_are_compared_with_the_first_policy() -> None:
    cell = TableCell(FOUR, 0.7, "hot", None, 100)
    first, second = summaries(list(runs([cell], ("round_robin", "kv"), 3)))
    assert (first.policy, first.seeds) == ("round_robin", 3)
    assert first.against_first["ttft_mean"].mean == 0.0
    against = second.against_first["ttft_mean"]
    assert against.low <= against.mean <= against.high
    assert against.mean < 0


def test_a_held_request_is_placed_once_there_is_room() -> None:
    """More prompts at once than the fleet has memory for: held by the router, none preempted."""
    fleet = SimulatedFleet((WorkerSpec(blocks=128),) * 2)
    requests = [request(n, 3200) for n in range(12)]
    result = simulate(fleet, requests, POLICIES["kv"](0))
    assert all(each.complete for each in result.served)
    assert result.preemptions == 0
    assert max(each.placed_ns for each in result.served) > 0
