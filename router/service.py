"""A router replica: pulls requests, decides with the core, publishes jobs, mends what dead workers leave behind.

All state is a fold of logs (KV events, WORK, DONE) and of the workers bucket, so any number of replicas decide
alike, and one that dies takes nothing with it: requests that it had not placed come again to another, those that
it had placed are in WORK.
"""

import asyncio
import functools
import random
import secrets
import time
from collections import OrderedDict
from typing import Any

import msgspec
import structlog

from configs.bus.connection import Bus
from configs.bus.fleet import Member
from configs.bus.publish import Ack, Publisher
from configs.bus.pull import ACK, IN_PROGRESS, TERM, Puller
from configs.settings import RouterSettings
from router.metrics import Metrics
from router.policy import Policy, Verdict
from router.rescue import Orphan, recover
from router.view import View
from router.waiting import WaitingRoom
from schemas import done, jobs, requests, wire
from schemas.blocks import keys_of
from schemas.errors import Code, ServingError
from schemas.jobs import Job
from schemas.requests import GenerateRequest, Priority
from schemas.subjects import HEADER_LOAD
from schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem

log = structlog.get_logger("router")

RENEW_S = 3.0  # the consumers' ack_wait is 10 s
SWEEP_S = 0.1
ORPHANS_S = 1.0
TERMINAL_S = 600.0
REMEMBERED = 50_000


class Waiting(msgspec.Struct, eq=False):
    """A request without a worker. ``reply``: acknowledge its message there; "" for one that is steered again."""

    request: GenerateRequest
    raw: bytes
    reply: str
    since_ns: int
    attempt: int = 1
    resume: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()
    reason: str = "new"
    renewed: float = 0.0


class Router:
    """``open`` it, then it works by itself; ``close`` gives unplaced requests back."""

    def __init__(self, bus: Bus, publisher: Publisher, settings: RouterSettings, metrics: Metrics) -> None:
        self.id = f"{settings.name or 'router'}-{secrets.token_hex(4)}"
        self._bus = bus
        self._publisher = publisher
        self._settings = settings
        self._metrics = metrics
        self._policy = Policy(
            settings.mode,
            overlap_weight=settings.overlap_weight,
            prefill_weight=settings.prefill_weight,
            temperature=settings.temperature,
            rng=random.Random(settings.seed or None),
        )
        self.view = View(bus, settings, on_change=self._pump_soon, on_returned=self._on_returned, on_lost=self._on_lost)
        self._rooms: dict[Priority, WaitingRoom[Waiting]] = {
            priority: WaitingRoom(settings.waiting_room) for priority in Priority
        }
        self._pullers: list[Puller] = []
        self._cancels: OrderedDict[str, str] = OrderedDict()
        self._rescuing: set[tuple[str, int]] = set()
        self._ending: set[str] = set()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._upkeep: list[asyncio.Task[None]] = []
        self._pump_due = False
        self._started = time.monotonic()

    # --- life ---

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        await self.view.start()
        self._upkeep = [
            asyncio.create_task(self._sweep(), name="router-sweep"),
            asyncio.create_task(self._watch_orphans(), name="router-orphans"),
        ]
        stream = self._bus.subjects.stream("REQUESTS")
        for priority in Priority:
            room = self._rooms[priority]
            puller = Puller(
                self._bus, stream, f"router-{priority.value}", self._on_request, functools.partial(getattr, room, "space")
            )
            await puller.start()
            self._pullers.append(puller)
        log.info("router_open", router=self.id, mode=self._settings.mode)

    async def close(self) -> None:
        for puller in self._pullers:
            await puller.stop()
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3.0)
        for room in self._rooms.values():
            for waiting in room.drain():
                if waiting.reply and self._bus.connected:
                    await self._bus.nc.publish(waiting.reply, b"-NAK")
        await self.view.stop()

    # --- requests in ---

    async def _on_request(self, message: Any) -> None:
        try:
            request = requests.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("request_unreadable", subject=message.subject, error=str(error))
            await self._bus.nc.publish(message.reply, TERM)
            return
        if self.view.loads.knows(request.id):  # placed already, its acknowledgement was lost with the broker
            await self._bus.nc.publish(message.reply, ACK)
            return
        if request.id in self._ending:
            return
        held = self._rooms[request.priority].get(request.id)
        if held is not None:
            held.reply = message.reply
            return
        await self._place(Waiting(request, message.data, message.reply, time.time_ns()))

    async def _place(self, waiting: Waiting, stay: bool = True) -> bool:
        """Give a request to a worker, or end it; False: it has to wait (in its room, if ``stay``)."""
        request = waiting.request
        now_ns = time.time_ns()
        if request.id in self._cancels:
            self._end(waiting, Code.cancelled, self._cancels[request.id])
            return True
        if now_ns >= request.deadline_ns:
            self._end(waiting, Code.deadline_exceeded, "the deadline passed before a worker was free")
            return True
        keys = keys_of(request.digests)
        verdict = self._policy.choose(request, self.view.candidates(request, keys, now_ns))
        if verdict.hopeless:
            self._end(waiting, verdict.hopeless, verdict.why)
            return True
        if not verdict.worker:
            if stay:
                self._rooms[request.priority].push(waiting)
            return False
        await self._dispatch(waiting, verdict, keys, now_ns)
        return True

    async def _dispatch(self, waiting: Waiting, verdict: Verdict, keys: tuple[int, ...], now_ns: int) -> None:
        """Publish the job; the request is acknowledged only after the job is stored."""
        request, attempt = waiting.request, waiting.attempt
        cached = min(verdict.overlap_blocks * request.block_size, len(request.prompt) // 4)
        decision = verdict.decision(
            router=self.id,
            at_ns=now_ns,
            waited_ns=now_ns - waiting.since_ns,
            reason=waiting.reason,
            positions=self.view.positions(),
            prompt_blocks=len(keys),
        )
        job = Job(
            request=msgspec.Raw(waiting.raw),
            attempt=attempt,
            decision=decision,
            resume=waiting.resume,
            finished=waiting.finished,
        )
        self.view.placed(request, attempt, verdict.worker, cached, keys, now_ns)
        acknowledged = await self._publisher.send(
            self._bus.subjects.work(verdict.role, verdict.worker),
            wire.encode(job),
            f"{request.id}:{attempt}",
            headers={
                HEADER_LOAD: jobs.load_header(
                    len(request.prompt) // 4, cached, request.gateway, request.deadline_ns, request.priority, request.n
                )
            },
            timeout=30.0,
        )
        self._metrics.placed(waiting.reason, cached, len(request.prompt) // 4, now_ns - waiting.since_ns)

        def stored(future: "asyncio.Future[Ack]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                ack = future.result()
                if ack.duplicate:
                    # Another router was first, perhaps with another worker: the log knows.
                    self.view.loads.withdraw(request.id, attempt, verdict.worker)
                if waiting.reply:
                    self._spawn(self._bus.nc.publish(waiting.reply, ACK))
                return
            log.warning("job_not_stored", request=request.id, error=str(error))
            self.view.loads.withdraw(request.id, attempt, verdict.worker)
            self._rooms[request.priority].push(waiting)

        acknowledged.add_done_callback(stored)

    def _pump_soon(self) -> None:
        """Room may have come free: look once per loop turn, not once per event."""
        if not self._pump_due and any(len(room) for room in self._rooms.values()):
            self._pump_due = True
            self._spawn(self._pump())

    async def _pump(self) -> None:
        """Place who waits, best class first; who finds no room lets the others pass."""
        self._pump_due = False
        for room in self._rooms.values():
            staying = []
            while self.view.any_room() and (waiting := room.pop(time.time_ns())) is not None:
                if not self.view.has_room(waiting.request.model) or not await self._place(waiting, stay=False):
                    staying.append(waiting)
            for waiting in staying:
                room.push(waiting)
        for puller in self._pullers:
            await puller.top_up()

    # --- ends that the router decides ---

    def _end(self, waiting: Waiting, code: Code, message: str) -> None:
        self._ending.add(waiting.request.id)
        self._spawn(self._tell_end(waiting, code, message))

    async def _tell_end(self, waiting: Waiting, code: Code, message: str) -> None:
        """Terminal token item, terminal event, acknowledgement: in this order, each stored before the next."""
        request, attempt = waiting.request, waiting.attempt
        reason = "cancelled" if code is Code.cancelled else "error"
        finish = Finish(reason, None, 0, code.value, message)
        item = TokenItem(request.id, attempt, WHOLE_REQUEST, 0, b"", finish)
        batch = TokenBatch(self.id, 0, 0, (item,))
        resumed = [wire.unpack_tokens(part) for part in waiting.resume]
        event = done.Done(
            request=request.id,
            model=request.model,
            attempt=attempt,
            choices=tuple(done.Outcome(part, reason) for part in waiting.resume),
            usage=done.Usage(len(request.prompt) // 4, sum(map(len, resumed))),
            timings=done.Timings(created_ns=request.created_ns, ended_ns=time.time_ns()),
            code=code.value,
            message=message,
            user=request.user,
        )
        subjects = self._bus.subjects
        try:
            await self._publisher.publish(
                subjects.tokens(request.gateway), wire.encode(batch), f"{request.id}:{attempt}:end", timeout=TERMINAL_S
            )
            await self._publisher.publish(
                subjects.done(request.model), wire.encode(event), request.id, timeout=TERMINAL_S
            )
            if waiting.reply:
                await self._bus.nc.publish(waiting.reply, ACK)
        finally:
            self._ending.discard(request.id)
        self.view.loads.finished(request.id)
        self._metrics.ended.labels(code.value).inc()
        log.info("request_ended_by_router", request=request.id, code=code.value)

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """A client gave up. If the request waits here it ends now; else its worker hears the same message."""
        if request_id in self._cancels:
            return
        self._cancels[request_id] = reason
        if len(self._cancels) > REMEMBERED:
            self._cancels.popitem(last=False)
        for room in self._rooms.values():
            waiting = room.remove(request_id)
            if waiting is not None:
                self._end(waiting, Code.cancelled, reason)

    # --- what dead workers leave behind ---

    def _on_lost(self, member: Member, why: str) -> None:
        worker = member.registration.worker
        log.warning("worker_lost", worker=worker, why=why)
        self._metrics.lost.inc()
        self._spawn(self._rescue_from({worker}, "worker_lost"))

    def _on_returned(self, event: done.Returned) -> None:
        self._spawn(self._rescue([(event.request, event.attempt)], f"returned: {event.reason}"[:200]))

    async def _watch_orphans(self) -> None:
        """The backstop: unfinished work of workers that are not registered, whoever placed it and whenever."""
        while True:
            await asyncio.sleep(ORPHANS_S)
            try:
                if self._bus.connected and self.view.settled():
                    gone = {worker for worker in self.view.loads.workers() if not self.view.is_member(worker)}
                    if gone:
                        await self._rescue_from(gone, "worker_lost")
            except Exception:
                log.exception("orphan_watch_failed")

    async def _rescue_from(self, workers: set[str], reason: str) -> None:
        attempts = [
            (entry.request, entry.attempt) for worker in workers for entry in self.view.loads.unfinished_of(worker)
        ]
        await self._rescue(attempts, reason)

    async def _rescue(self, attempts: list[tuple[str, int]], reason: str) -> None:
        """Steer unfinished requests again, behind the tokens that they have streamed."""
        fresh = [attempt for attempt in attempts if attempt not in self._rescuing]
        if not fresh:
            return
        self._rescuing.update(fresh)
        try:
            orphans = []
            for request_id, attempt in fresh:
                entry = self.view.loads.entry(request_id)
                if entry is not None and entry.attempt == attempt:
                    orphans.append(Orphan(request_id, attempt, entry.worker, entry.gateway, entry.seq))
            for found in await recover(self._bus, self._publisher, self.id, orphans):
                await self._steer_again(found, reason)
        except ServingError as error:
            log.warning("rescue_postponed", error=error.message, requests=len(fresh))
        finally:
            self._rescuing.difference_update(fresh)

    async def _steer_again(self, orphan: Orphan, reason: str) -> None:
        request = orphan.request
        assert request is not None
        entry = self.view.loads.entry(orphan.request_id)
        if entry is None or entry.attempt != orphan.attempt:
            return  # its terminal event or another router's decision came in the meantime
        waiting = Waiting(
            request,
            orphan.raw,
            "",
            time.time_ns(),
            attempt=orphan.attempt + 1,
            resume=tuple(part.tokens for part in orphan.progress),
            finished=tuple(i for i, part in enumerate(orphan.progress) if part.finish is not None),
            reason=reason,
        )
        if len(waiting.finished) == request.n:
            await self._tell_completed(orphan)
        elif waiting.attempt > self._settings.max_attempts:
            self._end(
                waiting,
                Code.worker_lost,
                f"{orphan.attempt} workers in turn were lost or failed while they ran this request ({reason})",
            )
        else:
            log.info("request_steered_again", request=request.id, attempt=waiting.attempt, reason=reason)
            self.view.loads.withdraw(orphan.request_id, orphan.attempt, orphan.worker)
            await self._place(waiting)

    async def _tell_completed(self, orphan: Orphan) -> None:
        """All tokens were streamed, only the terminal event is missing."""
        request = orphan.request
        assert request is not None
        finishes = [part.finish for part in orphan.progress]
        failed = next((f for f in finishes if f is not None and f.reason in ("error", "cancelled")), None)
        event = done.Done(
            request=request.id,
            model=request.model,
            attempt=orphan.attempt,
            worker=orphan.worker,
            choices=tuple(
                done.Outcome(part.tokens, part.finish.reason, part.finish.stop)
                for part in orphan.progress
                if part.finish is not None
            ),
            usage=done.Usage(
                len(request.prompt) // 4,
                sum(len(part.tokens) // 4 for part in orphan.progress),
                max((f.cached_tokens for f in finishes if f is not None), default=0),
            ),
            timings=done.Timings(created_ns=request.created_ns, ended_ns=time.time_ns()),
            code=failed.code if failed else "",
            message=failed.message if failed else "",
            user=request.user,
        )
        await self._publisher.publish(
            self._bus.subjects.done(request.model), wire.encode(event), request.id, timeout=TERMINAL_S
        )

    # --- upkeep ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(time.time_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed")

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        self.view.upkeep(now_ns)
        for room in self._rooms.values():
            for waiting in room.expired(now_ns):
                self._end(waiting, Code.deadline_exceeded, "the deadline passed before a worker was free")
            for waiting in room:
                if waiting.reply and now - waiting.renewed > RENEW_S and self._bus.connected:
                    waiting.renewed = now
                    await self._bus.nc.publish(waiting.reply, IN_PROGRESS)
        self._metrics.waiting.set(sum(len(room) for room in self._rooms.values()))
        self._pump_soon()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("router_task_failed", error=repr(task.exception()))
