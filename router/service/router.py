"""A router replica: reads requests, decides where each one goes, and publishes its job to the first worker.

All state is a fold of logs (KV events, WORK, DONE) and of the workers bucket, so any number of replicas decide alike.
One of them, the owner of a model (``ownership``), holds and places its requests. If the owner is lost, another replica
gets the requests that were not placed; the jobs of placed ones are in WORK.
"""

import asyncio
import functools
import heapq
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import RouterSettings
from penstock.infra.bus import memory_storage
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import MemoryStreams
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.infra.bus.puller import ACK, NAK, TERM, sequence, stored_ns
from penstock.infra.process.turns import TimeSlice
from penstock.router.held.held_requests import HeldOrder, HeldRequests
from penstock.router.held.tenant_weights import TenantWeights
from penstock.router.ownership.intake import BackgroundTasks, Intake, read_again
from penstock.router.ownership.membership import REST
from penstock.router.placement.cost import describe
from penstock.router.placement.decision_inputs import Decider
from penstock.router.placement.pending import (
    PendingRequest,
    Standing,
    as_fallback,
    build_job,
    build_load,
    standing,
    why_fall_back,
)
from penstock.router.placement.routing import LOCAL_PREFILL_TOKENS, RoutingDecision
from penstock.router.recovery.migration import Migration
from penstock.router.recovery.recovery import Recovery
from penstock.router.recovery.stalled_requests import resteer, watch
from penstock.router.recovery.terminal_events import TerminalPublisher
from penstock.router.service.cell_costs import CellCosts
from penstock.router.service.deletion import RequestDeleter
from penstock.router.service.maintenance import Maintenance
from penstock.router.service.usage_ledger import UsageLedger
from penstock.router.state.cluster_state import ClusterListener, ClusterState
from penstock.router.state.holders import keys_view
from penstock.router.state.router_metrics import Metrics
from penstock.router.state.target_loads import ENCODE
from penstock.schemas import contents, control, jobs, requests, wire
from penstock.schemas.cells import CELL, cell_target
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import run_together
from penstock.schemas.jobs import DecisionInputs, LoadHeader, Stage, unexplained_losses
from penstock.schemas.requests import FALLBACK, GenerateRequest, Priority, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS

log = structlog.get_logger("router")

CANCELS_REMEMBERED = 50_000
LONGEST_REASON = 200  # characters
DRAIN_S = 3.0
ABSENT_S = 1.0  # without a worker of its model, until a request falls back: a worker may be registering again
READ_AT_ONCE = 16  # requests that were left in the log; each may be as large as a message
WAKE_LOOK_S = 0.1  # between checks for waiting requests of models whose workers sleep
WAKE_AGAIN_S = 5.0  # for a worker to wake up, before another one is chosen
DEFERRAL_NS = 2_000_000_000  # until the broker delivers a request again that had no space here


class Router:
    """Runs in the background after ``open``; ``close`` returns requests that were not placed to the broker.

    Attributes:
        cluster: the workers and their load, folded from the log.
        decider: chooses the targets of a request.
        held: requests without a target that has room, ordered by the weights of ``tenants``.
        intake: reads the requests of the models that this router owns.
        terminal: publishes the ends of requests that no worker ends.
        recovery: requests whose worker was lost, hangs or is late.
        deletion: requests that were deleted.
        maintenance: periodic tasks.
        memory: the streams in memory storage.
    """

    def __init__(self, bus: Bus, publisher: Publisher, settings: RouterSettings, metrics: Metrics) -> None:
        self.id = f"{settings.name or 'router'}-{secrets.token_hex(4)}"
        self._bus = bus
        self._publisher = publisher
        self._settings = settings
        self.metrics = metrics
        self._cancels: OrderedDict[str, str] = OrderedDict()  # request -> reason
        self._time_slice = TimeSlice()
        self._placing_held = False
        self._several: Callable[[], bool] = lambda: False  # whether other cells are known
        self._reading = asyncio.Semaphore(READ_AT_ONCE)
        self.tasks = bus.tasks.group("router")
        self._background = BackgroundTasks(bus, self.tasks)
        self.memory = MemoryStreams(bus)
        self.deletion = RequestDeleter(bus)
        self.cluster = ClusterState(bus, settings, self.deletion.deleted.until, self.deletion.came_back)
        self.deletion.deleted.noted = self.cluster.forget
        self.decider = Decider(self.cluster, settings, metrics)
        self.tenants = TenantWeights(bus)
        self.held = self._make_held()
        self.intake = self._make_intake()
        self.cluster.owns = self.intake.owns
        self.cluster.disconnects.link_broke = self.intake.membership.link_broke
        self.terminal = TerminalPublisher(
            bus, publisher, self.id, cluster=self.cluster, background=self._background, metrics=metrics
        )
        self.recovery = Recovery(
            bus,
            publisher,
            self.id,
            cluster=self.cluster,
            terminal=self.terminal,
            background=self._background,
            metrics=metrics,
            max_attempts=settings.max_attempts,
            owns=lambda worker: self.intake.owns(self.cluster.model_of(worker)),
            misses_output=self._misses_output,
            is_held=self.held.__contains__,
            place=self.place,
            top_up=self.intake.top_up,
            fall_back=self.fall_back,
        )
        self.maintenance = Maintenance(
            bus,
            publisher,
            settings,
            cluster=self.cluster,
            held=self.held,
            terminal=self.terminal,
            background=self._background,
            metrics=metrics,
            place=self.place,
            place_held=self._place_held_soon,
            fall_back=self.fall_back_held,
        )

    def _make_held(self) -> HeldRequests:
        settings, cluster = self._settings, self.cluster
        order = HeldOrder[PendingRequest](
            cluster.tracker,
            self.decider.arrays,
            cluster.caches.overlaps,
            by_size=settings.mode == "kv",
            weights=self.tenants.weights,
        )
        limit = settings.local_prefill_tokens
        return HeldRequests(
            settings.max_held_bytes, LOCAL_PREFILL_TOKENS if limit < 0 else limit, order, self.tenants.bounds
        )

    def _make_intake(self) -> Intake:
        return Intake(
            self._bus,
            self.id,
            tracker=self.cluster.tracker,
            held=self.held,
            background=self._background,
            handle=self.on_request,
            space=self._space,
            owners_changed=self.cluster.owners_changed,
            taken_over=self._on_taken_over,
            resuming=lambda: self.recovery.resuming.values(),
            lost_leases=lambda: self.cluster.losses.recent(self._bus.clock.now_ns()),
        )

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        recovery = self.recovery
        await self.memory.open()
        await self.deletion.open(self.tasks)
        await self.cluster.start(
            ClusterListener(
                self._place_held_soon,
                recovery.on_returned,
                recovery.on_worker_lost,
                recovery.on_stranded,
            )
        )
        self.tasks.spawn(recovery.scan(), name="recovery")
        self.tasks.spawn(self.tenants.start(), name="tenant-weights")
        self.maintenance.start(self.tasks)
        leads = lambda: REST in self.intake.membership.own  # noqa: E731
        self.tasks.spawn(UsageLedger(self._bus, self.cluster.ended, leads).run(), name="usage")
        stalled_after_s = self._settings.stalled_after_s
        if stalled_after_s:
            watching = watch(self._bus, self.cluster, self.metrics, stalled_after_s, recovery.on_stalled)
            self.tasks.spawn(watching, name="watchdog")
        self.tasks.spawn(self._wake_sleepers(), name="wake")
        if self._settings.resteer_after_s:
            resteering = resteer(self._bus, self.cluster, self._settings.resteer_after_s, recovery.on_late)
            self.tasks.spawn(resteering, name="resteering")
        costs = CellCosts(
            self._bus,
            self.id,
            tracker=self.cluster.tracker,
            decider=self.decider,
            held=self.held,
            owns=self.intake.owns,
            registrations=self.cluster.registrations,
        )
        self.tasks.spawn(costs.run(), name="cell-costs")
        self._several = lambda: costs.wanted
        if self._settings.migrate_after_s:
            migration = Migration(
                self._bus,
                self._settings.migrate_after_s,
                several=self._several,
                cluster=self.cluster,
                held=self.held,
                terminal=self.terminal,
                owns=self.intake.owns,
                send=self.migrate,
            )
            self.tasks.spawn(migration.run(), name="migration")
        await self.intake.start(self.tasks)
        await self.deletion.start(self.tasks)
        log.info("router_open", router=self.id, mode=self._settings.mode)

    async def close(self) -> None:
        await self.intake.stop()  # otherwise the requests that are returned below would come here again
        await self.terminal.drain(DRAIN_S)
        await self.tasks.aclose()
        for pending in self.held:
            if pending.reply and self._bus.connected:
                await self._bus.nc.publish(pending.reply, NAK)
        await self.tenants.stop()
        await self.deletion.stop()
        await self.cluster.stop()

    async def _wake_sleepers(self) -> None:
        """Wake workers for requests that no awake worker takes, one at a time for each model; never returns."""
        asked: dict[str, float] = {}  # worker -> when
        while True:
            await asyncio.sleep(WAKE_LOOK_S)
            tracker, now = self.cluster.tracker, time.monotonic()
            if not tracker.sleepers or not len(self.held) or not self._bus.connected:
                continue
            asked = {worker: at for worker, at in asked.items() if worker in tracker.sleepers}
            for model in {pending.request.model for pending in self.held}:
                asked_at = {each.worker: asked.get(each.worker, 0.0) for each in tracker.asleep(model)}
                if not asked_at or now - max(asked_at.values()) < WAKE_AGAIN_S:
                    continue
                worker = min(asked_at, key=lambda each: (asked_at[each], each))
                asked[worker] = now
                log.info("worker_woken", worker=worker, model=model)
                await self._bus.nc.publish(self._bus.subjects.control(worker), wire.encode(control.Wake()))

    def _space(self, priority: Priority) -> int:
        """Further requests of a class that may be read from the log."""
        resuming = sum(each.request.priority is priority for each in self.recovery.resuming.values())
        return 0 if self.maintenance.work_is_full else max(0, self.held.space(priority) - resuming)

    # The path of a request: decode, check, decide, publish its job or hold it, acknowledge.

    async def on_request(self, message: Any) -> None:
        """Place a request as it comes from the log, for the first time or redelivered."""
        try:
            request = requests.decode_head(message.data)
        except msgspec.MsgspecError as error:
            log.error("request_unreadable", subject=message.subject, error=str(error))
            await self._bus.nc.publish(message.reply, TERM)
            return
        if request.id in self.deletion.deleted.until:  # it is delivered again until it is erased
            self.deletion.came_back(self._bus.subjects.stream("REQUESTS"), sequence(message.reply), request.id)
            return
        if not self.intake.owns(request.model):  # passed on by a router that considers this one the owner
            await self.cluster.fold_unowned()
        await self.cluster.folded()
        active = self.cluster.tracker.request(request.id)
        if active is not None and not active.echoed:  # its job is being stored, and acknowledges it then, not before
            return
        if active is not None or self.cluster.tracker.ended(request.id):  # its acknowledgement was lost
            await self._bus.nc.publish(message.reply, ACK)
            return
        if request.id in self.terminal.ending or self.held.delivered_again(request.id, message.reply):
            return
        if (resuming := self.recovery.resuming.get(request.id)) is not None:
            resuming.reply = message.reply
            return
        pending = PendingRequest(request, message.data, message.reply, self._bus.clock.now_ns())
        if request.resumes or request.interrupted_attempt:
            self.recovery.resume(pending)
            return
        await self.place(pending)
        await self._time_slice.yield_if_spent()

    async def place(self, pending: PendingRequest, *, held: bool = False) -> bool:
        """Give a request to a worker, end it, or hold it; False: it is held. Errors concern this request only.

        Args:
            held: the request has waited for its turn, and may wait longer for a better worker.
        """
        request = pending.request
        try:
            now_ns = self._bus.clock.now_ns()
            if self._is_over(pending, now_ns):
                return True
            if self._must_wait(pending, now_ns):
                self._hold(pending)
                return False
            if pending.suspect is Standing.poisonous:
                self._end_poisonous(pending)
                return True
            if not held and self._settings.mode == "kv" and self.held.is_waiting(pending):
                self._hold(pending)
                self._place_held_soon()  # it may be due before those
                return False
            if self._misses_content(pending):  # it is being stored again
                self._hold(pending)
                return False
            keys = keys_view(request.digests)
            waited_s = max(0, now_ns - request.created_ns) / 1e9
            decision, inputs = self.decider.decide(
                pending,
                keys,
                now_ns,
                held=len(self.held),
                waited_s=waited_s,
            )
            self.metrics.decision.observe((self._bus.clock.now_ns() - now_ns) / 1e9)
            if decision.route and all(stage.worker != pending.gone for stage in decision.route):
                job, load = self._admit(pending, decision, inputs, keys, now_ns)
                if pending.raw:
                    await self._publish_job(pending, decision, job, load)
                else:  # later requests do not wait for that
                    self._background.spawn(self._publish_left(pending, decision, job, load), "read-again")
                return True
            if decision.code is not None and not decision.route:
                message = f"no worker can ever run this request: {describe(decision.reason)}"
                self.terminal.end(pending, decision.code, message)
                return True
            self._hold(pending)
            return False
        except (NatsError, OSError, TimeoutError) as error:  # the connection has just failed
            log.warning("placement_postponed", request=request.id, error=repr(error))
            self.cluster.tracker.release(request.id, pending.attempt)
            self._hold(pending)
            return False
        except asyncio.CancelledError:  # a decision that stays would prevent every other one
            self.cluster.tracker.release(request.id, pending.attempt)
            raise
        except Exception as error:
            log.exception("placement_failed", request=request.id)
            self.cluster.tracker.release(request.id, pending.attempt)
            what = f"the router could not place the request ({type(error).__name__}); its log has the details"
            self.terminal.end(pending, Code.internal, what)
            return True

    async def fall_back(self, pending: PendingRequest, why: str) -> bool:
        """Run a request as the first of its fallbacks that has workers; False: none has, or it may not.

        Args:
            pending: a request that is not held. Later output of its earlier attempts is void.
        """
        request, number = pending.request, self._usable_fallback(pending)
        if not number:
            return False
        try:
            if not await read_again(self._bus, pending):
                return False
            other = as_fallback(pending, number, why, self._bus.clock.now_ns())
        except (ServingError, msgspec.MsgspecError, IndexError) as error:
            log.warning("fallback_unreadable", request=request.id, error=repr(error))
            return False
        log.info("request_fell_back", request=request.id, model=request.model, fallback=other.request.model, why=why)
        self.metrics.fallbacks.labels(request.model, other.request.model).inc()
        await self.place(other)
        return True

    async def fall_back_held(self, pending: PendingRequest, now_ns: int) -> bool:
        """Fall back for a held request that has waited long enough; False: it is still held, or was placed."""
        request, serving = pending.request, self.cluster.tracker.serving
        absent_s = ABSENT_S + (self._settings.migrate_after_s if self._several() else 0.0)
        why = why_fall_back(pending, run_together(serving(request.model)), now_ns, absent_s)
        if not why or not self._usable_fallback(pending) or self.held.remove(request.id) is None:
            return False
        if await self.fall_back(pending, why):
            return True
        self._hold(pending)
        return False

    def _usable_fallback(self, pending: PendingRequest) -> int:
        """Which fallback of a request can run now, as in ``GenerateRequest.fallback``; 0: none."""
        request = pending.request
        if pending.streaming or request.worker or pending.suspect is Standing.poisonous:
            return 0
        for number, each in enumerate(request.fallbacks, request.fallback + 1):
            serving = self.cluster.tracker.serving(each.model)
            if run_together(worker for worker in serving if FALLBACK in worker.logits_processors):
                return number
        return 0

    async def migrate(self, pending: PendingRequest, cell: int, why: str) -> None:
        """Give a request to another cell: its job is stored here first, so nothing here runs it any more.

        Args:
            cell: its number within the deployment.
        """
        request, now_ns = pending.request, self._bus.clock.now_ns()
        if self._is_over(pending, now_ns):
            return
        decision = RoutingDecision((Stage(CELL, cell_target(cell)),), (), how=why)
        job = build_job(
            pending,
            decision,
            mode=self._settings.mode,
            router=self.id,
            revision=pending.pinned_revision,
            prompt_blocks=0,
            positions=self.cluster.positions(),
            now_ns=now_ns,
            inputs=DecisionInputs(),
        )
        load = build_load(pending, decision)
        suspect = pending.suspect.value
        self.cluster.admit(request.id, pending.attempt, decision.route, load, (), now_ns, suspect=suspect)
        try:
            if pending.raw:
                await self._publish_job(pending, decision, job, load)
            else:
                await self._publish_left(pending, decision, job, load)
        except (NatsError, OSError, TimeoutError) as error:  # the connection has just failed
            log.warning("migration_postponed", request=request.id, error=repr(error))
            self.cluster.tracker.release(request.id, pending.attempt)
            self._hold(pending)

    def _misses_content(self, pending: PendingRequest) -> bool:
        """Whether this request is older than a restart of a broker without a cluster just now."""
        request = pending.request
        if not request.no_store or not self.memory.settling:
            return False
        return self.memory.misses(stored_ns(pending.reply)) if pending.reply else self._misses_output(request.id)

    def _misses_output(self, request_id: str) -> bool:
        """The same by a request's id, whose time is by its gateway's clock."""
        try:
            made_ns = time_of(request_id)
        except ValueError:
            made_ns = 0
        return self.memory.misses(made_ns - CLOCK_SKEW_NS)

    def _must_wait(self, pending: PendingRequest, now_ns: int) -> bool:
        """Find out how a request may run, and whether it must wait."""
        repeats, watched = pending.request.repeats_poison, pending.request.watched
        if pending.attempt == 1 and not repeats:
            return False
        request_id, waited_s = pending.request.id, (now_ns - pending.since_ns) / 1e9
        returned = self.cluster.returned.of(request_id)
        pending.suspect = standing(
            returned,
            unexplained_losses(pending.earlier_workers),
            self.cluster.is_back,
            waited_s,
            repeats=repeats,
            watched=watched,
        )
        if pending.suspect is Standing.alone:
            return self.cluster.tracker.another_alone(pending.request.model, request_id)
        return pending.suspect is Standing.unknown

    def _end_poisonous(self, pending: PendingRequest) -> None:
        crashes = self.cluster.returned.crashes(pending.request.id)
        self.terminal.end(
            pending,
            Code.poisoned_request,
            f"{crashes} workers crashed while they ran this request, the last one while it ran nothing else: it is not "
            "run again; `penstock dead show` has the attempts",
        )

    def _is_over(self, pending: PendingRequest, now_ns: int) -> bool:
        """Whether the request needs no worker: another router has placed it, or it ends here."""
        request, tracker = pending.request, self.cluster.tracker
        self.cluster.fold_of(request.id)
        active = tracker.request(request.id)
        placed = active is not None and active.echoed and active.attempt >= pending.attempt
        if placed or tracker.ended(request.id):
            if pending.reply:
                self._background.acknowledge(pending.reply, ACK)
            return True
        if request.id in self._cancels:
            self.terminal.end(pending, Code.cancelled, self._cancels[request.id])
            return True
        if now_ns >= request.deadline_ns:
            self.terminal.end(pending, Code.deadline_exceeded, "the deadline passed before a worker was free")
            return True
        return False

    def _admit(
        self,
        pending: PendingRequest,
        decision: RoutingDecision,
        inputs: DecisionInputs,
        keys: Sequence[int],
        now_ns: int,
    ) -> tuple[jobs.Job, LoadHeader]:
        """Count a request at its targets, before the next decision. Returns its job, and the part that others fold."""
        request, prefill = pending.request, self.cluster.tracker.worker(decision.prefill_worker)
        assert prefill is not None
        weight = self.tenants.weights.get(request.tenant, 1.0)
        job = build_job(
            pending,
            decision,
            mode=self._settings.mode,
            router=self.id,
            revision=prefill.revision,
            prompt_blocks=len(keys),
            positions=self.cluster.positions(),
            now_ns=now_ns,
            inputs=inputs if weight == 1.0 else msgspec.structs.replace(inputs, weight=weight),
        )
        load = build_load(pending, decision, prefill)
        suspect = pending.suspect.value
        self.cluster.admit(request.id, pending.attempt, decision.route, load, keys, now_ns, suspect=suspect)
        self.decider.sent(request, decision.route)
        return job, load

    async def _publish_left(
        self,
        pending: PendingRequest,
        decision: RoutingDecision,
        job: jobs.Job,
        load: LoadHeader,
    ) -> None:
        """Send the job of a request that was left in the log while it was held."""
        request = pending.request
        try:
            async with self._reading:
                found = await read_again(self._bus, pending)
            if found:
                job = msgspec.structs.replace(job, request=msgspec.Raw(pending.raw))
                await self._publish_job(pending, decision, job, load)
                return
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.warning("placement_postponed", request=request.id, error=str(error) or repr(error))
            self.cluster.tracker.release(request.id, pending.attempt)
            self._hold(pending)
            return
        self.cluster.tracker.release(request.id, pending.attempt)
        message = "the log lost the request before a worker was free; send it again"
        self.terminal.end(pending, Code.broker_unavailable, message)

    async def _publish_job(
        self,
        pending: PendingRequest,
        decision: RoutingDecision,
        job: jobs.Job,
        load: LoadHeader,
    ) -> None:
        """Send the job to its first worker. The request is acknowledged once the job is stored."""
        request, attempt, first = pending.request, pending.attempt, decision.route[0]
        now_ns, suspect = job.decision.at_ns, pending.suspect.value
        try:
            body, part = await self._encode(request, job, now_ns)
            if request.no_store and (worker := self.cluster.tracker.worker(first.worker)) is not None and worker.inbox:
                memory_storage.send_content(self._bus, request, worker.inbox)
            stored = await self._publisher.send(
                self._bus.subjects.work(first.role, first.worker),
                body,
                f"{request.id}:{attempt}",
                headers=jobs.headers_of(
                    jobs.load_header(*load),
                    no_store=request.no_store,
                    suspect=suspect,
                    part=part,
                ),
            )
        except ServingError as failure:  # too large for a message, together with all that was streamed so far
            self.cluster.tracker.release(request.id, attempt)
            self.terminal.end(pending, failure.code, failure.message)
            return
        metrics = self.metrics
        metrics.decisions.labels(pending.reason.partition(":")[0]).inc()
        metrics.routes.labels(decision.kind, "yes" if first.role == ENCODE else "no").inc()
        metrics.overlap.inc(load.cached_tokens)
        metrics.prompt.inc(load.prompt_tokens)
        metrics.wait.observe((now_ns - pending.since_ns) / 1e9)
        stored.add_done_callback(functools.partial(self._on_job_stored, pending))

    async def _encode(self, request: GenerateRequest, job: jobs.Job, now_ns: int) -> tuple[bytes, str]:
        """A job for WORK, and the complete one, which is sent to memory storage without waiting.

        Raises:
            ServingError: body_too_large.
        """
        if not (request.no_store and contents.has_content(job)):
            return wire.encode(job), ""
        part = contents.part_of(job.attempt)
        stored = await memory_storage.put(self._bus, self._publisher, request, part, wire.encode(job), now_ns=now_ns)
        stored.add_done_callback(functools.partial(_on_part_stored, request.id))
        return wire.encode(contents.shell_of(job)), part

    def _on_job_stored(self, pending: PendingRequest, stored: "asyncio.Future[Ack]") -> None:
        if stored.cancelled():
            return
        error = stored.exception()
        if error is None:  # if another router was first, perhaps with another worker, the log overrules this one
            self.cluster.stored(pending.request.id, pending.attempt, stored.result().seq)
            if pending.reply:
                self._background.acknowledge(pending.reply, ACK)
            return
        log.warning("job_not_stored", request=pending.request.id, error=str(error))
        self.cluster.tracker.release(pending.request.id, pending.attempt)
        self._hold(pending)

    def _hold(self, pending: PendingRequest) -> None:
        request, tracker = pending.request, self.cluster.tracker
        now_ns = self._bus.clock.now_ns()
        if not self.held.hold(pending, len(tracker.serving(request.model)), tracker.size, now_ns):
            delay_ns = min(DEFERRAL_NS, max(1, request.deadline_ns - now_ns))
            self._background.acknowledge(pending.reply, NAK + b' {"delay": %d}' % delay_ns)

    # Held requests

    def _on_taken_over(self) -> None:
        self._background.spawn(self._recover_taken_over(), "recovery")

    async def _recover_taken_over(self) -> None:
        await self.cluster.folded()
        await self.recovery.scan_now()

    def _place_held_soon(self) -> None:
        """Workers may have capacity again: try once per turn of the event loop, not once per event."""
        if not self._placing_held and len(self.held):
            self._placing_held = True
            self.tasks.spawn(self._place_held(), name="place-held")

    async def _place_held(self) -> None:
        """Place held requests, the next of all lanes first, and from each lane until none has a worker."""
        self._placing_held = False
        heads = self.held.heads()
        heapq.heapify(heads)
        while heads and self.cluster.tracker.has_capacity():
            _, lane = heapq.heappop(heads)
            if await self._place_next(lane):
                turn = self.held.turn(lane)
                if turn is not None:
                    heapq.heappush(heads, (turn, lane))
            await self._time_slice.yield_if_spent()
        await self.intake.top_up()

    async def _place_next(self, lane: str) -> bool:
        """Place the next held request of a lane that has a worker; False: none has."""
        for pending in self.held.candidates(lane, self._bus.clock.now_ns()):
            if self._must_wait(pending, self._bus.clock.now_ns()):
                continue
            if self.held.take(pending.request.id) is not None and await self.place(pending, held=True):
                return True
            await self._time_slice.yield_if_spent()
        return False

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """End a cancelled request if it is held here; its worker gets the same message. May be delivered again."""
        self._cancels.setdefault(request_id, reason[:LONGEST_REASON])
        if len(self._cancels) > CANCELS_REMEMBERED:
            self._cancels.popitem(last=False)
        pending = self.held.remove(request_id)
        if pending is not None:
            await self.place(pending, held=True)


def _on_part_stored(request_id: str, stored: "asyncio.Future[Ack]") -> None:
    if not stored.cancelled() and (error := stored.exception()) is not None:  # its worker ends the request
        log.warning("content_not_stored", request=request_id, error=str(error))
