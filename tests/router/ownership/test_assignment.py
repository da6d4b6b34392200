"""Which router owns which model."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.ownership.membership import assign, default_owner
from penstock.schemas.routers import Member

MODELS = st.frozensets(st.sampled_from("abcdefgh"), max_size=8)
CLAIMS = MODELS.map(lambda models: tuple(sorted(models)))
MEMBERS = st.lists(
    st.builds(Member, st.sampled_from(["r1", "r2", "r3", "r4"]), st.integers(0, 3), CLAIMS),
    min_size=1,
    max_size=4,
    unique_by=lambda member: member.router,
)


@given(MODELS, MEMBERS)
def test_each_model_has_one_owner_and_routers_have_about_as_many(models: frozenset[str], members: list[Member]) -> None:
    owners = assign(models, members)
    assert set(owners) == models
    counts = Counter(owners.values())
    assert {member.router for member in members} >= set(counts)
    owned = [counts[member.router] for member in members]
    assert max(owned) - min(owned) <= 1


@given(MODELS, MEMBERS, st.randoms())
def test_routers_agree_whatever_order_they_learned_of_each_other(
    models: frozenset[str], members: list[Member], random: object
) -> None:
    assert assign(models, members) == assign(sorted(models, reverse=True), list(reversed(members)))


@given(MODELS, MEMBERS)
def test_an_assignment_that_is_claimed_stays(models: frozenset[str], members: list[Member]) -> None:
    owners = assign(models, members)
    claimed = [
        Member(each.router, each.since_ns, tuple(m for m, router in owners.items() if router == each.router))
        for each in members
    ]
    assert assign(models, claimed) == owners


def test_a_router_that_starts_takes_nothing_from_the_only_owner_of_the_only_model() -> None:
    old, new = Member("old", 1, ("m",)), Member("new", 2)
    assert assign({"m"}, [new, old]) == {"m": "old"}
    assert default_owner({"m": "old"}, [new, old]) == "old", "so that the other one reads nothing"


def test_a_router_that_starts_gets_its_share_of_the_models() -> None:
    owners = assign({"a", "b", "c", "d"}, [Member("old", 1, ("a", "b", "c", "d")), Member("new", 2)])
    assert owners == {"a": "old", "b": "old", "c": "new", "d": "new"}


def test_of_two_that_claim_a_model_the_earlier_keeps_it() -> None:
    """A router that was stopped for longer than its lease counts as the later one."""
    assert assign({"m"}, [Member("woken", 9, ("m",)), Member("heir", 5, ("m",))]) == {"m": "heir"}


def test_without_models_the_earliest_reads_requests() -> None:
    assert default_owner({}, [Member("b", 2), Member("a", 1)]) == "a"
    assert default_owner({}, []) == ""
    assert assign({"m"}, []) == {}
