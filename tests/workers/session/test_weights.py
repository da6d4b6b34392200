"""When a worker sleeps and whose turn a shared device is. What updates do is in ``tests/pipeline/test_weights.py``."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.control import Sleep, Wake
from penstock.schemas.done import MadeWith
from penstock.schemas.fleet import CONTINUE, FINISH, WeightsEntry
from penstock.workers.engines import mock
from penstock.workers.session import weights
from penstock.workers.session.request_runner import ServedModel
from penstock.workers.session.weights import DeviceTurn, WeightsTable
from tests.pipeline.support import until

pytestmark = pytest.mark.timeout(60)


class Requests:
    """A runner with as many running and waiting requests as a test says."""

    def __init__(self) -> None:
        self.running = 0
        self.parked = 0
        self.submitted = 0

    def begun(self) -> int:
        return self.running

    async def park_waiting(self) -> None:
        pass

    def submit_parked(self) -> None:
        self.submitted, self.parked = self.submitted + self.parked, 0


class Worker:
    """A table over a mock engine, whose thread is the test's."""

    def __init__(self, turn: DeviceTurn | None = None, **settings: Any) -> None:
        self.engine = mock.build(mock.MockOptions(vocab_size=1000))
        self.requests = Requests()
        self.served = ServedModel("m", (), "old", None, "")
        given = WorkerSettings(**settings)
        self.table = WeightsTable(self.call, given, modeldir.TINY, self.served, AsyncMock(), turn=turn)
        self.table._holder = self.requests
        context: Any = MagicMock()
        context.tasks.spawn = lambda work, name: asyncio.ensure_future(work)
        context.reporter.made_with = MadeWith("old")
        self.table._context = context

    def call(self, work: Callable[[Any], Any]) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(self.engine))
        except Exception as error:
            done.set_exception(error)
        return done

    async def asleep(self) -> bool:
        self.table.look(asyncio.get_running_loop().time())
        return self.table.shown.asleep

    async def awake(self) -> bool:
        self.table.look(asyncio.get_running_loop().time())
        return not self.table.shown.asleep

    async def asked(self, entry: WeightsEntry, seq: int) -> str:
        self.table._entry = entry, seq
        await self.table._reconcile()
        return self.table.shown.error


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return "gpu0"


async def test_a_worker_without_requests_sleeps_and_wakes_up_for_one() -> None:
    worker = Worker(sleep_after_s=0.05)
    worker.requests.running = 1
    for _ in range(5):
        assert not await worker.asleep()
    worker.requests.running = 0
    await until(worker.asleep, "it sleeps", 5)
    assert worker.table.holds
    assert not worker.engine.has_work()
    worker.requests.parked = 2
    await until(worker.awake, "it wakes up", 5)
    await until(AsyncMock(side_effect=lambda: worker.requests.submitted == 2), "what waited is submitted", 5)
    assert not worker.table.holds


async def test_a_worker_that_is_told_to_sleep_finishes_first_or_says_that_it_cannot() -> None:
    worker = Worker()
    worker.requests.running = 1
    refused = await worker.table.rest(Sleep(within_s=0.05))
    assert "1 requests still run after 0.05 s" in refused.error
    assert (worker.table.holds, worker.table.shown.asleep) == (False, False)
    sleeping = asyncio.create_task(worker.table.rest(Sleep(within_s=10)))
    await asyncio.sleep(0)
    worker.requests.running = 0
    assert (await sleeping).error == ""
    assert worker.table.shown.asleep
    await worker.table.rest(Wake())
    await until(worker.awake, "it wakes up", 5)


def test_one_worker_at_a_time_has_the_device_and_learns_that_another_waits(device: str) -> None:
    first, second, third = (DeviceTurn(device) for _ in range(3))
    with contextlib.ExitStack() as left:
        for each in (first, second, third):
            left.callback(each.leave)
        assert first.take()
        assert not first.wanted
        assert not second.take()
        assert first.wanted
        assert not third.take()
        first.leave()
        assert not third.take(), "it is the turn of whoever waited first"
        assert second.take()
        assert not second.wanted
        assert not third.take()
        assert second.wanted


def test_the_turn_of_a_process_that_ended_is_free(device: str) -> None:
    turn = DeviceTurn(device)
    child = os.fork()
    if not child:
        os._exit(0 if DeviceTurn(device).take() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert turn.take()
    turn.leave()


def test_the_locks_of_a_device_are_where_no_other_user_can_prepare_them(device: str, tmp_path: Path) -> None:
    turn = DeviceTurn(device)
    assert turn.take()
    (lock,) = tmp_path.rglob("*.awake")
    assert lock.parent.parent == tmp_path / f"penstock-{os.geteuid()}"
    turn.leave()
    lock.unlink()
    lock.symlink_to(tmp_path / "others")
    with pytest.raises(OSError, match="symbolic links"):
        turn.take()
    assert not (tmp_path / "others").exists()
    turn.leave()


async def test_the_worker_that_is_awake_makes_room_for_another(device: str) -> None:
    one, two = (Worker(DeviceTurn(device)) for _ in range(2))
    assert cast(DeviceTurn, one.table._turn).take()
    two.table._show(asleep=True)
    two.table.holds = True
    two.requests.parked = 1

    async def changed() -> bool:
        await one.asleep()
        return await two.awake() and one.table.shown.asleep

    await until(changed, "they change", 5)
    assert two.requests.submitted == 1
    cast(DeviceTurn, two.table._turn).leave()


async def test_an_update_is_read_within_allowed_folders_once_and_of_one_base(tmp_path: Path) -> None:
    folder = tmp_path / "steps" / "one"
    folder.parent.mkdir()
    folder.symlink_to(modeldir.TINY)
    allowed = tmp_path / "allowed"
    (allowed / "two").mkdir(parents=True)
    for file in modeldir.TINY.iterdir():
        (allowed / "two" / file.name).write_bytes(file.read_bytes())
    worker = Worker(weights_folder=(str(allowed),))
    assert "is not within --weights-folder" in await worker.asked(WeightsEntry("m", 1, str(folder), "old"), 1)
    assert "is not within --weights-folder" in await worker.asked(WeightsEntry("m", 1, "../steps/one", "old"), 2)
    assert "there is no model in" in await worker.asked(WeightsEntry("m", 1, "none", "old"), 3)
    assert (worker.served.revision, worker.table.shown.update, worker.table.shown.entry) == ("old", 0, 3)
    await worker.asked(WeightsEntry("m", 4, "two", "another base"), 4)
    assert (worker.served.revision, worker.table.shown.entry) == ("old", 3)
    wrong = WeightsEntry("m", 2, "two", "old", revision="of another time")
    assert "and update 2 is of of another time" in await worker.asked(wrong, 5)
    assert worker.served.revision == "old"
    right = modeldir.revision(allowed / "two")
    assert not await worker.asked(WeightsEntry("m", 3, "two", "old", right, "old", CONTINUE), 6)
    shown = worker.table.shown
    assert (worker.served.revision, shown.update, shown.before, worker.table.holds) == (right, 3, "old", False)


async def test_models_with_constant_load_change_no_faster_than_by_turns_and_none_is_starved(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients ask one by one, so that each is idle for moments."""
    monkeypatch.setattr(weights, "TURN_S", 0.3)
    workers = [Worker(DeviceTurn(device)) for _ in range(3)]
    assert cast(DeviceTurn, workers[0].table._turn).take()
    for each in workers[1:]:
        each.table._show(asleep=True)
        each.table.holds = True
    order = [0]
    loop = asyncio.get_running_loop()
    until = loop.time() + 3.0
    while loop.time() < until:
        for number, each in enumerate(workers):
            awake = not each.table.shown.asleep
            each.requests.running = int(awake and not each.table.holds and not each.requests.running)
            each.requests.parked = int(each.table.holds)
            each.table.look(time.monotonic())
            if awake and order[-1] != number:
                order.append(number)
        await asyncio.sleep(0.005)
    assert len(order) <= 2 + 3.0 / 0.3
    assert all(order.count(number) >= 2 for number in range(3)), order
    for each in workers:
        cast(DeviceTurn, each.table._turn).leave()


async def test_a_paused_model_makes_room_on_a_shared_device_and_sleeps_on(device: str) -> None:
    one, two = (Worker(DeviceTurn(device)) for _ in range(2))
    assert cast(DeviceTurn, one.table._turn).take()
    assert not await one.asked(WeightsEntry("m", 0, "", "old", paused=FINISH), 1)
    two.table._show(asleep=True)
    two.table.holds = True
    one.requests.parked = two.requests.parked = 1

    async def changed() -> bool:
        await one.asleep()
        return await two.awake() and one.table.shown.asleep

    await until(changed, "they change", 10)
    assert one.requests.submitted == 0
    cast(DeviceTurn, two.table._turn).leave()
