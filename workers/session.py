"""One registered life of a worker: from lease to lease. The engine outlives it; a lost lease starts another.

Everything a session says carries its worker id, so after losing its lease nothing of it can be mistaken for the
next one's.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import OrderedDict
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from configs.bus.connection import Bus
from configs.bus.publish import Publisher
from configs.bus.pull import ACK, IN_PROGRESS, TERM, Puller
from configs.detokenize import Detokenizer
from configs.settings import WorkerSettings
from schemas import done, fleet, jobs, kv, requests
from schemas.control import Ok, Push, Pushed, Release
from schemas.errors import Code, ServingError
from schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from schemas.transfer import Encoded, Endpoint, Memory, Prefilled
from workers.dump import Dumper
from workers.engines.base import (
    Engine,
    EngineInfo,
    EngineStats,
    MediaReservation,
    RequestError,
    Reservation,
    VisionEngine,
)
from workers.lease import Lease
from workers.metrics import Metrics
from workers.outbox import Outbox
from workers.report import Reporter
from workers.requests import Active, admit, already_over, sequences
from workers.runner import Choice, EngineThread, Flush
from workers.stages import Stages
from workers.transfer.base import Transport

log = structlog.get_logger("worker")

ACK_WAIT_S = 30.0
REMEMBERED = 20_000
QUEUE_SHARE = 0.25  # jobs taken beyond the slots, so that a freed slot has work at once


class Model(msgspec.Struct, frozen=True):
    """What a worker must know of its model besides the engine."""

    name: str
    aliases: tuple[str, ...]
    revision: str
    detokenizer: Detokenizer | None
    connection: str


class Session:
    """Run with ``open``, then wait on ``lost``; end with ``drain`` or ``abandon``."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        engine: EngineThread,
        info: EngineInfo,
        model: Model,
        settings: WorkerSettings,
        metrics: Metrics,
        transport: Transport | None = None,
        vision: VisionEngine | None = None,
    ) -> None:
        self.id = f"{settings.name or 'worker'}-{secrets.token_hex(4)}"
        self.epoch = time.time_ns()
        self.lost = asyncio.Event()
        self._bus = bus
        self._engine = engine
        self._info = info
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, Active] = {}
        self._finishing: set[asyncio.Future[Any]] = set()
        self._over: OrderedDict[str, int] = OrderedDict()  # request -> attempt that ended or was revoked here
        self._cancels: OrderedDict[str, str] = OrderedDict()
        self._stats = EngineStats(0, 0, 0, 0, info.total_blocks)
        self._state = fleet.State.ready
        self._flushes: asyncio.Queue[Flush] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._queue = max(1, int(info.slots * QUEUE_SHARE))
        self._lease = Lease(bus, self.id, self._registration, self._on_lost, self._on_regained)
        self._outbox = Outbox(bus, self._lease.trusted)
        self._report = Reporter(bus, publisher, self._outbox, self.id, self.epoch, metrics)
        self._dumper = Dumper(engine, self.id, self.epoch)
        self._transport = transport
        self._vision = vision
        self._moving: set[asyncio.Future[Any]] = set()  # stages under way between workers
        self._stages = Stages(
            self,
            bus,
            publisher,
            self._outbox,
            engine,
            info,
            transport,
            vision,
            model.name,
            model.revision,
            settings,
            metrics,
        )
        self._puller = Puller(bus, bus.subjects.stream("WORK"), self.id, self._on_work, self._room)

    # --- life ---

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
        self._tasks = [
            asyncio.create_task(self._publish_flushes(), name="flushes"),
            asyncio.create_task(self._housekeeping(), name="housekeeping"),
        ]
        await self._stages.open()
        await self._puller.start()
        await self._lease.acquire()
        log.info("worker_registered", worker=self.id, model=self._model.name, slots=self._info.slots)

    def _consumer(self) -> ConsumerConfig:
        return ConsumerConfig(
            name=self.id,
            durable_name=self.id,
            filter_subject=self._bus.subjects.work(self._settings.role, self.id),
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=4 * (self._info.slots + self._queue),
            inactive_threshold=120.0,  # the server removes what a killed worker leaves behind
        )

    async def drain(self, timeout: float) -> None:
        """Finish what runs, give back what has not started, leave."""
        if self._state is not fleet.State.draining:
            self._state = fleet.State.draining
            # Jobs are still taken, to be given back at once: routers hear of the draining a moment later.
            await self._puller.top_up()
            await self._lease.update()
            for active in [a for a in self._active.values() if not a.started_ns]:
                await self.give_back(active, "draining")
        try:
            async with asyncio.timeout(timeout):
                while self._active or self._finishing or self._stages.open_leases:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("drain_timeout", unfinished=len(self._active))
            for active in list(self._active.values()):
                await self.give_back(active, "draining")
        await self._puller.drain()
        await self._settle()
        await self._lease.release()
        await self._close()

    async def fail(self, reason: str) -> None:
        """The engine is broken: give everything back, as poison if it was running, and leave."""
        await self._puller.close()
        for active in list(self._active.values()):
            await self.give_back(active, reason, poison=bool(active.started_ns))
        await self._settle()
        await self._lease.release()
        await self._close()

    async def abandon(self) -> None:
        """The lease is lost: drop everything without a word; others have taken over."""
        await self._puller.close()
        await self._lease.abandon()
        self._outbox.drop()
        for active in list(self._active.values()):
            self._remove(active)
        if self._moving:  # bounded by the transfer's own time; nothing may go on in the next session's name
            await asyncio.wait(self._moving, timeout=self._settings.transfer_timeout_s + 1.0)
        # Also without choices: behind this the engine delivers nothing more to this session, so that no flush is left
        # untaken here and the engine waits for it.
        dropped = asyncio.Event()

        def tell() -> None:
            self._loop.call_soon_threadsafe(dropped.set)

        self._engine.cancel([], tell)
        self._engine.taken()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(dropped.wait(), 10)
        await self._close()
        self._engine.new_epoch()

    async def _settle(self) -> None:
        """Wait, bounded, until terminal events and returns are stored."""
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=5.0)

    async def _close(self) -> None:
        await self._stages.close()
        for task in (*self._tasks, *self._moving):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._moving, return_exceptions=True)
        while not self._flushes.empty():
            self._flushes.get_nowait()
            self._engine.taken()
        if self._bus.connected:
            with contextlib.suppress(Exception):
                await self._bus.js.delete_consumer(self._bus.subjects.stream("WORK"), self.id)

    def _on_lost(self) -> None:
        self.lost.set()

    async def _on_regained(self) -> None:
        await self._outbox.resend()

    def _registration(self) -> fleet.Registration:
        info, stats = self._info, self._stats
        return fleet.Registration(
            worker=self.id,
            model=self._model.name,
            role=self._settings.role,
            engine=info.name,
            epoch=self.epoch,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            slots=info.slots,
            max_model_len=info.max_model_len,
            state=self._state,
            aliases=self._model.aliases,
            revision=self._model.revision,
            kv_events=info.kv_events and self._settings.publish_events_and_metrics,
            load=fleet.Load(stats.running, stats.waiting, stats.used_blocks, stats.cached_blocks),
            dp_size=info.dp_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=self._settings.name,
            queue=self._queue,
            connection=self._model.connection,
            transfer=self._endpoint(),
            vision=self._vision is not None,
        )

    def _endpoint(self) -> Endpoint | None:
        """How other workers reach this one's blocks; of engines that move KV by themselves only who fits whom."""
        if self._transport is not None:
            return self._transport.endpoint
        if not self._info.handover:
            return None
        layout = {"kv": Memory(0, 0, 0, layout=self._info.handover)}
        return Endpoint(self.id, self._info.name, pools=layout, address=socket.gethostname())

    async def renewed(self) -> None:
        """The transfer agent was made anew: say how it is reached now."""
        await self._lease.update()

    # --- work in ---

    def _room(self) -> int:
        taken = len(self._active) if self._state is fleet.State.ready else 0
        return self._info.slots + self._queue - taken

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
            if not await self._on_job(job, request, message, arrived):
                return
        await self._bus.nc.publish(message.reply, ACK)

    async def _on_job(
        self, job: jobs.Job, request: requests.GenerateRequest, message: Any, arrived: Prefilled | Encoded | None = None
    ) -> bool:
        """Start a job, or what the stage before made of it; True: its message needs no more than an acknowledgement."""
        if self._over.get(request.id, -1) >= job.attempt:
            return True
        running = self._active.get(request.id)
        if running is not None and running.attempt > job.attempt:
            return True
        if running is not None and running.attempt == job.attempt:
            running.delivery = message  # delivered again, after the broker restarted
            return False
        if running is not None:  # steered here again before this worker heard that it had lost the request
            await self._revoke(jobs.Revoke(request.id, running.attempt))
        try:
            active = admit(job, request, message, self._model.detokenizer)
        except Exception as error:
            log.exception("job_refused", request=request.id)
            active = Active(request, job.attempt, message, [], [], job.decision.at_ns)
            await self._end(active, Code.invalid_request, f"the worker cannot run this request: {error}")
            return False
        if self._state is fleet.State.draining:
            self._active[request.id] = active
            await self.give_back(active, "draining")
            return False
        if request.id in self._cancels:
            await self._end(active, Code.cancelled, self._cancels[request.id])
            return False
        if time.time_ns() >= request.deadline_ns:
            await self._end(active, Code.deadline_exceeded, "the deadline passed before the request could start")
            return False
        self._active[request.id] = active
        active.renewed = time.monotonic()
        for choice in active.choices:
            if active.outcomes[choice.index] is None and (finish := already_over(choice, request)):
                await self._finish_choice(active, choice, finish)
        if active.ended:
            self._finish(active)
        else:
            self._begin(active, arrived)
        return False

    def _begin(self, active: Active, arrived: Prefilled | Encoded | None) -> None:
        if self._settings.role == "encode":
            self._move(self._stages.encode(active))
        elif isinstance(arrived, Prefilled):
            self._move(self._stages.take_over(active, arrived))
        elif active.request.media:
            self._move(self._stages.see(active, arrived))
        else:
            self.compute(active)

    # --- for stages ---

    def current(self, active: Active) -> bool:
        """It is still this worker's to run."""
        return self._active.get(active.request.id) is active and active.cancelled is None

    def trusted(self) -> bool:
        """This worker may speak."""
        return self._lease.trusted()

    def compute(self, active: Active, reservation: Reservation | None = None, opaque: bytes = b"") -> None:
        """Give a request to the engine, with the KV that was brought here for it, or with what it needs to fetch it."""
        asked = sequences(active, self._model.revision, self._info.block_size, reservation, opaque)
        if reservation is not None:
            self._engine.call(lambda engine: engine.adopt(reservation))
        self._engine.submit(asked, lambda error: self._refuse(active, error))

    async def end(self, active: Active, code: Code, message: str) -> None:
        """End a request that this worker still has."""
        if self._active.get(active.request.id) is active:
            await self._end(active, code, message)

    def passed_on(self, active: Active) -> None:
        """The next stage has it."""
        self._remember(active.request.id, active.attempt)
        self._remove(active, cancel=False, drop=False)  # the lease holds the blocks

    def release(self, order: Release) -> Ok:
        return self._stages.release(order)

    async def push(self, order: Push) -> Pushed:
        return await self._stages.push(order)

    def _move(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._moving.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: "asyncio.Future[Any]") -> None:
        self._moving.discard(task)
        self._idle.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("stage_failed", error=repr(task.exception()), exc_info=task.exception())

    def _remove(self, active: Active, *, cancel: bool = True, drop: bool = True) -> None:
        """This worker has no more to do with a request: the engine lets go of all that is kept for it."""
        if self._active.get(active.request.id) is active:
            del self._active[active.request.id]
        self._idle.set()
        if cancel:
            self._engine.cancel(active.choices)
        holder, media = active.holder, active.media
        if holder is not None and drop:
            self._engine.call(lambda engine: engine.drop(holder))
        if media is not None:
            active.media = None
            self._engine.call(lambda engine: _let_go(engine, media))

    def _refuse(self, active: Active, error: RequestError) -> None:
        """In the engine thread: the engine takes none of the request's sequences."""

        def end() -> None:
            self._spawn(self._end(active, Code(error.code), error.message))

        self._loop.call_soon_threadsafe(end)

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
            if request_id not in self._over:
                self._cancels[request_id] = reason
                if len(self._cancels) > REMEMBERED:
                    self._cancels.popitem(last=False)
            return
        self._stop_early(active, Code.cancelled, reason)

    def _stop_early(self, active: Active, code: Code, message: str) -> None:
        """End a running request at the next step border."""
        if active.cancelled is not None or active.leaving:
            return  # the next stage hears of it too
        active.cancelled = (code, message)

        def dropped() -> None:  # engine thread; what was generated until now was handed over before
            self._loop.call_soon_threadsafe(self._flushes.put_nowait, _Ended(active))

        self._engine.cancel(active.choices, dropped)

    # --- tokens out ---

    def deliver(self, flush: Flush) -> None:
        """In the engine thread."""
        self._loop.call_soon_threadsafe(self._flushes.put_nowait, flush)

    async def _publish_flushes(self) -> None:
        while True:
            flush = await self._flushes.get()
            try:
                if isinstance(flush, _Ended):
                    await self._end_early(flush.active)
                    continue
                for gateway, items in flush.items.items():
                    await self._report.items(gateway, tuple(items))
                if flush.events and self._settings.publish_events_and_metrics:
                    await self._report.events(self._model.name, flush.seq, tuple(flush.events))
                self._account(flush)
            except Exception:
                log.exception("flush_failed")
            finally:
                if not isinstance(flush, _Ended):
                    self._engine.taken()

    def _account(self, flush: Flush) -> None:
        for choice in flush.started:
            active = choice.owner
            assert isinstance(active, Active)
            if not active.started_ns:
                active.started_ns = choice.started_ns
                active.cached = choice.cached
        if flush.items:
            now = time.time_ns()
            tokens = 0
            for items in flush.items.values():
                for item in items:
                    tokens += len(item.tokens) >> 2
                    if not item.first:
                        active_now = self._active.get(item.request)
                        if active_now is not None and not active_now.first_token_ns:
                            active_now.first_token_ns = now
            self._metrics.tokens.inc(tokens)
        for held in flush.held:
            choice = held.key  # type: ignore[assignment]
            active = choice.owner
            assert isinstance(active, Active)
            active.held = held
        for choice in flush.started:
            active = choice.owner
            assert isinstance(active, Active)
            if active.fetching is not None:
                self._stages.fetched(active)
        for choice in flush.ended:
            active = choice.owner
            assert isinstance(active, Active)
            finish = choice.finish
            if choice.lacking:
                self._spawn(self.give_back(active, choice.lacking))
                continue
            if finish is not None:
                active.outcomes[choice.index] = done.Outcome(choice.tokens.tobytes(), finish.reason, finish.stop)
            if not active.computed or active.leaving or not self.current(active):
                continue
            if active.ended:
                self._finish(active)
            else:
                active.leaving = True
                self._move(self._stages.hand_over(active))

    # --- ends ---

    def _finish(self, active: Active) -> None:
        """All choices ended: the terminal event, and after its acknowledgement the job's."""
        self._remove(active, cancel=False)
        self._remember(active.request.id, active.attempt)
        self._spawn(self._report.done(active))

    async def _finish_choice(self, active: Active, choice: Choice, finish: Finish) -> None:
        """End a choice that the engine does not run."""
        choice.finish = finish
        active.outcomes[choice.index] = done.Outcome(choice.tokens.tobytes(), finish.reason, finish.stop)
        request = active.request
        item = TokenItem(request.id, active.attempt, choice.index, len(choice.tokens), b"", finish)
        await self._report.items(request.gateway, (item,))

    async def _end(self, active: Active, code: Code, message: str) -> None:
        """End a request that does not run (any more) with an error."""
        request = active.request
        reason = "cancelled" if code is Code.cancelled else "error"
        finish = Finish(reason, None, active.cached, code.value, message)
        item = TokenItem(request.id, active.attempt, WHOLE_REQUEST, 0, b"", finish)
        await self._report.items(request.gateway, (item,))
        active.cancelled = (code, message)
        self._finish(active)

    async def _end_early(self, active: Active) -> None:
        if self._active.get(active.request.id) is active and active.cancelled is not None:
            await self._end(active, *active.cancelled)

    async def give_back(self, active: Active, reason: str, poison: bool = False) -> None:
        """This attempt ends here; a router steers the request again, from the tokens already streamed."""
        request = active.request
        if self._active.get(request.id) is not active:
            return
        self._remember(request.id, active.attempt)
        self._remove(active)
        self._spawn(self._report.returned(active, reason, poison))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._finishing.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: "asyncio.Future[Any]") -> None:
        self._finishing.discard(task)
        self._idle.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("ending_failed", error=repr(task.exception()))

    def _remember(self, request_id: str, attempt: int) -> None:
        self._over[request_id] = attempt
        self._cancels.pop(request_id, None)
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    # --- upkeep ---

    async def _housekeeping(self) -> None:
        """Deadlines, in-progress signs, statistics."""
        while True:
            await asyncio.sleep(0.1)
            now_ns, now = time.time_ns(), time.monotonic()
            for active in list(self._active.values()):
                if now_ns >= active.request.deadline_ns:
                    self._stop_early(active, Code.deadline_exceeded, "the deadline passed while the request ran")
                if now - active.renewed > ACK_WAIT_S / 3 and self._bus.connected:
                    active.renewed = now
                    await self._bus.nc.publish(active.delivery.reply, IN_PROGRESS)
            self._stages.sweep(now)
            self._engine.ask(lambda engine: engine.stats(), self._stats_arrived)

    def _stats_arrived(self, stats: EngineStats) -> None:
        self._stats = stats  # a reference assignment, from the engine thread
        self._metrics.observe(stats, self._outbox.unsent_bytes)

    async def dump(self, page: int) -> kv.KvDump:
        """A page of the cache's names."""
        return await self._dumper.page(page, self._bus.max_message // 2)


class _Ended(Flush):
    """In the order of flushes: the engine has dropped this request."""

    __slots__ = ("active",)

    def __init__(self, active: Active) -> None:
        super().__init__()
        self.active = active


def _let_go(engine: Engine, media: MediaReservation) -> None:
    engine.media_let_go(media)  # type: ignore[attr-defined]  # only an engine with eyes made one
