"""What targets are predicted to cache when they publish no KV events."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state.holders import TargetId
from penstock.router.state.prefix_index import ApproximateIndex

CAPACITY, TTL_S = 12, 10
PROMPTS = [[family * 100 + at for at in range(length)] for family in range(4) for length in (1, 3, 7, 11)]
TARGETS: list[TargetId] = [("a", 0), ("a", 1), ("b", 0)]
SENT = st.tuples(st.sampled_from(TARGETS), st.sampled_from(PROMPTS), st.integers(0, 4))


class Predicted:
    """The same as a plain list: the youngest records whose distinct blocks fit, none older than its time."""

    def __init__(self) -> None:
        self.records: list[tuple[float, TargetId, Sequence[int]]] = []

    def held(self, target: TargetId, now: float) -> set[int]:
        held: set[int] = set()
        for at, to, keys in reversed(self.records):
            if to == target:
                if at + TTL_S <= now or len(held | set(keys)) > CAPACITY:
                    break
                held |= set(keys)
        return held


@given(st.lists(SENT, max_size=30))
def test_a_target_keeps_the_prompts_it_was_sent_last_that_fit_its_cache(
    sent: list[tuple[TargetId, list[int], int]],
) -> None:
    index, plain, now = ApproximateIndex(10_000, ttl_s=TTL_S), Predicted(), 0
    for target, keys, step in sent:
        now += step
        index.record(target, keys, now, CAPACITY)
        plain.records.append((now, target, keys))
        for probe in PROMPTS:
            wanted = {}
            for each in TARGETS:
                held = plain.held(each, now)
                if depth := next((at for at, key in enumerate(probe) if key not in held), len(probe)):
                    wanted[each] = depth
            assert index.match(probe) == wanted


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    index = ApproximateIndex(1000)
    index.record(("a", 0), list(range(50)), 0, CAPACITY)
    assert index.match(list(range(60))) == {("a", 0): CAPACITY}


def test_a_forgotten_worker_holds_nothing_when_it_comes_back() -> None:
    index = ApproximateIndex(1000)
    index.record(("a", 0), [1, 2, 3], 0, CAPACITY)
    index.forget("a")
    index.record(("a", 0), [7], 1, CAPACITY)
    assert index.match([1, 2, 3]) == {}
    assert index.match([7, 8]) == {("a", 0): 1}
    index.expire(1e9)
    assert index.match([7, 8]) == {}
