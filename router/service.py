"""A router replica: pulls requests, decides with the core, publishes jobs, mends what dead workers leave behind.

All state is a fold of logs (KV events, WORK, DONE) and of the workers bucket, so any number of replicas decide
alike, and one that dies takes nothing with it: requests that it had not placed come again to another, those that
it had placed are in WORK.
"""

import asyncio
import functools
import heapq
import random
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from configs.settings import RouterSettings
from infra.bus.connection import Bus
from infra.bus.loop_lag import TimeSlice
from infra.bus.publisher import Ack, Publisher
from infra.bus.puller import ACK, IN_PROGRESS, NAK, TERM, Puller
from router import terminal_events
from router.cluster_state import ClusterState
from router.filters import describe
from router.holders import keys_view
from router.job_retention import Keeping
from router.load import ENCODE, ActiveRequest
from router.metrics import Metrics
from router.policy import decide
from router.queue import QueueEntry, RequestQueue
from router.recovery import Orphan, recover
from router.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights
from router.stragglers import Stragglers
from schemas import done, jobs, requests, wire
from schemas.errors import Code, ServingError
from schemas.jobs import Decision, Job
from schemas.requests import GenerateRequest, Priority
from schemas.streams import ROUTER_ACK_WAIT_S
from schemas.subjects import HEADER_LOAD
from schemas.tokens import Finish, Logprob, TokenBatch, carried

log = structlog.get_logger("router")

RENEW_S = ROUTER_ACK_WAIT_S / 3
SWEEP_S = 0.1
ORPHANS_S = 1.0
SNAPSHOT_S = 10.0
KEEP_S = 1.0  # between two looks at how full WORK is
TERMINAL_S = 600.0
REMEMBERED = 50_000
UNKNOWN_S = 30.0  # a return is kept so long for a job that is not known (yet)
NO_LIMIT = 1 << 30
CLOSE_S = 3.0
PARKED_NS = 2_000_000_000


class PendingRequest(msgspec.Struct, eq=False):
    """A request without a worker. ``reply``: acknowledge its message there; "" for one that is steered again."""

    request: GenerateRequest
    raw: bytes
    reply: str
    since_ns: int
    attempt: int = 1
    resume: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()
    endings: tuple[Finish, ...] = ()
    reason: str = "new"
    renewed: float = 0.0
    scored: int = 0  # as of ``Job``
    revision: str = ""  # that its earlier attempts ran in
    logprobs: tuple[tuple[Logprob, ...], ...] = ()  # as of ``Job``
    scores: tuple[Logprob, ...] = ()
    share: str = ""  # of its class's room, that it is counted in
    missing_since: float = 0.0  # when it was first seen that no worker of its revision is left; 0: one is there

    @property
    def begun(self) -> bool:
        """The client has tokens of ``revision``, and another's cannot follow them. Pictures begin anew."""
        return self.request.diffusion is None and (self.scored > 0 or any(self.resume) or bool(self.finished))

    @property
    def pin(self) -> str:
        return self.revision or self.request.revision

    @property
    def resumed_tokens(self) -> int:
        """Of the choices that go on; each has its own."""
        return sum(len(part) // 4 for i, part in enumerate(self.resume) if i not in self.finished)


class Router:
    """``open`` it, then it works by itself; ``close`` gives unplaced requests back."""

    def __init__(self, bus: Bus, publisher: Publisher, settings: RouterSettings, metrics: Metrics) -> None:
        self.id = f"{settings.name or 'router'}-{secrets.token_hex(4)}"
        self._bus = bus
        self._publisher = publisher
        self._settings = settings
        self._metrics = metrics
        self._weights = Weights(
            settings.overlap_weight,
            settings.prefill_weight,
            settings.temperature,
            settings.transfer_weight,
            settings.local_prefill_tokens,
        )
        self._rng = random.Random(settings.seed or None)
        self._turn = 0
        self.cluster = ClusterState(
            bus,
            settings,
            on_change=self._pump_soon,
            on_returned=self._on_returned,
            on_lost=self._on_lost,
            on_stranded=self._on_stranded,
        )
        self._queue: RequestQueue[PendingRequest] = RequestQueue(NO_LIMIT)  # limited by class when read
        self._held = dict.fromkeys(Priority, 0)
        self._shares: Counter[tuple[Priority, str]] = Counter()  # of what is held, by ``PendingRequest.share``
        self._pullers: list[Puller] = []
        self._keeping = Keeping(bus, publisher)
        self._stragglers = Stragglers(bus, publisher)
        self._parked: dict[str, str] = {}  # by request: where to acknowledge
        self._cancels: OrderedDict[str, str] = OrderedDict()
        self._returned_attempts: OrderedDict[str, tuple[int, str, float]] = OrderedDict()
        self._recovering: set[tuple[str, int]] = set()
        self._ending: set[str] = set()
        self.tasks = bus.tasks.group("router")
        self._time_slice = TimeSlice()
        self._pump_due = False
        self._started = time.monotonic()

    # --- life ---

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or the workers bucket cannot be read.
        """
        await self.cluster.start()
        self.tasks.spawn(self._sweep(), name="sweep")
        self.tasks.spawn(self._watch_orphans(), name="orphans")
        self.tasks.spawn(self._save(), name="snapshots")
        self.tasks.spawn(self._keep(), name="keeping")
        stream = self._bus.subjects.stream("REQUESTS")
        for priority in Priority:
            space = functools.partial(self._space, priority)
            puller = Puller(self._bus, stream, f"router-{priority.value}", self._on_request, space)
            await puller.start()
            self._pullers.append(puller)
        log.info("router_open", router=self.id, mode=self._settings.mode)

    async def close(self) -> None:
        for puller in self._pullers:
            await puller.drain()  # or what is given back below would come here again
        await self._finish_ends(CLOSE_S)
        await self.tasks.aclose()
        for entry in self._queue:
            if entry.item.reply and self._bus.connected:
                await self._bus.nc.publish(entry.item.reply, NAK)
        await self.cluster.stop()

    async def _finish_ends(self, seconds: float) -> None:
        """Until the ends that are on their way are stored, or so long."""
        deadline = time.monotonic() + seconds
        while self._ending and time.monotonic() < deadline:  # noqa: ASYNC110 - rare, and bounded
            await asyncio.sleep(SWEEP_S)

    # --- requests in ---

    async def _on_request(self, message: Any) -> None:
        try:
            request = requests.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("request_unreadable", subject=message.subject, error=str(error))
            await self._bus.nc.publish(message.reply, TERM)
            return
        known = self.cluster.tracker.request(request.id)
        if known is not None and not known.echoed:  # placed by us; acknowledged when its job is stored, not before
            return
        if known is not None or self.cluster.tracker.ended(request.id):  # its acknowledgement was lost with the broker
            await self._bus.nc.publish(message.reply, ACK)
            return
        if request.id in self._ending:
            return
        if request.id in self._queue:  # delivered again
            return
        await self._place(PendingRequest(request, message.data, message.reply, time.time_ns()))
        await self._time_slice.yield_if_spent()

    def _space(self, priority: Priority) -> int:
        """How many more requests of a class may be taken from the log."""
        return max(0, self._settings.max_pending - self._held[priority]) if not self._keeping.full else 0

    def _wait(self, pending: PendingRequest) -> None:
        request = pending.request
        if pending.reply and self._crowded(pending):
            delay_ns = min(PARKED_NS, max(1, request.deadline_ns - time.time_ns()))
            self._say(pending.reply, NAK + b' {"delay": %d}' % delay_ns)
            self._parked[request.id] = pending.reply
            return
        entered = self._queue.push(
            request.id,
            pending,
            rank=request.priority.rank,
            arrived_ns=request.created_ns,
            deadline_ns=request.deadline_ns,
            lane=self._lane(request, pending.pin),
        )
        if entered:
            self._held[request.priority] += 1
            self._shares[request.priority, pending.share] += 1

    def _crowded(self, pending: PendingRequest) -> bool:
        """Whether requests of its model would take the room from those of others; then it comes again in a while.

        Models without a worker may have a quarter of a class's room together, each other model half of it.
        """
        request, tracker = pending.request, self.cluster.tracker
        mine = tracker.serving(request.model)
        if len(mine) == tracker.size:  # there is no other model
            return False
        pending.share = request.model if mine else ""
        limit = self._settings.max_pending // (2 if mine else 4)
        return self._shares[request.priority, pending.share] >= max(1, limit)

    def _lane(self, request: GenerateRequest, pin: str) -> str:
        """Requests that wait for the same workers: others must not wait behind them."""
        long = len(request.prompt) // 4 > self._settings.local_prefill_tokens
        kind = "media" if request.media else "long" if long else "short"
        kind = request.diffusion.kind if request.diffusion is not None else kind
        parts = (request.model, request.worker, kind, pin, request.tokenizer, *sorted(_processors(request)))
        return " ".join(parts)

    def _left(self, entry: QueueEntry[PendingRequest]) -> PendingRequest:
        pending = entry.item
        priority = pending.request.priority
        self._held[priority] -= 1
        self._shares[priority, pending.share] -= 1
        return pending

    def _overtaken(self, pending: PendingRequest) -> bool:
        """Whether another replica, that was given the same request, has placed it or seen it end."""
        known = self.cluster.tracker.request(pending.request.id)
        placed = known is not None and known.echoed and known.attempt >= pending.attempt
        if not placed and not self.cluster.tracker.ended(pending.request.id):
            return False
        if pending.reply:
            self._say(pending.reply, ACK)
        return True

    async def _place(self, pending: PendingRequest) -> bool:
        """Give a request to a worker, or end it; False: it has to wait. Whatever fails, fails for this one only."""
        request = pending.request
        try:
            return await self._try_place(pending)
        except (NatsError, OSError, TimeoutError) as error:  # the link broke just now
            log.warning("placement_postponed", request=request.id, error=repr(error))
            self.cluster.tracker.release(request.id, pending.attempt)
            self._wait(pending)
            return False
        except Exception as error:
            log.exception("placement_failed", request=request.id)
            self.cluster.tracker.release(request.id, pending.attempt)
            what = f"the router could not place it ({type(error).__name__}); its log has the details"
            self._end(pending, Code.internal, what)
            return True

    async def _try_place(self, pending: PendingRequest) -> bool:
        request = pending.request
        now_ns = time.time_ns()
        if self._overtaken(pending):
            return True
        if request.id in self._cancels:
            self._end(pending, Code.cancelled, self._cancels[request.id])
            return True
        if now_ns >= request.deadline_ns:
            self._end(pending, Code.deadline_exceeded, "the deadline passed before a worker was free")
            return True
        keys = keys_view(request.digests)
        decision = self._choose(pending, keys, now_ns)
        if decision.code is not None:
            self._end(pending, decision.code, f"no worker can ever run this request: {describe(decision.reason)}")
            return True
        if not decision.route:
            self._wait(pending)
            return False
        await self._dispatch(pending, decision, keys, now_ns)
        return True

    def _choose(self, pending: PendingRequest, keys: Sequence[int], now_ns: int) -> RoutingDecision:
        request = pending.request
        routing_request = RoutingRequest(
            request.model,
            len(request.prompt) // 4,
            request.stop.max_tokens,
            prompt_blocks=len(keys),
            n=request.n,
            worker=request.worker,
            avoid=self.cluster.suspects(),
            resumed_tokens=pending.resumed_tokens,
            medium=request.media[0].digest if request.media else b"",
            output=request.diffusion.kind if request.diffusion is not None else "",
            processors=_processors(request),
            revision=self._revision_for(pending),
            tokenizer=request.tokenizer,
        )
        self._turn += 1
        return decide(
            RoutingContext(
                routing_request,
                self.cluster.tracker.targets(now_ns, request.model),
                self.cluster.overlaps(keys) if not _computes_all(pending) else {},
                self._settings.mode,
                self._weights,
                self._rng,
                self._turn,
            )
        )

    def _revision_for(self, pending: PendingRequest) -> str | None:
        """The revision that has to run it; None: whichever has the worker that it names."""
        request, pin = pending.request, pending.pin
        if pending.begun and pin:
            return pin
        if request.worker:
            return None
        known = self.cluster.tracker.revisions(request.model, request.tokenizer)
        if pin and (pin in known.present or known.serving is None):
            return pin
        if pin:
            log.info("request_moved_to_revision", request=request.id, before=pin, revision=known.serving)
            self._metrics.repinned.inc()
            pending.revision = known.serving or ""
        return known.serving

    def _stranded(self, pending: PendingRequest, now: float) -> bool:
        """Whether a request that has begun has waited long enough for a worker of its revision."""
        request, pin = pending.request, pending.pin
        if (
            not pending.begun
            or not pin
            or pin in self.cluster.tracker.revisions(request.model, request.tokenizer).present
        ):
            pending.missing_since = 0.0
            return False
        if not pending.missing_since:
            pending.missing_since = now
        return now - pending.missing_since >= self._settings.revision_wait_s

    def _end_stranded(self, pending: PendingRequest) -> None:
        tokens, wait_s = pending.resumed_tokens, self._settings.revision_wait_s
        self._end(
            pending,
            Code.revision_unavailable,
            f"its first {tokens} tokens came from revision {pending.pin} of {pending.request.model!r}, whose last "
            f"worker is gone, and none came back within {wait_s:g} s (--revision-wait-s); another revision would go "
            "on in other words: send the request again",
        )

    async def _dispatch(
        self, pending: PendingRequest, decision: RoutingDecision, keys: Sequence[int], now_ns: int
    ) -> None:
        """Publish the job to its first worker; the request is acknowledged only after the job is stored."""
        request, attempt, route, first = pending.request, pending.attempt, decision.route, decision.route[0]
        computing = self.cluster.tracker.worker(decision.prefill_worker)
        assert computing is not None
        prompt_tokens = len(request.prompt) // 4
        cached = decision.overlap_blocks * computing.block_size
        kv_seq, work_seq, done_seq = self.cluster.positions()
        record = Decision(
            mode=self._settings.mode,
            chosen=first.worker,
            router=self.id,
            at_ns=now_ns,
            candidates=decision.candidates,
            prompt_blocks=len(keys),
            waited_ns=now_ns - pending.since_ns,
            kv_seq=kv_seq,
            work_seq=work_seq,
            done_seq=done_seq,
            rank=first.rank,
            reason=pending.reason,
            route=route if len(route) > 1 else (),
            how=decision.how,
            revision=computing.revision,
        )
        job = Job(
            request=msgspec.Raw(pending.raw),
            attempt=attempt,
            decision=record,
            resume=pending.resume,
            finished=pending.finished,
            endings=pending.endings,
            route=route[1:],
            scored=pending.scored,
            logprobs=pending.logprobs,
            scores=pending.scores,
        )
        load = jobs.LoadHeader(
            prompt_tokens,
            cached,
            request.gateway,
            request.deadline_ns,
            request.priority.value,
            request.n,
            route if len(route) > 1 or first.rank else (),
        )
        self.cluster.placed(request, attempt, route, load, keys, now_ns)
        try:
            acknowledged = await self._publisher.send(
                self._bus.subjects.work(first.role, first.worker),
                wire.encode(job),
                f"{request.id}:{attempt}",
                headers={HEADER_LOAD: jobs.load_header(*load)},
            )
        except ServingError as failure:  # too large for a message, with all that was streamed so far
            self.cluster.tracker.release(request.id, attempt)
            self._end(pending, failure.code, failure.message)
            return
        self._metrics.placed(
            pending.reason, decision.kind, first.role == ENCODE, cached, prompt_tokens, now_ns - pending.since_ns
        )

        def stored(future: "asyncio.Future[Ack]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:  # if another router was first, with another worker perhaps, the log will say so
                if pending.reply:
                    self._say(pending.reply, ACK)
                return
            log.warning("job_not_stored", request=request.id, error=str(error))
            self.cluster.tracker.release(request.id, attempt)
            self._wait(pending)

        acknowledged.add_done_callback(stored)

    def _pump_soon(self) -> None:
        """Room may have come free: look once per loop turn, not once per event."""
        if not self._pump_due and len(self._queue):
            self._pump_due = True
            self.tasks.spawn(self._pump(), name="pump")

    async def _pump(self) -> None:
        """Place who waits: who is next of all lanes first, and in each lane until one finds no room."""
        self._pump_due = False
        lanes = self._queue.lanes if self.cluster.has_capacity() else []
        heads = [(turn, lane) for lane in lanes if (turn := self._queue.turn(lane)) is not None]
        heapq.heapify(heads)
        while heads:
            _, lane = heapq.heappop(heads)
            entry = self._queue.pop_best(lane)
            if entry is not None and await self._place(self._left(entry)):
                following = self._queue.turn(lane)
                if following is not None:
                    heapq.heappush(heads, (following, lane))
            await self._time_slice.yield_if_spent()
        for puller in self._pullers:
            await puller.top_up()

    # --- ends that the router decides ---

    def _end(self, pending: PendingRequest, code: Code, message: str) -> None:
        if pending.request.id in self._ending:
            return
        self._ending.add(pending.request.id)
        self._spawn(self._tell_end(pending, code, message), f"end-{pending.request.id}")

    async def _tell_end(self, pending: PendingRequest, code: Code, message: str) -> None:
        """Terminal token item, terminal event, acknowledgement: in this order, each stored before the next."""
        request, attempt = pending.request, pending.attempt
        batch = TokenBatch(self.id, 0, 0, (terminal_events.last_item(request, attempt, code, message),))
        event = terminal_events.refused(
            request, pending.raw, attempt, pending.resume, code=code, message=message, now_ns=time.time_ns()
        )
        subjects = self._bus.subjects
        try:
            await self._publisher.publish(
                subjects.tokens(request.gateway), wire.encode(batch), f"{request.id}:{attempt}:end", timeout=TERMINAL_S
            )
            await self._tell_done(request, event)
            if pending.reply:
                await self._bus.nc.publish(pending.reply, ACK)
        finally:
            self._ending.discard(request.id)
        self.cluster.tracker.finish(request.id)
        self._metrics.ended.labels(code.value).inc()
        log.info("request_ended_by_router", request=request.id, code=code.value)

    async def _tell_done(self, request: GenerateRequest, event: done.Done) -> None:
        payload = done.encode_within(event, self._bus.max_message)
        subject = self._bus.subjects.done(request.tenant, request.model, request.id)
        await self._publisher.publish(subject, payload, request.id, timeout=TERMINAL_S, once=True)

    async def _complete(self, orphan: Orphan) -> None:
        """Nothing but the terminal event is missing."""
        request = orphan.request
        assert request is not None
        try:
            event = terminal_events.completed(
                request,
                orphan.raw,
                orphan.attempt,
                orphan.worker,
                progress=orphan.progress,
                scores=orphan.scores,
                now_ns=time.time_ns(),
            )
            await self._tell_done(request, event)
        finally:
            self._ending.discard(request.id)

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """A client gave up. If the request waits here it ends now; else its worker hears the same message."""
        if request_id in self._cancels:
            return
        self._cancels[request_id] = reason
        if len(self._cancels) > REMEMBERED:
            self._cancels.popitem(last=False)
        entry = self._queue.remove(request_id)
        if entry is not None:
            await self._place(self._left(entry))  # to its end

    # --- what dead workers leave behind ---

    def _on_lost(self, worker: str, why: str, orphans: list[ActiveRequest]) -> None:
        log.warning("worker_lost", worker=worker, why=why, requests=len(orphans))
        self._metrics.lost.inc()
        if orphans:
            self._spawn(self._recover_requests(orphans, "worker_lost"), f"recover-{worker}")

    def _on_stranded(self, entry: ActiveRequest) -> None:
        """An attempt is at a worker, or goes to one, that is known to be gone."""
        self._spawn(self._recover_requests([entry], "worker_lost"), f"recover-{entry.request}")

    def _on_returned(self, request_id: str, attempt: int, why: str) -> None:
        reason = f"returned: {why}"[:200]
        self._returned_attempts[request_id] = (attempt, reason, time.monotonic())
        if len(self._returned_attempts) > REMEMBERED:
            self._returned_attempts.popitem(last=False)
        entry = self.cluster.tracker.request(request_id)
        if entry is not None and entry.attempt == attempt:
            self._spawn(self._recover_requests([entry], reason), f"recover-{request_id}")

    def _pending_returns(self, now: float) -> dict[str, list[ActiveRequest]]:
        """By reason: returns that came before their job was known, or whose rescue failed."""
        found: dict[str, list[ActiveRequest]] = {}
        for request_id, (attempt, reason, since) in list(self._returned_attempts.items()):
            entry = self.cluster.tracker.request(request_id)
            if entry is not None and entry.attempt == attempt:
                found.setdefault(reason, []).append(entry)
            elif entry is not None or now - since > UNKNOWN_S or self.cluster.tracker.ended(request_id):
                del self._returned_attempts[request_id]
        return found

    async def _watch_orphans(self) -> None:
        """The backstop: unfinished work of workers that are not registered or gave it back, whoever placed it."""
        while True:
            await asyncio.sleep(ORPHANS_S)
            orphans = self.cluster.orphans()
            if orphans:
                await self._recover_requests(orphans, "worker_lost")
            for reason, entries in self._pending_returns(time.monotonic()).items():
                await self._recover_requests(entries, reason)

    async def _recover_requests(self, lost: list[ActiveRequest], reason: str) -> None:
        """Steer unfinished requests again, behind the tokens that they have streamed."""
        fresh = [entry for entry in lost if (entry.request, entry.attempt) not in self._recovering]
        if not fresh:
            return
        names = {(entry.request, entry.attempt) for entry in fresh}
        self._recovering |= names
        try:
            orphans = [Orphan(e.request, e.attempt, e.worker, e.gateway, e.seq) for e in fresh]
            for found in await recover(self._bus, self._publisher, self.id, orphans):
                await self._requeue(found, reason)
                await self._time_slice.yield_if_spent()
        except ServingError as error:
            log.warning("recovery_postponed", error=error.message, requests=len(fresh))
        finally:
            self._recovering -= names

    async def _requeue(self, orphan: Orphan, reason: str) -> None:
        request = orphan.request
        assert request is not None
        entry = self.cluster.tracker.request(orphan.request_id)
        if entry is None or entry.attempt != orphan.attempt:
            return  # its terminal event or another router's decision came in the meantime
        if reason == "worker_lost":
            await self._revoke(entry)
        wants_logprobs = request.sampling.logprobs is not None
        pending = PendingRequest(
            request,
            orphan.raw,
            "",
            time.time_ns(),
            attempt=orphan.attempt + 1,
            resume=tuple(part.tokens for part in orphan.progress),
            finished=tuple(i for i, part in enumerate(orphan.progress) if part.finish is not None),
            endings=tuple(part.finish for part in orphan.progress if part.finish is not None),
            reason=reason,
            revision=orphan.revision,
            logprobs=tuple(carried(part.logprobs) for part in orphan.progress) if wants_logprobs else (),
            scores=carried(orphan.scores),
            scored=len(orphan.scores) + 1 if orphan.scores else 0,
        )
        if len(pending.finished) == request.n:
            if request.id not in self._ending:
                self._ending.add(request.id)
                self._spawn(self._complete(orphan), f"end-{request.id}")
        elif pending.attempt > self._settings.max_attempts:
            self._end(
                pending,
                Code.worker_lost,
                f"{orphan.attempt} workers in turn were lost or failed while they ran this request ({reason})",
            )
        else:
            log.info("request_requeued", request=request.id, attempt=pending.attempt, reason=reason)
            self.cluster.tracker.end_attempt(orphan.request_id, orphan.attempt)
            await self._place(pending)

    async def _revoke(self, entry: ActiveRequest) -> None:
        """Spare a worker that lives the rest of an attempt that is void, since another one of its route is lost."""
        holder = self.cluster.tracker.worker(entry.worker)
        if holder is None or not entry.later:
            return
        try:
            stored = await self._publisher.send(
                self._bus.subjects.work(holder.role, holder.worker),
                wire.encode(jobs.Revoke(entry.request, entry.attempt)),
                f"{entry.request}:{entry.attempt}:revoke",
            )
            stored.add_done_callback(lambda future: future.cancelled() or future.exception())
        except ServingError as error:  # it costs that worker some time, and nobody an answer
            log.warning("attempt_not_revoked", request=entry.request, worker=entry.worker, error=error.message)

    # --- upkeep ---

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            try:
                await self._keeping.look(self.cluster.tracker.active())
            except ServingError as error:
                log.warning("jobs_not_kept", error=error.message)
            try:
                await self._keep_waiting()
            except ServingError as error:
                log.warning("requests_not_kept", error=error.message)

    async def _keep_waiting(self) -> None:
        """Only where this router asks for more: a copy of what waits must not stand behind what was never read."""
        parked, self._parked = self._parked, {}
        held = {
            entry.id: entry.item.reply
            for entry in self._queue
            if entry.item.reply and self._space(entry.item.request.priority)
        }
        for request_id, reply in await self._stragglers.look((parked | held).items()):
            entry = self._queue.get(request_id)
            if entry is not None and entry.item.reply == reply:
                self._queue.remove(request_id)
                self._left(entry)
            self._say(reply, ACK)

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            await self.cluster.save()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._sweep_once(time.time_ns(), time.monotonic())

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        await self.cluster.upkeep(now_ns)
        for entry in self._queue.expired(now_ns):
            await self._place(self._left(entry))  # to its end
        for entry in self._queue:
            pending = entry.item
            if self._stranded(pending, now):
                self._queue.remove(entry.id)
                self._end_stranded(self._left(entry))
                continue
            if pending.reply and now - pending.renewed > RENEW_S and self._bus.connected:
                pending.renewed = now
                await self._claim(pending.reply)
            await self._time_slice.yield_if_spent()
        self._metrics.waiting.set(len(self._queue))
        if self.cluster.index is not None:
            self._metrics.blocks.set(self.cluster.index.blocks)
        self._metrics.workers.set(self.cluster.tracker.size)
        self._pump_soon()

    async def _claim(self, reply: str) -> None:
        """What waits here shall not come to another router."""
        try:
            await self._bus.nc.publish(reply, IN_PROGRESS)
        except (NatsError, OSError) as error:  # the link broke just now
            log.debug("claim_failed", error=repr(error))

    def _say(self, reply: str, verdict: bytes) -> None:
        """How a request's message ends; if it is not heard, the message comes again."""
        self._spawn(self._bus.nc.publish(reply, verdict), "verdict")

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Work for single requests, which come again if it fails: their messages, or by the watch for orphans."""

        def failed(error: BaseException) -> None:
            log.error("router_task_failed", task=name, error=repr(error), exc_info=error)

        self.tasks.spawn(work, name=name, on_failure=failed)


def _computes_all(pending: PendingRequest) -> bool:
    """Whether no part of the prompt may come from a cache: what is there has no log-probabilities."""
    request = pending.request
    return request.sampling.prompt_logprobs is not None and pending.scored < len(request.prompt) // 4


def _processors(request: GenerateRequest) -> frozenset[str]:
    """Logits processors that its workers must have."""
    return frozenset(each.name for each in request.sampling.logits_processors)
