"""Requests of workers that were lost or that returned them: fence the attempt, then requeue, complete or end it.

A fence is a token item of the next attempt, stored in the stream of the tokens. For every reader, the old attempt ends
at the fence: the client has received, or will receive, exactly the tokens before it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import find_lost, get, read
from penstock.infra.bus.publisher import Publisher
from penstock.infra.process.turns import TimeSlice
from penstock.router.ownership.intake import BackgroundTasks
from penstock.router.placement.pending import PendingRequest
from penstock.router.recovery.terminal_events import InterruptedAttempt, TerminalPublisher
from penstock.router.state.attempts import ActiveRequest
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.lost_workers import DRAINED
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import jobs, requests, tokens, wire
from penstock.schemas.cells import is_cell
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import WORKER_LOST, EarlierWorker
from penstock.schemas.requests import time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import HEADER_MSG_ID, in_memory, request_of
from penstock.schemas.token_dedup import replay, scores
from penstock.schemas.tokens import WHOLE_REQUEST, TokenBatch, TokenItem, carried

log = structlog.get_logger("router")

SCAN_S = 1.0
SCANS_LEFT = 2
SCANS_UNHELD = 10  # longer than any step between the end of an attempt and the decision on the next
LOOK_AGAIN_S = 3.0
AGAIN_S = 10.0  # between attempts to find a job that the log lacks, or to repeat a failed recovery
RETURNS_REMEMBERED = 50_000
FEW = 8  # requests of one shard lie far apart
UNKNOWN_S = 30.0  # how long a return of an unknown request is remembered: its job may be read later
LONGEST_REASON = 200  # characters
LATE = "resteered"  # prefix of the reason of a request that waited at a late worker
STALLED = "stalled"  # prefix of the reason of a request whose worker's engine makes no steps


class Recovery:
    """
    Attributes:
        resuming: requests whose earlier output is being read, before they are placed; of several deliveries the reply
            of the latest counts.

    Args:
        router: id of this router.
        owns: whether this router owns the model of a worker. Other routers' models are left to them for two scans;
            then this router acts, too, in case the owner was lost.
        misses_output: whether a request, by its id, is older than a restart of a broker without a cluster just now. Its
            output with ``no_store`` is being stored again, so it must not be fenced yet.
        is_held: whether a request, by its id, waits here for its next worker.
        place: gives a later attempt to a worker, or holds it.
        top_up: reads more requests from the log.
        fall_back: runs a later attempt as a fallback of its request, for this reason; False: it has none that can.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        router: str,
        *,
        cluster: ClusterState,
        terminal: TerminalPublisher,
        background: BackgroundTasks,
        metrics: Metrics,
        max_attempts: int,
        owns: Callable[[str], bool],
        misses_output: Callable[[str], bool],
        is_held: Callable[[str], bool],
        place: Callable[[PendingRequest], Awaitable[bool]],
        top_up: Callable[[], Awaitable[None]],
        fall_back: Callable[[PendingRequest, str], Awaitable[bool]],
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._router = router
        self._cluster = cluster
        self._terminal = terminal
        self._background = background
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._owns = owns
        self._misses_output = misses_output
        self._is_held = is_held
        self._place = place
        self._top_up = top_up
        self._fall_back = fall_back
        self.resuming: dict[str, PendingRequest] = {}
        self._to_resume: list[PendingRequest] = []
        self._resume_turn = asyncio.Lock()
        self._returned: OrderedDict[str, tuple[int, str, float]] = OrderedDict()  # request -> attempt, reason, when
        self._recovering: set[tuple[str, int]] = set()
        self._left_to_owner: dict[tuple[str, int], int] = {}  # request, attempt -> scans
        self._unheld: dict[tuple[str, int], int] = {}  # request, attempt -> scans
        self._job_lost: dict[str, tuple[int, int]] = {}  # request -> attempt, sequence of its job in WORK
        self._looked = -1  # number of reconnects at the last search for lost jobs
        self._look_at = 0.0  # earliest monotonic time of the next search
        self._postponed: OrderedDict[tuple[str, int], float] = OrderedDict()  # request, seq in WORK -> monotonic time
        self._time_slice = TimeSlice()

    def on_worker_lost(self, worker: str, why: str, requests: list[ActiveRequest]) -> None:
        if why == DRAINED and not requests:  # else its engine has failed, even if it was idle
            log.info("worker_left", worker=worker, why=why)
            return
        log.warning("worker_lost", worker=worker, why=why, requests=len(requests))
        self._metrics.lost.inc()
        self._recover_owned(worker, requests, WORKER_LOST)

    def on_stranded(self, entry: ActiveRequest) -> None:
        """A request was sent to a worker that had left before, or is on its way to one."""
        self._recover_owned(entry.worker, [entry], WORKER_LOST)

    def on_returned(self, request_id: str, attempt: int, why: str) -> None:
        """A worker returned an attempt, or was reported to have ended while it ran the attempt."""
        ended = self._cluster.returned.of(request_id).get(attempt)
        reason = f"{WORKER_LOST if ended else 'returned'}: {why}"[:LONGEST_REASON]
        self._returned[request_id] = (attempt, reason, time.monotonic())
        if len(self._returned) > RETURNS_REMEMBERED:
            self._returned.popitem(last=False)
        entry = self._cluster.tracker.request(request_id)
        if entry is not None and entry.attempt == attempt:
            self._recover_owned(entry.worker, [entry], reason)

    def on_stalled(self, entry: ActiveRequest, why: str) -> None:
        """The engine of a request's worker makes no steps: another worker continues it, once."""
        self._recover_owned(entry.worker, [entry], f"{STALLED}: {why}")

    def on_late(self, entry: ActiveRequest, why: str) -> None:
        """A request waits at a worker that is late, and another worker is idle."""
        self._recover_owned(entry.worker, [entry], f"{LATE}: {why}")

    def _recover_owned(self, worker: str, entries: list[ActiveRequest], reason: str) -> None:
        """Recover requests of a worker in the background; ``scan`` looks after those of other routers' models."""
        if entries and self._owns(worker):
            self._background.spawn(self.recover(entries, reason), f"recover-{entries[0].request}")

    async def scan(self) -> None:
        """Look for orphans and unhandled returns every second, whichever router placed them; never returns."""
        while True:
            await asyncio.sleep(SCAN_S)
            await self.scan_now()

    async def scan_now(self) -> None:
        self._reopen_unheld()
        await self._look_for_lost_jobs()
        before, self._left_to_owner = self._left_to_owner, {}
        if orphans := self._due(self._cluster.orphans(), before):
            await self.recover(orphans, WORKER_LOST)
        for reason, entries in self._unhandled_returns(time.monotonic()).items():
            if due := self._due(entries, before):
                await self.recover(due, reason)
        if due := self._due(self._without_job(), before):
            await asyncio.sleep(0)
            await self.recover(due, jobs.JOB_LOST)

    async def _look_for_lost_jobs(self) -> None:
        """Search after each reconnect: a worker that runs may never have got the job, so nothing else would find it.

        After a power failure or damage to its disk, a broker lacks messages that it had stored.
        """
        cluster, links = self._cluster, self._bus.reconnects
        known = links == self._looked and not cluster.cut_off
        if known or not self._bus.connected or time.monotonic() < self._look_at:
            return
        try:
            await cluster.fold_unowned()
            lost = await self._lost_of(cluster.stored_jobs())
            while cluster.cut_off:
                lost |= await self._lost_of(cluster.cut_off[0])
                del cluster.cut_off[0]
        except ServingError as error:
            log.warning("lost_jobs_unknown", error=error.message)
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            return
        self._looked = links
        if lost:
            log.error("jobs_lost", requests=[*lost][:FEW], jobs=len(lost))
            self._job_lost |= lost
            await asyncio.sleep(0)  # for thousands, each step takes milliseconds

    async def _lost_of(self, active: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
        jobs_of = {(seq, f"{request}:{attempt}"): (request, attempt) for request, attempt, seq in active}
        lost = await find_lost(self._bus, self._bus.subjects.stream("WORK"), jobs_of.keys())
        return {request: (attempt, job[0]) for job, (request, attempt) in jobs_of.items() if job in lost}

    def _without_job(self) -> list[ActiveRequest]:
        found = {name: self._cluster.tracker.request(name) for name in self._job_lost}
        left = {name: e for name, e in found.items() if e is not None and (e.attempt, e.seq) == self._job_lost[name]}
        self._job_lost = {name: self._job_lost[name] for name in left}
        return list(left.values())

    def _due(self, entries: list[ActiveRequest], before: dict[tuple[str, int], int]) -> list[ActiveRequest]:
        """Requests to recover here: of own models, and others that their owner has not recovered for two scans."""
        due = []
        for entry in entries:
            name = (entry.request, entry.attempt)
            scans = before.get(name, 0)
            if scans >= SCANS_LEFT or self._owns(entry.worker):
                due.append(entry)
            else:
                self._left_to_owner[name] = scans + 1
        return due

    def _reopen_unheld(self) -> None:
        """Reopen ended attempts of requests that nothing here holds, places or ends: their recovery was interrupted."""
        before, self._unheld = self._unheld, {}
        tracker = self._cluster.tracker
        for entry in tracker.waiting():
            request, name = entry.request, (entry.request, entry.attempt)
            if tracker.request(request) is not None or self._is_held(request) or request in self._terminal.ending:
                continue
            if (scans := before.get(name, 0)) < SCANS_UNHELD:
                self._unheld[name] = scans + 1
            elif name not in self._recovering:
                log.warning("attempt_reopened", request=request, attempt=entry.attempt)
                tracker.reopen(request)

    async def recover(self, entries: list[ActiveRequest], reason: str) -> None:
        """Requeue requests after the tokens that they have streamed. Failures are left to a later ``scan``."""
        by_address: dict[str, list[InterruptedAttempt]] = {}
        for entry in entries:
            if self._is_due(entry):
                address = entry.token_address
                attempt = InterruptedAttempt(entry.request, entry.attempt, entry.worker, address, entry.seq)
                by_address.setdefault(address, []).append(attempt)
        # If one gateway's tokens cannot be stored or read, the requests of others are still recovered.
        await asyncio.gather(*(self._recover_of(address, group, reason) for address, group in by_address.items()))

    def _is_due(self, entry: ActiveRequest) -> bool:
        """Whether to recover it now; otherwise a later ``scan`` does, for example once its job is in the log."""
        if not entry.seq or (entry.request, entry.attempt) in self._recovering:
            return False
        if in_memory(entry.token_address) and self._misses_output(entry.request):
            return False
        return self._postponed.get((entry.request, entry.seq), 0.0) <= time.monotonic()

    async def _recover_of(self, address: str, attempts: list[InterruptedAttempt], reason: str) -> None:
        names = {(attempt.request_id, attempt.attempt) for attempt in attempts}
        self._recovering |= names
        try:
            found = await fence(self._bus, self._publisher, self._router, attempts)
            with_job = {attempt.request_id for attempt in found}
            for attempt in attempts:
                if attempt.request_id not in with_job:
                    self._postpone(attempt)
            for attempt in found:
                try:
                    await self._continue(attempt, reason)
                except Exception:
                    log.exception("recovery_failed", request=attempt.request_id)
                    self._postpone(attempt)
                await self._time_slice.yield_if_spent()
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            why = error.message if isinstance(error, ServingError) else repr(error)
            log.warning("recovery_postponed", error=why, token_address=address, requests=len(attempts))
        finally:
            self._recovering -= names

    def _postpone(self, attempt: InterruptedAttempt) -> None:
        """Postpone this job only: a copy of it has another sequence, and is handled as soon as it is read."""
        self._postponed[attempt.request_id, attempt.work_seq] = time.monotonic() + AGAIN_S
        while len(self._postponed) > RETURNS_REMEMBERED:
            self._postponed.popitem(last=False)

    def _unhandled_returns(self, now: float) -> dict[str, list[ActiveRequest]]:
        """Returns that were read before their job, or whose recovery failed, by reason."""
        returns: dict[str, list[ActiveRequest]] = {}
        for request_id, (attempt, reason, since) in list(self._returned.items()):
            entry = self._cluster.tracker.request(request_id)
            if entry is not None and entry.attempt == attempt:
                returns.setdefault(reason, []).append(entry)
            elif entry is not None or now - since > UNKNOWN_S or self._cluster.tracker.ended(request_id):
                del self._returned[request_id]
        return returns

    def resume(self, pending: PendingRequest) -> None:
        """Place a request that resumes, after the output that the token stream has of it already.

        Output from another cell is attempt 0. A request that its gateway stored again has the output of attempts whose
        jobs are lost. One that has all of its output is ended here. All that wait are read together, since each pass
        reads everything that their gateway got meanwhile. If that fails, they are delivered again.
        """
        self.resuming[pending.request.id] = pending
        self._to_resume.append(pending)
        if len(self._to_resume) == 1:
            self._background.spawn(self._resume_waiting(), "resume")

    async def _resume_waiting(self) -> None:
        async with self._resume_turn:
            batch, self._to_resume = self._to_resume, []
            groups: dict[tuple[str, bool], list[PendingRequest]] = {}
            for pending in batch:
                request = pending.request
                groups.setdefault((request.token_address, bool(request.interrupted_attempt)), []).append(pending)
            try:
                for (address, lost), group in groups.items():
                    await self._resume_together(address, group, lost=lost)
            finally:
                for pending in batch:
                    if self.resuming.get(pending.request.id) is pending:  # else it was deferred, and has come again
                        del self.resuming[pending.request.id]
        await self._top_up()

    async def _resume_together(self, address: str, group: list[PendingRequest], *, lost: bool) -> None:
        waiting: dict[str, tuple[PendingRequest, InterruptedAttempt]] = {}
        for pending in group:
            request = pending.request
            if lost and in_memory(address) and self._misses_output(request.id):
                log.warning("resumption_postponed", request=request.id, error="its output is being stored again")
                continue
            number = request.interrupted_attempt or -1  # attempt 0 is the fence of attempt -1
            since_ns = max(0, _made_ns(request.id) - CLOCK_SKEW_NS)
            before = InterruptedAttempt(
                request.id, number, "", address, 0, pending.raw, request, revision=request.revision, since_ns=since_ns
            )
            waiting[request.id] = pending, before
        attempts = [before for _, before in waiting.values()]
        try:
            fence_seq = None
            if lost and attempts:
                fence_seq = await _publish_fences(self._bus, self._publisher, self._router, address, attempts)
            unread = await _read_progress(self._bus, address, attempts, fence_seq) if attempts else {}
        except (ServingError, NatsError, OSError, TimeoutError) as error:  # they are delivered again
            unread = dict.fromkeys(waiting, str(error) or repr(error))
        for request_id, (pending, before) in waiting.items():
            if request_id in unread:
                log.warning("resumption_postponed", request=request_id, error=unread[request_id])
                continue
            if lost and all(part.finish is not None for part in before.progress):
                self.resuming.pop(request_id, None)
                self._terminal.complete(before)
                continue
            try:
                if lost:
                    await self._revoke_everywhere(before)
            except (NatsError, OSError, TimeoutError) as error:
                log.warning("resumption_postponed", request=request_id, error=str(error) or repr(error))
                continue
            following = _next_attempt(before, jobs.JOB_LOST if lost else pending.reason, pending.since_ns)
            following.attempt, following.reply = max(0, before.attempt) + 1, pending.reply
            self.resuming.pop(request_id, None)  # from here on ``place`` recognises a further delivery
            await self._place(following)
            await self._time_slice.yield_if_spent()

    async def _revoke_everywhere(self, attempt: InterruptedAttempt) -> None:
        """Stop a worker that may still run an attempt without a job: its end would end the request.

        The one that streamed its tokens; without any, or if a prefill worker did, which has handed the job on, each
        worker of the model and of its fallbacks.
        """
        request, tracker = attempt.request, self._cluster.tracker
        assert request is not None
        streamed_by = tracker.worker(attempt.worker)
        if streamed_by is not None and streamed_by.role != "prefill":
            workers = {attempt.worker}
        else:
            models = {request.model, *(each.model for each in request.fallbacks)}
            workers = {each.worker for model in models for each in tracker.serving(model)}
        for worker in sorted(workers):
            await self._revoke(worker, attempt.request_id, attempt.attempt)

    async def _continue(self, attempt: InterruptedAttempt, reason: str) -> None:
        entry = self._cluster.tracker.request(attempt.request_id)
        if entry is None or entry.attempt != attempt.attempt:
            return  # its terminal event, or the decision of another router, was read in the meantime
        if reason.startswith((STALLED, LATE, jobs.JOB_LOST)) or (reason == WORKER_LOST and entry.later):
            await self._revoke(entry.worker, entry.request, entry.attempt)
        dead = self._cluster.returned.of(attempt.request_id).get(attempt.attempt)  # although it may be registered yet
        pending = _next_attempt(attempt, reason, self._bus.clock.now_ns())
        pending.gone = attempt.worker if dead else ""
        had_it, ended_at = [stage.worker for stage in entry.stages] or [attempt.worker], [attempt.worker]
        if reason == WORKER_LOST:
            known = self._cluster.tracker.worker
            ended_at = [stage.worker for stage in entry.stages if known(stage.worker) is None] or [attempt.worker]
        why = reason[:LONGEST_REASON]
        pending.earlier_workers += tuple(
            EarlierWorker(attempt.attempt, worker, why if worker in ended_at else "")
            for worker in dict.fromkeys((*had_it, *ended_at))
        )
        if len(pending.finished) == pending.request.n:
            attempt.earlier_workers = pending.earlier_workers
            self._terminal.complete(attempt)
            return
        failure = self._failure(pending, attempt, reason)
        self._cluster.tracker.requeue(attempt.request_id, attempt.attempt)
        if failure is None:
            _, waited, why = reason.partition(f"returned: {jobs.WAITED}: ")
            if waited and await self._fall_back(pending, why):
                return
            log.info("request_requeued", request=attempt.request_id, attempt=pending.attempt, reason=reason)
            await self._place(pending)
        elif not await self._fall_back(pending, f"{failure[0].value}: {failure[1]}"):
            self._terminal.end(pending, *failure)

    def _failure(self, pending: PendingRequest, attempt: InterruptedAttempt, reason: str) -> tuple[Code, str] | None:
        """The error that ends a request without a further attempt, unless it falls back to another model."""
        if (failure := jobs.failure_in(reason)) is not None:
            return failure
        if reason.startswith(STALLED) and attempt.reason.startswith(STALLED):
            return Code.engine_error, f"{reason}; the attempt before {attempt.reason}"
        if not self._used_up(pending):
            return None
        count = (
            attempt.attempt - _in_cells(pending) - jobs.waited(pending.earlier_workers, pending.request.fell_back_at)
        )
        workers = "1 worker was" if count == 1 else f"{count} workers in turn were"
        return Code.worker_lost, f"{workers} lost or failed while running this request ({reason})"

    def _used_up(self, pending: PendingRequest) -> bool:
        """Whether a request may have no further attempt.

        Crashes have a separate limit. Returns by another cell and late starts are not failures of a worker. A fallback
        counts from zero.
        """
        uncounted = self._cluster.returned.crashes(pending.request.id) + _in_cells(pending)
        uncounted += jobs.waited(pending.earlier_workers, pending.request.fell_back_at)
        before = max(0, pending.request.fell_back_at - 1)
        return pending.attempt - uncounted - before > self._max_attempts

    async def _revoke(self, worker: str, request: str, attempt: int) -> None:
        """Stop the worker of the present stage: the attempt is void."""
        holder = self._cluster.tracker.worker(worker)
        if holder is None:
            return
        try:
            stored = await self._publisher.send(
                self._bus.subjects.work(holder.role, holder.worker),
                wire.encode(jobs.Revoke(request, attempt)),
                f"{request}:{attempt}:revoke:{worker}",  # several workers may get it
                headers=jobs.REVOKE_HEADERS,
            )
            stored.add_done_callback(lambda future: future.cancelled() or future.exception())
        except ServingError as error:  # the worker computes in vain; the answer is not affected
            log.warning("attempt_not_revoked", request=request, worker=worker, error=error.message)


def _in_cells(pending: PendingRequest) -> int:
    """Attempts that other cells returned."""
    return len({each.attempt for each in pending.earlier_workers if is_cell(each.worker)})


def _next_attempt(attempt: InterruptedAttempt, reason: str, now_ns: int) -> PendingRequest:
    request, progress = attempt.request, attempt.progress
    assert request is not None
    wants_logprobs = request.sampling.logprobs is not None
    return PendingRequest(
        request,
        attempt.raw,
        "",
        now_ns,
        attempt=attempt.attempt + 1,
        resume=() if request.embedding is not None else tuple(part.tokens for part in progress),
        finished=tuple(i for i, part in enumerate(progress) if part.finish is not None),
        endings=tuple(part.finish for part in progress if part.finish is not None),
        reason=reason,
        revision=attempt.revision,
        logprobs=tuple(carried(part.logprobs) for part in progress) if wants_logprobs else (),
        scores=carried(attempt.scores),
        scored=len(attempt.scores) + 1 if attempt.scores else 0,
        streamed_ns=attempt.streamed_ns,
        earlier_workers=attempt.earlier_workers,
    )


async def fence(
    bus: Bus, publisher: Publisher, router: str, attempts: list[InterruptedAttempt]
) -> list[InterruptedAttempt]:
    """Fence the attempts and fill in what each had streamed. Attempts whose job cannot be found are left out.

    Raises:
        ServingError: the broker did not answer. Nothing is lost; try again.
    """
    loaded = [attempt for attempt in attempts if await _load_job(bus, attempt)]
    by_address: dict[str, list[InterruptedAttempt]] = {}
    for attempt in loaded:
        by_address.setdefault(attempt.token_address, []).append(attempt)
    for address, group in by_address.items():
        until_seq = await _publish_fences(bus, publisher, router, address, group)
        for problem in (await _read_progress(bus, address, group, until_seq)).values():
            raise ServingError(Code.broker_unavailable, problem)
    return loaded


async def _load_job(bus: Bus, attempt: InterruptedAttempt) -> bool:
    """Read the job from WORK, as it was published or handed off between stages; False: it cannot be found.

    A broker skips messages that are damaged on disk. If the job is lost, the accepted request is read instead.
    """
    if not attempt.work_seq:
        return False
    try:
        entry = await get(bus, bus.subjects.stream("WORK"), attempt.work_seq)
        work = jobs.decode(entry.data) if entry is not None else None
        named = entry.headers.get(HEADER_MSG_ID, "").split(":")[:2] if entry is not None else []
        if entry is None or named != [attempt.request_id, str(attempt.attempt)] or isinstance(work, jobs.Revoke):
            log.error("job_not_found", request=attempt.request_id, seq=attempt.work_seq)
            return await _load_request(bus, attempt)
        assert work is not None
        job = work if isinstance(work, jobs.Job) else jobs.decode_job(bytes(work.job))
        _fill(attempt, bytes(job.request), entry.time_ns)
        attempt.revision = job.decision.revision
        attempt.reason = job.decision.reason
        attempt.earlier_workers = jobs.earlier_workers(job)
        return True
    except msgspec.MsgspecError as error:  # perhaps written by a newer version; the other attempts must not wait for it
        log.error("job_unreadable", request=attempt.request_id, seq=attempt.work_seq, error=str(error))
    return False


def _made_ns(request_id: str) -> int:
    """Unix time by its gateway's clock; 0: the id has none."""
    try:
        return time_of(request_id)
    except ValueError:
        return 0


async def _load_request(bus: Bus, attempt: InterruptedAttempt) -> bool:
    """Read the request from REQUESTS; False: it was deleted, or lost and not yet stored again by its gateway."""
    if not (made_ns := _made_ns(attempt.request_id)):
        return False
    stream, shard = bus.subjects.stream("REQUESTS"), bus.subjects.shard_of(attempt.request_id)
    async with aclosing(read(bus, stream, shard, since_ns=made_ns - CLOCK_SKEW_NS, batch=FEW)) as entries:
        async for entry in entries:
            if request_of(entry.headers) == attempt.request_id:
                _fill(attempt, entry.data, entry.time_ns)
                assert attempt.request is not None
                attempt.revision = attempt.request.revision
                return True
            if entry.time_ns > made_ns + LONGEST_DEADLINE_S * 1e9:
                break
    return False


def _fill(attempt: InterruptedAttempt, raw: bytes, stored_ns: int) -> None:
    attempt.raw = raw
    attempt.request = request = requests.decode_head(raw)
    attempt.since_ns = request.created_ns - CLOCK_SKEW_NS
    if attempt.since_ns > stored_ns:  # the gateway's clock is ahead of the broker's
        attempt.since_ns = stored_ns - (request.deadline_ns - request.created_ns)


async def _publish_fences(
    bus: Bus, publisher: Publisher, router: str, address: str, group: list[InterruptedAttempt]
) -> int:
    """Returns the sequence of the last fence: later items of these attempts are void."""
    subject = bus.subjects.tokens(address)
    waits = []
    for attempt in group:
        item = TokenItem(attempt.request_id, attempt.attempt + 1, WHOLE_REQUEST, 0)
        batch = TokenBatch(router, 0, time.time_ns(), (item,))
        msg_id = f"{attempt.request_id}:{attempt.attempt + 1}:fence"
        waits.append(await publisher.send(subject, wire.encode(batch), msg_id, timeout=10.0))
    return max(ack.seq for ack in await asyncio.gather(*waits))


async def _read_progress(
    bus: Bus, address: str, group: list[InterruptedAttempt], until_seq: int | None
) -> dict[str, str]:
    """Fill in what each attempt had streamed; returns the requests that cannot be read yet, and why."""
    unread: dict[str, str] = {}
    items: dict[str, list[TokenItem]] = {attempt.request_id: [] for attempt in group}
    workers: dict[tuple[str, int], str] = {}
    streamed_ns: dict[str, int] = {}
    since = min(attempt.since_ns for attempt in group)
    stream, subject = bus.subjects.tokens_stream(address), bus.subjects.tokens(address)
    async for entry in read(bus, stream, subject, since_ns=since, until_seq=until_seq):
        try:
            batch = tokens.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.error("token_batch_unreadable", subject=subject, seq=entry.seq, error=str(error))
            continue
        for item in batch.items:
            if item.request in items:
                items[item.request].append(item)
                if item.choice >= 0 and item.tokens:
                    workers[item.request, item.attempt] = batch.worker
                    streamed_ns.setdefault(item.request, entry.time_ns)
    for attempt in group:
        assert attempt.request is not None
        progress = items[attempt.request_id]
        if not any(item.attempt == attempt.attempt + 1 for item in progress):
            unread[attempt.request_id] = f"the fence of {attempt.request_id} cannot be read back yet"
            continue
        attempt.progress = replay(progress, attempt.request.n)
        attempt.streamed_ns = streamed_ns.get(attempt.request_id, 0)
        attempt.worker = attempt.worker or workers.get((attempt.request_id, attempt.attempt), "")
        if attempt.request.sampling.prompt_logprobs is not None:
            attempt.scores = scores(progress)
    return unread
