"""Disturbances are a function of the seed, hit what they may, and leave room for what they are to find."""

from collections import Counter

import pytest

from tests.chaos.audit import Circumstances
from tests.chaos.plan import ACTS, BROKER, LONG_S, Act, Disturbance, Hit, Way, plan

TARGETS = {"worker": 5.0, "gateway": 2.0, BROKER: 1.0}
NAMES = ["gateway-0", "gateway-1", "nats", "router-0", "worker-0", "worker-1", "worker-2"]


def test_the_same_seed_is_the_same_plan_and_another_seed_another() -> None:
    assert plan(7, 120, TARGETS) == plan(7, 120, TARGETS)
    assert plan(7, 120, TARGETS) != plan(8, 120, TARGETS)


def test_a_plan_is_in_order_within_its_time_and_about_as_dense_as_asked() -> None:
    found = plan(1, 600, TARGETS, every_s=3)
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(0 < each.at_s < 600 for each in found)
    assert 150 < len(found) < 320


def test_every_act_and_every_target_takes_its_turn() -> None:
    found = [each for each in plan(3, 600, TARGETS) if each.target]
    assert {each.act for each in found} == set(ACTS)
    assert {each.target for each in found} == set(TARGETS)
    assert all((each.hold_s > 0) == (each.act is Act.stop) for each in found)


@pytest.mark.parametrize(("seconds", "rolls", "crashes"), [(60, 0, 0), (150, 1, 1), (600, 4, 4)])
def test_everything_is_restarted_in_turn_and_killed_at_once_now_and_then(
    seconds: float, rolls: int, crashes: int
) -> None:
    acts = [each.act for each in plan(1, seconds, TARGETS)]
    assert (acts.count(Act.roll), acts.count(Act.crash)) == (rolls, crashes)


@pytest.mark.parametrize(
    ("target", "draw", "victim"),
    [
        ("worker", 0.0, "worker-0"),
        ("worker", 0.999, "worker-2"),
        ("gateway", 0.5, "gateway-1"),
        ("nats", 0.7, "nats"),
        ("encode", 0.5, None),
    ],
)
def test_a_victim_is_drawn_from_those_there_are(target: str, draw: float, victim: str | None) -> None:
    assert Disturbance(1.0, Act.kill, target, draw).victim(NAMES) == victim


def test_what_a_deployment_can_have_more_changes_nothing_of_the_ordinary_plan() -> None:
    little, much = plan(5, 300, TARGETS), plan(5, 300, TARGETS, more=(Act.stall, Act.fill))
    assert [each for each in much if each.act not in (Act.stall, Act.fill)] == little
    stalls = [each for each in much if each.act is Act.stall]
    fills = [each for each in much if each.act is Act.fill]
    assert len(stalls) == 25
    assert {each.way for each in stalls} == set(Way)
    assert not any(each.target == BROKER for each in stalls), "its own link is everybody's"
    several = plan(5, 300, TARGETS, more=(Act.stall,), several=True)
    assert any(each.act is Act.stall and each.target == BROKER for each in several), "that of one of them is not"
    assert len(fills) == 4
    assert all(each.hold_s > 0 for each in (*stalls, *fills))


def test_some_disturbances_come_two_at_once_and_some_stops_outlast_every_lease() -> None:
    found = plan(3, 600, TARGETS)
    times = Counter(each.at_s for each in found)
    twins = [at for at, number in times.items() if number == 2]
    assert 20 < len(twins) < 60
    for at in twins:
        assert len({each.target for each in found if each.at_s == at}) == 2
    assert sum(each.hold_s == LONG_S for each in found) == 8


@pytest.mark.parametrize(("at", "end"), [(1.0, False), (6.0, True), (9.5, True), (12.0, False)])
def test_a_hit_is_over_when_what_it_held_continues(at: float, end: bool) -> None:
    around = Circumstances([Hit(5.0, Act.stop, "gateway-0", 5.0)])
    assert around.hit(("gateway",), at, at + 1) is end
    assert not around.hit(("router",), at, at + 1)
