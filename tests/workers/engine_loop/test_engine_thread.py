"""The thread of an engine. ``test_loop`` tests what is done there."""

import asyncio
import threading

import pytest

from penstock.workers.engine_loop.loop import MAX_AHEAD, EngineLoop, EngineThread
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
        self.thread = EngineThread(lambda: made, self.loop, refuse)

    def _deliver(self, flush: Flush) -> None:
        self.threads.add(threading.get_ident())
        self.ended += len(flush.ended)
        self.event_loop.call_soon_threadsafe(self.loop.flush_consumed)

    def submit(self) -> None:
        self.loop.submit([sequence(new_choice(), [1, 2], TOKENS)], refuse)

    async def end(self) -> None:
        self.loop.stop()
        assert await asyncio.to_thread(self.thread.join, 10)


async def test_an_engine_has_its_own_thread_in_which_its_output_is_delivered() -> None:
    made = Running(engine())
    made.thread.start()
    await asyncio.to_thread(made.thread.wait_ready, 10)
    made.submit()
    await eventually(lambda: made.ended)
    assert len(made.threads) == 1
    assert threading.get_ident() not in made.threads
    await made.end()


def test_what_comes_behind_the_end_fails_or_is_ignored_even_without_an_event_loop() -> None:
    async def run() -> Running:
        made = Running(engine())
        made.thread.start()
        await asyncio.to_thread(made.thread.wait_ready, 10)
        made.submit()
        await made.end()
        return made

    made = asyncio.run(run())
    assert made.engine.closes == 1
    made.loop.wake()
    made.loop.flush_consumed()
    with pytest.raises(EngineError, match="has ended"):
        made.loop.call(lambda engine: engine.stats()).result(10)
