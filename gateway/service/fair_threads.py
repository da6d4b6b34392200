"""A few threads whose tenants take turns, so that one tenant's long work does not hold another's."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from penstock.infra.fair_queue import FairQueue, QueueLimits
from penstock.schemas.errors import Code, ServingError

T = TypeVar("T")

LIMITS = QueueLimits(entries=4_096, size_bytes=1 << 30, tenant_entries=1_024, tenant_bytes=256 << 20)
RETRY_S = 1.0


class _Job(NamedTuple):
    tenant: str
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class FairThreads:
    """
    Args:
        threads: each competes with the event loop for the interpreter.
        per_tenant: how many of them one tenant's work may hold at once; fewer than all, so that another finds one.
    """

    def __init__(self, threads: int, per_tenant: int, name: str, limits: QueueLimits = LIMITS) -> None:
        self._free = threads
        self._per_tenant = per_tenant
        self._executor = ThreadPoolExecutor(threads, name)
        self._waiting: FairQueue[_Job] = FairQueue(limits)
        self._running: Counter[str] = Counter()

    def close(self) -> None:
        """Nothing that waits is begun. What runs ends on its own."""
        while (job := self._waiting.take()) is not None:
            job.done.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises.

        Args:
            size_bytes: of what the work holds while it waits.
        Raises:
            ServingError: overloaded: too much waits already.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._waiting.add(tenant, done, _Job(tenant, work, done), size_bytes):
            raise ServingError(Code.overloaded, "too many large requests wait to be prepared", retry_after=RETRY_S)
        self._begin()
        try:
            return await done
        finally:
            self._waiting.drop(tenant, done)  # its client has gone

    def _begin(self) -> None:
        while self._free and (job := self._waiting.take(self._held)) is not None:
            self._free -= 1
            self._running[job.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            running.add_done_callback(partial(self._end, job))

    def _held(self, tenant: str) -> bool:
        return self._running[tenant] >= self._per_tenant

    def _end(self, job: _Job, future: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if job.done.done():
            if not future.cancelled():
                future.exception()  # nobody waits for it
        elif future.cancelled():
            job.done.cancel()
        elif (error := future.exception()) is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())
        self._begin()
