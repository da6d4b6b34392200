"""The block cache of simulated engines, step by step against plain lists."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.measure.simulation.cache import BlockCache
from tests.properties import examples

CAPACITY = 12


class CacheSteps(RuleBasedStateMachine):
    """Sequences take chains of keys, publish them and let go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(CAPACITY)
        self.taken: list[list[int]] = []
        self.held: set[int] = set()

    @rule(family=st.integers(0, 2), length=st.integers(1, 6))
    def take(self, family: int, length: int) -> None:
        keys = [family * 100 + n for n in range(length)]
        held, active = self.cache.match(keys)
        before = self.cache.active
        copies = self.cache.take(keys[:held], length - held)
        if copies is None:
            assert length - active > CAPACITY - before
            assert self.cache.active == before
            return
        self.taken.append(copies + self.cache.publish(keys[held:]))
        self.note()

    @rule(family=st.integers(0, 2), length=st.integers(1, 3))
    def compute_what_another_computes(self, family: int, length: int) -> None:
        if self.cache.take((), length) is not None:
            self.taken.append(self.cache.publish([family * 100 + n for n in range(length)]))
            self.note()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.taken:
            self.cache.release(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))), 0)

    def note(self) -> None:
        stored, removed = self.cache.drain()
        self.held = (self.held - set(removed)) | {key for keys, _ in stored for key in keys}

    @invariant()
    def events_tell_what_is_held(self) -> None:
        assert self.held == {key for family in range(3) for n in range(6) if (key := family * 100 + n) in self.cache}

    @invariant()
    def blocks_in_use_are_those_of_sequences(self) -> None:
        assert self.cache.active == len({copy for copies in self.taken for copy in copies})
        assert 0 <= self.cache.free <= CAPACITY - self.cache.active


TestCacheSteps = CacheSteps.TestCase
TestCacheSteps.settings = examples(60, stateful_step_count=30)


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = BlockCache(4)
    for keys in ([1, 2], [3, 4]):
        assert cache.take((), 2) == []
        cache.release(cache.publish(keys), 0)
    assert cache.take((), 1) == []
    assert [key in cache for key in (1, 2, 3, 4)] == [True, False, True, True]
