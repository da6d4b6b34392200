"""Several publishers as one stream."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored
from penstock.workers.engines.events.translator import BlockTree, Consolidator
from tests.workers.engines.events.support import Names, digest, fold


def test_a_block_is_stored_with_its_first_publisher_and_removed_with_its_last() -> None:
    stream = Consolidator()
    assert stream.feed("a", [Stored(digest(1) + digest(2))]) == [Stored(digest(1) + digest(2))]
    assert stream.feed("b", [Stored(digest(1) + digest(2) + digest(3))]) == [Stored(digest(3), digest(2))]
    assert stream.feed("a", [Removed(digest(2) + digest(1))]) == []
    assert stream.feed("b", [Removed(digest(3))]) == [Removed(digest(3))]
    assert stream.feed("b", [Removed(digest(2) + digest(1))]) == [Removed(digest(2) + digest(1))]
    assert stream.dump() == []


def test_repeats_and_removals_of_unheld_blocks_change_nothing() -> None:
    stream = Consolidator()
    stream.feed("a", [Stored(digest(1))])
    assert stream.feed("a", [Stored(digest(1))]) == []
    assert stream.feed("b", [Removed(digest(1))]) == []
    assert stream.feed("a", [Removed(digest(1))]) == [Removed(digest(1))]


def test_a_publisher_that_clears_removes_only_its_own_blocks() -> None:
    stream = Consolidator()
    stream.feed("a", [Stored(digest(1) + digest(2))])
    stream.feed("b", [Stored(digest(1))])
    assert stream.feed("a", [Cleared()]) == [Removed(digest(2))]
    assert stream.drop("b") == [Cleared()]
    assert stream.drop("never") == []


def test_a_block_in_two_tiers_is_announced_for_each() -> None:
    stream = Consolidator()
    stream.feed("gpu", [Stored(digest(1))])
    assert stream.feed("host", [Stored(digest(1), tier=1)]) == [Stored(digest(1), tier=1)]
    assert stream.feed("gpu", [Removed(digest(1))]) == [Removed(digest(1))]
    assert stream.dump() == [Stored(digest(1), tier=1)]


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["store", "store", "remove", "clear", "drop"]), st.integers(0, 9)),
    max_size=60,
)


@given(STEPS)
def test_the_stream_is_the_union_of_its_publishers(steps: list[tuple[int, str, int]]) -> None:
    """Three engines with a tree each; the parent of block n is (n - 1) // 2."""
    stream, announced = Consolidator(), fold([])
    trees = [BlockTree() for _ in range(3)]
    each: list[Names] = [{}, {}, {}]
    for source, what, number in steps:
        tree = trees[source]
        out: list[KvEvent]
        if what == "drop":
            out = stream.drop(source)
            trees[source], each[source] = BlockTree(), {}
        else:
            if what == "store":
                above = tree.find((number - 1) // 2) if number else None
                if above is not None or not number:
                    tree.store(number, above, digest(number))
            elif what == "remove":
                tree.remove(number)
            else:
                tree.clear()
            events = tree.take_events()
            fold(events, each[source])
            out = stream.feed(source, events)
        fold(out, announced)
        assert set(announced) == set().union(*each)
        assert set(fold(stream.dump())) == set(announced)
