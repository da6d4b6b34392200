"""The radix tree of holdings against a dict of sets, its order of eviction, and depths read as a mapping."""

import gc
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state import radix_tree
from penstock.router.state.holders import Depths, Holders, TargetBits, TargetId, bits_of
from penstock.router.state.radix_tree import NODE_BLOCKS, NOTHING, RadixTree
from penstock.schemas.block_hashes import chain, keys_of, root
from tests.properties import examples

TARGETS: tuple[TargetId, ...] = (("a", 0), ("b", 0), ("b", 1), ("c", 0))


def keys(*tokens: int) -> tuple[int, ...]:
    """Keys of a prompt of one-token blocks."""
    return keys_of(chain(b"".join(t.to_bytes(4, "little") for t in tokens), 1, root("m")))


def check(holders: Holders) -> None:
    """Everything that the tree stores twice agrees, and it stores nothing for nothing."""
    tree = holders.tree
    nodes = [node for node, chunk in enumerate(tree.chunks) if chunk]
    assert sum(len(tree.chunks[node]) for node in nodes) == tree.blocks
    assert len(nodes) == len(tree)
    children = dict.fromkeys(nodes, 0)
    for node in nodes:
        assert all(tree.find(key) == node for key in tree.chunks[node])
        if tree.parents[node] != NOTHING:
            children[tree.parents[node]] += 1
    assert children == {node: tree.children[node] for node in nodes}
    leaves = {node for node, count in children.items() if not count}
    assert {node for group in tree._leaves.by_age.values() for node in group} == leaves
    assert all(tree.masks[node] or node in tree._unsettled for node in leaves), "nobody holds its last block"
    assert all(tree.ages[node] == age for age, group in tree._leaves.by_age.items() for node in group)
    for node, partial in tree.partial.items():
        assert partial
        assert all(0 < count < len(tree.chunks[node]) for count in partial)
        masks = [tree.masks[node], *partial.values()]
        assert all(partial.values())
        assert sum(mask.bit_count() for mask in masks) == sum(masks).bit_count(), "no holder is in two"
    for holding in holders._by_target.values():
        mine = [(tree.chunks[node][: tree.held(node, holding.bit)]) for node in nodes]
        assert holding.blocks == sum(map(len, mine))
        assert holding.key_sum == sum(map(sum, mine))


class Model(NamedTuple):
    """The same, naively."""

    held: dict[TargetId, set[int]]

    def match(self, probe: tuple[int, ...]) -> dict[TargetId, int]:
        depths = {}
        for target, known in self.held.items():
            depth = next((at for at, key in enumerate(probe) if key not in known), len(probe))
            if depth:
                depths[target] = depth
        return depths


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
STEP = st.tuples(
    st.sampled_from(["store", "store", "store", "part", "remove", "tail", "retire", "sweep"]),
    st.sampled_from(TARGETS),
    TOKENS,
    st.integers(0, 13),
    st.randoms(use_true_random=False),
)


@pytest.mark.parametrize("node_blocks", [1, 3, 1024])
@examples(120)
@given(steps=st.lists(STEP, max_size=50))
def test_matches_equal_those_of_a_set_per_target_whatever_is_stored_and_removed(
    node_blocks: int, steps: list[tuple[str, TargetId, list[int], int, random.Random]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radix_tree, "NODE_BLOCKS", node_blocks)
        holders, model, holdings = Holders(10_000), Model({}), {}
        for kind, target, tokens, at, rng in steps:
            if target not in holdings:
                holdings[target], model.held[target] = holders.open(target), set()
            holding, known, names = holdings[target], model.held[target], keys(*tokens)
            if kind == "store":
                holders.store(holding, names, None)
                known.update(names)
            elif kind == "part":  # with a gap before it, perhaps
                at %= len(names)
                holders.store(holding, names[at:], names[at - 1] if at else None)
                known.update(names[at:])
            elif kind == "remove":
                gone = rng.sample(names, rng.randint(0, len(names)))
                holders.remove(holding, gone)
                known.difference_update(gone)
            elif kind == "tail":
                holders.remove(holding, names[: at % len(names) : -1])
                known.difference_update(names[at % len(names) + 1 :])
            elif kind == "retire":
                holders.retire(target)
                del holdings[target], model.held[target]
            else:
                holders.sweep(at)
            check(holders)
            assert holders.match(names) == model.match(names)
            probe = keys(*(rng.randrange(3) for _ in range(14)))
            assert holders.match(probe) == model.match(probe)
        while not holders.sweep(3):
            pass
        check(holders)
        held = {key & radix_tree.KEY_MASK for known in model.held.values() for key in known}
        assert held <= {key for chunk in holders.tree.chunks for key in chunk}


@given(
    st.lists(st.tuples(st.sampled_from(TARGETS), TOKENS, st.integers(0, 13)), max_size=60),
    st.integers(1, 25),
    st.randoms(use_true_random=False),
)
def test_eviction_depends_on_what_was_stored_and_not_on_what_was_looked_up(
    steps: list[tuple[TargetId, list[int], int]], cap: int, rng: random.Random
) -> None:
    quiet, asked = Holders(cap), Holders(cap)
    opened = {each: {target: each.open(target) for target in TARGETS} for each in (quiet, asked)}
    for target, tokens, cut in steps:
        names = keys(*tokens)
        for holders, holdings in opened.items():
            holders.store(holdings[target], names, None)
            holders.remove(holdings[target], names[len(names) - cut % 3 :])
            check(holders)
            assert len(holders) <= cap
        for _ in range(rng.randrange(4)):
            asked.match(keys(*(rng.randrange(3) for _ in range(9))))
        assert quiet.match(names) == asked.match(names)
        assert quiet.checksum() == asked.checksum()


def test_at_the_cap_what_was_stored_or_continued_longest_ago_goes_from_its_end() -> None:
    holders = Holders(30)
    one, two = holders.open(("a", 0)), holders.open(("b", 0))
    hot, old = keys(*range(10)), keys(*range(50, 60))
    holders.store(one, hot, None)
    holders.store(one, old, None)
    for number in range(100, 140):
        holders.store(two, keys(*range(10), number), None)
        assert len(holders) <= 30
        assert holders.match(hot) == {("a", 0): 10, ("b", 0): 10}, "it is continued all the time"
    assert holders.match(old) == {}
    assert holders.match(keys(*range(10), 139)) == {("a", 0): 10, ("b", 0): 11}
    long = keys(*range(200, 225))
    holders.store(one, long, None)
    assert holders.match(long) == {("a", 0): 25}
    longer = keys(*range(300, 340))
    holders.store(two, longer, None)
    assert holders.match(longer) == {("b", 0): 30}, "the cap is less than one prompt"
    following = keys(*range(300, 350))[40:]
    holders.store(two, following, longer[-1])
    assert not any(holders.holds(two, key) for key in following), "what follows evicted blocks would never be found"
    check(holders)


def test_replicas_that_lost_a_worker_at_different_times_agree_again_once_its_room_is_used() -> None:
    one, two, rng = Holders(200), Holders(200), random.Random(4)
    holdings = [{t: each.open(t) for t in TARGETS} for each in (one, two)]

    def store(number: int, targets: tuple[TargetId, ...]) -> None:
        target, names = rng.choice(targets), keys(number % 7, *range(number, number + rng.randrange(20)))
        for each, held in zip((one, two), holdings, strict=True):
            if target in held:
                each.store(held[target], names, None)

    for number in range(60):
        store(number, TARGETS)
    one.retire(TARGETS[0])
    del holdings[0][TARGETS[0]]
    for number in range(60, 70):
        store(number, TARGETS)
    two.retire(TARGETS[0])
    del holdings[1][TARGETS[0]]
    for number in range(70, 200):
        store(number, TARGETS[1:])
        one.sweep(1000)
        two.sweep(7)
    assert any(holding.cut for holding in holdings[0].values())
    assert one.checksum() == two.checksum()


def test_a_parent_that_is_not_one_does_no_harm() -> None:
    holders = Holders(1000)
    one, two = holders.open(("a", 0)), holders.open(("b", 0))
    first, second, third = keys(1, 2, 3), keys(4, 5, 6), keys(4, 5, 7)
    holders.store(one, first, None)
    holders.store(one, second, first[-1])
    assert holders.match(first) == {("a", 0): 3}
    assert holders.match(second) == {("a", 0): 3}
    assert holders.match(third) == {("a", 0): 2}
    holders.store(two, third, None)
    assert holders.match(third) == {("a", 0): 2, ("b", 0): 3}
    holders.remove(one, second)
    assert holders.match(second) == {("b", 0): 2}
    holders.remove(one, first)
    check(holders)
    assert one.blocks == 0


@pytest.mark.parametrize("depths", [range(1, 41), range(40, 0, -1)])
def test_a_run_that_targets_hold_to_different_depths_is_one_node_until_it_branches(depths: range) -> None:
    holders = Holders(1000)
    for depth in depths:
        holders.store(holders.open((f"w{depth}", 0)), keys(*range(depth)), None)
    assert len(holders.tree) == 1
    assert holders.match(keys(*range(40))) == {(f"w{depth}", 0): depth for depth in depths}
    holders.store(holders.open(("other", 0)), keys(*range(7), 99), None)
    check(holders)
    assert len(holders.tree) == 3
    assert holders.match(keys(*range(40))) == {(f"w{depth}", 0): depth for depth in depths} | {("other", 0): 7}


def test_a_long_prompt_that_loses_its_last_holder_is_removed_in_short_steps() -> None:
    holders = Holders(1_000_000)
    holding = holders.open(("a", 0))
    holders.store(holding, range(400_000), None)
    holders.retire(("a", 0))
    done, most = False, 0
    while not done:
        before = len(holders)
        done = holders.sweep(1000)
        most = max(most, before - len(holders))
    assert len(holders) == 0
    assert most <= 4 * radix_tree.NODE_BLOCKS


def test_blocks_of_several_nodes_that_are_lost_in_any_order_split_each_once_for_each_gap() -> None:
    holders = Holders(10_000)
    one, other = holders.open(("a", 0)), holders.open(("b", 0))
    run = keys(*range(2 * NODE_BLOCKS))
    holders.store(one, run, None)
    holders.store(other, run, None)
    assert len(holders.tree) == 2
    gone = [*run[100:200], *run[NODE_BLOCKS + 100 : NODE_BLOCKS + 200]]
    random.Random(1).shuffle(gone)
    holders.remove(one, gone)
    assert len(holders.tree) == 4
    assert holders.match(run) == {("a", 0): 100, ("b", 0): 2 * NODE_BLOCKS}
    check(holders)


def test_what_a_split_moves_is_not_moved_again_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    holders, moved = Holders(10_000), []
    one, other = holders.open(("a", 0)), holders.open(("b", 0))
    run = keys(*range(1000))
    holders.store(one, run, None)
    holders.store(other, run, None)
    split = RadixTree.split

    def counted(tree: RadixTree, node: int, at: int) -> int:
        moved.append(at)
        return split(tree, node, at)

    monkeypatch.setattr(RadixTree, "split", counted)
    holders.remove(one, run[1::2])
    assert len(moved) == 499
    assert sum(moved) < len(run)
    assert holders.match(run) == {("a", 0): 1, ("b", 0): 1000}
    check(holders)


def test_blocks_cost_the_garbage_collector_nothing() -> None:
    """A full collection that visits every block of an index stops its router for a second."""
    holders = Holders(1_000_000)
    holding = holders.open(("a", 0))
    gc.collect()
    before = len(gc.get_objects())
    for start in range(0, 200_000, 100):
        holders.store(holding, range(start, start + 100), None)
    gc.collect()
    assert len(gc.get_objects()) - before < 1_000  # from Python 3.14 on, a dict for each age of leaves: 820


DEPTHS = st.dictionaries(st.integers(0, 90), st.integers(1, 50), max_size=12)


@given(DEPTHS)
def test_depths_are_a_mapping_of_the_targets_of_their_masks(depths: dict[int, int]) -> None:
    bits = TargetBits()
    for number in depths:
        bits.put(1 << number, (f"w{number}", 0))
    numbers = [*set(depths.values())]
    masks = [sum(1 << number for number in depths if depths[number] == each) for each in numbers]
    found = Depths((masks, numbers), bits)
    assert bool(found) == bool(depths)
    assert found == {(f"w{number}", 0): depth for number, depth in depths.items()}
    assert found.get(("nobody", 0), 7) == 7


@given(st.integers(0, 1 << 80))
def test_the_bits_of_a_mask_are_all_of_it_lowest_first(mask: int) -> None:
    bits = bits_of(mask)
    assert sum(bits) == mask
    assert bits == sorted(bits)
    assert all(bit.bit_count() == 1 for bit in bits)


def test_a_change_of_targets_changes_the_version() -> None:
    bits = TargetBits()
    bits.put(1, ("w", 0))
    before = bits.version
    bits.remove(1)
    assert bits.version != before
    assert bits.targets == {}
