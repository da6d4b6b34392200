"""Times at and beyond the points of a profile, against the engine's own formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.profile.data import BadProfile, Prefill
from penstock.planner.capacity import EngineTiming
from tests.penstock.planner.engines import engine

TIMING = engine()


@given(st.floats(200, 20_000), st.floats(1, 120))
def test_slopes_continue_beyond_what_was_measured(context: float, concurrency: float) -> None:
    assert TIMING.itl_ms(context, concurrency) == pytest.approx(10 + 0.1 * context * concurrency / 1e3, rel=1e-6)
    assert TIMING.prefill_ms(context) == pytest.approx(100 * context / 1e3)


def test_the_kv_cache_and_the_batch_bound_what_decodes_at_once() -> None:
    assert (TIMING.most(4000), engine(max_batch=20).most(4000), TIMING.most(10**9)) == (100, 20, 1)


def test_a_profile_of_prefill_alone_is_refused() -> None:
    profile = TIMING.profile
    with pytest.raises(BadProfile, match="prefill and of decode"):
        EngineTiming(type(profile)(setup=profile.setup, url="", prefill=Prefill(), decode=profile.decode))
