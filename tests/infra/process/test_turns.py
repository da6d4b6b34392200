"""What keeps the turns of an event loop short."""

import asyncio
import time

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.infra.process.turns import READS, SLICE_S, TURN_S, TimeSlice, TurnBudget


async def test_a_short_turn_is_not_given_away_however_long_the_loop_was_idle_before() -> None:
    time_slice, others = TimeSlice(), 0

    def other() -> None:
        nonlocal others
        others += 1

    for _ in range(3):
        await asyncio.sleep(2 * SLICE_S)
        asyncio.get_running_loop().call_soon(other)
        before = others
        await time_slice.yield_if_spent()
        await time_slice.yield_if_spent()
        assert others == before, "what one turn publishes leaves in one write"


async def test_a_long_turn_lets_others_run() -> None:
    time_slice, ran = TimeSlice(), asyncio.Event()
    await time_slice.yield_if_spent()
    asyncio.get_running_loop().call_soon(ran.set)
    time.sleep(2 * SLICE_S)  # noqa: ASYNC251 - work
    await time_slice.yield_if_spent()
    assert ran.is_set()


class Burst:
    """Tasks that all become ready at once. Each runs a part, and time passes in parts only."""

    def __init__(self, parts: list[float], running: frozenset[int] = frozenset(), turn_s: float = TURN_S) -> None:
        """
        Args:
            parts: seconds of each.
            running: those that belong to running answers; the others are new requests.
        """
        self.parts = parts
        self.running = running
        self.now = 0.0
        self.budget = TurnBudget(lambda: self.now, turn_s=turn_s)
        self.order: list[int] = []
        self.turn = 0
        self.took: dict[int, float] = {}  # by turn

    async def part(self, number: int) -> None:
        if number in self.running:
            waiter = asyncio.get_running_loop().create_future()
            self.budget.wake(waiter)
            await waiter
            await self.budget.resume()
        else:
            await self.budget.enter()
        self.order.append(number)
        self.now += self.parts[number]
        self.took[self.turn] = self.took.get(self.turn, 0.0) + self.parts[number]

    async def run(self, *, cancelled: frozenset[int] = frozenset()) -> None:
        def count() -> None:
            self.turn += 1
            handles.append(loop.call_soon(count))

        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(self.part(number)) for number in range(len(self.parts))]
        handles = [loop.call_soon(count)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.wait(tasks, timeout=10)
        handles[-1].cancel()
        assert all(task.done() for task in tasks)
        assert not self.budget.expects_new()


PARTS = st.lists(st.sampled_from([0.0, 0.00001, 0.0003, 0.001, 0.003, 0.01]), min_size=1, max_size=100)
SOME = st.frozensets(st.integers(0, 99))


@given(PARTS, SOME, st.sampled_from([TURN_S, TURN_S / 2]))
@example([0.00001] * 60 + [0.003] * 30, frozenset(), TURN_S)
@example([0.00001] * 60 + [0.003] * 30, frozenset(range(0, 90, 2)), TURN_S / 2)
def test_parts_of_a_burst_run_in_order_and_no_turn_takes_longer_than_its_budget_and_one_part(
    parts: list[float], running: frozenset[int], turn_s: float
) -> None:
    burst = Burst(parts, running, turn_s)
    asyncio.run(burst.run())
    assert [number for number in burst.order if number in running] == sorted(running & set(range(len(parts))))
    assert [number for number in burst.order if number not in running] == sorted(set(range(len(parts))) - running)
    assert max(burst.took.values()) <= turn_s + max(parts) + 1e-9


@given(PARTS, SOME, SOME)
def test_parts_whose_tasks_are_cancelled_while_they_wait_stop_no_other(
    parts: list[float], running: frozenset[int], cancelled: frozenset[int]
) -> None:
    numbers = set(range(len(parts)))
    burst = Burst(parts, running)
    asyncio.run(burst.run(cancelled=cancelled & numbers))
    assert numbers - cancelled <= set(burst.order)


def test_short_parts_share_turns() -> None:
    burst = Burst([0.00001] * 1000)
    asyncio.run(burst.run())
    assert len(burst.took) < 50


def test_running_answers_and_new_requests_take_turns() -> None:
    burst = Burst([0.0003] * 1000, frozenset(range(500, 1000)))
    asyncio.run(burst.run())
    assert 400 <= sum(number in burst.running for number in burst.order[:900]) <= 500


async def test_a_part_runs_in_every_turn_however_long_other_things_take() -> None:
    burst = Burst([0.0001] * 20)

    def other() -> None:
        burst.now += 2 * TURN_S
        handles.append(loop.call_soon(other))

    loop = asyncio.get_running_loop()
    handles = [loop.call_soon(other)]
    await burst.run()
    handles[-1].cancel()
    assert burst.turn <= 25


async def test_few_requests_are_read_in_one_turn_and_the_others_in_the_following_ones() -> None:
    budget, read = TurnBudget(), []
    read += [number for number in range(100) if budget.may_read(lambda number=number: read.append(number))]  # type: ignore[misc]
    assert read == list(range(READS))
    while len(read) < 100:
        before = len(read)
        assert budget.expects_new()
        await asyncio.sleep(0)
        assert before < len(read) <= before + READS
    assert read == list(range(100))
    await asyncio.sleep(0)
    assert not budget.expects_new()
