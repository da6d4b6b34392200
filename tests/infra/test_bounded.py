"""A cache and a queue that are bounded by entries and bytes."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.bounded import ENTRY_BYTES, ByteCache, FairQueue, QueueLimits

cache_steps = st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 5), st.integers(0, 2_000)))


@given(steps=cache_steps)
def test_the_entries_used_last_are_kept_as_many_as_fit(steps: list[tuple[str, int, int]]) -> None:
    cache: ByteCache[int, int] = ByteCache(3_000, lambda key, value: value)
    plain: OrderedDict[int, int] = OrderedDict()
    for step, key, value in steps:
        if step == "get":
            assert cache.get(key) == plain.get(key)
            if key in plain:
                plain.move_to_end(key)
        elif step == "pop":
            cache.pop(key)
            plain.pop(key, None)
        else:
            cache.put(key, value)
            plain.pop(key, None)
            plain[key] = value
            while sum(plain.values()) + ENTRY_BYTES * len(plain) > 3_000:
                plain.popitem(last=False)
        assert cache.size_bytes == sum(plain.values()) + ENTRY_BYTES * len(plain) <= 3_000
        assert all(each in cache for each in plain)
        assert len(cache) == len(plain)


def test_an_entry_that_can_never_fit_leaves_the_others_alone() -> None:
    cache: ByteCache[str, bytes] = ByteCache(1_000, lambda key, value: len(value))
    cache.put("small", b"x")
    cache.put("large", bytes(1_000))
    assert cache.get("small") == b"x"
    assert cache.get("large") is None


LIMITS = QueueLimits(entries=12, size_bytes=1_000, tenant_entries=6, tenant_bytes=500)
queue_steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "take", "drop"]), st.sampled_from("abc"), st.integers(0, 200)), max_size=60
)


@given(steps=queue_steps)
def test_each_tenants_smallest_entry_is_next_and_its_limits_are_kept(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue(LIMITS)
    waiting: list[tuple[str, int, int]] = []  # tenant, number, bytes
    for number, (step, tenant, size) in enumerate(steps):
        own = [each for each in waiting if each[0] == tenant]
        if step == "add":
            fits = len(waiting) < 12 and len(own) < 6
            fits = fits and sum(each[2] for each in waiting) + size <= 1_000 and sum(e[2] for e in own) + size <= 500
            assert queue.add(tenant, number, (tenant, number, size), size) is fits
            if fits:
                waiting.append((tenant, number, size))
        elif step == "drop" and own:
            queue.drop(tenant, own[-1][1])
            waiting.remove(own[-1])
        elif step == "take":
            taken = queue.take()
            assert (taken is None) == (not waiting)
            if taken is not None:
                assert taken == min((each for each in waiting if each[0] == taken[0]), key=lambda each: each[2])
                waiting.remove(taken)
        assert len(queue) == len(waiting)


def test_a_tenant_with_many_entries_has_every_second_turn() -> None:
    queue: FairQueue[str] = FairQueue(QueueLimits())
    for number in range(8):
        queue.add("many", number, "many", 1)
    for number in range(3):
        queue.add("few", number, "few", 1)
    assert [queue.take() for _ in range(6)] == ["many", "few"] * 3


def test_who_is_held_misses_the_turn_and_no_more() -> None:
    queue: FairQueue[str] = FairQueue(QueueLimits())
    for number, tenant in enumerate("aabb"):
        queue.add(tenant, number, tenant, 1)
    assert queue.take(lambda tenant: tenant == "a") == "b"
    assert queue.take(lambda tenant: True) is None
    assert [queue.take() for _ in range(4)] == ["a", "b", "a", None]
