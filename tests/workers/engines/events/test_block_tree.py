"""Blocks by an engine's hashes: announced blocks are closed towards the front in any order of changes."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Cleared, Removed, Stored
from penstock.workers.engines.events.translator import BlockTree, merge_adjacent
from tests.workers.engines.events.support import digest, fold


def test_a_chain_is_one_stored_event_and_removed_from_its_end() -> None:
    tree = BlockTree()
    parent = None
    for number in range(3):
        parent = tree.store(number, parent, digest(number))
    assert tree.take_events() == [Stored(digest(0) + digest(1) + digest(2))]
    tree.remove(0)
    (gone,) = tree.take_events()
    assert isinstance(gone, Removed)
    assert split(gone.digests) == [digest(2), digest(1), digest(0)]
    assert tree.visible == 0


def test_a_child_is_announced_again_with_its_parent() -> None:
    tree = BlockTree()
    root = tree.store("p", None, digest(1))
    tree.store("c", root, digest(2))
    tree.take_events()
    assert tree.remove("p")
    assert fold(tree.dump()) == {}
    again = tree.store("p", tree.find("x"), digest(1))
    assert again is root
    tree.take_events()
    assert set(fold(tree.dump())) == {(digest(1), 0), (digest(2), 0)}
    assert not tree.remove("never")


def test_blocks_in_other_memory_are_announced_with_their_tier() -> None:
    tree = BlockTree()
    block = tree.store("a", None, digest(1))
    tree.store("a", None, digest(1), tier=1)
    tree.store("b", block, digest(2), tier=1)
    assert set(fold(tree.take_events())) == {(digest(1), 0), (digest(1), 1), (digest(2), 1)}
    tree.clear(0)
    assert tree.take_events() == [Removed(digest(1))]
    tree.clear()
    assert tree.take_events() == [Cleared()]
    assert tree.dump() == []


def test_only_events_of_one_chain_are_merged() -> None:
    chain = [Stored(digest(n), digest(n - 1) if n else None) for n in range(3)]
    assert merge_adjacent(list(chain)) == [Stored(digest(0) + digest(1) + digest(2))]
    assert merge_adjacent([chain[0], chain[2]]) == [chain[0], chain[2]]
    assert merge_adjacent([Removed(digest(1)), Removed(digest(2)), Cleared()]) == [
        Removed(digest(1) + digest(2)),
        Cleared(),
    ]


@given(st.lists(st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 11), st.integers(0, 1)), max_size=60))
def test_events_and_dump_agree_with_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    """The parent of block n is (n - 1) // 2. A block is visible if it and all above it are on the device."""
    tree, present, announced = BlockTree(), set[tuple[int, int]](), fold([])

    def visible(number: int) -> bool:
        return (number, 0) in present and (number == 0 or visible((number - 1) // 2))

    for what, number, tier in steps:
        if what == "remove":
            assert tree.remove(number, tier) == ((number, tier) in present)
            present.discard((number, tier))
        else:
            above = None if number == 0 else tree.find((number - 1) // 2)
            if number == 0 or above is not None:
                tree.store(number, above, digest(number), tier)
                present.add((number, tier))
        fold(tree.take_events(), announced)
        wanted = {(digest(n), 0) for n in range(12) if visible(n)} | {(digest(n), 1) for n, t in present if t}
        assert set(announced) == wanted
        assert tree.visible == sum(not tier for _, tier in wanted)
    assert set(fold(tree.dump())) == set(announced)
