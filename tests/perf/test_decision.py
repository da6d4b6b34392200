"""The decisions that are measured are decisions."""

import msgspec
import pytest

from penstock.schemas.jobs import Job, with_candidates
from tests.perf import index


@pytest.mark.parametrize("what", index.HELD)
def test_what_is_measured_is_a_job_with_its_score_table(what: str) -> None:
    fleet = index.Fleet(20, index.HELD[what])
    job = with_candidates(msgspec.msgpack.decode(fleet.place(), type=Job))
    assert job.decision is not None
    chosen = job.decision.candidates[0]
    assert chosen.worker == job.decision.chosen
    assert len(job.decision.candidates) == 16
    assert chosen.overlap_blocks == index.HELD[what](int(chosen.worker.split("-")[1]), 20)
