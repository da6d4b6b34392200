"""When the owner of models has other routers place requests, too."""

from penstock.router.ownership.intake import CALM_S, Sharing


def test_requests_are_shared_once_the_owner_was_busy_for_two_seconds() -> None:
    sharing = Sharing()
    assert [sharing.update(0.9, 5000, now) for now in (0, 1, 2)] == [False, False, True]


def test_a_moment_of_rest_begins_anew() -> None:
    sharing = Sharing()
    assert not any(sharing.update(busy, 5000, now) for now, busy in enumerate((0.9, 0.9, 0.3, 0.9, 0.9)))
    assert sharing.update(0.9, 5000, 5)


def test_sharing_ends_when_the_rate_of_all_has_fallen_for_long_and_not_because_the_owner_has_less_to_do() -> None:
    sharing = Sharing()
    for now in range(3):
        sharing.update(0.9, 5000, now)
    assert all(sharing.update(0.2, 4000, now) for now in range(3, 60))
    fallen = [sharing.update(0.2, 2000, 60 + now) for now in range(int(CALM_S) + 1)]
    assert fallen == [True] * int(CALM_S) + [False]
    assert not sharing.update(0.2, 2000, 80)


def test_sharing_ends_although_the_owner_was_busy_with_something_else_when_it_began() -> None:
    """The index of a start, or KV events: at a rate of requests that says nothing."""
    sharing = Sharing()
    assert [sharing.update(0.9, 0, now) for now in range(3)][-1]
    busy_for_helpers = [sharing.update(0.3, 900, 3 + now, own_rate=300) for now in range(60)]
    assert all(busy_for_helpers), "alone, it would use up to 0.9 of a core"
    calm = [sharing.update(0.1, 900, 63 + now, own_rate=300) for now in range(int(CALM_S) + 1)]
    assert calm == [True] * int(CALM_S) + [False]
