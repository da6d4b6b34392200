"""One registered life of a worker: from lease to lease. What computes outlives it; a lost lease starts another.

Everything a life says carries its worker id, so after losing its lease nothing of it can be mistaken for the next
one's. This module knows jobs, attempts, cancellations, deadlines and ends; what a request is made into, and by what,
is the subclass's matter (``workers.session``: tokens; ``workers.diffusion``: pictures).
"""

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from configs.settings import WorkerSettings
from infra.bus.connection import Bus
from infra.bus.publisher import Publisher
from infra.bus.puller import ACK, IN_PROGRESS, TERM, Puller
from infra.bus.tasks import as_serving_error
from infra.model.detokenizer import Detokenizer
from schemas import fleet, jobs, requests
from schemas.control import Ok, Push, Pushed, Release
from schemas.errors import Code, ServingError
from schemas.kv import KvDump
from schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from schemas.trace import wanted
from schemas.transfer import Encoded, Prefilled
from workers.lease import Lease
from workers.metrics import Metrics
from workers.outbox import Outbox
from workers.reporter import Reporter
from workers.requests import RunningRequest

log = structlog.get_logger("worker")

ACK_WAIT_S = 30.0
SETTLE_S = 2.0  # for what is on its way in the end
REMEMBERED = 20_000

StageInput = Prefilled | Encoded


class Model(msgspec.Struct, frozen=True):
    """What a worker must know of its model besides the engine."""

    name: str
    aliases: tuple[str, ...]
    revision: str
    detokenizer: Detokenizer | None
    connection: str
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    tokenizer: str = ""  # digest of it


class Life(ABC):
    """Run with ``open``, then wait on ``lost``; end with ``drain``, ``fail`` or ``fence``.

    Args:
        slots: requests that run at once.
        queue: requests taken beyond them.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        model: Model,
        settings: WorkerSettings,
        metrics: Metrics,
        *,
        slots: int,
        queue: int,
    ) -> None:
        self.id = f"{settings.name or 'worker'}-{secrets.token_hex(4)}"
        self.epoch = time.time_ns()
        self.lost = asyncio.Event()
        self._bus = bus
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._slots = slots
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, RunningRequest] = {}
        self._finishing: set[asyncio.Future[Any]] = set()
        self._ending: dict[str, RunningRequest] = {}  # those whose end is not stored yet
        self._over: OrderedDict[str, int] = OrderedDict()  # request -> attempt that ended or was revoked here
        self._cancels: OrderedDict[str, str] = OrderedDict()
        self._state = fleet.State.ready
        self._tasks = bus.tasks.group(self.id)  # what fails there without a handler ends the process
        self._idle = asyncio.Event()
        self._lease = Lease(bus, self.id, self._registration, self._on_lost, self._on_regained)
        self._outbox = Outbox(bus, self._lease.trusted, acknowledged=settings.durability == "power")
        self._report = Reporter(bus, publisher, self._outbox, self.id, self.epoch, metrics)
        self._puller = Puller(bus, bus.subjects.stream("WORK"), self.id, self._on_work, self._room)

    # --- what a kind of worker does ---

    @abstractmethod
    def _registration(self) -> fleet.Registration:
        """How it is registered now."""

    @abstractmethod
    def _admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        """The state of a request that came; whatever it raises ends the request as invalid."""

    @abstractmethod
    async def _take(self, active: RunningRequest, arrived: StageInput | None) -> None:
        """Begin with a request, or go on with what the stage before made of it."""

    @abstractmethod
    def _stop_early(self, active: RunningRequest, code: Code, message: str) -> None:
        """End a running request at the next border between two steps."""

    def _remove(self, active: RunningRequest, *, cancel: bool = True) -> None:
        """This worker has no more to do with a request; ``cancel``: it may still be computing it."""
        if self._active.get(active.request.id) is active:
            del self._active[active.request.id]
        self._idle.set()

    def _background(self) -> None:  # noqa: B027
        """Begin what runs from ``open`` to the end."""

    def _unwanted(self, arrived: StageInput) -> None:  # noqa: B027
        """What the stage before made of a request that is not run here (any more)."""

    async def _opening(self) -> None:  # noqa: B027
        """Before the first job can come."""

    async def _closing(self) -> None:  # noqa: B027
        """First step of the end: nothing comes any more."""

    def _upkeep(self, now: float) -> None:  # noqa: B027
        """A few times a second."""

    async def _not_begun(self) -> list[RunningRequest]:
        """Requests of which nothing was computed here, and nothing will be: any other worker may begin them."""
        return [active for active in self._active.values() if not active.started_ns]

    def _holding(self) -> bool:
        """Whether something is held for others, for which draining waits."""
        return False

    # --- orders, of those who have the like ---

    async def dump(self, page: int) -> KvDump:
        """A page of the cache's names; of a worker without a cache an empty one."""
        return KvDump(self.id, self.epoch, 0, ())

    def release(self, order: Release) -> Ok:
        return Ok(error="this worker pins no blocks")

    async def push(self, order: Push) -> Pushed:
        return Pushed("refused", "this worker holds no blocks")

    # --- from open to the end ---

    async def open(self) -> None:
        """Create this life's consumer, register, and start pulling.

        Raises:
            ServingError: the broker refused the consumer or the registration.
        """
        stream = self._bus.subjects.stream("WORK")
        try:
            await self._bus.js.add_consumer(stream, self._consumer())
        except (NatsError, TimeoutError) as error:
            raise ServingError(
                Code.broker_unavailable,
                f"no consumer could be created on {stream} ({error!r}); run 'penstock streams apply' and check the "
                "user's permissions",
            ) from error
        self._background()
        self._tasks.spawn(self._housekeeping(), name="housekeeping")
        await self._opening()
        await self._puller.start()
        await self._lease.acquire()
        log.info("worker_registered", worker=self.id, model=self._model.name, slots=self._slots)

    def _consumer(self) -> ConsumerConfig:
        return ConsumerConfig(
            name=self.id,
            durable_name=self.id,
            filter_subject=self._bus.subjects.work(self._settings.role, self.id),
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=4 * (self._slots + self._queue),
            # The server removes it behind us: the right to do that would be one over all workers' consumers.
            inactive_threshold=120.0,
        )

    async def drain(self, timeout: float) -> None:
        """Finish what runs, give back what has not started, leave."""
        if self._state is not fleet.State.draining:
            self._state = fleet.State.draining
            # Jobs are still taken, to be given back at once: routers hear of the draining a moment later.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._puller.top_up()
                    await self._lease.update()
            for active in await self._not_begun():
                await self.requeue(active, "draining")
        try:
            async with asyncio.timeout(timeout):
                while self._active or self._finishing or self._holding():
                    self._idle.clear()
                    with contextlib.suppress(TimeoutError):  # the end of a lease sets no event
                        await asyncio.wait_for(self._idle.wait(), 0.1)
        except TimeoutError:
            log.warning("drain_timeout", unfinished=len(self._active))
            for active in list(self._active.values()):
                await self.requeue(active, "draining")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._puller.drain()
        await self._puller.close()
        await self._settle()
        await self._lease.release()
        await self._close()

    async def fail(self, reason: str, *, poison: bool = True) -> None:
        """What computes, or serves it, is broken: give everything back, and leave.

        Args:
            poison: what was running may be the cause.
        """
        await self._puller.close()
        for active in list(self._active.values()):
            await self.requeue(active, reason, poison=poison and bool(active.started_ns))
        await self._settle()
        await self._lease.release()
        await self._close()

    async def fence(self) -> None:
        """The lease is lost: drop everything without a word; others have taken over."""
        await self._drop_all()
        await self._close()

    async def _drop_all(self) -> None:
        await self._puller.close()
        await self._lease.stop()
        self._outbox.clear()
        for end in self._finishing:
            end.cancel()
        for active in list(self._active.values()):
            self._remove(active)

    async def _settle(self) -> None:
        """BlockWait, bounded, until terminal events and returns are stored."""
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=SETTLE_S)

    async def _close(self) -> None:
        await self._closing()
        await self._tasks.aclose()  # of ends: whoever takes over reads in the log how far they came

    def _on_lost(self) -> None:
        self.lost.set()

    async def _on_regained(self) -> None:
        await self._outbox.resend()

    async def renewed(self) -> None:
        """What the registration says has changed: publish it now."""
        await self._lease.update()

    # --- work in ---

    def _room(self) -> int:
        room = self._slots + self._queue
        if self._state is not fleet.State.ready:
            return room
        # Ends that cannot be stored are as many as fit in here once more, then no more work is taken.
        return room - len(self._active) - max(0, len(self._ending) - room)

    async def _on_work(self, message: Any) -> None:
        try:
            work = jobs.decode(message.data)
            job = work if isinstance(work, jobs.Job) else None
            if isinstance(work, Prefilled | Encoded):
                job = jobs.decode_job(work.job)
            request = requests.decode(job.request) if job is not None else None
        except msgspec.MsgspecError as error:
            log.error("job_unreadable", error=str(error))
            await self._bus.nc.publish(message.reply, TERM)
            return
        if isinstance(work, jobs.Revoke):
            await self._revoke(work)
        elif job is not None and request is not None:
            arrived = work if isinstance(work, Prefilled | Encoded) else None
            over = await self._on_job(job, request, message, arrived)
            running = self._active.get(request.id)
            if arrived is not None and (running is None or running.attempt != job.attempt):
                self._unwanted(arrived)
            if not over:
                return
        await self._bus.nc.publish(message.reply, ACK)

    async def _on_job(
        self, job: jobs.Job, request: requests.GenerateRequest, message: Any, arrived: StageInput | None = None
    ) -> bool:
        """Start a job, or what the stage before made of it; True: its message needs no more than an acknowledgement."""
        if self._over.get(request.id, -1) >= job.attempt:
            return True
        ending = self._ending.get(request.id)
        if ending is not None and ending.attempt > job.attempt:
            return True
        if ending is not None and ending.attempt == job.attempt:
            ending.delivery = message  # neither run again nor acknowledged before its end is stored
            return False
        running = self._active.get(request.id)
        if running is not None and running.attempt > job.attempt:
            return True
        if running is not None and running.attempt == job.attempt:
            running.delivery = message  # delivered again, after the broker restarted
            return False
        if running is not None:  # steered here again before this worker heard that it had lost the request
            await self._revoke(jobs.Revoke(request.id, running.attempt))
        try:
            active = self._admit(job, request, message)
        except Exception as error:
            log.exception("job_rejected", request=request.id)
            active = RunningRequest(request, job.attempt, message, [], [], job.decision.at_ns, job=job)
            await self._end(active, Code.invalid_request, f"the worker cannot run this request: {error}")
            return False
        if self._state is fleet.State.draining:
            self._active[request.id] = active
            await self.requeue(active, "draining")
            return False
        if request.id in self._cancels:
            await self._end(active, Code.cancelled, self._cancels[request.id])
            return False
        if time.time_ns() >= request.deadline_ns:
            await self._end(active, Code.deadline_exceeded, "the deadline passed before the request could start")
            return False
        if request.trace is not None and wanted(request.trace):
            active.marks = {"received_ns": time.time_ns()}
        self._active[request.id] = active
        active.renewed = time.monotonic()
        try:
            await self._take(active, arrived)
        except Exception as error:
            self._failed(active, "its start", error)
        return False

    def current(self, active: RunningRequest) -> bool:
        """It is still this worker's to run."""
        return self.owns(active) and active.cancelled is None

    def owns(self, active: RunningRequest) -> bool:
        """It is still this worker's, to run or to end."""
        return self._active.get(active.request.id) is active

    def trusted(self) -> bool:
        """This worker may speak."""
        return self._lease.trusted()

    async def _revoke(self, revoke: jobs.Revoke) -> None:
        self._remember(revoke.request, revoke.attempt)
        active = self._active.get(revoke.request)
        if active is not None and active.attempt <= revoke.attempt:
            self._remove(active)
            await self._bus.nc.publish(active.delivery.reply, ACK)

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """The client gave up. Remembered, in case the job is still on its way."""
        active = self._active.get(request_id)
        if active is None:
            if request_id not in self._over and request_id not in self._ending:
                self._cancels[request_id] = reason
                if len(self._cancels) > REMEMBERED:
                    self._cancels.popitem(last=False)
            return
        self._stop_early(active, Code.cancelled, reason)

    # --- ends ---

    def _finish(self, active: RunningRequest) -> None:
        """All choices ended: the terminal event, and after its acknowledgement the job's."""
        self._remove(active, cancel=False)
        self._conclude(active, partial(self._report.done, active))

    def _conclude(self, active: RunningRequest, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The request is over here once its end is stored; until then a job delivered again only waits for that."""
        self._ending[active.request.id] = active
        self._spawn(self._concluded(active, store))

    async def _concluded(self, active: RunningRequest, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        request_id = active.request.id
        try:
            await store()
            self._remember(request_id, active.attempt)
            await self._bus.nc.publish(active.delivery.reply, ACK)
        finally:
            if self._ending.get(request_id) is active:
                del self._ending[request_id]

    async def end(self, active: RunningRequest, code: Code, message: str) -> None:
        """End a request that this worker still has."""
        if self._active.get(active.request.id) is active:
            await self._end(active, code, message)

    async def _end(self, active: RunningRequest, code: Code, message: str) -> None:
        """End a request that does not run (any more) with an error."""
        request = active.request
        reason = "cancelled" if code is Code.cancelled else "error"
        finish = Finish(reason, None, active.cached, code.value, message)
        item = TokenItem(request.id, active.attempt, WHOLE_REQUEST, 0, b"", finish)
        await self._report.items(request.gateway, (item,))
        active.cancelled = (code, message)
        self._finish(active)

    async def _end_early(self, active: RunningRequest) -> None:
        if self._active.get(active.request.id) is active and active.cancelled is not None:
            await self._end(active, *active.cancelled)

    async def requeue(self, active: RunningRequest, reason: str, poison: bool = False) -> None:
        """This attempt ends here; a router steers the request again, from the tokens already streamed."""
        if self.owns(active):
            self._requeue(active, reason, poison)

    def _requeue(self, active: RunningRequest, reason: str, poison: bool) -> None:
        self._remove(active)
        self._conclude(active, partial(self._report.returned, active, reason, poison))

    def _failed(self, active: RunningRequest, what: str, error: BaseException) -> None:
        """Something that this worker did for a request failed: another one may do better, once."""
        log.error("request_failed", request=active.request.id, attempt=active.attempt, what=what, exc_info=error)
        if not self.owns(active):
            return
        if active.attempt == 1 and active.cancelled is None:
            self._requeue(active, f"{what} failed: {error!r}"[:300], poison=True)
            return
        reason = as_serving_error(error, what)
        active.cancelled = active.cancelled or (reason.code, reason.message)
        self._remove(active)
        self._spawn(self._end_anyway(active, *active.cancelled))

    async def _end_anyway(self, active: RunningRequest, code: Code, message: str) -> None:
        try:
            await self._end(active, code, message)
        except Exception as error:  # the terminal event says it too
            log.warning("finish_publish_failed", request=active.request.id, error=repr(error))
            self._finish(active)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.spawn(work, name="end", on_failure=self._not_ended)
        self._finishing.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: "asyncio.Future[Any]") -> None:
        self._finishing.discard(task)
        self._idle.set()

    def _not_ended(self, error: BaseException) -> None:
        """Its job is not acknowledged, so it is delivered again."""
        log.error("terminal_event_failed", error=repr(error))

    def _remember(self, request_id: str, attempt: int) -> None:
        self._over[request_id] = attempt
        self._cancels.pop(request_id, None)
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    # --- upkeep ---

    async def _housekeeping(self) -> None:
        """Deadlines, in-progress signs."""
        while True:
            await asyncio.sleep(0.1)
            now_ns, now = time.time_ns(), time.monotonic()
            for active in list(self._active.values()):
                if now_ns >= active.request.deadline_ns:
                    self._stop_early(active, Code.deadline_exceeded, "the deadline passed while the request ran")
            for active in (*self._active.values(), *self._ending.values()):
                if now - active.renewed > ACK_WAIT_S / 3 and self._bus.connected:
                    active.renewed = now
                    with contextlib.suppress(NatsError):  # the link broke just now; on the next one again
                        await self._bus.nc.publish(active.delivery.reply, IN_PROGRESS)
            with contextlib.suppress(NatsError):
                await self._outbox.confirm()
            self._upkeep(now)
