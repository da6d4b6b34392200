"""The hint that a session gives: where its last request went, unless requests of it run at the same time."""

from penstock.measure.simulation.placement import Arrival
from penstock.router.placement.cost import FAVOUR
from penstock.router.placement.decision_inputs import SessionId, Sessions
from tests.penstock.measure.simulation.test_simulated_router import BLOCK, S, arrival, placement, target

ME = SessionId("acme", "m", "", "chat-1")


def named(name: str, blocks: int, *, family: int) -> Arrival:
    return arrival(name, blocks, family=family)._replace(session="chat-1", model="m")


def test_a_session_is_where_its_last_request_went() -> None:
    sessions = Sessions(lambda request: False)
    assert sessions.targets(ME, "r1") == ()
    sessions.sent(ME, "r1", [("a", 0)])
    sessions.sent(ME, "r2", [("p", 0), ("d", 1)])
    assert sessions.targets(ME, "r3") == (("p", 0), ("d", 1))
    for other in (ME._replace(tenant="other"), ME._replace(model="n"), ME._replace(salt="s"), ME._replace(name="2")):
        assert sessions.targets(other, "r3") == ()


def test_there_is_no_hint_while_another_request_of_the_session_runs_but_for_its_next_attempt() -> None:
    active = {"r1"}
    sessions = Sessions(active.__contains__)
    sessions.sent(ME, "r1", [("a", 0)])
    assert sessions.targets(ME, "r2") == ()
    assert sessions.targets(ME, "r1") == (("a", 0),)
    active.clear()
    assert sessions.targets(ME, "r2") == (("a", 0),)


def test_the_sessions_used_longest_ago_are_forgotten() -> None:
    sessions = Sessions(lambda request: False, most_bytes=1_000)  # two of these
    for name in ("1", "2", "1", "3"):
        sessions.sent(ME._replace(name=name), name, [("a", 0)])
    assert [bool(sessions.targets(ME._replace(name=name), "r")) for name in "123"] == [True, False, True]
    assert len(sessions) == 2


def test_long_names_take_the_place_of_many_short_ones() -> None:
    sessions = Sessions(lambda request: False, most_bytes=100_000)
    for number in range(1_000):
        sessions.sent(ME._replace(name=f"{number:0256}"), "r", [("a", 0)])
    assert 0 < len(sessions) < 100


def test_a_session_stays_where_targets_are_equal_otherwise() -> None:
    """Its prompts have nothing in common, so the index knows nothing; others take turns."""
    core, _ = placement(4)
    homes, others = [], []
    for turn in range(8):
        homes.append(target(core.arrive(named(f"r{turn}", 5, family=turn), turn * S)))
        core.ended(f"r{turn}")
        others.append(target(core.arrive(arrival(f"o{turn}", 5, family=100 + turn), turn * S)))
        core.ended(f"o{turn}")
    assert len(set(homes)) == 1
    assert len(set(others)) > 1


def test_a_session_leaves_a_target_that_has_more_to_do_than_the_hint_is_worth() -> None:
    core, caches = placement(2)
    home = target(core.arrive(named("r1", 5, family=1), 0))
    core.ended("r1")
    caches.blocks[home, 0] = set(range(20_000, 20_005))
    assert target(core.arrive(arrival("long", int(FAVOUR) // BLOCK + 10, family=20), 0)) == home
    assert target(core.arrive(named("r2", 20, family=3), 0)) == {"w0": "w1", "w1": "w0"}[home]


def test_a_cached_prefix_counts_more_than_the_hint() -> None:
    core, caches = placement(2)
    home = target(core.arrive(named("r1", 5, family=1), 0))
    core.ended("r1")
    other = {"w0": "w1", "w1": "w0"}[home]
    caches.blocks[other, 0] = set(range(3000, 3020))
    assert target(core.arrive(named("r2", 20, family=3), 0)) == other
