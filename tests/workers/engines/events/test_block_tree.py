"""Blocks by an engine's hashes: what is told is closed towards the front, whatever comes and goes."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import split
from schemas.kv import Cleared, Removed, Stored
from tests.workers.engines.events.support import digest, fold
from workers.engines.events.block_tree import Forest, joined


def test_a_chain_is_told_as_one_event_and_removed_from_its_end() -> None:
    forest = Forest()
    parent = None
    for number in range(3):
        parent = forest.store(number, parent, digest(number))
    assert forest.take() == [Stored(digest(0) + digest(1) + digest(2))]
    forest.remove(0)
    (gone,) = forest.take()
    assert isinstance(gone, Removed)
    assert split(gone.digests) == [digest(2), digest(1), digest(0)]
    assert forest.shown == 0


def test_a_child_whose_parent_left_and_came_back_can_be_found_again() -> None:
    forest = Forest()
    root = forest.store("p", None, digest(1))
    forest.store("c", root, digest(2))
    forest.take()
    assert forest.remove("p")
    assert fold(forest.dump()) == {}
    again = forest.store("p", forest.find("x"), digest(1))
    assert again is root
    forest.take()
    assert set(fold(forest.dump())) == {(digest(1), 0), (digest(2), 0)}
    assert not forest.remove("never")


def test_other_memory_is_told_by_its_tier() -> None:
    forest = Forest()
    block = forest.store("a", None, digest(1))
    forest.store("a", None, digest(1), tier=1)
    forest.store("b", block, digest(2), tier=1)
    assert set(fold(forest.take())) == {(digest(1), 0), (digest(1), 1), (digest(2), 1)}
    forest.clear(0)
    assert forest.take() == [Removed(digest(1))]
    forest.clear()
    assert forest.take() == [Cleared()]
    assert forest.dump() == []


def test_chains_are_joined_and_others_are_not() -> None:
    chain = [Stored(digest(n), digest(n - 1) if n else None) for n in range(3)]
    assert joined(list(chain)) == [Stored(digest(0) + digest(1) + digest(2))]
    assert joined([chain[0], chain[2]]) == [chain[0], chain[2]]
    assert joined([Removed(digest(1)), Removed(digest(2)), Cleared()]) == [Removed(digest(1) + digest(2)), Cleared()]


@given(st.lists(st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 11), st.integers(0, 1)), max_size=60))
def test_events_and_dump_agree_with_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    """Block n hangs below (n - 1) // 2. A block is visible if it and all above it are on the device."""
    forest, here, told = Forest(), set[tuple[int, int]](), fold([])

    def visible(number: int) -> bool:
        return (number, 0) in here and (number == 0 or visible((number - 1) // 2))

    for what, number, tier in steps:
        if what == "remove":
            assert forest.remove(number, tier) == ((number, tier) in here)
            here.discard((number, tier))
        else:
            above = None if number == 0 else forest.find((number - 1) // 2)
            if number == 0 or above is not None:
                forest.store(number, above, digest(number), tier)
                here.add((number, tier))
        fold(forest.take(), told)
        wanted = {(digest(n), 0) for n in range(12) if visible(n)} | {(digest(n), 1) for n, t in here if t}
        assert set(told) == wanted
        assert forest.shown == sum(not tier for _, tier in wanted)
    assert set(fold(forest.dump())) == set(told)
