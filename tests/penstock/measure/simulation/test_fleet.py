"""Fleets of simulated engines: what a policy and a client see."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from penstock.measure.simulation.cache import StoredRun
from penstock.measure.simulation.engine import TOKEN_NS, decode_ns, prefill_ns
from penstock.measure.simulation.fleet import SimulatedRequest, Simulation, SimulationError, simulate
from penstock.measure.simulation.placement import PlacementPolicy, name
from penstock.measure.simulation.policy import Placement, SimulatedFleet, Target, WorkerSpec
from penstock.measure.simulation.trace import Request
from penstock.router.state.holders import TierDepths
from tests.perf.policies import RulePolicy, round_robin
from tests.perf.workloads import generate

POOL = 1000 * 64
MS = 1_000_000


def request(index: int, at_ms: int = 0, prompt: int = 640, output: int = 3, media: int = 0) -> Request:
    return Request(index, at_ms * MS, prompt, output, [index * 1000 + n for n in range(prompt // 64)], media)


class Recorded(RulePolicy):
    """Round robin that records its calls."""

    def __init__(self) -> None:
        super().__init__(round_robin)
        self.seen: list[tuple[int, str, object]] = []

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self.seen.append((now_ns, "events", (target, list(stored))))

    def prefilled(self, request: Request, now_ns: int) -> None:
        self.seen.append((now_ns, "prefilled", request.index))

    def finished(self, request: Request, now_ns: int) -> None:
        super().finished(request, now_ns)
        self.seen.append((now_ns, "finished", request.index))


def times(served: Sequence[SimulatedRequest]) -> list[tuple[int, int]]:
    return [(each.first_ns, each.last_ns) for each in served]


def test_a_policy_sees_blocks_then_the_first_token_at_the_end_of_the_pass() -> None:
    policy = Recorded()
    result = simulate(SimulatedFleet((WorkerSpec(blocks=1000),)), [request(0)], policy)
    first = prefill_ns(1, 640, 0)
    second = first + decode_ns(641, POOL)
    third = second + decode_ns(642, POOL)
    assert times(result.served) == [(first, third)]
    assert policy.seen == [
        (first, "events", ((0, 0), [(list(range(10)), None)])),
        (first, "prefilled", 0),
        (third, "finished", 0),
    ]


def test_an_arrival_during_decode_joins_at_the_end_of_the_pass_under_way() -> None:
    long = request(0, output=1000)
    alone = simulate(SimulatedFleet((WorkerSpec(blocks=1000),)), [long], RulePolicy(round_robin)).served[0]
    both = simulate(
        SimulatedFleet((WorkerSpec(blocks=1000),)), [long, request(1, at_ms=1000)], RulePolicy(round_robin)
    ).served
    assert both[0].first_ns == alone.first_ns
    joined = both[1].first_ns
    assert 1000 * MS + prefill_ns(1, 640, 0) < joined < 1000 * MS + prefill_ns(1, 640, 0) + 2 * decode_ns(1700, POOL)


def test_a_slow_worker_takes_twice_as_long() -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=1000), WorkerSpec(blocks=1000, slowness=2.0)))
    fast, slow = times(simulate(fleet, [request(0), request(1)], RulePolicy(round_robin)).served)
    assert slow == (2 * fast[0], 2 * fast[1])


def test_ranks_of_a_worker_step_together() -> None:
    both = SimulatedFleet((WorkerSpec(blocks=1000, ranks=2),))
    long, short = simulate(both, [request(0, prompt=6400), request(1, prompt=640)], RulePolicy(round_robin)).served
    assert long.placement != short.placement
    assert short.first_ns == long.first_ns == prefill_ns(1, 6400, 0)


def test_a_prompt_goes_from_a_prefill_to_a_decode_worker() -> None:
    fleet = SimulatedFleet((WorkerSpec("prefill", 1000), WorkerSpec("decode", 1000)))
    (served,) = simulate(fleet, [request(0)], RulePolicy(round_robin)).served
    handed = prefill_ns(1, 640, 0)
    assert served.decode == (1, 0)
    assert served.first_ns == handed + decode_ns(640, POOL)
    assert served.last_ns == served.first_ns + decode_ns(641, POOL) + decode_ns(642, POOL)
    slower = replace(fleet, transfer_ns_per_token=1000)
    (later,) = simulate(slower, [request(0)], RulePolicy(round_robin)).served
    assert later.first_ns - served.first_ns == 640 * 1000


class SecondReads(RulePolicy):
    """Round robin, where each worker reads what it lacks of a prompt from the other one."""

    def __init__(self) -> None:
        super().__init__(round_robin)

    def arrive(self, request: Request, now_ns: int) -> Placement:
        placement = super().arrive(request, now_ns)
        source = (1 - placement.target[0], 0)
        return placement._replace(source=source, prefix_blocks=len(request.keys))


def test_a_prefix_is_read_from_another_worker_as_far_as_it_is_there() -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=1000), WorkerSpec(blocks=1000)), move_ns=5 * MS, move_ns_per_token=1000)
    asked = [request(0), replace(request(1, at_ms=500, prompt=1280), keys=[*range(10), *range(900, 910)])]
    first, second = simulate(fleet, asked, SecondReads()).served
    assert (first.moved_tokens, first.first_ns) == (0, prefill_ns(1, 640, 0))
    assert (second.moved_tokens, second.cached_tokens) == (640, 640)
    assert second.first_ns == 500 * MS + 5 * MS + 640 * 1000 + prefill_ns(1, 1280, 640)


def test_a_prefix_for_which_there_is_no_room_is_computed() -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=1000), WorkerSpec(blocks=12)))
    busy, same = request(1, at_ms=400, output=100), replace(request(3, at_ms=500), keys=list(range(10)))
    served = simulate(fleet, [request(0), busy, request(2, at_ms=450), same], SecondReads()).served
    assert all(each.complete for each in served)
    assert [each.placement.target[0] for each in served if each.placement is not None] == [0, 1, 0, 1]
    assert served[3].first_ns > served[1].last_ns
    assert (served[3].moved_tokens, served[3].cached_tokens) == (0, 0)


def test_a_prefill_worker_keeps_blocks_until_the_decode_worker_has_room() -> None:
    # The decode worker has room for one of the prompts, the prefill worker for two.
    fleet = SimulatedFleet((WorkerSpec("prefill", 21), WorkerSpec("decode", 12)))
    requests = [request(n, output=20) for n in range(3)]
    served = simulate(fleet, requests, RulePolicy(round_robin)).served
    assert all(each.complete for each in served)
    assert served[1].first_ns > served[0].last_ns
    assert served[2].first_ns > served[1].last_ns


def test_an_image_is_encoded_once_before_its_prompts() -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=1000),), encoders=1, encode_ms=50.0)
    requests = [request(0, media=7), request(1, at_ms=500, media=7), request(2, at_ms=500)]
    first, again, plain = simulate(fleet, requests, RulePolicy(round_robin)).served
    assert first.first_ns == 50 * MS + prefill_ns(1, 640, 0)
    assert again.first_ns == plain.first_ns


def test_a_prompt_larger_than_the_cache_is_rejected() -> None:
    served = simulate(
        SimulatedFleet((WorkerSpec(blocks=8),)), [request(0), request(1, prompt=64)], RulePolicy(round_robin)
    ).served
    assert (served[0].rejected, served[0].complete) == (True, False)
    assert served[1].complete


@pytest.mark.parametrize("name", ["agents", "mixed"])
def test_planned_runs_end_where_single_passes_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet under pressure: the same times whether decode passes are planned one by one or in runs."""
    fleet = SimulatedFleet((WorkerSpec(blocks=1600), WorkerSpec("prefill", 1600), WorkerSpec("decode", 1600)))
    requests = [each for each in generate(name, 3, 80, 8.0).requests(64) if each.prompt_tokens < 90_000]
    requests = [replace(each, index=n) for n, each in enumerate(requests)]
    runs = simulate(fleet, requests, RulePolicy(round_robin))
    monkeypatch.setattr("penstock.measure.simulation.engine._RUN", 1)
    single = simulate(fleet, requests, RulePolicy(round_robin))
    assert times(runs.served) == times(single.served)
    assert runs.preemptions == single.preemptions


class PlacesAgain(RulePolicy):
    """Holds the first request, and then places it with every pump."""

    def __init__(self) -> None:
        super().__init__(round_robin)
        self.held: list[Request] = []

    def pump(self, now_ns: int) -> list[tuple[Request, Placement]]:
        return [(self.held[0], Placement((0, 0)))] * 2


def test_a_policy_that_places_a_request_twice_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PlacesAgain()
    monkeypatch.setattr(policy, "arrive", lambda request, now_ns: policy.held.append(request))
    with pytest.raises(SimulationError, match="placed twice"):
        simulate(SimulatedFleet((WorkerSpec(blocks=1000),)), [request(0)], policy)


def test_what_left_the_device_comes_back_in_the_time_that_it_takes() -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=20, lower=(10, 20), tier_costs=(0.25, 0.75)),))
    requests = [request(0, prompt=640 + 7), *(request(at, at_ms=1000 * at, prompt=640) for at in (1, 2, 3))]
    again = replace(requests[0], index=4, arrival_ns=9000 * MS)
    result = simulate(fleet, [*requests, again], RulePolicy(round_robin))
    alone = simulate(SimulatedFleet((WorkerSpec(blocks=20),)), [requests[0]], RulePolicy(round_robin))
    assert result.served[4].cached_tokens == 640
    took, computed = (each.first_ns - each.request.arrival_ns for each in (result.served[4], alone.served[0]))
    brought = round(0.75 * 64 * TOKEN_NS)
    assert took == prefill_ns(1, 647, 640) + 10 * brought
    assert took < computed + 10 * brought


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_knows_what_each_tier_has(seed: int) -> None:
    fleet = SimulatedFleet((WorkerSpec(blocks=300, lower=(200, 300)), WorkerSpec(blocks=300)))
    policy = PlacementPolicy(seed)
    requests = [each for each in generate("chat", seed, 150, 2.0).requests(64) if each.prompt_tokens < 250 * 64]
    requests = [replace(each, index=index) for index, each in enumerate(requests)]
    simulation = Simulation(fleet, requests, policy)
    simulation.run()
    deeper = 0
    for number in range(2):
        cache = simulation._workers[number].ranks[0].cache
        held = [cache, *(tier for _, tier in cache._lower)]
        for each in requests:
            depths = [
                next(
                    (at for at, key in enumerate(each.keys) if all(key not in tier for tier in held[: count + 1])), None
                )
                for count in range(len(held))
            ]
            found = policy.overlaps(each.keys)
            assert isinstance(found, TierDepths)
            known = list(accumulate(found.tiers((name(number), 0)), max))
            assert known[: len(held)] == [len(each.keys) if depth is None else depth for depth in depths]
            deeper += known[0] < known[1] < known[2]
    assert deeper
