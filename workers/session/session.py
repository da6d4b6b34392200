"""One registration of a worker: receive a job, admit it, run it, report it. The engine survives re-registration.

All output of a session carries its worker id. After a lost lease the next session has a new id, so nothing late can be
mistaken for the new session's. A ``RequestRunner`` runs the requests.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.clock import steady_ns
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.faststream_app import BusBroker, JobSubscriber
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.memory_storage import ContentReader, MemoryStreams, fetch
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import ACK, is_of, make_again, present, sequence
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import contents, fleet, jobs, requests
from penstock.schemas.done import MadeWith
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_PART, Subjects
from penstock.schemas.tokens import ANOTHER_MODEL, TokenBatch, TokenItem
from penstock.schemas.trace import wanted
from penstock.schemas.wire import encode
from penstock.workers.engines.support import build_of
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.session.crash_journal import CrashJournal
from penstock.workers.session.lease import Lease, Outbox
from penstock.workers.session.request_runner import RequestRunner, ServedModel, SessionContext, StageInput
from penstock.workers.session.requests import ACK_WAIT_S, Admission, Housekeeping, RequestTable, RunningRequest
from penstock.workers.session.terminal_events import SETTLE_S, Reporter, TerminalEvents

log = structlog.get_logger("worker")

CONSUMER_TTL_S = 120.0
ANNOUNCE_S = 10.0  # to store which fallback runs a request, before a router places it again
DECLARE_S = 1.0  # for the streams with memory storage, before output is sent again: a lease has 3 s
MISSING_S = 5.0  # without its consumer, a worker leaves the fleet
DRAIN_POLL_S = 0.1  # an expiring lease sets no event


class _Received(msgspec.Struct, frozen=True):
    """A received job; ``stage_input``: the output of the previous stage."""

    job: jobs.Job
    request: requests.GenerateRequest
    delivery: Any
    stage_input: StageInput | None


class _Revoked(msgspec.Struct, frozen=True):
    """A received revocation."""

    revoke: jobs.Revoke
    delivery: Any


def job_subscriber(
    broker: BusBroker,
    subjects: Subjects,
    role: str,
    worker: str,
    room: Callable[[], int] = lambda: 0,
    remake: Callable[[str], Awaitable[bool]] | None = None,
) -> JobSubscriber:
    """Where a worker's jobs arrive, revocations of them, and the outputs of earlier stages."""
    return broker.jobs(
        subjects.work(role, worker),
        stream=subjects.stream("WORK"),
        consumer=worker,
        room=room,
        decode=_decode,
        payload=jobs.WorkMessage,
        title="Jobs",
        remake=remake,
    )


class _Restoring:
    """A job whose content is being read from memory storage."""

    __slots__ = ("delivery", "received")

    def __init__(self, received: _Received) -> None:
        self.received = received  # without its content
        self.delivery = received.delivery  # the latest one

    @property
    def attempt(self) -> int:
        return self.received.job.attempt


class WorkerSession:
    """Run ``open``, then wait for ``lost``; end with ``drain``, ``fail`` or ``fence``.

    Args:
        broker: with which the handler of jobs subscribes.
        make_runner: makes the runner of this session's requests.
        journal: records running requests; None: they are not recorded.
    Attributes:
        requests: running ones, and those whose end is not stored yet.
        contents: reads contents from memory storage.
        reporter, terminal: publish tokens and events, and ends of requests.
        housekeeping: periodic tasks.
        tasks: of this session; a failure of one ends the process.
    """

    def __init__(
        self,
        bus: Bus,
        broker: BusBroker,
        publisher: Publisher,
        model: ServedModel,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        make_runner: Callable[[SessionContext], RequestRunner],
        journal: CrashJournal | None = None,
    ) -> None:
        self.id = f"{settings.name or 'worker'}-{secrets.token_hex(4)}"
        self.epoch = time.time_ns()
        self.lost = asyncio.Event()
        self._bus = bus
        self._broker = broker
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._state = fleet.WorkerState.ready
        self._time_slice = TimeSlice()
        self._idle = asyncio.Event()
        self._journal = journal or CrashJournal(None, settings.name)
        self._reserved_for: RunningRequest | None = None  # which runs alone here, or waits until nothing else does
        self._publisher = publisher
        self._waiting: tuple[RunningRequest, StageInput | None] | None = None  # of ``_reserved_for``
        self.tasks = bus.tasks.group(self.id)  # a failure without a handler ends the process
        self.lease = Lease(bus, self.id, self._registration, self.lost.set, self._on_regained)
        self._outbox = Outbox(bus, self.lease.trusted, acknowledged=settings.durability == "power")
        self.reporter = Reporter(
            bus,
            publisher,
            self._outbox,
            self.id,
            self.epoch,
            metrics,
            MadeWith(model.revision, settings.engine, build_of(settings.engine)),
        )
        self._memory = MemoryStreams(bus)
        self._used_memory = False
        self.contents = ContentReader(bus)
        self._restoring: dict[str, _Restoring] = {}
        self._to_restore: list[_Restoring] = []  # received in this turn of the event loop
        self.requests = RequestTable(self._on_removed)
        self.terminal = TerminalEvents(bus, self.reporter, self.requests, self.tasks, self._on_settled)
        self.runner = make_runner(
            SessionContext(
                id=self.id,
                epoch=self.epoch,
                bus=bus,
                publisher=publisher,
                model=model,
                settings=settings,
                metrics=metrics,
                tasks=self.tasks,
                lease=self.lease,
                outbox=self._outbox,
                reporter=self.reporter,
                requests=self.requests,
                terminal=self.terminal,
                memory=self._memory,
            )
        )
        self._jobs = job_subscriber(broker, bus.subjects, settings.role, self.id, self._room, self._make_again)
        self._jobs(self._receive)
        self.housekeeping = Housekeeping(bus, self._outbox, self.requests, self._stop_early, self.runner.housekeeping)

    # --- receive ---

    def _room(self) -> int:
        """How many more jobs to pull."""
        room = self.runner.slots + self.runner.queue
        if self._state is not fleet.WorkerState.ready:
            return room  # a draining worker takes jobs to requeue them immediately
        # While terminal events cannot be stored, as many jobs again are taken, then none.
        taken = len(self.requests.running) + len(self._restoring)
        return room - taken - max(0, len(self.requests.ending) - room)

    async def _receive(self, received: _Received | _Revoked) -> None:
        """Acknowledge a message, unless its request does so when it ends."""
        if isinstance(received, _Revoked):
            await self._revoke(received.revoke)
        elif (whole := self._with_sent_content(received)) is None:
            if not self._restore(received):
                return
        elif not await self._accept(whole):
            await self._time_slice.yield_if_spent()
            return
        await self._bus.nc.publish(received.delivery.reply, ACK)

    def _with_sent_content(self, received: _Received) -> _Received | None:
        """A complete job; None: it cannot start yet.

        Its content must be read first, if the router could not send it here before; or it runs as a fallback.
        """
        request = received.request
        if request.fallback:
            return None  # its readers are informed first
        if not request.no_store:
            return received
        data = self.contents.take(request.id)
        if data is None or len(_part_names(received)) > 1 or request.id in self._restoring:
            return None
        with contextlib.suppress(msgspec.MsgspecError):  # it is read again, and the job rejected
            whole = _with_content(received, [data])
            if whole.request.id == request.id:
                self._used_memory = True
                return whole
        return None

    def _restore(self, received: _Received) -> bool:
        """Read a job's content, beside other jobs; True: the job is over."""
        job, request, delivery = received.job, received.request, received.delivery
        under_way = self._restoring.get(request.id)
        if under_way is not None and under_way.attempt >= job.attempt:
            if under_way.attempt == job.attempt:
                under_way.delivery = delivery
            return under_way.attempt > job.attempt
        admission = self.requests.admission(request.id, job.attempt, delivery)
        if admission is Admission.RUN:
            self._used_memory |= request.no_store
            restoring = self._restoring[request.id] = _Restoring(received)
            self._to_restore.append(restoring)
            if len(self._to_restore) == 1:
                self.tasks.spawn(self._restore_together(), name="restore")
        return admission is Admission.OVER

    async def _restore_together(self) -> None:
        """Start the jobs of one turn of the event loop whose contents are found at once."""
        batch, self._to_restore = self._to_restore, []
        wanted = [self._parts_of(restoring.received) for restoring in batch]
        found = await self.contents.find(list(chain.from_iterable(wanted)))
        for restoring, subjects in zip(batch, wanted, strict=True):
            parts = [data for subject in subjects if (data := found.pop(subject, None)) is not None]
            if len(parts) < len(subjects) or restoring.received.request.fallback:  # it may come yet: beside the others
                self.tasks.spawn(self._accept_restored(restoring), name="restore", on_failure=_rejected)
                continue
            try:
                await self._accept_restored(restoring, parts)
            except Exception as error:
                _rejected(error)
            await self._time_slice.yield_if_spent()

    async def _accept_restored(self, restoring: _Restoring, parts: Sequence[bytes] = ()) -> None:
        """Start a job once its content is there; without content, the job ends.

        Args:
            parts: its content; empty: read it first.
        """
        received = restoring.received
        job, request = received.job, received.request
        failure: ServingError | None = None
        try:
            if request.no_store:
                received = _with_content(received, parts or await self._content(received))
            if request.fallback:
                await self._announce(received)
        except ServingError as error:
            failure = error
        except (msgspec.MsgspecError, IndexError) as error:
            log.error("job_unreadable", request=request.id, error=str(error))
            failure = ServingError(Code.internal, "the content of the request cannot be read by this build")
        finally:
            if self._restoring.get(request.id) is restoring:
                del self._restoring[request.id]
        received = msgspec.structs.replace(received, delivery=restoring.delivery)
        if failure is None:
            over = await self._accept(received)
        else:
            over = self.requests.admission(request.id, job.attempt, restoring.delivery) is Admission.OVER
            if not over:
                running = RunningRequest(request, job.attempt, restoring.delivery, [], [], job.decision.at_ns, job=job)
                self.requests.running[request.id] = running
                if failure.code is Code.broker_unavailable:
                    self.terminal.requeue(running, "content")
                else:
                    await self.terminal.reject(running, failure.code, failure.message)
        if over:
            await self._bus.nc.publish(restoring.delivery.reply, ACK)

    async def _announce(self, received: _Received) -> None:
        """Announce the model of this attempt's tokens to readers of the answer. Stored before the first token.

        Raises:
            ServingError: broker_unavailable: it could not be stored.
        """
        request, attempt = received.request, received.job.attempt
        item = TokenItem(request.id, attempt, ANOTHER_MODEL, request.fallback)
        batch = TokenBatch(self.id, self.epoch, 0, (item,))
        await self._publisher.publish(
            self._bus.subjects.tokens(request.token_address),
            encode(batch),
            f"{request.id}:{attempt}:model",
            timeout=ANNOUNCE_S,
            gate=self._outbox.open,
        )

    def _parts_of(self, received: _Received) -> list[str]:
        if not received.request.no_store:
            return []
        request, contents_of = received.request, self._bus.subjects.contents
        return [contents_of(request.gateway, request.id, name) for name in _part_names(received)]

    async def _content(self, received: _Received) -> Sequence[bytes]:
        """
        Raises:
            ServingError: the content was deleted.
        """
        names = _part_names(received)
        return await asyncio.gather(*(fetch(self._bus, self._memory, received.request, name) for name in names))

    async def _accept(self, received: _Received) -> bool:
        """Start a job; True: it is over, so its message needs only an acknowledgement."""
        job, request = received.job, received.request
        delivery, stage_input = received.delivery, received.stage_input
        admission = self.requests.admission(request.id, job.attempt, delivery)
        if admission is Admission.RUN:
            running = self.requests.running.get(request.id)
            if running is not None:  # placed here again before this worker learned that it had lost the request
                await self._revoke(jobs.Revoke(request.id, running.attempt))
            await self._admit(received)
        if stage_input is not None:
            running = self.requests.running.get(request.id)
            if running is None or running.attempt != job.attempt:
                self.runner.release_input(stage_input)
        return admission is Admission.OVER

    async def _revoke(self, revoke: jobs.Revoke) -> None:
        """A router placed the request elsewhere: drop this attempt without an event."""
        name, attempt = revoke.request, revoke.attempt
        self.requests.mark_ended(name, attempt)
        running, ending = self.requests.running.get(name), self.requests.ending.get(name)
        if running is not None and running.attempt <= attempt:
            self.requests.remove(running)
            await self._bus.nc.publish(running.delivery.reply, ACK)
        if ending is not None and ending.attempt <= attempt:
            self.terminal.revoked(ending)
            await self._bus.nc.publish(ending.delivery.reply, ACK)

    # --- admit ---

    async def _admit(self, received: _Received) -> None:
        """Run a new request, or end or requeue it immediately."""
        job, request = received.job, received.request
        delivery, stage_input = received.delivery, received.stage_input
        try:
            running = self.runner.admit(job, request, delivery)
        except Exception as error:
            log.exception("job_rejected", request=request.id)
            running = RunningRequest(request, job.attempt, delivery, [], [], job.decision.at_ns, job=job)
            message = f"the worker cannot run this request: {error}"
            await self.terminal.reject(running, Code.invalid_request, message)
            return
        cancelled = self.requests.early_cancel(request.id)
        if self._state is fleet.WorkerState.draining or self._reserved_for is not None:
            self.requests.running[request.id] = running
            draining = self._state is fleet.WorkerState.draining
            self.terminal.requeue(running, "draining" if draining else "reserved for a request that runs alone")
            return
        if cancelled is not None:
            await self.terminal.reject(running, Code.cancelled, cancelled)
            return
        if self._bus.clock.now_ns() >= request.deadline_ns:
            message = "the deadline passed before the request could start"
            await self.terminal.reject(running, Code.deadline_exceeded, message)
            return
        if request.trace is not None and wanted(request.trace):
            running.stamp_times = {"received_ns": steady_ns()}
        self.requests.running[request.id] = running
        running.progress_signalled = time.monotonic()
        if running.alone:
            self._reserved_for = running
            if not self._is_alone(running):
                self._waiting = running, stage_input
                return
        await self._begin(running, stage_input)

    # --- run ---

    async def _begin(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        self._journal.began(running, self.id)
        try:
            await self.runner.run(running, stage_input)
        except Exception as error:
            self.terminal.fail(running, "its start", error)

    def _is_alone(self, running: RunningRequest) -> bool:
        """Whether all other requests have ended, and their ends are stored."""
        return not self.requests.ending and all(other is running for other in self.requests.running.values())

    def _on_settled(self) -> None:
        """A request was removed, or its end stored."""
        self._idle.set()
        if self._waiting is not None and self._is_alone(self._waiting[0]):
            (running, stage_input), self._waiting = self._waiting, None
            self.terminal.spawn(self._begin(running, stage_input))

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """The client cancelled. The reason is kept in case the job is still on its way."""
        running = self.requests.running.get(request_id)
        if running is None:
            self.requests.remember_cancel(request_id, reason)
        else:
            self._stop_early(running, Code.cancelled, reason)

    def _stop_early(self, running: RunningRequest, code: Code, message: str) -> None:
        if running.cancelled is None and self.runner.accepts_stop(running):
            running.cancelled = (code, message)
            if self._waiting is not None and self._waiting[0] is running:
                self.terminal.spawn(self.terminal.end_cancelled(running))
                return
            self.runner.stop_early(running)

    # --- report: the runner reports tokens and ends through ``_reporter`` and ``_terminal`` ---

    def _on_removed(self, running: RunningRequest, cancel: bool) -> None:
        self._journal.ended(running.request.id)
        if running is self._reserved_for:
            self._reserved_for = None
            if self._waiting is not None and self._waiting[1] is not None:
                self.runner.release_input(self._waiting[1])
            self._waiting = None
        self.runner.free(running, cancel)
        self._on_settled()

    async def _on_regained(self) -> None:
        await self._memory.declare(DECLARE_S)
        await self._outbox.resend()

    def _uses_memory(self) -> bool:
        """Whether a request without a stored content runs, or has run since the last call."""
        used, self._used_memory = self._used_memory, False
        return used or any(running.request.no_store for running in self.requests.running.values())

    async def _on_memory_replaced(self) -> None:
        """Output sent to a deleted stream was lost: send it again, as after a reconnect."""
        if self.lease.trusted():
            await self._outbox.resend()

    def _registration(self) -> fleet.Registration:
        own = self.runner.registration(self._state)
        seen: dict[object, fleet.GpuUse] = {}  # two processes of an engine on one machine may see the same GPUs
        for number, gpu in enumerate(self._metrics.gpu_use + own.load.gpus):
            seen.setdefault(gpu.id or number, gpu)
        load = msgspec.structs.replace(own.load, gpus=tuple(seen.values()))
        return msgspec.structs.replace(own, load=load, inbox=self.contents.inbox, reads_packed=True)

    async def update_registration(self) -> None:
        """Publish the registration again because it has changed."""
        await self.lease.update()

    # --- start and stop ---

    async def open(self) -> None:
        """Create this session's consumer, register, and start pulling.

        Raises:
            ServingError: the broker refused the consumer or the registration.
        """
        stream = self._bus.subjects.stream("WORK")
        await self._memory.open()  # before the outbox sends again after a reconnect
        await self.contents.open()
        try:
            await self._bus.js.add_consumer(stream, self._consumer())
        except (NatsError, TimeoutError) as error:
            raise ServingError(
                Code.broker_unavailable,
                f"no consumer could be created on {stream} ({error!r}); run 'penstock streams apply' and check the "
                "user's permissions",
            ) from error
        self.tasks.spawn(self.housekeeping.run(), name="housekeeping")
        self.tasks.spawn(self._memory.watch(self._uses_memory, self._on_memory_replaced), name="memory")
        await self.runner.open()
        await self._jobs.start()
        await self.lease.acquire()
        await self._outbox.resend()  # if the link was replaced before the lease's hook was there, nothing else opens it
        log.info("worker_registered", worker=self.id, model=self._model.name, slots=self.runner.slots)

    async def _make_again(self, last: str) -> bool:
        """This session's consumer was deleted. If it cannot be made again, leave the fleet: no job would arrive.

        From the first job if the stream was recreated, or if this process may not read it: known jobs are recognised.
        """
        stream, config = self._bus.subjects.stream("WORK"), self._consumer().as_dict()
        known = False
        with contextlib.suppress(OSError):  # if there is no stream, there can be no consumer either
            known = bool(last) and is_of(last, await present(self._bus, stream))
        try:
            return await make_again(
                self._bus, stream, config, start_seq=sequence(last) + 1 if known else 0, filtered=True
            )
        except OSError as error:
            if self._jobs.missing_s(time.monotonic()) > MISSING_S:
                log.error("consumer_lost", worker=self.id, error=str(error), action="registering again")
                self.lost.set()
            raise

    def _consumer(self) -> ConsumerConfig:
        return ConsumerConfig(
            name=self.id,
            durable_name=self.id,
            filter_subject=self._bus.subjects.work(self._settings.role, self.id),
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=4 * (self.runner.slots + self.runner.queue),
            # The server removes it: a permission to delete consumers would cover those of all workers.
            inactive_threshold=CONSUMER_TTL_S,
        )

    async def drain(self, timeout: float, hurried: asyncio.Event | None = None) -> None:
        """Finish running requests, requeue those that have not started, and unregister.

        Args:
            timeout: in seconds; requests that still run then are requeued.
            hurried: the same when it is set, at once.
        """
        if self._state is not fleet.WorkerState.draining:
            self._state = fleet.WorkerState.draining
            # Jobs still arrive, and are requeued at once: routers see the new state a moment later.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._jobs.top_up()
                    await self.lease.update()
            for running in await self.runner.not_begun():
                self.terminal.requeue(running, "draining")
        try:
            async with asyncio.timeout(timeout):
                while self.requests.running or self.terminal.pending or self.runner.holds_leases:
                    if hurried is not None and hurried.is_set():
                        raise TimeoutError
                    self._idle.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._idle.wait(), DRAIN_POLL_S)
        except TimeoutError:
            log.warning("drain_timeout", unfinished=len(self.requests.running))
            for running in list(self.requests.running.values()):
                self.terminal.requeue(running, "draining")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._jobs.stop()
        await self._jobs.close()
        await self._unregister()

    async def fail(self, reason: str, *, poison: bool = True) -> None:
        """The engine or a task of the worker failed: requeue everything and unregister.

        Args:
            poison: the requests that were running may be the cause.
        """
        await self._jobs.close()
        waiting = self._waiting[0] if self._waiting is not None else None
        self._waiting = None
        for running in list(self.requests.running.values()):
            started, ran = bool(running.started_ns), running is not waiting
            self.terminal.requeue(running, reason, poison=poison and started, crashed=poison and ran)
        await self._unregister()

    async def _unregister(self) -> None:
        await self.terminal.settle()
        await self.lease.release()
        await self._close()

    async def fence(self) -> None:
        """The lease is lost and others have taken over: drop everything and publish nothing more."""
        await self._jobs.close()
        await self.lease.stop()
        self._outbox.clear()
        self._waiting = None
        self.terminal.cancel()
        for running in list(self.requests.running.values()):
            self.requests.remove(running)
        await self.runner.fence()
        await self._close()

    async def _close(self) -> None:
        await self._broker.remove(self._jobs)
        self._memory.close()
        await self.contents.close()
        await self.runner.close()
        await self.tasks.aclose()  # the router that recovers the requests reads from the log what was stored


def _decode(message: Message) -> _Received | _Revoked:
    """
    Raises:
        msgspec.MsgspecError: the message is not a job.
    """
    work = jobs.decode(message.data)
    if isinstance(work, jobs.Revoke):
        return _Revoked(work, message)
    job, stage_input = _opened(work)
    return _Received(job, requests.decode(job.request), message, stage_input)


def _rejected(error: BaseException) -> None:
    log.error("job_rejected", exc_info=error)


def _part_names(received: _Received) -> list[str]:
    part = (received.delivery.headers or {}).get(HEADER_PART, "")
    return [contents.REQUEST, *([part] if part else [])]


def _with_content(received: _Received, parts: Sequence[bytes]) -> _Received:
    """
    Raises:
        msgspec.MsgspecError, IndexError: it is of a version that this one cannot read.
    """
    job, stage_input = received.job, received.stage_input
    if len(parts) > 1:
        work = jobs.decode(parts[1])
        assert not isinstance(work, jobs.Revoke)
        job, stage_input = _opened(work)
    request = requests.with_content(requests.decode(parts[0]), received.request)
    return _Received(job, request, received.delivery, stage_input)


def _opened(work: jobs.Job | StageInput) -> tuple[jobs.Job, StageInput | None]:
    if isinstance(work, jobs.Job):
        return work, None
    return jobs.decode_job(work.job), work
