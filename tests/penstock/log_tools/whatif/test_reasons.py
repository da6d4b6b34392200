"""Why requests went where they did: terms that add up, and sums of them that are known."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.whatif import reasons as chapter
from penstock.log_tools.whatif.change import recorded_cost
from penstock.log_tools.whatif.reasons import ALONE, EQUAL, UNLISTED, Part, Sample, reasons, terms
from penstock.router.placement.cost import RequestSize
from penstock.router.placement.routing import Weights
from penstock.schemas.jobs import Candidate, DecisionInputs, LowerTiers
from tests.penstock.log_tools.whatif.test_change import BLOCK, job

STAGES: tuple[Part, ...] = ("whole", "prefill", "decode")
COUNTS = st.integers(0, 5_000)


@given(
    st.builds(
        Candidate,
        st.just("w"),
        overlap_blocks=st.integers(0, 60),
        prefill_tokens=COUNTS,
        running=st.integers(0, 20),
        slots=st.integers(1, 8),
        context_blocks=COUNTS,
        computing=st.integers(0, 5),
        slowness=st.sampled_from([0.5, 1.0, 3.0]),
        decode_slowness=st.sampled_from([1.0, 2.0]),
        served_tokens=COUNTS,
    ),
    st.builds(RequestSize, st.integers(1, 4_000), st.integers(0, 60), st.integers(1, 3), st.integers(0, 10)),
    st.sampled_from([(), (("w", 0),)]),
    st.sampled_from(STAGES),
    st.builds(Weights, st.sampled_from([0.5, 1.0]), st.sampled_from([1.0, 2.0])),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_the_terms_of_a_cost_add_up(
    at: Candidate,
    size: RequestSize,
    session: tuple[tuple[str, int], ...],
    stage: Part,
    weights: Weights,
    lower: tuple[int, int],
) -> None:
    at = msgspec.structs.replace(at, overlap_blocks=at.overlap_blocks + sum(lower))
    inputs = DecisionInputs(block_size=BLOCK, session=session, lower_tiers=(LowerTiers("w", 0, *lower, 0.2, 0.6),))
    found = terms(size, at, inputs, weights, stage=stage)
    assert sum(found.values()) == pytest.approx(getattr(recorded_cost(size, at, inputs, weights), stage), rel=1e-6)
    signed = {chapter.SESSION, chapter.SLOWER}
    if weights.overlap < 1 and size.shared:  # then less of a shared prefix may count for more
        signed.add(chapter.BROUGHT)
    assert all(cost > -1e-6 for term, cost in found.items() if term not in signed)


def test_a_worker_that_gets_nothing_has_its_reasons() -> None:
    first = Candidate("w-1", slots=8)
    table = [
        [first, Candidate("w-2", prefill_tokens=9_000, slots=8), Candidate("w-3", excluded="full", slots=8)],
        [first, Candidate("w-2", served_tokens=90_000, slots=8), Candidate("w-3", slowness=3.0, slots=8)],
        [first, Candidate("w-2", slots=8)],
        [first, Candidate("w-3", excluded="draining", slots=8)],
    ]
    found = reasons([job(candidates) for candidates in table], 4)
    assert found.decisions == 4
    assert found.decided_by == {"prompts ahead": 1, "served lately": 1, EQUAL: 1, ALONE: 1}
    by_name = {each.worker: each for each in found.workers}
    assert [by_name[name].chosen for name in ("w-1", "w-2", "w-3")] == [4, 0, 0]
    assert by_name["w-2"].behind == {"prompts ahead": 1, "served lately": 1, EQUAL: 1}
    assert by_name["w-3"].behind == {"slower": 1}
    assert by_name["w-3"].excluded == {"full": 1, "draining": 1}
    assert [by_name[name].unlisted for name in ("w-1", "w-2", "w-3")] == [0, 1, 1]
    assert UNLISTED


def test_another_weight_sends_requests_elsewhere() -> None:
    cached = Candidate("w-1", overlap_blocks=20, prefill_tokens=500, slots=8)
    found = reasons([job([cached, Candidate("w-2", slots=8)])] * 3, 3)
    by_name = {each.worker: each for each in found.workers}
    chosen = "w-1" if by_name["w-1"].chosen else "w-2"
    assert by_name[chosen].chosen == 3
    for change, moved in found.moved.items():
        assert sum(each.then[change] for each in found.workers) == 3
        assert by_name[chosen].then[change] == 3 - moved
    assert any(found.moved.values()), "no weight matters"


def test_a_sample_is_even_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapter, "MOST", 10)
    sample = Sample()
    for number in range(100):
        sample.add(job([Candidate("w-1", slots=8)], at_ns=number))
        assert min(number + 1, 5) <= len(sample.jobs) <= 10
    times = [each.decision.at_ns for each in sample.jobs]
    assert {later - earlier for earlier, later in pairwise(times)} == {16}
