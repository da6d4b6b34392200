"""Which revision of a model answers: one at a time, the same for everybody who sees the same registrations."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.fleet import Registration, WeightsState, WorkerState, reads, revisions


def worker(name: str, epoch: int, revision: str, *, role: str = "aggregated", **more: Any) -> Registration:
    return Registration(name, "m", role, "mock", epoch, 32, 9, 9, 9, revision=revision, **more)


WORKERS = st.lists(
    st.builds(
        worker,
        st.text("abcd", min_size=1, max_size=2),
        st.integers(1, 4),
        st.sampled_from(["one", "two", "three"]),
        role=st.sampled_from(["aggregated", "prefill", "decode", "encode"]),
        state=st.sampled_from(list(WorkerState)),
        tokenizer=st.sampled_from(["", "t", "u"]),
    ),
    max_size=6,
    unique_by=lambda made: made.worker,
)


@given(WORKERS, st.randoms(use_true_random=False))
def test_the_order_in_which_workers_become_known_does_not_matter(
    workers: list[Registration], rng: random.Random
) -> None:
    found = revisions(workers, "t")
    rng.shuffle(workers)
    assert revisions(workers, "t") == found
    assert (found.serving is None) == (not found.present)
    assert found.serving is None or found.serving in found.present


def test_the_revision_that_came_first_serves_until_its_last_worker_leaves() -> None:
    fleet = [worker("b", 1, "old"), worker("a", 2, "old"), worker("c", 3, "new"), worker("d", 4, "new")]
    for leaving in range(3):
        draining = [worker(w.worker, w.epoch, w.revision, state=WorkerState.draining) for w in fleet[:leaving]]
        assert revisions([*draining, *fleet[leaving:]], "").serving == ("old" if leaving < 2 else "new")


def test_the_latest_update_of_weights_serves_whoever_came_first() -> None:
    """A worker that has not followed it, as one of an older build, stands by."""
    updated = WeightsState(2, before="one")
    fleet = [
        worker("a", 1, "zero"),
        worker("b", 2, "one", weights=WeightsState(1)),
        worker("c", 3, "two", weights=updated),
        worker("d", 4, "two", weights=updated),
    ]
    assert revisions(fleet, "") == ("two", frozenset({"zero", "one", "two"}), {"one": "two"})
    assert revisions(fleet[:2], "").serving == "one"


def test_a_worker_of_another_tokenizer_or_that_only_encodes_decides_nothing() -> None:
    fleet = [
        worker("a", 1, "foreign", tokenizer="u"),
        worker("b", 2, "encoder", role="encode"),
        worker("c", 3, "own", tokenizer="t"),
    ]
    assert revisions(fleet, "t") == ("own", frozenset({"own"}), {})
    assert [reads(w, "t") for w in fleet] == [False, True, True]
    assert revisions(fleet, "").serving == "foreign"
