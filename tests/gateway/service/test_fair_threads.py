"""Threads whose tenants take turns."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.gateway.service.preparation import FairThreads
from penstock.infra.bounded import QueueLimits
from penstock.schemas.errors import Code, ServingError


class Gate:
    """Work that waits, and the order in which it was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self.open = threading.Event()

    def __call__(self, name: str) -> str:
        with self.changed:
            self.begun.append(name)
            self.changed.notify_all()
        self.open.wait(30)
        return name

    async def until(self, count: int) -> None:
        def wait() -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.begun) >= count, 30)

        await asyncio.to_thread(wait)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


@pytest.fixture
async def threads() -> AsyncIterator[FairThreads]:
    made = FairThreads(3, 2, "test", QueueLimits(tenant_entries=4))
    yield made
    made.close()


async def test_results_and_errors_come_back(threads: FairThreads) -> None:
    assert await threads.run("a", 1, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", 1, lambda: 1 // 0)  # type: ignore[return-value]


async def test_a_tenant_leaves_a_thread_to_others_and_waits_for_its_turn(threads: FairThreads, gate: Gate) -> None:
    many = [asyncio.create_task(threads.run("many", 1, lambda: gate("many"))) for _ in range(4)]
    await gate.until(2)
    few = asyncio.create_task(threads.run("few", 1, lambda: gate("few")))
    await gate.until(3)
    assert gate.begun == ["many", "many", "few"]
    gate.open.set()
    assert await asyncio.gather(*many, few) == ["many"] * 4 + ["few"]


async def test_who_gives_up_is_never_begun(threads: FairThreads, gate: Gate) -> None:
    held = [asyncio.create_task(threads.run("a", 1, lambda: gate("a"))) for _ in range(2)]
    gone = asyncio.create_task(threads.run("a", 1, lambda: gate("gone")))
    await gate.until(2)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.open.set()
    await asyncio.gather(*held)
    assert await threads.run("a", 1, lambda: "next") == "next"
    assert gate.begun == ["a", "a"]


async def test_whose_client_goes_while_it_runs_ends_without_a_trace(threads: FairThreads, gate: Gate) -> None:
    def fail() -> None:
        gate("fails")
        raise ValueError

    task = asyncio.create_task(threads.run("a", 1, fail))
    await gate.until(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open.set()
    assert await threads.run("a", 1, lambda: "next") == "next"


async def test_too_many_of_a_tenant_are_refused(threads: FairThreads, gate: Gate) -> None:
    waiting = [asyncio.create_task(threads.run("a", 1, lambda: gate("a"))) for _ in range(6)]
    await gate.until(2)
    with pytest.raises(ServingError, match="too many large requests wait") as caught:
        await threads.run("a", 1, lambda: None)
    assert caught.value.code is Code.overloaded
    assert caught.value.retry_after
    assert await threads.run("b", 1, lambda: 1) == 1
    gate.open.set()
    await asyncio.gather(*waiting)


async def test_closing_ends_what_waits(threads: FairThreads, gate: Gate) -> None:
    waiting = [asyncio.create_task(threads.run("a", 1, lambda: gate("a"))) for _ in range(4)]
    await gate.until(2)
    threads.close()
    gate.open.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [each if isinstance(each, str) else type(each) for each in ended[:2]] == ["a", "a"]
    assert [type(each) for each in ended[2:]] == [asyncio.CancelledError] * 2
