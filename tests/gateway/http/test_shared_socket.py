"""Gateways that accept from one socket, on real sockets; each is a ``SharedSocket`` here."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http import shared_socket
from penstock.gateway.http.shared_socket import MOVE_CONNECTIONS, SLOTS, ConnectionCounts, SharedSocket, surplus
from penstock.infra.bus.tasks import Tasks
from tests.infra.bus.support import eventually


def lives(process: int) -> bool:
    return True  # the ids here are of nobody


class AcceptingGateway:
    def __init__(self, process: int, listener: socket.socket, memory: int) -> None:
        self.counts = ConnectionCounts(memory, process, lives)
        self.open: list[socket.socket] = []
        self.tasks = Tasks("accepting")
        self.listener = listener.dup()
        self.listener.setblocking(False)
        self.shared = SharedSocket(
            self.listener, self.counts, self.tasks, connections=lambda: len(self.open), connect=self._connect
        )

    async def _connect(self, accepted: socket.socket) -> None:
        await asyncio.sleep(0)
        self.open.append(accepted)

    async def close(self) -> None:
        self.shared.close()
        await self.tasks.aclose()
        for each in self.open:
            each.close()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield listener


def gateways(listener: socket.socket, memory: int, closing: AsyncExitStack, count: int) -> list[AcceptingGateway]:
    made = [AcceptingGateway(1 + number, listener, memory) for number in range(count)]
    for each in made:
        closing.push_async_callback(each.close)
    return made


async def connect(listener: socket.socket, closing: AsyncExitStack, count: int) -> None:
    for _ in range(count):
        closing.enter_context(socket.create_connection(listener.getsockname()))


async def until(made: list[AcceptingGateway], count: int) -> list[int]:
    await eventually(lambda: sum(len(each.open) for each in made) == count)
    return [len(each.open) for each in made]


async def test_connections_that_come_together_are_shared_evenly(
    listener: socket.socket, memory: int, closing: AsyncExitStack
) -> None:
    made = gateways(listener, memory, closing, 3)
    for each in made:
        each.shared.start()
    await connect(listener, closing, 96)
    assert max(await until(made, 96)) <= 1.3 * 32


async def test_a_gateway_that_has_more_connections_leaves_new_ones_to_others(
    listener: socket.socket, memory: int, closing: AsyncExitStack
) -> None:
    full, empty = made = gateways(listener, memory, closing, 2)
    full.shared.start()
    await connect(listener, closing, 8)
    assert await until(made, 8) == [8, 0]
    empty.shared.start()
    await connect(listener, closing, 8)
    assert max(await until(made, 16)) <= 10


async def test_connections_of_a_gateway_that_hangs_are_accepted_by_another_without_waiting_for_its_numbers(
    listener: socket.socket, memory: int, closing: AsyncExitStack
) -> None:
    lives, hangs = made = gateways(listener, memory, closing, 2)
    lives.shared.start()
    hangs.counts.set(0)
    await connect(listener, closing, 20)
    assert await until(made, 20) == [20, 0]


async def test_numbers_that_are_not_renewed_are_forgotten_and_one_that_leaves_is_immediately(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ConnectionCounts(memory, 1, lives), ConnectionCounts(memory, 2, lives)
    assert first.fewest() is None
    first.set(7)
    second.set(3)
    assert (first.fewest(), second.fewest()) == (3, 7)
    second.leave()
    assert first.fewest() is None
    second.set(3)
    later = time.monotonic() + shared_socket.STALE_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert first.fewest() is None


def test_what_a_killed_gateway_has_left_does_not_count(memory: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed, own = ConnectionCounts(memory, child.pid), ConnectionCounts(memory)
    killed.set(3)
    assert own.fewest() == 3
    child.kill()
    child.communicate()
    assert own.fewest() is None


def test_two_gateways_with_one_slot_do_not_see_themselves(memory: int) -> None:
    first, second = ConnectionCounts(memory, 1, lives), ConnectionCounts(memory, 1 + SLOTS, lives)
    first.set(7)
    second.set(3)
    assert second.fewest() is None
    assert first.fewest() == 3


async def test_without_a_free_descriptor_a_connection_waits_and_is_accepted_later(
    listener: socket.socket, memory: int, closing: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = made = gateways(listener, memory, closing, 1)
    monkeypatch.setattr(shared_socket, "NO_FILES_S", 0.01)
    refusals = iter([OSError(24, "Too many open files")] * 2)

    class Listener:
        def fileno(self) -> int:
            return only.listener.fileno()

        def accept(self) -> tuple[socket.socket, object]:
            for error in refusals:
                raise error
            return only.listener.accept()

        def close(self) -> None:
            only.listener.close()

    monkeypatch.setattr(only.shared, "_listener", Listener())
    only.shared.start()
    await connect(listener, closing, 1)
    assert await until(made, 1) == [1]
    assert next(refusals, None) is None


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_kept_connections_move_until_all_have_about_as_many_and_then_stay(numbers: list[int]) -> None:
    total, share = sum(numbers), sum(numbers) / len(numbers)
    for _ in range(100):  # seconds
        moving = [surplus(own, numbers[:at] + numbers[at + 1 :]) for at, own in enumerate(numbers)]
        assert all(0 <= some <= own for some, own in zip(moving, numbers, strict=True))
        for at, some in enumerate(moving):
            numbers[at] -= some
            for _ in range(some):
                numbers[numbers.index(min(numbers))] += 1  # accepted by the emptiest
        if not any(moving):
            break
    assert not any(moving)
    assert sum(numbers) == total
    assert max(numbers) <= 1.25 * share + MOVE_CONNECTIONS


async def test_a_gateway_that_has_closed_moves_nothing(
    listener: socket.socket, memory: int, closing: AsyncExitStack
) -> None:
    full, empty = made = gateways(listener, memory, closing, 2)
    full.shared.start()
    await connect(listener, closing, 8)
    await until(made, 8)
    assert (full.shared.gateways, full.shared.to_move()) == (1, 0)
    empty.shared.start()
    assert (full.shared.gateways, full.shared.to_move(), empty.shared.to_move()) == (2, 1, 0)
    empty.shared.close()
    assert (full.shared.gateways, full.shared.to_move(), empty.shared.to_move()) == (1, 0, 0)
