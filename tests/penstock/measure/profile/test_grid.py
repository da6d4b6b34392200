"""Points of a profile, and the figures of each from records of requests whose engine is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.profile.data import concurrencies, kv_tokens, prefill_throughput, spaced, steady_itl
from penstock.measure.sweep.figures import RequestRecord

counts = st.integers(2, 64)


@given(st.integers(0, 10**6), st.integers(0, 10**6), counts)
def test_spaced_numbers_rise_and_have_both_ends(low: int, high: int, count: int) -> None:
    found = spaced(low, high, count)
    if high < low:
        assert found == []
        return
    assert (found[0], found[-1]) == (low, high)
    assert found == sorted(set(found))
    assert len(found) == min(count, high - low + 1)


@given(st.integers(1, 20_000), st.integers(0, 10**6), st.integers(1, 512), counts, st.integers(1, 16))
def test_every_concurrency_fits_and_is_the_same_on_each_rank(
    length: int, pool: int, most: int, granularity: int, dp: int
) -> None:
    found = concurrencies(length, pool, most, granularity, dp)
    assert all(0 < each <= most and each * length <= pool and each % dp == 0 for each in found)
    if pool >= length * dp and most >= dp:
        assert found[0] == dp
        assert found[-1] == min(most, pool // length) // dp * dp


def answers(
    starts: list[float], step_ms: float, tokens: int, *, per_read: int = 1, slow_until: float = 0.0
) -> list[RequestRecord]:
    """Requests sent at 0 whose first text comes at ``starts``; until ``slow_until``, steps take twice as long."""
    records = []
    for number, start in enumerate(starts):
        now, gaps = start, []
        for _ in range((tokens - 1) // per_read):
            gap = step_ms * per_read * (2 if now < slow_until else 1)
            gaps.append(gap)
            now += gap
        records.append(RequestRecord(number, 0.0, now, ttft_ms=start, gaps_ms=tuple(gaps), isl=100, osl=tokens))
    return records


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50), st.sampled_from((1, 2, 5)))
def test_the_steps_of_an_engine_are_found_whenever_its_answers_begin(
    starts: list[int], step_ms: int, per_read: int
) -> None:
    records = answers([float(step_ms * each) for each in starts], step_ms, 101, per_read=per_read)
    assert steady_itl(records) == pytest.approx(step_ms)


def test_steps_beside_prefills_do_not_count() -> None:
    records = answers([100.0, 400.0, 900.0], 5.0, 401, slow_until=900.0)
    assert steady_itl(records) == pytest.approx(5.0)
    assert sum(records[0].gaps_ms) / 400 > 5.5  # the mean of the whole answer is another one


def test_requests_that_wait_for_others_have_no_common_step() -> None:
    assert steady_itl(answers([10.0, 10.0, 5000.0], 5.0, 101)) is None
    assert steady_itl([]) is None
    assert steady_itl([RequestRecord(0, 0.0, error="HTTP 500")]) is None


def test_throughput_per_gpu_counts_every_rank() -> None:
    assert prefill_throughput(4000, 500.0, 8) == 1000
    assert prefill_throughput(4000, 500.0, 8, attention_dp=4) == 4000
    assert kv_tokens(32, 4000, 500) == 144_000
