"""A cache that is bounded by the bytes of its entries."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.byte_cache import ENTRY_BYTES, ByteCache

steps = st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 5), st.integers(0, 2_000)))


@given(steps=steps)
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
