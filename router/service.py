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
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from configs.bus.connection import Bus
from configs.bus.publish import Ack, Publisher
from configs.bus.pull import ACK, IN_PROGRESS, NAK, TERM, Puller
from configs.settings import RouterSettings
from router import ends
from router.fleet import ENCODE, Unfinished
from router.holders import keys_view
from router.metrics import Metrics
from router.policy import Ask, Choice, Weights, choose, explained
from router.rescue import Orphan, recover
from router.view import View
from router.waiting import Waiting as Entry
from router.waiting import WaitingRoom
from schemas import done, jobs, requests, wire
from schemas.errors import Code, ServingError
from schemas.jobs import Decision, Job
from schemas.requests import GenerateRequest, Priority
from schemas.subjects import HEADER_LOAD
from schemas.tokens import Finish, TokenBatch

log = structlog.get_logger("router")

RENEW_S = 3.0  # the consumers' ack_wait is 10 s
SWEEP_S = 0.1
ORPHANS_S = 1.0
SNAPSHOT_S = 10.0
TERMINAL_S = 600.0
REMEMBERED = 50_000
UNKNOWN_S = 30.0  # a return is kept so long for a job that is not known (yet)
NO_LIMIT = 1 << 30


class Waiting(msgspec.Struct, eq=False):
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
        self.view = View(
            bus,
            settings,
            on_change=self._pump_soon,
            on_returned=self._on_returned,
            on_lost=self._on_lost,
            on_stranded=self._on_stranded,
        )
        self._room: WaitingRoom[Waiting] = WaitingRoom(NO_LIMIT)  # what enters from the log is limited by class
        self._held = dict.fromkeys(Priority, 0)
        self._pullers: list[Puller] = []
        self._cancels: OrderedDict[str, str] = OrderedDict()
        self._given_back: OrderedDict[str, tuple[int, str, float]] = OrderedDict()  # request -> attempt, reason, when
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
            asyncio.create_task(self._save(), name="router-snapshots"),
        ]
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
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3.0)
        for entry in self._room:
            if entry.item.reply and self._bus.connected:
                await self._bus.nc.publish(entry.item.reply, NAK)
        await self.view.stop()

    # --- requests in ---

    async def _on_request(self, message: Any) -> None:
        try:
            request = requests.decode(message.data)
        except msgspec.MsgspecError as error:
            log.error("request_unreadable", subject=message.subject, error=str(error))
            await self._bus.nc.publish(message.reply, TERM)
            return
        known = self.view.fleet.request(request.id)
        if known is not None and not known.echoed:  # placed by us; acknowledged when its job is stored, not before
            return
        if known is not None or self.view.fleet.ended(request.id):  # its acknowledgement was lost with the broker
            await self._bus.nc.publish(message.reply, ACK)
            return
        if request.id in self._ending:
            return
        if request.id in self._room:  # delivered again
            return
        await self._place(Waiting(request, message.data, message.reply, time.time_ns()))

    def _space(self, priority: Priority) -> int:
        """How many more requests of a class may be taken from the log."""
        return max(0, self._settings.waiting_room - self._held[priority])

    def _wait(self, waiting: Waiting) -> None:
        request = waiting.request
        entered = self._room.push(
            request.id,
            waiting,
            rank=request.priority.rank,
            arrived_ns=request.created_ns,
            deadline_ns=request.deadline_ns,
            lane=self._lane(request),
        )
        if entered:
            self._held[request.priority] += 1

    def _lane(self, request: GenerateRequest) -> str:
        """Requests that wait for the same workers: others must not wait behind them."""
        long = len(request.prompt) // 4 > self._settings.local_prefill_tokens
        kind = "media" if request.media else "long" if long else "short"
        kind = request.diffusion.kind if request.diffusion is not None else kind
        return " ".join([request.model, request.worker, kind, *sorted(_processors(request))])

    def _left(self, entry: Entry[Waiting]) -> Waiting:
        self._held[entry.item.request.priority] -= 1
        return entry.item

    def _overtaken(self, waiting: Waiting) -> bool:
        """Whether another replica, that was given the same request, has placed it or seen it end."""
        known = self.view.fleet.request(waiting.request.id)
        placed = known is not None and known.echoed and known.attempt >= waiting.attempt
        if not placed and not self.view.fleet.ended(waiting.request.id):
            return False
        if waiting.reply:
            self._spawn(self._bus.nc.publish(waiting.reply, ACK))
        return True

    async def _place(self, waiting: Waiting) -> bool:
        """Give a request to a worker, or end it; False: it has to wait."""
        request = waiting.request
        now_ns = time.time_ns()
        if self._overtaken(waiting):
            return True
        if request.id in self._cancels:
            self._end(waiting, Code.cancelled, self._cancels[request.id])
            return True
        if now_ns >= request.deadline_ns:
            self._end(waiting, Code.deadline_exceeded, "the deadline passed before a worker was free")
            return True
        keys = keys_view(request.digests)
        choice = self._choose(waiting, keys, now_ns)
        if choice.code is not None:
            self._end(waiting, choice.code, f"no worker can ever run this request: {explained(choice.reason)}")
            return True
        if not choice.route:
            self._wait(waiting)
            return False
        await self._dispatch(waiting, choice, keys, now_ns)
        return True

    def _choose(self, waiting: Waiting, keys: Sequence[int], now_ns: int) -> Choice:
        request = waiting.request
        ask = Ask(
            request.model,
            len(request.prompt) // 4,
            request.stop.max_tokens,
            prompt_blocks=len(keys),
            n=request.n,
            worker=request.worker,
            avoid=self.view.suspects(),
            resumed_tokens=waiting.resumed_tokens,
            medium=request.media[0].digest if request.media else b"",
            picture=request.diffusion.kind if request.diffusion is not None else "",
            processors=_processors(request),
        )
        self._turn += 1
        return choose(
            ask,
            self.view.fleet.members(now_ns, request.model),
            self.view.overlaps(keys) if not _computes_all(waiting) else {},
            self._settings.mode,
            self._weights,
            self._rng,
            self._turn,
        )

    async def _dispatch(self, waiting: Waiting, choice: Choice, keys: Sequence[int], now_ns: int) -> None:
        """Publish the job to its first worker; the request is acknowledged only after the job is stored."""
        request, attempt, route, first = waiting.request, waiting.attempt, choice.route, choice.route[0]
        computing = self.view.fleet.worker(choice.computing)
        assert computing is not None
        prompt_tokens = len(request.prompt) // 4
        cached = choice.overlap_blocks * computing.block_size
        kv_seq, work_seq, done_seq = self.view.positions()
        decision = Decision(
            mode=self._settings.mode,
            chosen=first.worker,
            router=self.id,
            at_ns=now_ns,
            candidates=choice.candidates,
            prompt_blocks=len(keys),
            waited_ns=now_ns - waiting.since_ns,
            kv_seq=kv_seq,
            work_seq=work_seq,
            done_seq=done_seq,
            rank=first.rank,
            reason=waiting.reason,
            route=route if len(route) > 1 else (),
            how=choice.how,
        )
        job = Job(
            request=msgspec.Raw(waiting.raw),
            attempt=attempt,
            decision=decision,
            resume=waiting.resume,
            finished=waiting.finished,
            endings=waiting.endings,
            route=route[1:],
            scored=waiting.scored,
        )
        self.view.placed(request, attempt, route, cached, keys, now_ns)
        load = jobs.load_header(
            prompt_tokens,
            cached,
            request.gateway,
            request.deadline_ns,
            request.priority.value,
            request.n,
            route if len(route) > 1 or first.rank else (),
        )
        try:
            acknowledged = await self._publisher.send(
                self._bus.subjects.work(first.role, first.worker),
                wire.encode(job),
                f"{request.id}:{attempt}",
                headers={HEADER_LOAD: load},
            )
        except ServingError as failure:  # too large for a message, with all that was streamed so far
            self.view.fleet.withdraw(request.id, attempt)
            self._end(waiting, failure.code, failure.message)
            return
        self._metrics.placed(
            waiting.reason, choice.kind, first.role == ENCODE, cached, prompt_tokens, now_ns - waiting.since_ns
        )

        def stored(future: "asyncio.Future[Ack]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:  # if another router was first, with another worker perhaps, the log will say so
                if waiting.reply:
                    self._spawn(self._bus.nc.publish(waiting.reply, ACK))
                return
            log.warning("job_not_stored", request=request.id, error=str(error))
            self.view.fleet.withdraw(request.id, attempt)
            self._wait(waiting)

        acknowledged.add_done_callback(stored)

    def _pump_soon(self) -> None:
        """Room may have come free: look once per loop turn, not once per event."""
        if not self._pump_due and len(self._room):
            self._pump_due = True
            self._spawn(self._pump())

    async def _pump(self) -> None:
        """Place who waits: who is next of all lanes first, and in each lane until one finds no room."""
        self._pump_due = False
        lanes = self._room.lanes if self.view.any_room() else []
        heads = [entry for lane in lanes if (entry := self._room.peek(lane)) is not None]
        heapq.heapify(heads)
        while heads:
            lane = heapq.heappop(heads).lane
            entry = self._room.pop_best(lane)
            if entry is not None and await self._place(self._left(entry)):
                following = self._room.peek(lane)
                if following is not None:
                    heapq.heappush(heads, following)
        for puller in self._pullers:
            await puller.top_up()

    # --- ends that the router decides ---

    def _end(self, waiting: Waiting, code: Code, message: str) -> None:
        self._ending.add(waiting.request.id)
        self._spawn(self._tell_end(waiting, code, message))

    async def _tell_end(self, waiting: Waiting, code: Code, message: str) -> None:
        """Terminal token item, terminal event, acknowledgement: in this order, each stored before the next."""
        request, attempt = waiting.request, waiting.attempt
        batch = TokenBatch(self.id, 0, 0, (ends.last_item(request, attempt, code, message),))
        event = ends.refused(request, attempt, waiting.resume, code, message, time.time_ns())
        subjects = self._bus.subjects
        try:
            await self._publisher.publish(
                subjects.tokens(request.gateway), wire.encode(batch), f"{request.id}:{attempt}:end", timeout=TERMINAL_S
            )
            await self._tell_done(event)
            if waiting.reply:
                await self._bus.nc.publish(waiting.reply, ACK)
        finally:
            self._ending.discard(request.id)
        self.view.fleet.finished(request.id)
        self._metrics.ended.labels(code.value).inc()
        log.info("request_ended_by_router", request=request.id, code=code.value)

    async def _tell_done(self, event: done.Done) -> None:
        payload = done.encode_within(event, self._bus.max_message)
        await self._publisher.publish(self._bus.subjects.done(event.model), payload, event.request, timeout=TERMINAL_S)

    async def on_cancel(self, request_id: str, reason: str) -> None:
        """A client gave up. If the request waits here it ends now; else its worker hears the same message."""
        if request_id in self._cancels:
            return
        self._cancels[request_id] = reason
        if len(self._cancels) > REMEMBERED:
            self._cancels.popitem(last=False)
        entry = self._room.remove(request_id)
        if entry is not None:
            await self._place(self._left(entry))  # to its end

    # --- what dead workers leave behind ---

    def _on_lost(self, worker: str, why: str, orphans: list[Unfinished]) -> None:
        log.warning("worker_lost", worker=worker, why=why, requests=len(orphans))
        self._metrics.lost.inc()
        if orphans:
            self._spawn(self._rescue(orphans, "worker_lost"))

    def _on_stranded(self, entry: Unfinished) -> None:
        """An attempt is at a worker, or goes to one, that is known to be gone."""
        self._spawn(self._rescue([entry], "worker_lost"))

    def _on_returned(self, event: done.Returned) -> None:
        reason = f"returned: {event.reason}"[:200]
        self._given_back[event.request] = (event.attempt, reason, time.monotonic())
        if len(self._given_back) > REMEMBERED:
            self._given_back.popitem(last=False)
        entry = self.view.fleet.request(event.request)
        if entry is not None and entry.attempt == event.attempt:
            self._spawn(self._rescue([entry], reason))

    def _still_given_back(self, now: float) -> dict[str, list[Unfinished]]:
        """By reason: returns that came before their job was known, or whose rescue failed."""
        found: dict[str, list[Unfinished]] = {}
        for request_id, (attempt, reason, since) in list(self._given_back.items()):
            entry = self.view.fleet.request(request_id)
            if entry is not None and entry.attempt == attempt:
                found.setdefault(reason, []).append(entry)
            elif entry is not None or now - since > UNKNOWN_S or self.view.fleet.ended(request_id):
                del self._given_back[request_id]
        return found

    async def _watch_orphans(self) -> None:
        """The backstop: unfinished work of workers that are not registered or gave it back, whoever placed it."""
        while True:
            await asyncio.sleep(ORPHANS_S)
            try:
                orphans = self.view.orphans()
                if orphans:
                    await self._rescue(orphans, "worker_lost")
                for reason, entries in self._still_given_back(time.monotonic()).items():
                    await self._rescue(entries, reason)
            except Exception:
                log.exception("orphan_watch_failed")

    async def _rescue(self, lost: list[Unfinished], reason: str) -> None:
        """Steer unfinished requests again, behind the tokens that they have streamed."""
        fresh = [entry for entry in lost if (entry.request, entry.attempt) not in self._rescuing]
        if not fresh:
            return
        names = {(entry.request, entry.attempt) for entry in fresh}
        self._rescuing |= names
        try:
            orphans = [Orphan(e.request, e.attempt, e.worker, e.gateway, e.seq) for e in fresh]
            for found in await recover(self._bus, self._publisher, self.id, orphans):
                await self._steer_again(found, reason)
        except ServingError as error:
            log.warning("rescue_postponed", error=error.message, requests=len(fresh))
        finally:
            self._rescuing -= names

    async def _steer_again(self, orphan: Orphan, reason: str) -> None:
        request = orphan.request
        assert request is not None
        entry = self.view.fleet.request(orphan.request_id)
        if entry is None or entry.attempt != orphan.attempt:
            return  # its terminal event or another router's decision came in the meantime
        if reason == "worker_lost":
            await self._revoke(entry)
        waiting = Waiting(
            request,
            orphan.raw,
            "",
            time.time_ns(),
            attempt=orphan.attempt + 1,
            resume=tuple(part.tokens for part in orphan.progress),
            finished=tuple(i for i, part in enumerate(orphan.progress) if part.finish is not None),
            endings=tuple(part.finish for part in orphan.progress if part.finish is not None),
            reason=reason,
            scored=orphan.scored,
        )
        if len(waiting.finished) == request.n:
            await self._tell_done(
                ends.completed(request, orphan.attempt, orphan.worker, orphan.progress, time.time_ns())
            )
        elif waiting.attempt > self._settings.max_attempts:
            self._end(
                waiting,
                Code.worker_lost,
                f"{orphan.attempt} workers in turn were lost or failed while they ran this request ({reason})",
            )
        else:
            log.info("request_steered_again", request=request.id, attempt=waiting.attempt, reason=reason)
            self.view.fleet.returned(orphan.request_id, orphan.attempt)
            await self._place(waiting)

    async def _revoke(self, entry: Unfinished) -> None:
        """Spare a worker that lives the rest of an attempt that is void, since another one of its route is lost."""
        holder = self.view.fleet.worker(entry.worker)
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

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            try:
                await self.view.save()
            except Exception:
                log.exception("snapshot_failed")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(time.time_ns(), time.monotonic())
            except Exception:
                log.exception("sweep_failed")

    async def _sweep_once(self, now_ns: int, now: float) -> None:
        self.view.upkeep(now_ns)
        for entry in self._room.expired(now_ns):
            await self._place(self._left(entry))  # to its end
        for entry in self._room:
            waiting = entry.item
            if waiting.reply and now - waiting.renewed > RENEW_S and self._bus.connected:
                waiting.renewed = now
                await self._bus.nc.publish(waiting.reply, IN_PROGRESS)
        self._metrics.waiting.set(len(self._room))
        if self.view.index is not None:
            self._metrics.blocks.set(self.view.index.stats.blocks)
        self._metrics.workers.set(len(self.view.fleet.workers()))
        self._pump_soon()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("router_task_failed", error=repr(task.exception()))


def _computes_all(waiting: Waiting) -> bool:
    """Whether no part of the prompt may come from a cache: what is there has no log-probabilities."""
    request = waiting.request
    return request.sampling.prompt_logprobs is not None and waiting.scored < len(request.prompt) // 4


def _processors(request: GenerateRequest) -> frozenset[str]:
    """Logits processors that its workers must have."""
    return frozenset(each.name for each in request.sampling.logits_processors)
