"""The newest snapshot of a deployment, shared by all open pages.

Without an open page nothing is read. However many are open, the broker is asked once per interval.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

import structlog

from infra.broker.jetstream_api import BrokerProblem
from infra.operate.observe import Observer, Snapshot
from schemas.errors import ServingError

log = structlog.get_logger("dashboard")

HISTORY = 180  # snapshots
AGAIN_S = 2.0  # after the broker did not answer


class Moment(NamedTuple):
    """The last snapshots, and the reason if there is no newer one ("": there is)."""

    history: tuple[Snapshot, ...]
    problem: str = ""


class Live:
    """Run ``run`` in a task; iterate over ``follow`` for every watcher."""

    def __init__(self, observer: Observer, interval_s: float) -> None:
        self._observer = observer
        self._interval_s = interval_s
        self._history: deque[Snapshot] = deque(maxlen=HISTORY)
        self._problem = ""
        self._changed = asyncio.Condition()
        self._watchers = 0
        self._watched = asyncio.Event()
        self._number = 0  # of looks

    @property
    def now(self) -> Moment:
        """The last snapshot; empty before the first page was opened."""
        return Moment(tuple(self._history), self._problem)

    @property
    def watchers(self) -> int:
        return self._watchers

    async def run(self) -> None:
        """Look again and again while anybody watches."""
        while True:
            await self._watched.wait()
            try:
                if not self._history:  # rates are between two looks
                    await self._observer.look()
                    await asyncio.sleep(self._interval_s / 2)
                self._history.append(await self._observer.look())
                self._problem = ""
            except (ServingError, BrokerProblem) as error:
                self._problem = str(error)
                log.warning("snapshot_failed", error=str(error))
            async with self._changed:
                self._number += 1
                self._changed.notify_all()
            await asyncio.sleep(AGAIN_S if self._problem else self._interval_s)

    async def follow(self) -> AsyncGenerator[Moment, None]:
        """Yield the present moment, and a new one after each read."""
        self._watchers += 1
        self._watched.set()
        seen = self._number if self._history else -1
        try:
            if self._history:
                yield self.now
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen = self._number
                yield self.now
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()
