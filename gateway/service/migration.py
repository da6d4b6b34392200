"""Carries requests to another cell, and their answers back.

A router that has no worker for a request, or holds it while another cell has room, stores a job under the name of that
cell (``penstock.router.recovery.migration``). All gateways take such jobs from one consumer. The gateway that gets one

1. submits the request to the other cell, under an id that follows from the job, after the tokens streamed so far,
2. stores the resulting tokens in the token stream of the request's own cell, as items of the job's attempt,
3. stores the end there, as the one terminal event, or returns the attempt if the other cell could not run it,
4. acknowledges the job.

All steps can be repeated. If a gateway dies, another one gets the job after ``MIGRATION_ACK_WAIT_S``, finds the request
under the same id, and reads its answer from the beginning: readers drop duplicates, and a second terminal event is not
stored. So a request runs once, and its readers need only its own cell.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
from blake3 import blake3
from nats.errors import Error as NatsError

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.service.cell import Cell
from penstock.gateway.service.cell_choice import CellChooser
from penstock.gateway.service.fleet import FleetView
from penstock.infra.bus import memory_storage, object_store
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.publisher import Ack
from penstock.infra.bus.puller import ACK, IN_PROGRESS, NAK, TERM, Puller
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import contents, control, done, jobs, requests, summary, wire
from penstock.schemas.cells import cell_target, decode_room_question, number_of, returned_by
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import ALONE, Job
from penstock.schemas.requests import GenerateRequest, Media, new_request_id
from penstock.schemas.streams import CLOCK_SKEW_NS, MIGRATION_ACK_WAIT_S
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_PART
from penstock.schemas.tokens import ANOTHER_MODEL, PROMPT, TokenBatch, TokenItem

log = structlog.get_logger("gateway")

MOST = 512  # requests that a gateway carries at a time; others stay in WORK
CLAIM_S = MIGRATION_ACK_WAIT_S / 3
LATER = NAK + b' {"delay": 1000000000}'  # in ns; for a job whose cells do not answer or are unknown here
ACCEPT_S = 10.0  # for the other cell to accept a request, before it is returned
RETRY_S = 0.5
END_S = 30.0  # for the record of a request whose tokens have ended
LOOK_S = 0.1
STORE_S = 600.0  # to store an end: as long as a broker may be away
MEDIUM_BYTES = 1 << 30  # media of accepted requests are within stricter limits
QUEUE = "gateways"  # queue group: one gateway answers a router

# Ends in the other cell that do not end the request. ``worker_lost`` ends it: its attempts there are used up.
UNRUN = (Code.model_unavailable, Code.shutting_down)


def guest_id(job: Job, request_id: str, cell: int) -> str:
    """The id under which an attempt of a request runs in another cell. Pure, so that every gateway finds the same id.

    Args:
        cell: number of the other cell, as in ids.
    """
    name = f"{request_id}:{job.attempt}".encode()
    return new_request_id(job.decision.at_ns, blake3(name).digest(10), cell=cell)


def guest_of(job: Job, request: GenerateRequest, guest: str, gateway: str) -> GenerateRequest:
    """The request as it runs in another cell. Pure."""
    return msgspec.structs.replace(
        request,
        id=guest,
        gateway=gateway,
        media=tuple(msgspec.structs.replace(each, private=guest if each.private else "") for each in request.media),
        revision=job.decision.revision or request.revision,
        watched=request.watched or bool(job.suspect),  # it has already crashed a worker
        repeats_poison=request.repeats_poison or job.suspect == ALONE,
        origin=request.id,
        resumes=bool(streamed_before(job, guest)),
        interrupted_attempt=0,
        fallbacks=(),  # its own cell chooses
    )


def streamed_before(job: Job, guest: str) -> list[TokenItem]:
    """The tokens of earlier attempts, as items of attempt 0 of the request in another cell. Pure."""
    items: list[TokenItem] = []
    if job.scores:
        items.append(TokenItem(guest, 0, PROMPT, 1, b"", None, job.scores))
    endings = dict(zip(job.finished, job.endings, strict=False))
    for choice, tokens in enumerate(job.resume):
        logprobs = job.logprobs[choice] if choice < len(job.logprobs) else ()
        if tokens or choice in endings:
            items.append(TokenItem(guest, 0, choice, 0, tokens, endings.get(choice), logprobs or None))
    return items


def moved_back(items: Sequence[TokenItem], request_id: str, attempt: int) -> tuple[TokenItem, ...]:
    """Items of the other cell as items of an attempt in this cell. Pure.

    The end of an attempt that will be returned is left out: the request continues after it.
    """
    moved = []
    for item in items:
        finish = None if item.finish is not None and item.finish.code in UNRUN else item.finish
        if item.tokens or item.logprobs or finish is not None:
            moved.append(TokenItem(request_id, attempt, item.choice, item.first, item.tokens, finish, item.logprobs))
    return tuple(moved)


def event_of(job: Job, request: GenerateRequest, record: done.Done) -> done.Done:
    """The terminal event of a request, from its record in another cell. Pure."""
    times = record.timings
    there = (each._replace(attempt=job.attempt) for each in times.earlier_workers)
    return msgspec.structs.replace(
        record,
        request=request.id,
        attempt=job.attempt,
        timings=msgspec.structs.replace(
            times,
            created_ns=request.created_ns,
            streamed_ns=job.streamed_ns or times.streamed_ns,
            earlier_workers=(*jobs.earlier_workers(job), *there),
        ),
        submitted=done.recorded(
            msgspec.structs.replace(done.without_text(request) if request.no_store else request, ran_as=record.request)
        ),
        left_out=tuple(dict.fromkeys((*done.not_recorded(request), *record.left_out))),
    )


def redelivered(reply: str) -> bool:
    """Whether the message with this reply subject was delivered before. Pure."""
    parts = reply.split(".")  # $JS.ACK.[domain.account.]stream.consumer.deliveries.…
    return len(parts) >= 9 and parts[4 if len(parts) == 9 else 6] != "1"


class _Carried:
    """A request that this gateway carries.

    Attributes:
        reply: reply subject of the job's last delivery, for acknowledgements.
        guest: its id in the other cell, once it may have been submitted there.
        cancelled: the reason; "": not cancelled.
        claimed: time of the last claim that the broker confirmed (``time.monotonic``).
        overtaken: claims failed for so long that another gateway may carry it now.
    """

    def __init__(self, reply: str, attempt: int, host: Cell) -> None:
        self.reply = reply
        self.attempt = attempt
        self.host = host
        self.guest = ""
        self.cancelled = ""
        self.claimed = time.monotonic()
        self.overtaken = False

    def claim(self) -> None:
        self.is_ours()
        self.claimed = time.monotonic()

    def is_ours(self) -> bool:
        """Whether the broker cannot have delivered the job to another gateway."""
        if time.monotonic() - self.claimed > MIGRATION_ACK_WAIT_S:
            self.overtaken = True
        return not self.overtaken


class Carrier:
    """``open`` it for each cell whose broker is there.

    Args:
        gateway: id of this gateway.
        first: number of the first cell, as in ids.
        own: the cell whose requests it carries away.
    """

    def __init__(
        self,
        own: Cell,
        cells: Sequence[Cell],
        gateway: str,
        first: int,
        fleet: FleetView,
        chooser: CellChooser,
        tasks: Tasks,
    ) -> None:
        self._own = own
        self._cells = cells
        self._gateway = gateway
        self._first = first
        self._fleet = fleet
        self._chooser = chooser
        self._tasks = tasks.group(f"migration-{own.number}")
        self._carried: dict[str, _Carried] = {}
        self._batches = 0
        stream = own.bus.subjects.stream("WORK")
        self._puller = Puller(own.bus, stream, "gateway", self._take, lambda: MOST - len(self._carried))
        self._opened = False

    async def open(self) -> None:
        if self._opened:
            return
        nc, subjects = self._own.bus.nc, self._own.bus.subjects
        await nc.subscribe(subjects.room, queue=QUEUE, cb=self._answer)
        await nc.subscribe(subjects.cancel, cb=self._on_cancel)
        await self._puller.start()
        self._tasks.spawn(self._claim_forever(), name="claim")
        self._opened = True

    async def close(self) -> None:
        """Stop; other gateways continue with the requests that this one carried."""
        if not self._opened:
            return
        await self._puller.close()
        await self._tasks.aclose()
        for carried in self._carried.values():
            self._own.bus.nc.post(carried.reply, NAK)

    # --- which cells have room ---

    async def _answer(self, message: Any) -> None:
        try:
            question = decode_room_question(message.data)
        except msgspec.MsgspecError as error:  # of a later release
            log.debug("room_not_known", error=str(error))
            return
        others = self._fleet.best_of(
            (each.number for each in self._cells if each is not self._own and each.serves),
            question.model,
            question.revision,
        )
        if message.reply and self._own.bus.connected:
            answer = self._chooser.room(question, others)
            await self._own.bus.nc.publish(message.reply, wire.encode(answer))

    # --- carrying ---

    async def _take(self, message: Message) -> None:
        """Carry a job to another cell."""
        try:
            job = jobs.decode(message.data)
            if not isinstance(job, Job):
                raise msgspec.ValidationError("it is not a job")
            request = requests.decode(job.request)
            number = number_of(message.subject.rpartition(".")[2])
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("migration_unreadable", subject=message.subject, error=str(error))
            await self._own.bus.nc.publish(message.reply, TERM)
            return
        if number >= len(self._cells):  # cells were added, and other gateways know them
            late = request.deadline_ns < self._own.bus.clock.now_ns()
            await self._own.bus.nc.publish(message.reply, TERM if late else LATER)
            return
        host = self._cells[number]
        known = self._carried.get(request.id)
        if known is not None and known.attempt >= job.attempt:
            known.reply, known.claimed, known.overtaken = message.reply, time.monotonic(), False
            return
        carried = self._carried[request.id] = _Carried(message.reply, job.attempt, host)
        part = (message.headers or {}).get(HEADER_PART, "")
        self._tasks.spawn(
            self._carry(carried, job, request, part), name="carry", on_failure=partial(self._failed, request.id)
        )

    def _failed(self, request_id: str, error: BaseException) -> None:
        log.error("migration_failed", request=request_id, exc_info=error)

    async def _carry(self, carried: _Carried, job: Job, request: GenerateRequest, part: str) -> None:
        verdict = LATER
        try:
            await self._run(carried, job, request, part)
            verdict = ACK
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.warning("migration_postponed", request=request.id, error=str(error) or repr(error))
            if self._own.bus.clock.now_ns() > request.deadline_ns + int(END_S * 1e9):
                with contextlib.suppress(ServingError, NatsError, OSError, TimeoutError):  # the job is delivered again
                    await self._end_late(carried, job, request)
                    verdict = ACK
        finally:
            if self._carried.get(request.id) is carried:
                del self._carried[request.id]
            self._own.bus.nc.post(carried.reply, verdict)
        await self._puller.top_up()

    async def _run(self, carried: _Carried, job: Job, request: GenerateRequest, part: str) -> None:
        """
        Raises:
            ServingError: a cell does not answer; nothing is lost if it is repeated.
        """
        own, host = self._own, carried.host
        if await own.records.find(request.id) is not None:
            return
        if not host.opened:
            raise ServingError(Code.broker_unavailable, f"the broker of cell {host.number} is not there yet")
        guest = guest_id(job, request.id, self._first + host.number)
        record = await host.records.find(guest)
        if record is None and redelivered(carried.reply) and await self._was_returned(job, request):
            return  # a gateway died before it acknowledged the job; a router has placed the next attempt
        if record is None or request.no_store:
            try:
                if request.no_store:
                    job, request = await self._with_content(job, request, part)
                record = await self._follow(carried, job, request, guest, record)
            except ServingError as error:
                if error.code is Code.broker_unavailable and await host.records.find(guest) is None:
                    raise
                log.info("request_not_migrated", request=request.id, cell=host.number, error=error.message)
                if record is None:
                    if not carried.is_ours():  # another gateway carries it now and may have submitted it
                        raise ServingError(
                            Code.broker_unavailable, f"request {request.id} was claimed too late to be given back"
                        ) from error
                    await self._give_back(carried, request, error.message)
                    return
        if record.code in UNRUN:
            await self._give_back(carried, request, record.message, guest)
        else:
            await self._end(job, request, record)

    async def _was_returned(self, job: Job, request: GenerateRequest) -> bool:
        """
        Raises:
            ServingError: the log does not answer.
        """
        subjects, name = self._own.bus.subjects, f"{request.id}:{job.attempt}:"
        since_ns = max(0, job.decision.at_ns - CLOCK_SKEW_NS)
        stored = read(self._own.bus, subjects.stream("DONE"), subjects.returned(request.model), since_ns=since_ns)
        async with contextlib.aclosing(stored) as entries:
            return any([entry.headers.get(HEADER_MSG_ID, "").startswith(name) async for entry in entries])

    async def _with_content(self, job: Job, request: GenerateRequest, part: str) -> tuple[Job, GenerateRequest]:
        """The request with its content from memory storage, if it has ``no_store``.

        Raises:
            ServingError: content_lost, deadline_exceeded, broker_unavailable.
        """
        names = [contents.REQUEST, *([part] if part else [])]
        streams = self._own.unstored.streams
        found = [await memory_storage.fetch(self._own.bus, streams, request, name) for name in names]
        if part:
            whole = jobs.decode(found[1])
            assert isinstance(whole, Job)
            job = whole
        return job, requests.with_content(requests.decode(found[0]), request)

    async def _follow(
        self, carried: _Carried, job: Job, request: GenerateRequest, guest: str, record: done.Done | None
    ) -> done.Done:
        """Run a request in the other cell, and store its tokens here until it has ended.

        Raises:
            ServingError: it was not accepted, or its end cannot be read.
        """
        host = carried.host
        visitor = guest_of(job, request, guest, self._gateway)
        if record is not None:  # with ``no_store``: some of its tokens may not have been stored here
            stored, record = await host.look_up(guest)
            inflight = await host.read_again(stored, record.attempt if record is not None else None)
        else:
            for medium, copy in zip(request.media, visitor.media, strict=True):
                await self._copy(host, request, medium, copy)
            inflight = await self._submit(host, visitor, streamed_before(job, guest))
        carried.guest = guest
        if carried.cancelled:
            self._cancel(carried)
        try:
            await self._relay(inflight, job, request, live=record is None)
        except ServingError as error:  # its end is in its record
            log.debug("migrated_tokens_ended", request=request.id, error=error.message)
        finally:
            host.release(inflight)
        until = time.monotonic() + END_S
        while (record := await host.records.find(guest)) is None:
            if time.monotonic() > until:
                raise ServingError(Code.broker_unavailable, f"the record of {guest} is not there yet")
            await asyncio.sleep(LOOK_S)
        return record

    async def _submit(self, host: Cell, visitor: GenerateRequest, streamed: Sequence[TokenItem]) -> InflightRequest:
        until = time.monotonic() + ACCEPT_S
        while True:
            try:
                return await host.submit(visitor, owner=False, streamed=streamed)
            except ServingError as error:
                if error.code is not Code.queue_full or time.monotonic() > until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _copy(self, host: Cell, request: GenerateRequest, medium: Media, copy: Media) -> None:
        """Store an input image in the other cell.

        Raises:
            ServingError: the image is missing, or cannot be stored.
        """
        bus, keep_s = self._own.bus, max(1.0, (request.deadline_ns - self._own.bus.clock.now_ns()) / 1e9)
        if medium.private:
            data = await memory_storage.fetch_medium(bus, self._own.unstored.streams, request, medium)
            await host.unstored.keep_medium(copy.private, medium.digest, data, keep_s)
            return
        name = medium.digest.hex()
        data = await object_store.get(bus, "media", name, limit=MEDIUM_BYTES)
        await object_store.put(host.bus, "media", name, data, keep_s=keep_s)

    async def _relay(self, inflight: InflightRequest, job: Job, request: GenerateRequest, *, live: bool) -> None:
        """Store the items of the other cell as those of an attempt of this one, until all choices have ended.

        Raises:
            ServingError: no more items will come.
        """
        left, waits = request.n, list[asyncio.Future[Ack]]()
        if request.fallback:  # known before its first token
            await (await self._store(request, (TokenItem(request.id, job.attempt, ANOTHER_MODEL, request.fallback),)))
        try:
            while left:
                items = await inflight.take() if live else inflight.available()
                if not items:
                    break
                waits = [each for each in waits if not each.done()]
                if moved := moved_back(items, request.id, job.attempt):
                    waits.append(await self._store(request, moved))
                left -= sum(each.finish is not None and each.choice >= 0 for each in items)
        finally:
            if waits and request.no_store:  # its record has no tokens: they come before it
                await asyncio.wait(waits)
            for each in waits:
                each.add_done_callback(lambda stored: stored.cancelled() or stored.exception())

    async def _store(self, request: GenerateRequest, items: tuple[TokenItem, ...]) -> "asyncio.Future[Ack]":
        self._batches += 1
        batch = TokenBatch(self._gateway, 0, self._batches, items)
        subject = self._own.bus.subjects.tokens(request.token_address)
        msg_id = f"{self._gateway}:{self._own.number}:migrated:{self._batches}"
        return await self._own.publisher.send(subject, wire.encode(batch), msg_id)

    async def _end(self, job: Job, request: GenerateRequest, record: done.Done) -> None:
        own = self._own
        event = event_of(job, request, record)
        await own.publisher.publish(
            own.bus.subjects.done(request.tenant, request.recorded_under, request.id),
            done.encode_within(event, own.bus.max_message),
            request.id,
            headers=summary.headers_of(event, request),
            timeout=STORE_S,
            once=True,
        )

    async def _end_late(self, carried: _Carried, job: Job, request: GenerateRequest) -> None:
        """Store the end of a request past its deadline whose other cell cannot be reached.

        Raises:
            ServingError: the end cannot be stored.
        """
        number = carried.host.number
        record = done.Done(
            guest_id(job, request.id, self._first + number),
            request.model,
            job.attempt,
            choices=tuple(done.Outcome(tokens, "error") for tokens in job.resume),
            usage=done.usage_of(request, job.resume),
            timings=done.Timings(created_ns=request.created_ns, ended_ns=self._own.bus.clock.now_ns()),
            code=Code.deadline_exceeded.value,
            message=f"its deadline passed while the broker of cell {number}, which was to run it, was away",
            user=request.user,
            left_out=("tokens",),
        )
        await self._end(job, request, done.without_content(record, request) if request.no_store else record)

    async def _give_back(self, carried: _Carried, request: GenerateRequest, why: str, guest: str = "") -> None:
        """Return an attempt that ended without a result: the router of the request's cell places the next one.

        Args:
            guest: its id in the other cell; "": it was not accepted there.
        """
        if request.no_store:
            why = "it did not run in another cell"
        if guest:
            why = returned_by(carried.host.number, guest, why)
        target = cell_target(carried.host.number)
        event = done.Returned(request.id, request.model, carried.attempt, target, why)
        await self._own.publisher.publish(
            self._own.bus.subjects.returned(request.model),
            wire.encode(event),
            done.returned_id(event),
            headers=done.returned_headers(event),
            timeout=STORE_S,
        )

    # --- upkeep ---

    async def _claim_forever(self) -> None:
        """Renew the claims of carried jobs, so that the broker does not deliver them to another gateway, and repeat
        cancellations, which workers miss while their broker is away."""
        while True:
            await asyncio.sleep(CLAIM_S)
            for carried in self._carried.values():
                carried.claim()
                if carried.cancelled and carried.guest:
                    self._cancel(carried)
                self._own.bus.nc.post(carried.reply, IN_PROGRESS)

    async def _on_cancel(self, message: Any) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            order = control.decode_cancel(message.data)
            carried = self._carried.get(order.request)
            if carried is not None and not carried.cancelled:
                carried.cancelled = order.reason
                if carried.guest:
                    self._cancel(carried)

    def _cancel(self, carried: _Carried) -> None:
        self._tasks.spawn(
            carried.host.cancel(carried.guest, carried.cancelled),
            name="cancel",
            on_failure=lambda error: log.debug("cancel_failed", error=repr(error)),
        )
