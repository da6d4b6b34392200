"""What a worker notes of what it runs, and what is made of it once its process is gone."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import done
from penstock.schemas.subjects import HEADER_CRASHED, Subjects
from penstock.workers.session.crash_journal import (
    CrashJournal,
    End,
    LastProcess,
    Ran,
    judge,
    paths,
    read_journal,
    returns,
)
from penstock.workers.session.requests import RunningRequest
from tests.infra.bus.support import eventually
from tests.pipeline.support import Process
from tests.workers.support import LogClient, WorkerHarness, answer, ids, request, run_worker

SEGV, KILL, TERM = -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGTERM
RAN = Ran("r1", 2, "m", "w-1")


@pytest.fixture
async def worker(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[WorkerHarness]:
    async with run_worker(broker, pipeline) as worker:
        yield worker


def running(name: str) -> RunningRequest:
    return RunningRequest(request(id=name), 1, None, [], [], 0)


def life(**changed: Any) -> LastProcess:
    return LastProcess("boot", 7, {"r1": RAN}, 3)._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "seen", "crashed", "why"),
    [
        ({}, {"status": SEGV}, True, "SIGSEGV"),
        ({}, {"status": 1}, True, "exit status 1"),
        ({"stopping": True}, {"status": SEGV}, True, "SIGSEGV"),
        ({"stopping": True}, {"status": 75}, False, "stopped"),
        ({}, {"status": KILL}, False, "killed"),
        ({}, {"status": TERM}, False, "killed"),
        ({}, {"status": KILL, "killed": 4}, True, "lack of memory"),
        ({"killed": -1}, {"status": KILL, "killed": 4}, False, "killed"),
        ({}, {"trace": "Fatal Python error: Aborted"}, True, "Aborted"),
        ({}, {"killed": 4}, True, "lack of memory"),
        ({}, {}, False, "killed"),
        ({"stopping": True}, {}, False, "stopped"),
        ({"boot": "before"}, {"trace": "Fatal Python error: Aborted"}, False, "restarted"),
        ({"end": End(True, "as judged before")}, {"status": KILL}, True, "as judged before"),
    ],
)
def test_only_a_process_that_ends_by_its_own_fault_has_crashed(
    changed: dict[str, Any], seen: dict[str, Any], crashed: bool, why: str
) -> None:
    end = judge(life(**changed), **{"boot": "boot", "killed": 3} | seen)
    assert end.crashed is crashed
    assert why in end.reason


def test_what_ran_is_returned_and_says_whether_it_ran_alone() -> None:
    subjects = Subjects("ps")
    alone = life(running={"r1": RAN, "r2": Ran("r2", 3, "m", "w-1", alone=True)})
    shared_of, alone_of = returns(alone, End(True, "crashed: SIGSEGV"), subjects)
    assert shared_of.headers[HEADER_CRASHED] == "shared"
    assert alone_of.headers[HEADER_CRASHED] == "alone"
    assert shared_of.id == "r1:2:returned"
    assert shared_of.subject == subjects.returned("m")
    assert done.decode(alone_of.payload) == done.Returned("r2", "m", 3, "w-1", "crashed: SIGSEGV", True, "alone")
    (innocent, _) = returns(alone, End(False, "it was killed"), subjects)
    assert innocent.headers[HEADER_CRASHED] == done.KILLED


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60), st.integers(0, 40))
def test_a_journal_has_what_began_and_did_not_end(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool]], compact: int
) -> None:
    folder = tmp_path_factory.mktemp("state")
    journal = CrashJournal(folder, "w")
    journal.begin()
    runs: set[str] = set()
    for number, (name, begins) in enumerate(steps):
        if begins:
            journal.began(running(name), "w-1")
        else:
            journal.ended(name)
        runs = runs | {name} if begins else runs - {name}
        if number == compact:
            journal.compact()
    data = paths(folder, "w")[0].read_bytes()
    found, torn = read_journal(data), read_journal(data[:-1])
    assert found is not None
    assert torn is not None
    assert set(found.running) == runs
    journal.close()
    assert read_journal(paths(folder, "w")[0].read_bytes()) is None


def test_a_life_that_ends_before_it_reported_the_last_one_is_not_taken_for_it(tmp_path: Path) -> None:
    first = CrashJournal(tmp_path, "w")
    first.begin()
    first.began(running("r1"), "w-1")
    first._close()  # as a process that is killed
    second = CrashJournal(tmp_path, "w")
    assert second.last is not None
    assert second.last.end == End(False, "it was killed")
    second._close()
    paths(tmp_path, "w")[1].write_text("Fatal Python error: Segmentation fault")  # of the second, while it loads
    third = CrashJournal(tmp_path, "w")
    assert third.last is not None
    assert third.last.end == End(False, "it was killed")
    assert set(third.last.running) == {"r1"}
    third.close()
    fourth = CrashJournal(tmp_path, "w")
    assert fourth.last is not None  # it was not reported yet
    fourth.close()


def test_two_workers_of_one_name_do_not_share_a_journal(tmp_path: Path) -> None:
    first = CrashJournal(tmp_path, "w")
    first.begin()
    first.began(running("r1"), "w-1")
    second = CrashJournal(tmp_path, "w")
    second.begin()
    second.began(running("r2"), "w-2")
    second.close()
    found = read_journal(paths(tmp_path, "w")[0].read_bytes())
    assert found is not None
    assert set(found.running) == {"r1"}
    first.close()


async def test_a_request_that_runs_alone_waits_for_all_others_and_keeps_further_ones_away(
    log: LogClient, worker: WorkerHarness
) -> None:
    worker.engine.hold()
    before, suspect, after = request(), request(), request()
    await log.send_job(worker.id, before)
    worker.engine.allow(1)
    await log.has_streamed(before)
    await log.send_job(worker.id, suspect, suspect="alone")
    await log.send_job(worker.id, after)
    assert "alone" in (await log.handed_back(after)).reason
    assert not log.streamed(suspect)
    worker.engine.resume()
    assert ids((await log.end(before)).choices[0].tokens) == answer(before)
    assert ids((await log.end(suspect)).choices[0].tokens) == answer(suspect)
    first = [item.request for item in log.items]
    assert first.index(suspect.id) > max(at for at, name in enumerate(first) if name == before.id)
    last = request()
    await log.send_job(worker.id, last)
    assert ids((await log.end(last)).choices[0].tokens) == answer(last)
    await log.settled(worker.id)


async def test_a_request_that_waits_to_run_alone_can_be_cancelled_and_drained(
    log: LogClient, worker: WorkerHarness
) -> None:
    worker.engine.hold()
    before, cancelled, drained = request(), request(), request()
    await log.send_job(worker.id, before)
    worker.engine.allow(1)
    await log.has_streamed(before)
    await log.send_job(worker.id, cancelled, suspect="alone")
    await eventually(lambda: cancelled.id in worker.session.requests.running)
    await worker.session.on_cancel(cancelled.id, "the client left")
    assert (await log.end(cancelled)).code == "cancelled"
    await log.send_job(worker.id, drained, suspect="alone")
    await eventually(lambda: drained.id in worker.session.requests.running)
    worker.engine.resume()
    await worker.session.drain(20.0)
    # Stored by now, and on its way: which of both it is depends on when the drain began.
    await eventually(lambda: log.ends(drained) or [each for each in log.returned if each.request == drained.id])
    assert log.ends(drained) or (await log.handed_back(drained)).reason == "draining"


async def test_when_the_engine_breaks_only_what_ran_has_crashed_with_it(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    ran, waits = request(), request()
    await log.send_job(worker.id, ran)
    worker.engine.allow(1)
    await log.has_streamed(ran)
    await log.send_job(worker.id, waits, suspect="alone")
    await eventually(lambda: waits.id in worker.session.requests.running)
    worker.engine.breaks_at = worker.engine.steps
    worker.engine.resume()
    await eventually(lambda: worker.failures)
    await worker.session.fail("engine_error: gone")
    assert [(await log.handed_back(asked)).crashed for asked in (ran, waits)] == ["shared", ""]


async def test_a_worker_that_crashes_is_reported_by_its_next_life(
    log: LogClient, broker: EmbeddedNats, tmp_path: Path
) -> None:
    """Without a supervisor: what the process notes is all there is."""
    flags = [
        "worker", "--engine=mock", "--mock-speedup=0", "--name=w", f"--state-dir={tmp_path / 'state'}",
        f"--namespace={log.bus.subjects.namespace}", "--mock-crash-token=77", "--served-model-name=m",
        "--model", str(Path(__file__).parents[3] / "configs" / "models" / "tiny"),
    ]  # fmt: skip

    async def registered(others: set[str]) -> str:
        found: set[str] = set()

        def there() -> bool:
            found.update(name for name, registration in log.registrations if registration is not None)
            return bool(found - others)

        await eventually(there, 60)
        (new,) = found - others
        return new

    first = Process(tmp_path / "first.log", *flags, nats_url=broker.url("operator"))
    try:
        worker = await registered(set())
        poison = request((1, 77, 2))
        await log.send_job(worker, poison)
        await eventually(lambda: first._process.poll() is not None, 30)
        assert first._process.poll() == SEGV
    finally:
        first.kill()
    second = Process(tmp_path / "second.log", *flags, nats_url=broker.url("operator"))
    try:
        back = await log.handed_back(poison)
        assert (back.worker, back.crashed, back.poison) == (worker, "shared", True)
        assert "Segmentation fault" in back.reason
        again = await registered({worker})
        calm = request((1, 2, 3), 4)
        await log.send_job(again, calm)
        await log.end(calm)
        second.kill()  # as an operator does, who is no defect of a request
        assert read_journal(paths(tmp_path / "state", "w")[0].read_bytes()) is not None
    finally:
        second.kill()
