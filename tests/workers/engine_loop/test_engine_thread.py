"""Where an engine runs. ``test_engine_loop`` tests in either place what is done with it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.workers.engine_loop import engine_thread
from penstock.workers.engine_loop.engine_thread import EngineThread
from penstock.workers.engine_loop.loop import MAX_AHEAD, EngineLoop
from penstock.workers.engine_loop.step_output import Flush
from penstock.workers.engines.engine_protocol import EngineError
from tests.infra.bus.support import eventually
from tests.workers.engine_loop.test_loop import new_choice, refuse, sequence
from tests.workers.support import ControlledEngine, engine

TOKENS = 2 * MAX_AHEAD


class Running:
    """An engine that has work for ``TOKENS`` steps, whose output is consumed in the event loop."""

    def __init__(self, made: ControlledEngine) -> None:
        self.engine = made
        self.event_loop = asyncio.get_running_loop()
        self.threads: set[int] = set()  # that delivered output
        self.ended = 0
        self.loop = EngineLoop()
        self.loop.begin_session(self._deliver)
        self.thread = EngineThread(lambda: made, self.loop, refuse, self.event_loop)

    def _deliver(self, flush: Flush) -> None:
        self.threads.add(threading.get_ident())
        self.ended += len(flush.ended)
        self.event_loop.call_soon_threadsafe(self.loop.flush_consumed)

    def submit(self) -> None:
        self.loop.submit([sequence(new_choice(), [1, 2], TOKENS)], refuse)

    async def end(self) -> None:
        self.loop.stop()
        assert await asyncio.to_thread(self.thread.join, 10)


@contextlib.asynccontextmanager
async def running(*, short_steps: bool) -> AsyncIterator[Running]:
    made = Running(engine(short_steps=short_steps))
    made.thread.start()
    await asyncio.to_thread(made.thread.wait_ready, 10)
    yield made
    await made.end()


@pytest.mark.parametrize("short_steps", [False, True])
async def test_an_engine_shares_the_thread_of_the_event_loop_if_its_steps_are_short(short_steps: bool) -> None:
    async with running(short_steps=short_steps) as made:
        made.submit()
        await eventually(lambda: made.ended)
        assert (made.threads == {threading.get_ident()}) is short_steps
        assert made.loop.in_event_loop is short_steps


@pytest.mark.parametrize("slice_s", [0.0, 60.0])
async def test_the_event_loop_gets_its_turn_when_a_time_slice_is_over(
    monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    monkeypatch.setattr(engine_thread, "SLICE_S", slice_s)
    async with running(short_steps=True) as made:
        made.loop._clock = lambda: 1.0  # after the first flush, all output is gathered
        made.submit()
        most = before = 0
        while not made.ended:
            await asyncio.sleep(0)
            most, before = max(most, made.engine.steps - before), made.engine.steps
        assert (most == 1) is (slice_s == 0.0)


def test_what_comes_behind_the_end_fails_or_is_ignored_even_without_an_event_loop() -> None:
    async def run() -> Running:
        async with running(short_steps=True) as made:
            made.submit()
        return made

    made = asyncio.run(run())
    assert made.engine.closes == 1
    made.loop.wake()
    made.loop.flush_consumed()
    with pytest.raises(EngineError, match="has ended"):
        made.loop.call(lambda engine: engine.stats()).result(10)
