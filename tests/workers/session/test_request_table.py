"""Which deliveries of a job are run, acknowledged or kept, by what is known of the request."""

from typing import Any

import pytest

from penstock.workers.session.requests import REMEMBERED, Admission, RequestTable, RunningRequest
from tests.workers.support import request


class Table:
    def __init__(self) -> None:
        self.removed: list[tuple[RunningRequest, bool]] = []
        self.table = RequestTable(lambda running, cancel: self.removed.append((running, cancel)))

    def running(self, attempt: int = 2, delivery: Any = "first") -> RunningRequest:
        running = RunningRequest(request(id="r"), attempt, delivery, [], [], 0)
        self.table.running["r"] = running
        return running


@pytest.mark.parametrize(("attempt", "admission"), [(1, Admission.OVER), (2, Admission.PENDING), (3, Admission.RUN)])
@pytest.mark.parametrize("ending", [False, True])
def test_an_attempt_is_compared_with_the_one_that_runs_or_ends(
    attempt: int, admission: Admission, ending: bool
) -> None:
    t = Table()
    running = t.running()
    if ending:
        t.table.remove(running, cancel=False)
        t.table.begin_ending(running)
    assert t.table.admission("r", attempt, "again") is admission
    assert running.delivery == ("again" if admission is Admission.PENDING else "first")


@pytest.mark.parametrize(("attempt", "admission"), [(1, Admission.OVER), (2, Admission.OVER), (3, Admission.RUN)])
def test_an_attempt_that_ended_is_over_with_all_before_it(attempt: int, admission: Admission) -> None:
    t = Table()
    t.table.mark_ended("r", 2)
    t.table.mark_ended("r", 1)  # revoked late, or its end is stored late
    assert t.table.admission("r", attempt, "again") is admission


def test_a_request_is_not_over_before_its_end_is_stored() -> None:
    t = Table()
    running = t.running()
    t.table.remove(running, cancel=False)
    t.table.begin_ending(running)
    assert "r" not in t.table.ended
    t.table.mark_ended("r", 2)
    t.table.stop_ending(running)
    assert "r" in t.table.ended
    assert t.table.ending == {}


def test_removing_an_older_attempt_leaves_the_newer_one_running() -> None:
    t = Table()
    old = t.running(1)
    new = t.running(2)
    t.table.remove(old)
    assert t.table.running == {"r": new}
    assert t.removed == [(old, True)]
    assert (t.table.owns(old), t.table.owns(new)) == (False, True)


def test_a_cancellation_is_kept_for_a_job_on_its_way_but_not_for_one_that_ended() -> None:
    t = Table()
    t.table.remember_cancel("r", "gone")
    assert t.table.early_cancel("r") == "gone"
    t.table.mark_ended("r", 1)
    assert t.table.early_cancel("r") is None
    t.table.remember_cancel("r", "gone")
    assert t.table.early_cancel("r") is None


def test_of_a_reason_only_the_beginning_is_kept() -> None:
    t = Table()
    t.table.remember_cancel("r", "x" * 1_000_000)
    assert len(t.table.early_cancel("r") or "") == 200


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    t = Table()
    for number in range(REMEMBERED + 1):
        t.table.mark_ended(str(number), 1)
        t.table.remember_cancel(f"c{number}", "gone")
    assert ("0" in t.table.ended, "1" in t.table.ended) == (False, True)
    assert (t.table.early_cancel("c0"), t.table.early_cancel("c1")) == (None, "gone")
