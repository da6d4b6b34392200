"""When a cell has no worker for a request, and who looks after what another cell runs."""

import msgspec
import pytest

from penstock.router.placement.pending import PendingRequest
from penstock.router.recovery.migration import can_run, may_leave
from penstock.router.state.load_tracker import LoadTracker, merge
from penstock.schemas.cells import CELL, cell_target, is_cell, number_of
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.jobs import EarlierWorker, LoadHeader
from tests.penstock.log_tools.traces import samples

LOAD = LoadHeader(100, 0, "gateway", 600_000_000_000, "standard")


def worker(role: str = "aggregated", state: WorkerState = WorkerState.ready, **more: object) -> Registration:
    return Registration(role, "m", role, "mock", 1, 32, 100, 4, 4096, state=state, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "runs"),
    [
        ([], False),
        ([worker()], True),
        ([worker(state=WorkerState.draining)], False),
        ([worker("encode")], False),
        ([worker("prefill")], True),
        ([worker("prefill", pair_only=True)], False),
        ([worker("prefill", pair_only=True), worker("decode", pair_only=True)], True),
    ],
)
def test_a_cell_runs_requests_if_its_ready_workers_do_together(workers: list[Registration], runs: bool) -> None:
    assert can_run(workers, "m") is runs
    assert not can_run(workers, "another")


def test_what_a_revision_has_begun_is_run_by_workers_of_that_revision_only() -> None:
    workers = [msgspec.structs.replace(worker(), revision="2f6c"), msgspec.structs.replace(worker(), revision="9d10")]
    assert [can_run(workers[:count], "m", "9d10") for count in (1, 2)] == [False, True]
    assert can_run(workers[:1], "m")


def test_what_another_cell_runs_is_no_orphan_until_it_is_returned() -> None:
    tracker = LoadTracker()
    tracker.admit("r", 1, cell_target(2), LOAD, now_ns=1, role=CELL, echoed=True, seq=7)
    tracker.admit("s", 1, "w", LOAD, now_ns=1, role="aggregated", echoed=True, seq=8)
    assert [entry.request for entry in tracker.orphans()] == ["s"]
    tracker.requeue("r", 1)
    again = LoadTracker()
    again.restore(merge(tracker.parts()))
    assert {entry.request for entry in again.orphans()} == {"r", "s"}, "no router remembers that it was returned"


def test_cells_have_names_in_place_of_workers() -> None:
    assert number_of(cell_target(12)) == 12
    assert is_cell(cell_target(12))
    assert not is_cell("cell-12ab34cd")
    with pytest.raises(ValueError, match="no cell"):
        number_of("worker-1")


def test_what_a_cell_has_returned_stays_for_a_while() -> None:
    """A cell that takes nothing would be asked several times a second, and each time takes a job and a fence."""
    request = samples.request()
    pending = PendingRequest(request, b"", "", since_ns=1_000, attempt=2)
    assert may_leave(pending, 0)
    pending.earlier_workers = (EarlierWorker(1, cell_target(1), "returned: cell 1: no worker"),)
    assert not may_leave(pending, 999)
    assert may_leave(pending, 1_000)
    pending.earlier_workers += (EarlierWorker(2, "w", "worker_lost"),)
    assert may_leave(pending, 999)
