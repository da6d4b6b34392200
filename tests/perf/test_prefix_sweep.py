"""Traces of a sweep over the common share of prompts."""

import pytest

from tests.perf.comparison import PrefixSweep


def test_the_common_share_is_one_of_so_many_prefixes_and_the_rest_is_each_prompts_own() -> None:
    sweep = PrefixSweep((0.25, 0.75), requests=80, prompt_tokens=6400, prefixes=5, rate=10.0)
    for ratio, trace in sweep.traces().items():
        shared = round(100 * ratio)
        assert len({row.hash_ids[:shared] for row in trace.rows}) == 5
        own = [unit for row in trace.rows for unit in row.hash_ids[shared:]]
        assert len(own) == len(set(own))
        lengths = [row.input_length for row in trace.rows]
        assert sum(lengths) / 80 == pytest.approx(6400, rel=0.1)
        assert 4 < trace.rows[-1].timestamp / 1e3 < 16  # 80 arrivals at 10 a second
    assert sweep.traces() == sweep.traces()
