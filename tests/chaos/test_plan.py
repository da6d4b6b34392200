"""Disturbances are a function of the seed, hit what they may, and leave room for what they are to find."""

import pytest

from tests.chaos.plan import ACTS, BROKER, Act, Disturbance, plan

TARGETS = {"worker": 5.0, "gateway": 2.0, BROKER: 1.0}
NAMES = ["gateway-0", "gateway-1", "nats", "router-0", "worker-0", "worker-1", "worker-2"]


def test_the_same_seed_is_the_same_plan_and_another_seed_another() -> None:
    assert plan(7, 120, TARGETS) == plan(7, 120, TARGETS)
    assert plan(7, 120, TARGETS) != plan(8, 120, TARGETS)


def test_a_plan_is_in_order_within_its_time_and_about_as_dense_as_asked() -> None:
    found = plan(1, 600, TARGETS, every_s=3)
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(0 < each.at_s < 600 for each in found)
    assert 150 < len(found) < 260


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
