"""What the supervisor makes of a worker's end: its requests go back to the routers, and say whether it crashed."""

import signal
from pathlib import Path

import pytest

from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.deployment import report_end
from penstock.schemas import done
from penstock.schemas.subjects import Subjects
from penstock.workers.session.crash_journal import CrashJournal, paths, read_journal
from penstock.workers.session.requests import RunningRequest
from tests.workers.support import dial, request


def killed(folder: Path, *names: str) -> None:
    """Leave what a worker leaves that is killed while it runs these requests."""
    journal = CrashJournal(folder, "worker-0")
    journal.begin()
    for name in names:
        journal.began(RunningRequest(request(id=name), 1, None, [], [], 0), "worker-0-1a")
    journal._close()


async def returned(broker: EmbeddedNats, subjects: Subjects) -> list[done.Returned]:
    async with dial(broker, subjects) as bus:
        stream, subject = subjects.stream("DONE"), subjects.all("returned")
        return [done.decode(entry.data) async for entry in read(bus, stream, subject)]


@pytest.mark.parametrize(("signum", "crashed"), [(signal.SIGSEGV, "shared"), (signal.SIGKILL, "killed")])
async def test_what_a_dead_worker_ran_is_returned_before_its_next_start(
    broker: EmbeddedNats, pipeline: Subjects, tmp_path: Path, signum: signal.Signals, crashed: str
) -> None:
    killed(tmp_path, "r1", "r2")
    for _ in range(2):  # the second finds nothing
        await report_end(tmp_path, "worker-0", -signum, broker.url("operator"), pipeline)
    back = await returned(broker, pipeline)
    assert [(each.request, each.crashed) for each in back] == [("r1", crashed), ("r2", crashed)]
    assert all(signum.name in each.reason for each in back)
    assert read_journal(paths(tmp_path, "worker-0")[0].read_bytes()) is None


async def test_without_a_broker_the_next_life_reports_what_the_supervisor_saw(tmp_path: Path) -> None:
    killed(tmp_path, "r1")
    await report_end(tmp_path, "worker-0", -signal.SIGSEGV, "nats://127.0.0.1:9", Subjects("ps"))
    last = read_journal(paths(tmp_path, "worker-0")[0].read_bytes())
    assert last is not None
    assert last.end is not None
    assert last.end.crashed


async def test_a_worker_that_ran_nothing_or_has_no_journal_is_not_reported(tmp_path: Path) -> None:
    await report_end(tmp_path, "worker-0", -signal.SIGSEGV, "nats://127.0.0.1:9", Subjects("ps"))
    killed(tmp_path)
    await report_end(tmp_path, "worker-0", -signal.SIGSEGV, "nats://127.0.0.1:9", Subjects("ps"))
