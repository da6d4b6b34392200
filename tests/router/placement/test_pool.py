"""What is known of targets, written into arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.placement.arrays import Pools, lowest_of
from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.holders import Depths, TargetBits
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration
from tests.properties import examples


@examples(100)
@given(
    depths=st.dictionaries(st.integers(0, 40), st.integers(1, 9), max_size=30),
    bits=st.permutations(range(70)),
    spread=st.sampled_from([1, 29]),
    workers=st.integers(1, 30),
)
def test_masks_and_dicts_of_depths_make_the_same_column(
    depths: dict[int, int], bits: list[int], spread: int, workers: int
) -> None:
    """Also with targets of other pools, among thousands, and where a bit is another target's later."""
    bits = [bit * spread for bit in bits]
    tracker, known = LoadTracker(), TargetBits()
    for number in range(workers):
        tracker.put_worker(Registration(f"w{number:02}", "m", "aggregated", "mock", 1, 16, 100, 4, 1000))
    pool = Pools(tracker).pool(RoutingRequest("m", 100, 10))
    assert pool is not None
    for _ in range(2):
        for number in range(41):
            known.put(1 << bits[number], (f"w{number:02}", 0))
        numbers = [*set(depths.values())]
        masks = [sum(1 << bits[number] for number in depths if depths[number] == each) for each in numbers]
        by_name = pool.column({(f"w{number:02}", 0): depth for number, depth in depths.items()})
        assert by_name.tolist() == [depths.get(number, 0) for number in range(workers)]
        assert pool.column(Depths((masks, numbers), known)).tolist() == by_name.tolist()
        for number in range(41):
            known.remove(1 << bits[number])
        bits = bits[::-1]


@examples(100)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(1, 17))
def test_the_lowest_scores_come_in_order_the_first_of_equal_ones_first(scores: list[int], count: int) -> None:
    found = lowest_of(np.array(scores, np.float64), count)
    assert found.tolist() == sorted(range(len(scores)), key=scores.__getitem__)[:count]
