"""Reserves engine blocks and slots for data from other workers, in turn, and frees them once nothing writes to them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import Engine
from penstock.workers.session.requests import RequestTable, RunningRequest

T = TypeVar("T")


class BlockReserver:
    """
    Args:
        quarantine_s: the longest time that a transfer of unknown state may still write.
    """

    def __init__(self, engine: EngineLoop, requests: RequestTable, quarantine_s: float) -> None:
        self._engine = engine
        self._requests = requests
        self._quarantine_s = quarantine_s

    async def reserve(
        self,
        running: RunningRequest,
        within_s: float,
        pool: str,
        take: Callable[[Engine], T | None],
        undo: Callable[[Engine, T], object],
    ) -> T | None:
        """What ``take`` returns once there are blocks, in turn. Who removes the request cancels its ``block_wait``.

        Returns: None if there were none within that time or the request ended meanwhile.

        Raises:
            RequestError: raised by ``take``; there can never be enough.
        """
        running.block_wait = wait = self._engine.wait(pool, take)
        timer = asyncio.get_running_loop().call_later(max(0.0, within_s), self._engine.cancel_wait, wait)

        def undo_answer(answer: "Future[T | None]") -> None:
            reserved = None if answer.exception() else answer.result()
            if reserved is not None:
                self._engine.call(lambda engine: undo(engine, reserved))

        try:
            result = await asyncio.shield(asyncio.wrap_future(wait.answer))
        except asyncio.CancelledError:
            self._engine.cancel_wait(wait)
            wait.answer.add_done_callback(undo_answer)
            raise
        finally:
            timer.cancel()
            running.block_wait = None
        if result is not None and not self._requests.is_current(running):
            undo_answer(wait.answer)
            return None
        return result

    def free(self, free: Callable[[Engine], object]) -> None:
        self._engine.call(free)

    def free_when_settled(self, settled: "Future[None]", free: Callable[[Engine], object]) -> None:
        """Free blocks that a transfer may still write, once it has ended."""
        settled.add_done_callback(lambda _: self._engine.call(free))

    def free_after_quarantine(self, free: Callable[[Engine], object]) -> None:
        """Free blocks of a transfer whose state is unknown."""
        asyncio.get_running_loop().call_later(self._quarantine_s, self._engine.call, free)
