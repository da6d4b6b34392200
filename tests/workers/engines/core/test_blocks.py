import random

import pytest

from penstock.schemas.kv import Removed, Stored
from penstock.workers.engines.core.blocks import BlockManager
from tests.workers.engines.core.support import Mirror, check_pool


def names(text: str) -> list[bytes]:
    """Digests of a chain: each letter is a block, and the name covers all letters before it."""
    return [text[: end + 1].encode().rjust(16, b".") for end in range(len(text))]


def hold(manager: BlockManager, text: str) -> list[int]:
    """A table for a chain, as a scheduler makes and fills it."""
    digests = names(text)
    hits = manager.match(digests, len(digests))
    table = manager.take(hits, len(text) - len(hits))
    assert table is not None
    manager.name(table, digests, len(hits), len(text))
    return table


def test_a_released_chain_is_found_again_in_the_same_blocks() -> None:
    manager = BlockManager(4)
    table = hold(manager, "abc")
    manager.release(table)
    assert manager.match(names("abcd"), 4) == table
    assert manager.match(names("abcd"), 2) == table[:2]
    assert manager.match(names("xbc"), 3) == []


def test_names_stay_until_their_block_is_taken_and_leaves_go_first() -> None:
    manager = BlockManager(3)
    manager.release(hold(manager, "abc"))
    manager.take_events()
    assert (manager.used_blocks, manager.cached_blocks, manager.free_blocks) == (0, 3, 0)
    assert manager.take([], 2) is not None
    assert manager.take_events() == [Removed(names("abc")[2] + names("abc")[1])]
    assert len(manager.match(names("abc"), 3)) == 1


def test_a_hit_makes_a_chain_young_again() -> None:
    manager = BlockManager(4)
    manager.release(hold(manager, "ab"))
    manager.release(hold(manager, "xy"))
    manager.release(hold(manager, "ab"))
    assert manager.take([], 2)
    assert len(manager.match(names("ab"), 2)) == 2
    assert manager.match(names("xy"), 2) == []


def test_a_hit_needs_no_room_but_reviving_it_does() -> None:
    manager = BlockManager(3)
    manager.release(hold(manager, "ab"))
    hits = manager.match(names("ab"), 2)
    assert manager.take(hits, 2) is None
    assert manager.take(hits, 1) is not None
    assert manager.take(hits, 0) is not None
    assert manager.available == 0
    assert manager.take([], 1) is None


def test_consecutive_blocks_are_one_event_with_their_parent() -> None:
    manager = BlockManager(8)
    table = manager.take([], 5)
    assert table
    chain = names("abcde")
    assert manager.name(table, chain, 0, 2) == 2
    assert manager.name(table, chain, 2, 5) == 5
    assert manager.take_events() == [Stored(b"".join(chain[:2])), Stored(b"".join(chain[2:]), chain[1])]
    assert manager.take_events() == []


def test_a_name_that_leaves_and_comes_back_is_reported_in_that_order() -> None:
    manager = BlockManager(1)
    manager.release(hold(manager, "a"))
    manager.release(hold(manager, "b"))
    manager.release(hold(manager, "a"))
    a, b = names("a")[0], names("b")[0]
    assert manager.take_events() == [Stored(a), Removed(a), Stored(b), Removed(b), Stored(a)]


def test_the_first_copy_keeps_the_name_while_it_is_held() -> None:
    manager = BlockManager(8)
    first, second = manager.take([], 2), manager.take([], 3)
    assert first
    assert second
    chain = names("abc")
    manager.name(first, chain, 0, 2)
    manager.take_events()
    assert manager.name(second, chain, 0, 3) == 0
    assert manager.match(chain, 3) == first
    assert manager.take_events() == []
    # The second leaves before the first: what only it has can be found from now on.
    assert manager.name(second, chain, 0, 3, leaving=True) == 3
    manager.release(second)
    assert manager.match(chain, 3) == [*first, second[2]]
    assert manager.take_events() == [Stored(chain[2], chain[1])]
    check_pool(manager, [first])


def test_blocks_that_others_hold_get_no_name_behind_a_parent_that_they_do_not_hold() -> None:
    """Two answers share blocks that were handed off; a third sequence computed the first of them before."""
    manager = BlockManager(16)
    chain = names("abc")
    other, first = manager.take([], 1), manager.take([], 3)
    assert other is not None
    assert first is not None
    second = manager.share(first)
    assert manager.name(other, chain, 0, 1) == 1
    assert manager.name(first, chain, 0, 3, leaving=True) == 1
    manager.release(first)
    manager.release(other)
    check_pool(manager, [second])
    assert manager.name(second, chain, 0, 3, leaving=True) == 3
    manager.release(second)
    check_pool(manager, [])
    assert manager.match(chain, 3) == second


def test_a_held_copy_takes_the_name_over_from_an_idle_one_without_an_event() -> None:
    manager = BlockManager(8)
    first, second = manager.take([], 2), manager.take([], 3)
    assert first
    assert second
    chain = names("abc")
    manager.name(first, chain, 0, 2)
    manager.release(first)
    manager.take_events()
    assert manager.name(second, chain, 0, 3) == 3
    assert manager.match(chain, 3) == second
    assert manager.take_events() == [Stored(chain[2], chain[1])]
    check_pool(manager, [second])


def test_without_prefix_cache_released_blocks_are_just_free() -> None:
    manager = BlockManager(2, prefix_cache=False)
    table = manager.take([], 2)
    assert table
    manager.release(table)
    assert (manager.cached_blocks, manager.free_blocks) == (0, 2)
    assert manager.dump() == []


def test_without_kv_events_the_cache_works_and_reports_nothing() -> None:
    manager = BlockManager(2, kv_events=False)
    manager.release(hold(manager, "ab"))
    manager.release(hold(manager, "xy"))
    assert len(manager.match(names("xy"), 2)) == 2
    assert not manager.has_events
    assert manager.take_events() == []
    assert manager.dump() == [Stored(b"".join(names("xy")))]


def test_releasing_twice_is_noticed() -> None:
    manager = BlockManager(2)
    table = manager.take([], 1)
    assert table
    manager.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(table)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(0)


@pytest.mark.parametrize("seed", range(30))
def test_events_and_dump_mean_the_cache_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    manager, mirror = BlockManager(rng.randrange(4, 24)), Mirror()
    live: list[tuple[list[int], list[bytes], int]] = []  # table, digests, named
    for _ in range(300):
        if live and rng.random() < 0.45:
            table, digests, named = live.pop(rng.randrange(len(live)))
            manager.name(table, digests, named, rng.randint(named, len(table)), leaving=True)
            manager.release(table)
        elif live and rng.random() < 0.5:
            position = rng.randrange(len(live))
            table, digests, named = live[position]
            live[position] = table, digests, manager.name(table, digests, named, rng.randint(named, len(table)))
        else:
            digests = names("".join(rng.choice("ab") for _ in range(rng.randint(1, 6))))
            hits = manager.match(digests, rng.randint(0, len(digests)))
            taken = manager.take(hits, len(digests) - len(hits))
            if taken is not None:
                live.append((taken, digests, len(hits)))
        check_pool(manager, [table for table, _, _ in live])
        if rng.random() < 0.3:
            mirror.apply(manager.take_events())
            assert mirror.parents.keys() == manager.cache.keys()
            fresh = Mirror()
            fresh.apply(manager.dump())
            assert fresh.parents == mirror.parents
