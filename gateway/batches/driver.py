"""Runs batches: each is driven by one gateway, which submits its lines to the pipeline as room appears.

The driver of a batch renews its entry once a second. If an entry was not renewed for ``LEASE_S``, another gateway takes
the batch over: it reads the batch's log, follows the requests in it, and continues with the lines after them.

A line's request id is in the batch's log before the request is submitted. For ``FRESH_S`` it may be submitted, or
submitted again, under this id, which REQUESTS stores only once. After that it is only looked up. If it is not found
after ``GONE_S``, when no submission can still be under way, the line gets a new id. So no line runs twice, even if
drivers die.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from blake3 import blake3

from penstock.gateway.access.authentication import Caller
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.endpoints import encode_answer
from penstock.gateway.base.gateway_metrics import account
from penstock.gateway.batches.batch import (
    RUN,
    BatchProgress,
    Line,
    answered,
    body_of,
    entered,
    files_of,
    next_to_drive,
    read_input,
    refused,
)
from penstock.gateway.batches.store import BatchLog, BatchStore, BucketEntry, LeaseLost, key_of
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.batches import (
    FILE,
    Batch,
    BatchResults,
    BatchStatus,
    BatchTaken,
    LineError,
    LineResult,
    StoredFile,
)
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority, cell_in, new_request_id, time_of

log = structlog.get_logger("gateway")

LOOK_S = 0.5  # between two checks for batches without a driver
RENEW_S = 1.0
LEASE_S = 5.0  # without a renewal, a batch is taken over
START_AGAIN_S = 2.0
MAX_RUNS = 6  # batches that one gateway drives, since their inputs are in memory
MAX_RUNS_OF_TENANT = 2
MAX_WAITING = 32  # submitted lines of a batch that no worker has started; unsubmitted ones have no deadline yet
MAX_OPEN = 512  # submitted lines of a batch that have not ended
POLL_S = 0.1
FLUSH_S = 0.1  # between two writes of results
FLUSH_BYTES = 1 << 20
MAX_RESULT_BYTES = 6 << 20  # a message of the log carries 8 MiB
FRESH_S = 60.0  # a request may be submitted under its id until it is this old
GONE_S = 90.0  # a request that is not in the log by then never will be
CANCEL_AGAIN_S = 0.5
CANCEL_S = 10.0  # lines whose requests have not ended by then count as cancelled, too
HAND_OVER_S = 0.8
END_S = 1.0  # for cancelled tasks
MAX_LATE = 3  # times that a line may reach its deadline before a worker starts it

# The request can be accepted later, or continues without this gateway.
_LATER = frozenset(
    {
        Code.queue_full,
        Code.overloaded,
        Code.broker_unavailable,
        Code.model_unavailable,
        Code.revision_unavailable,
        Code.shutting_down,
        Code.rate_limit_exceeded,
    }
)


class BatchRun:
    """One batch while this gateway drives it.

    Args:
        stored: the batch's entry, which names this gateway as its driver.
        caller: the caller that the requests belong to; raises ``ServingError`` if its key is no longer valid.
    """

    def __init__(
        self, gateway: Gateway, store: BatchStore, stored: BucketEntry, caller: Callable[[Batch], Caller]
    ) -> None:
        assert isinstance(stored.value, Batch)
        self._gateway = gateway
        self._store = store
        self._caller = caller
        self._batch: Batch = stored.value
        self._revision = stored.revision
        self._changing = asyncio.Lock()
        self._log = BatchLog(gateway.bus, self._batch)
        self._data = b""
        self._lines: list[Line] = []
        self._next: deque[int] = deque()  # lines to take, in order
        self._open: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, str] = {}  # ids of open lines
        self._inflight: dict[int, InflightRequest] = {}
        self._late: Counter[int] = Counter()  # how often a line was not started within its deadline
        self._progress = BatchProgress()
        self._results: list[LineResult] = []
        self._flushing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._pause_until = 0.0

    def seen(self, stored: BucketEntry) -> None:
        """Note a change of the batch's entry, which another gateway may have made."""
        value = stored.value
        if isinstance(value, Batch) and value.status is BatchStatus.cancelling and stored.revision > self._revision:
            self._batch = _cancelling(self._batch, value)
            self._wake.set()

    async def run(self) -> None:
        """Return when the batch has ended.

        Raises:
            ServingError: the broker cannot be reached.
            LeaseLost: another gateway drives it.
        """
        renewing = asyncio.create_task(self._renew(), name=f"batch-renew-{self._batch.id}")
        running = asyncio.create_task(self._run(), name=f"batch-{self._batch.id}")
        try:
            await asyncio.wait([renewing, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            else:
                renewing.result()  # it ends by an error only
        finally:
            await _end(renewing, running, *self._open.values())

    async def hand_over(self) -> None:
        """After ``run`` was cancelled: store the results so far, and release the batch to other gateways."""
        with suppress(ServingError, LeaseLost, TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                await self._flush()
                await self._change(lambda batch: msgspec.structs.replace(batch, driver=""))

    # --- the entry ---

    async def _renew(self) -> None:
        failing = 0.0
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._change(lambda batch: batch)
                failing = 0.0
            except ServingError as error:  # the broker is away; the first gateway that reaches it continues
                failing = failing or time.monotonic()
                log.debug("batch_not_renewed", batch=self._batch.id, error=str(error))

    async def _change(self, change: Callable[[Batch], Batch]) -> None:
        """Store a change of the entry, with the current counts.

        Raises:
            LeaseLost: another gateway drives the batch, or it is gone.
            ServingError: broker_unavailable.
        """
        async with self._changing:
            while True:
                changed = change(self._batch)
                if not changed.status.ended:
                    done = self._progress
                    changed = msgspec.structs.replace(changed, completed=done.completed, failed=done.failed)
                stored = await self._store.change(changed, self._revision)
                if stored is None:
                    try:
                        stored = await self._store.find(self._batch.id, self._batch.tenant, Batch)
                    except ServingError as error:
                        if error.code is Code.request_not_found:
                            raise LeaseLost from None
                        raise
                    value = stored.value
                    if not isinstance(value, Batch) or value.driver != self._gateway.id:
                        raise LeaseLost
                    if value.status is BatchStatus.cancelling and self._batch.status is not value.status:
                        self._batch = _cancelling(self._batch, value)
                        self._wake.set()
                    self._revision = stored.revision
                    continue
                self._revision = stored.revision
                before, self._batch = self._batch, changed
                if before.status is BatchStatus.cancelling and not changed.status.ended:  # since a moment ago
                    self._batch = _cancelling(changed, before)
                return

    # --- from its input to its end ---

    async def _run(self) -> None:
        batch = self._batch
        name = f"{batch.tenant}.{batch.input_file}"
        progress = self._progress = await self._log.open(self._gateway.id)
        try:
            source = await self._store.find(batch.input_file, batch.tenant, StoredFile)
            assert isinstance(source.value, StoredFile), name
            self._data = await self._store.content(source.value)
        except ServingError as error:
            if error.code is not Code.request_not_found:
                raise
            problem = LineError("input_file_missing", f"the input file {batch.input_file} is not there any more")
            await self._fail((problem,))
            return
        parsed = await asyncio.to_thread(read_input, self._data, batch.endpoint)
        if isinstance(parsed[0], LineError):
            await self._fail(tuple(each for each in parsed if isinstance(each, LineError)))
            return
        self._lines = [each for each in parsed if isinstance(each, Line)]

        def started(batch: Batch) -> Batch:
            begun = msgspec.structs.replace(batch, total=len(self._lines))
            if batch.status is BatchStatus.validating:
                return entered(begun, BatchStatus.in_progress, self._now_ns())
            return begun

        await self._change(started)
        for number, request_id in progress.taken.items():
            self._start(number, request_id, None)
        self._next.extend(n for n in range(len(self._lines)) if n not in progress.ended and n not in progress.taken)
        flushing = asyncio.create_task(self._flush_often(), name=f"batch-flush-{batch.id}")
        try:
            feeding = asyncio.create_task(self._feed(), name=f"batch-feed-{batch.id}")
            try:
                await asyncio.wait([feeding, flushing], return_when=asyncio.FIRST_COMPLETED)
                (feeding if feeding.done() else flushing).result()
            finally:
                await _end(feeding)
        finally:
            await _end(flushing)
        await self._flush()
        await self._finish()

    @property
    def _ending(self) -> BatchStatus | None:
        """The status with which the batch ends early: cancelled or expired. None: it runs to its last result."""
        if self._batch.status is BatchStatus.cancelling:
            return BatchStatus.cancelled
        return BatchStatus.expired if self._now_ns() >= self._batch.expires_ns else None

    def _now_ns(self) -> int:
        return self._gateway.bus.clock.now_ns()

    async def _feed(self) -> None:
        """Submit lines; return when each has a result, or the batch ends early."""
        while self._ending is None:
            self._wake.clear()
            room = self._room()
            if room > 0 and self._next:
                await self._take([self._next.popleft() for _ in range(min(room, len(self._next)))])
            elif not self._open and not self._next:
                return
            if self._ending is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_S)
        await self._cancel_open(
            "the batch was cancelled" if self._batch.status is BatchStatus.cancelling else "the batch expired"
        )

    def _room(self) -> int:
        """The number of lines that may be submitted now."""
        if time.monotonic() < self._pause_until:
            return 0
        waiting = sum(each.fold.attempt < 0 for each in self._inflight.values()) + len(self._open) - len(self._inflight)
        return min(MAX_WAITING - waiting, MAX_OPEN - len(self._open), self._gateway.room(Priority.batch))

    async def _cancel_open(self, reason: str) -> None:
        """Cancel the open requests; their partial answers are not results."""
        until = time.monotonic() + CANCEL_S
        while self._open and time.monotonic() < until:
            for request_id in list(self._requests.values()):
                with suppress(ServingError):
                    await self._gateway.cell_of(request_id).cancel(request_id, reason)
            await asyncio.wait(list(self._open.values()), timeout=CANCEL_AGAIN_S)
        for task in self._open.values():
            task.cancel()

    async def _take(self, numbers: list[int]) -> None:
        """Submit the requests of these lines."""
        prepared: list[tuple[int, PreparedRequest]] = []
        left = deque(numbers)
        while left:
            number = left[0]
            try:
                prepared.append((number, await self._prepare(number)))
            except ServingError as error:
                if self._comes_later(error):
                    self._pause_until = time.monotonic() + max(0.5, min(error.retry_after or 0.0, 10.0))
                    break
                self._ended(refused(number, self._lines[number], new_request_id(), error))
            left.popleft()
        self._next.extendleft(reversed(left))
        if not prepared:
            return
        try:
            await self._log.append(BatchTaken(tuple((number, each.request.id) for number, each in prepared)))
        except BaseException:
            for _, each in prepared:
                self._gateway.charges.abandon(each.request.id)
            raise
        for number, each in prepared:
            self._start(number, each.request.id, each)

    def _comes_later(self, error: ServingError) -> bool:
        # After a restart, models are not known before their workers.
        unknown = error.code is Code.model_not_found and bool(self._gateway.not_ready())
        return error.code in _LATER or unknown

    async def _prepare(self, number: int) -> PreparedRequest:
        """
        Raises:
            ServingError: the line cannot be served, or not now.
        """
        gateway = self._gateway
        body = body_of(self._data, self._lines[number])
        if len(body) > gateway.settings.max_body_bytes:
            raise ServingError(
                Code.body_too_large,
                f"the body is larger than {gateway.settings.max_body_bytes} bytes (--max-body-bytes)",
            )
        caller = self._caller(self._batch)
        await gateway.turns.enter()
        prepared = await gateway.prepare(RUN[self._batch.endpoint], body, caller=caller)
        if prepared.request.no_store:
            raise ServingError(
                Code.unsupported, "the lines of a batch are stored: no_store is not supported", param="no_store"
            )
        await gateway.charges.reserve(caller, prepared)
        return prepared._replace(request=msgspec.structs.replace(prepared.request, priority=Priority.batch))

    def _start(self, number: int, request_id: str, prepared: PreparedRequest | None) -> None:
        self._requests[number] = request_id
        task = self._open[number] = asyncio.create_task(
            self._follow(number, request_id, prepared), name=f"batch-line-{self._batch.id}-{number}"
        )
        task.add_done_callback(lambda done: self._left(number, done))

    def _left(self, number: int, task: "asyncio.Task[None]") -> None:
        self._open.pop(number, None)
        self._requests.pop(number, None)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch_line_failed", batch=self._batch.id, line=number, error=repr(error))
            internal = ServingError(Code.internal, "internal error; the gateway's log has the details")
            self._ended(refused(number, self._lines[number], "", internal))

    async def _follow(self, number: int, request_id: str, prepared: PreparedRequest | None) -> None:
        """Wait until a line has a result, or has to be submitted again."""
        gateway, line = self._gateway, self._lines[number]
        try:
            while True:
                try:
                    inflight = await self._accepted(number, request_id, prepared)
                    if inflight is None:
                        if self._ending is None:
                            self._next.appendleft(number)
                        return
                    body = await self._answer(number, inflight)
                    self._ended(self._bounded(number, answered(number, line, request_id, body)))
                    return
                except ServingError as error:
                    if self._ending is not None and error.code in (Code.cancelled, Code.request_not_found):
                        return
                    if error.code is Code.deadline_exceeded and self._late[number] < MAX_LATE:
                        self._late[number] += 1
                        self._next.appendleft(number)
                        return
                    if not self._comes_later(error):
                        gateway.metrics.of(gateway.fleet.name_in(body_of(self._data, line))).requests.labels(
                            "batch", error.code.value
                        ).inc()
                        self._ended(refused(number, line, request_id, error))
                        return
                    prepared = None
                    await asyncio.sleep(max(0.5, min(error.retry_after or 0.0, 10.0)))
        finally:
            gateway.charges.abandon(request_id)

    async def _accepted(self, number: int, request_id: str, prepared: PreparedRequest | None) -> InflightRequest | None:
        """The accepted request of a line, submitted now if necessary. None: the line has to be taken again.

        Raises:
            ServingError: it cannot be accepted.
        """
        gateway = self._gateway
        while True:
            if prepared is not None and self._age_s(request_id) < FRESH_S:
                return await gateway.submit(prepared.request, owner=False)
            try:
                stored, record = await gateway.look_up(request_id)
                return await gateway.attach(stored, record)
            except ServingError as error:
                if error.code is not Code.request_not_found:
                    raise
            if self._ending is not None:
                return None
            age_s = self._age_s(request_id)
            if age_s > GONE_S:
                return None
            if age_s < FRESH_S - 5.0:
                gateway.charges.abandon(request_id)  # reserved by an earlier try
                made = await self._prepare(number)
                gateway.charges.rename(made.request.id, request_id)
                prepared = made._replace(request=msgspec.structs.replace(made.request, id=request_id))
            else:
                prepared = None
                await asyncio.sleep(1.0)

    def _age_s(self, request_id: str) -> float:
        return (self._now_ns() - time_of(request_id)) / 1e9

    async def _answer(self, number: int, inflight: InflightRequest) -> bytes:
        """The body of an answer.

        Raises:
            ServingError: the request failed.
        """
        gateway = self._gateway
        self._inflight[number] = inflight
        try:
            collector = await gateway.collected(inflight)
            body = await encode_answer(collector)
            metrics = gateway.metrics.of(inflight.request.model)
            account(metrics, collector.usage)
            metrics.requests.labels("batch", "ok").inc()
            return body
        except ServingError:
            self._late[number] += MAX_LATE * (inflight.fold.attempt >= 0)  # a worker started it
            raise
        finally:
            self._inflight.pop(number, None)
            gateway.release(inflight)

    # --- results ---

    def _bounded(self, number: int, result: LineResult) -> LineResult:
        if len(result.text) <= MAX_RESULT_BYTES:
            return result
        error = ServingError(
            Code.body_too_large,
            f"the answer has {len(result.text)} bytes; a result of a batch has at most {MAX_RESULT_BYTES}",
        )
        return refused(number, self._lines[number], self._requests.get(number, ""), error)

    def _ended(self, result: LineResult) -> None:
        self._results.append(result)

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        """
        Raises:
            LeaseLost: another gateway drives the batch.
        """
        async with self._flushing:
            while self._results:
                size = count = 0
                for result in self._results:
                    if count and size + len(result.text) > FLUSH_BYTES:
                        break
                    size, count = size + len(result.text), count + 1
                message = BatchResults(tuple(self._results[:count]))
                await self._log.append(message)
                del self._results[:count]
                self._progress.push(message)

    async def _finish(self) -> None:
        def finalizing(batch: Batch) -> Batch:
            cancelling = batch.status is BatchStatus.cancelling
            return batch if cancelling else entered(batch, BatchStatus.finalizing, self._now_ns())

        expired = self._ending is BatchStatus.expired
        await self._change(finalizing)
        status = BatchStatus.expired if expired else BatchStatus.completed
        if self._batch.status is BatchStatus.cancelling:
            status = BatchStatus.cancelled
        messages = await self._log.messages()
        files = await asyncio.to_thread(files_of, messages, self._lines, self._batch.id, status)
        names = [
            await self._store_file(kind, text) for kind, text in (("output", files.output), ("error", files.errors))
        ]
        await self._change(
            lambda batch: entered(
                msgspec.structs.replace(
                    batch,
                    driver="",
                    completed=files.completed,
                    failed=files.failed,
                    unanswered=files.unanswered,
                    output_file=names[0],
                    error_file=names[1],
                ),
                status,
                self._now_ns(),
            )
        )
        await self._log.purge()
        log.info("batch_ended", batch=self._batch.id, status=status.value, lines=len(self._lines), failed=files.failed)

    async def _store_file(self, kind: str, text: bytes) -> str:
        """Store a file and return its id, which follows from the batch: a second driver writes the same file."""
        if not text:
            return ""
        batch, now_ns = self._batch, self._now_ns()
        digest = blake3(f"{batch.id}\0{kind}".encode()).digest(length=10)
        name = FILE + new_request_id(batch.created_ns, digest, cell=cell_in(batch.id.removeprefix("batch_")))
        expires_ns = now_ns + batch.keep_s * 1_000_000_000
        file = StoredFile(name, batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", len(text), now_ns, expires_ns)
        await self._store.put_file(file, text)
        return name

    async def _fail(self, errors: tuple[LineError, ...]) -> None:
        cancelled = self._batch.status is BatchStatus.cancelling
        status = BatchStatus.cancelled if cancelled else BatchStatus.failed
        await self._change(
            lambda batch: entered(msgspec.structs.replace(batch, driver="", errors=errors), status, self._now_ns())
        )
        await self._log.purge()


def _cancelling(batch: Batch, seen: Batch) -> Batch:
    """The batch, cancelled at the time that the entry ``seen`` has."""
    return entered(batch, BatchStatus.cancelling, seen.times.get(BatchStatus.cancelling, 0))


async def _end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=END_S)
    for task in ended:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not warn; the caller raises the first one


class Batches:
    """Drives batches in one gateway. ``open`` it after the gateway, ``close`` it before.

    Attributes:
        store: files and batches of the deployment; ``ready`` once they have been read.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: Tasks = gateway.bus.tasks.group("batches")
        self.store = BatchStore(gateway.bus, self._on_batch)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[Any]]] = {}
        self._closing = False

    def open(self) -> None:
        self._tasks.spawn(self._keep(), name="batches")

    async def close(self) -> None:
        """Stop, and release the batches that this gateway drives to others."""
        self._closing = True
        runs = list(self._runs.values())
        for _, task in runs:
            task.cancel()
        if runs:
            await asyncio.wait([task for _, task in runs], timeout=2.0)
            await asyncio.gather(*(run.hand_over() for run, _ in runs))
        await self._tasks.aclose()
        await self.store.stop()

    async def _keep(self) -> None:
        while not await self._could_start():  # noqa: ASYNC110 - the far end is the broker
            await asyncio.sleep(START_AGAIN_S)
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except ServingError as error:
                log.debug("batches_not_looked_at", error=str(error))

    async def _could_start(self) -> bool:
        try:
            await self.store.start()
        except ServingError as error:
            log.warning("batches_unavailable", error=str(error), action="run `penstock streams apply`")
            return False
        return True

    async def _look(self) -> None:
        """Take over batches without a driver."""
        await self.store.discard_expired()
        now, bus = time.monotonic(), self._gateway.bus
        if not bus.connected or self._closing or self._gateway.draining:
            return
        free = {
            key: stored
            for key, stored in self.store.entries.items()
            if isinstance(stored.value, Batch) and not stored.value.status.ended and key not in self._runs
            if not stored.value.driver or now - stored.seen >= LEASE_S
        }
        while free and len(self._runs) < MAX_RUNS:
            driven = Counter(key.partition(".")[0] for key in self._runs)
            candidates = (each.value for each in free.values() if isinstance(each.value, Batch))
            batch = next_to_drive(candidates, driven, MAX_RUNS_OF_TENANT)
            if batch is None:
                return
            key = key_of(batch)
            revision = free.pop(key).revision
            taken = await self.store.change(msgspec.structs.replace(batch, driver=self._gateway.id), revision)
            if taken is not None:
                run = BatchRun(self._gateway, self.store, taken, self._caller)
                task = self._tasks.spawn(self._drive(key, run), name=f"batch-drive-{batch.id}")
                self._runs[key] = run, task

    async def _drive(self, key: str, run: BatchRun) -> None:
        try:
            await run.run()
        except LeaseLost:
            log.info("batch_left", batch=key)
        except ServingError as error:
            log.warning("batch_interrupted", batch=key, error=str(error))
        except Exception:
            log.exception("batch_failed", batch=key)
        finally:
            if not self._closing:
                self._runs.pop(key, None)

    def _on_batch(self, stored: BucketEntry) -> None:
        found = self._runs.get(key_of(stored.value))
        if found is not None:
            found[0].seen(stored)

    def _caller(self, batch: Batch) -> Caller:
        return self._gateway.guard.caller_with_key(batch.key, batch.tenant)
