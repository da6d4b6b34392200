"""Recorded decisions with a change, without a broker."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.whatif.change import PlacementChange, Redecided, decide_again, ms_per_token, redecide, report
from penstock.router.placement.routing import Weights
from penstock.schemas.jobs import Candidate, Decision, DecisionInputs, Job
from tests.schemas.samples import REQUEST

BLOCK = 16

candidates = st.lists(
    st.builds(
        Candidate,
        worker=st.sampled_from([f"worker-{number}-0000000{number}" for number in range(8)]),
        overlap_blocks=st.integers(0, 20),
        prefill_tokens=st.integers(0, 5_000),
        active_blocks=st.integers(0, 500),
        running=st.integers(0, 40),
        slots=st.just(32),
        slowness=st.floats(0.5, 4.0),
        excluded=st.sampled_from(["", "", "", "full"]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.worker,
).filter(lambda found: not all(each.excluded for each in found))


def job(found: list[Candidate], at_ns: int = 1_000, tokens: int = 20 * BLOCK + 3) -> Job:
    """A job whose record this build would have written: it goes where the formula says."""
    request = msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(REQUEST, prompt=bytes(4 * tokens), n=1)))
    open_ones = [each for each in found if not each.excluded]
    first = Decision("kv", open_ones[0].worker, "r", at_ns, tuple(found), prompt_blocks=20)
    made = Job(request, 1, first, inputs=DecisionInputs(seed=7, block_size=BLOCK))
    again = decide_again(made)
    assert again is not None
    return msgspec.structs.replace(made, decision=msgspec.structs.replace(first, chosen=again.chosen[0]))


@given(candidates)
def test_nothing_moves_without_a_change(found: list[Candidate]) -> None:
    made = redecide(job(found), PlacementChange(), 0)
    assert made is not None
    assert made.reproduced
    assert made.then == made.recorded


@given(
    candidates,
    st.builds(Weights, overlap=st.floats(0, 2), prefill=st.floats(0, 2)),
    st.sampled_from(["kv", "round_robin", "random", "least_loaded"]),
    st.sets(st.sampled_from([f"worker-{number}" for number in range(8)])),
    st.integers(0, 10),
)
def test_a_request_goes_to_a_candidate_that_is_left_or_waits(
    found: list[Candidate], weights: Weights, mode: str, without: set[str], number: int
) -> None:
    change = PlacementChange(weights, mode, frozenset(without))  # type: ignore[arg-type]
    made = redecide(job(found), change, number)
    assert made is not None
    left = {each.worker for each in found if not each.excluded and each.worker[:8] not in without}
    assert (made.then is None) == (not left)
    if made.then is not None:
        assert made.then.worker in left
        assert 0 <= made.then.cached <= made.prompt_tokens
        assert made.then.ahead > 0


def test_a_killed_worker_is_there_before_its_end() -> None:
    found = [Candidate("a-00000000", overlap_blocks=20), Candidate("b-00000000")]
    change = PlacementChange(killed=frozenset({"a"}), at_ns=500)
    before, after = (redecide(job(found, at_ns=at_ns), change, 0) for at_ns in (499, 500))
    assert before is not None
    assert before.then is not None
    assert after is not None
    assert after.then is not None
    assert (before.then.worker, after.then.worker) == ("a-00000000", "b-00000000")


def test_a_missing_worker_is_known_by_its_id_or_name() -> None:
    workers = ["worker-0-00000000", "worker-1-00000001"]
    change = PlacementChange(
        without=frozenset({"worker-0", "worker-1-00000001", "worker-2"}), killed=frozenset({"worker"})
    )
    assert change.unknown(workers) == ["worker", "worker-2"]


def test_a_record_that_does_not_suffice_is_none() -> None:
    made = job([Candidate("a-00000000")])
    assert redecide(msgspec.structs.replace(made, inputs=None), PlacementChange(), 0) is None


def test_figures_compare_what_was_with_what_would_have_been() -> None:
    found = [Candidate("a-00000000", overlap_blocks=20), Candidate("b-00000000")]
    made = [redecide(job(found), PlacementChange(without=frozenset({"a"})), 0) for _ in range(4)]
    seen = report(5, [each for each in made if isinstance(each, Redecided)], 2.0)
    assert (seen.decisions, seen.usable, seen.reproduced, seen.moved, seen.waiting) == (5, 4, 4, 4, 0)
    assert seen.recorded.cached_share == pytest.approx(320 / 323)
    assert (seen.then.cached_share, seen.then.by_worker) == (0.0, {"b-00000000": 4})
    assert (seen.recorded.ahead_p50, seen.then.ahead_p50) == (3.0, 323.0)


def test_time_per_token_is_the_median_of_what_was_measured() -> None:
    assert ms_per_token([(10, 10), (40, 20), (900, 300)]) == 2.0
    assert ms_per_token([(5, 0)]) is None
