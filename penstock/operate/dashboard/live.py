"""The newest snapshot of a deployment, shared by all open pages.

Without an open page nothing is read. However many are open, the broker is asked once per interval.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

import structlog

from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.operate.observe import DeploymentSnapshot, Observer
from penstock.schemas.errors import ServingError

log = structlog.get_logger("dashboard")

HISTORY = 180  # snapshots
AGAIN_S = 2.0  # after the broker did not answer
KEPT_S = 10.0  # without a watcher; afterwards, earlier data is outdated and a new line begins
FRESH_S = 2.0  # the age up to which counts are shown as those of now


class Moment(NamedTuple):
    """The last snapshots, and the reason if there is no newer one ("": there is)."""

    history: tuple[DeploymentSnapshot, ...]
    problem: str = ""


class Live:
    """Run ``run`` in a task; iterate over ``follow`` for every watcher."""

    def __init__(self, observer: Observer, interval_s: float) -> None:
        self._observer = observer
        self._interval_s = interval_s
        self._history: deque[DeploymentSnapshot] = deque(maxlen=HISTORY)
        self._problem = ""
        self._changed = asyncio.Condition()
        self._watchers = 0
        self._watched = asyncio.Event()
        self._number = 0  # of looks
        self._left = float("-inf")  # monotonic: when the last watcher went

    @property
    def now(self) -> Moment:
        """The last snapshots; empty if no page was open lately, or none is as new as a page that opens shows."""
        if self._is_old or not (self._is_fresh or self._problem):
            return Moment((), "")
        return Moment(tuple(self._history), self._problem)

    @property
    def _is_old(self) -> bool:
        return not self._watchers and time.monotonic() - self._left > KEPT_S

    @property
    def _is_fresh(self) -> bool:
        return bool(self._history) and time.time_ns() - self._history[-1].at_ns < FRESH_S * 1e9

    @property
    def watchers(self) -> int:
        return self._watchers

    async def run(self) -> None:
        """Read the state repeatedly while a page is open."""
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
        if self._is_old:
            self._history.clear()
        self._watchers += 1
        self._watched.set()
        seen = self._number if self._history else -1
        try:
            if self._is_fresh:
                yield self.now
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen = self._number
                yield Moment(tuple(self._history), self._problem)
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._left = time.monotonic()
                self._watched.clear()
