"""A bounded queue whose tenants take turns."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.fair_queue import FairQueue, QueueLimits

LIMITS = QueueLimits(entries=12, size_bytes=1_000, tenant_entries=6, tenant_bytes=500)
steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "take", "drop"]), st.sampled_from("abc"), st.integers(0, 200)), max_size=60
)


@given(steps=steps)
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
