"""Groups of background tasks: every failure is seen, and nothing outlives its owner."""

import asyncio
import contextlib
import gc
import signal
import sys

import pytest

from penstock.infra.bus.tasks import EXIT_FAILED, EXIT_OK, ProcessStop, Tasks, as_serving_error, count_tasks, end
from penstock.schemas.errors import Code, ServingError


class Fatal:
    """A fatal handler that can be waited for."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.called = asyncio.Event()

    def __call__(self, error: BaseException) -> None:
        self.errors.append(error)
        self.called.set()


@pytest.fixture
async def fatal() -> Fatal:
    return Fatal()


async def fails(error: BaseException) -> None:
    raise error


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_failure_that_nothing_handles_ends_the_process(fatal: Fatal) -> None:
    tasks, error = Tasks("worker", fatal), ValueError("broken")
    tasks.spawn(fails(error), name="housekeeping")
    await asyncio.wait_for(fatal.called.wait(), 5)
    assert fatal.errors == [error]
    assert len(tasks) == 0


async def test_a_failure_with_a_handler_stays_there(fatal: Fatal) -> None:
    tasks, seen, error = Tasks("worker", fatal), Fatal(), ValueError("broken")
    tasks.spawn(fails(error), name="stage", on_failure=seen)
    await asyncio.wait_for(seen.called.wait(), 5)
    assert (seen.errors, fatal.errors) == ([error], [])


async def test_a_handler_that_fails_itself_ends_the_process(fatal: Fatal) -> None:
    def bad(error: BaseException) -> None:
        raise KeyError("second") from error

    Tasks("worker", fatal).spawn(fails(ValueError("first")), name="stage", on_failure=bad)
    await asyncio.wait_for(fatal.called.wait(), 5)
    assert [type(error) for error in fatal.errors] == [KeyError]


async def test_a_task_is_kept_while_it_runs_and_forgotten_at_its_end() -> None:
    tasks, go = Tasks("worker"), asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        await go.wait()
        ended.append("worked")

    task = tasks.spawn(work(), name="work")
    gc.collect()
    assert len(tasks) == 1
    go.set()
    await asyncio.wait_for(task, 5)
    assert (len(tasks), ended) == (0, ["worked"])


async def test_nothing_outlives_a_closed_group_nor_its_components(fatal: Fatal) -> None:
    process = Tasks("worker", fatal)
    component = process.group("stages")
    inner = component.group("one")
    running = [group.spawn(for_ever(), name="waits") for group in (process, component, inner)]
    assert len(process) == 3
    assert await process.aclose()
    assert all(task.cancelled() for task in running)
    late = [group.spawn(for_ever(), name="late") for group in (process, component, inner, process.group("later"))]
    await asyncio.wait(late, timeout=5)
    assert all(task.cancelled() for task in late)
    assert fatal.errors == []


async def test_a_component_that_closes_leaves_the_others_alone() -> None:
    process = Tasks("worker")
    first, second = process.group("first"), process.group("second")
    ended, goes_on = first.spawn(for_ever(), name="ended"), second.spawn(for_ever(), name="goes-on")
    await first.aclose()
    assert (ended.cancelled(), goes_on.done(), len(process)) == (True, False, 1)
    await process.aclose()


async def test_a_component_s_failure_reaches_the_handler_of_the_process(fatal: Fatal) -> None:
    Tasks("worker", fatal).group("stages").spawn(fails(ValueError("broken")), name="stage")
    await asyncio.wait_for(fatal.called.wait(), 5)


async def test_a_cancellation_that_gets_lost_is_sent_again() -> None:
    tasks, lost = Tasks("worker"), 0

    async def deaf() -> None:
        nonlocal lost
        while lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
        await for_ever()

    tasks.spawn(deaf(), name="deaf")
    await asyncio.sleep(0)
    assert await tasks.aclose()
    assert lost == 3


async def test_closing_is_bounded_also_with_a_task_that_does_not_end() -> None:
    tasks, release = Tasks("worker"), asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    task = tasks.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    assert not await asyncio.wait_for(tasks.aclose(0.2), 5)
    release.set()
    await asyncio.wait([task], timeout=5)


async def test_a_failure_while_closing_is_no_reason_to_end_the_process(fatal: Fatal) -> None:
    tasks = Tasks("worker", fatal)

    async def breaks_at_its_end() -> None:
        try:
            await for_ever()
        finally:
            raise ValueError("at the end")

    tasks.spawn(breaks_at_its_end(), name="breaks")
    await asyncio.sleep(0)
    assert await tasks.aclose()
    assert fatal.errors == []


async def test_a_task_may_close_its_own_group() -> None:
    tasks = Tasks("worker")
    other = tasks.spawn(for_ever(), name="other")

    async def closes() -> bool:
        return await tasks.aclose()

    assert await asyncio.wait_for(tasks.spawn(closes(), name="closes"), 5)
    assert other.cancelled()


async def test_ending_single_tasks_takes_those_that_are_over_and_none() -> None:
    loop = asyncio.get_running_loop()
    over, runs = loop.create_task(asyncio.sleep(0)), loop.create_task(for_ever())
    await over
    assert await end([over, None, runs])
    assert runs.cancelled()


async def test_a_process_ends_when_asked_and_when_a_task_failed() -> None:
    loop = asyncio.get_running_loop()
    stop = ProcessStop()
    stop.on_signals()
    try:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 5)
        assert stop.status == EXIT_OK
        stop = ProcessStop()
        stop.on_signals()
        Tasks("worker", stop.failed).spawn(fails(ValueError("broken")), name="stage")
        await asyncio.wait_for(stop.wait(), 5)
        assert stop.status == EXIT_FAILED
        stop = ProcessStop()
        stop.on_signals()
        Tasks("worker").spawn(fails(ValueError("broken")), name="stage")  # no handler: SIGTERM
        await asyncio.wait_for(stop.wait(), 5)
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def test_a_failure_becomes_the_reason_of_its_request() -> None:
    own = ServingError(Code.queue_full, "full")
    assert as_serving_error(own, "the stage") is own
    made = as_serving_error(KeyError("x"), "the stage")
    assert (made.code, "the stage failed (KeyError)" in made.message) == (Code.internal, True)


async def test_many_tasks_are_counted_without_a_visit_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr("penstock.infra.bus.tasks.EXACT_TASKS", 0)
    if sys.version_info < (3, 14):
        monkeypatch.setattr(asyncio, "all_tasks", lambda loop: pytest.fail("it visits each"))
    before = count_tasks(loop)
    tasks = [asyncio.create_task(for_ever()) for _ in range(5)]
    assert count_tasks(loop) == before + 5
    assert await asyncio.to_thread(count_tasks, loop) >= before + 5
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_of_a_few_tasks_those_that_have_ended_do_not_count() -> None:
    gc.collect()  # of tasks of earlier tests, of which there may be many
    loop = asyncio.get_running_loop()
    before = count_tasks(loop)
    kept = [asyncio.create_task(asyncio.sleep(0)) for _ in range(5)]
    assert count_tasks(loop) == before + 5
    await asyncio.wait(kept)
    assert count_tasks(loop) == await asyncio.to_thread(count_tasks, loop) == before
