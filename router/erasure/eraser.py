"""Erases requests with ``no_store`` from the log, a grace period after their end.

The task itself is in the log, so no process can lose it: such requests have their own subject in REQUESTS, and stay
there until everything else about them is erased. A router that starts reads that subject and erases ended requests,
whichever router or worker died before.

Order: jobs, tokens, media, the request. A router that starts in between finds no job without its end, and the record
in DONE has no content (``done.without_content``). Requests are erased independently of each other: one that cannot be
erased delays no other.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get, get_last, get_last_of, read
from infra.bus.erase import erase
from infra.bus.private_objects import media_owners, private_owners, private_sequences
from infra.bus.publisher import Publisher
from infra.bus.tasks import Tasks
from infra.bus.unerased import UnerasedRequests
from router.erasure.ledger import Due, ErasureLedger
from router.metrics import Metrics
from schemas import done, requests, wire
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import request_of, token

log = structlog.get_logger("router")

TICK_S = 0.25
MEDIA = "media"
UNACCEPTED_NS = 600 * 10**9  # media of a request that REQUESTS does not have so long after it was made are erased
SCAN_S = 30.0  # between two scans for requests that no message announced
RETRY_S = 2.0
TOGETHER = 64  # requests erased at once
AT_ONCE = 16  # concurrent deletions
LOOKED_UP = 200  # records looked up at once


class Eraser:
    """
    Args:
        ledger: filled by the fold of WORK.
        since_ns: WORK was folded from this Unix time on. The first scan reads older jobs.
        owns: whether this router owns a model, by its name as a subject token.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        ledger: ErasureLedger,
        metrics: Metrics,
        *,
        since_ns: int,
        owns: Callable[[str], bool],
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._ledger = ledger
        self._metrics = metrics
        self._since_ns = since_ns
        self._owns = owns
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._unerased = UnerasedRequests(bus)
        self._read_jobs = False

    def on_done(self, entry: Entry) -> None:
        """Handle the end of a request with ``no_store``, read from DONE. ``scan`` finds earlier ends."""
        if (entry.time_ns or self._since_ns) >= self._since_ns:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self._ledger.end(request_of(entry.headers), entry.time_ns or time.time_ns(), own=self._owns(_model(entry)))

    def start(self, tasks: Tasks) -> None:
        tasks.spawn(self._run(), name="erasure")

    async def _run(self) -> None:
        scanned = float("-inf")
        while True:
            try:
                if time.monotonic() - scanned > SCAN_S:
                    await self.scan()
                    scanned = time.monotonic()
                while await self.erase_due(time.time_ns()):
                    pass
            except (ServingError, NatsError, OSError, TimeoutError) as error:
                log.warning("erasure_postponed", error=str(error))
                await asyncio.sleep(RETRY_S)
            except Exception:  # erasure must go on
                log.exception("erasure_failed")
                await asyncio.sleep(RETRY_S)
            self._metrics.to_erase.set(len(self._ledger))
            await asyncio.sleep(TICK_S)

    # Finding

    async def scan(self) -> None:
        """Find ended requests that are still stored, also those that this router did not see end.

        Raises:
            ServingError: a stream cannot be read.
        """
        subjects, ledger, stored = self._bus.subjects, self._ledger, self._unerased
        with_jobs = ledger.unended()  # found before the requests are read, which were stored earlier
        await stored.refresh()
        left = (with_jobs | await self._with_tokens()).difference(stored)
        if not self._read_jobs:
            await self._read_older_jobs(left)
            self._read_jobs = True
        ledger.left_over([*left, *stored])
        for request in left:  # stored late, after another router had erased the request
            if request not in ledger:
                record = await get_last(self._bus, subjects.stream("DONE"), subjects.done_of(request))
                if record is not None:
                    self._add(record)
        ends = [each.done for request, each in stored.items() if request not in ledger]
        for start in range(0, len(ends), LOOKED_UP):
            for record in await get_last_of(self._bus, subjects.stream("DONE"), ends[start : start + LOOKED_UP]):
                self._add(record)
        try:
            await self._erase_unaccepted_media(time.time_ns())
        except (ServingError, NatsError, OSError, TimeoutError) as error:  # as with rights of an earlier release
            log.warning("media_not_erased", error=str(error) or repr(error))

    async def _read_older_jobs(self, left: Collection[str]) -> None:
        """Add the jobs from before WORK was folded to the ledger: one read, however many requests there are."""
        subjects, stored, times = self._bus.subjects, self._unerased, [self._since_ns]
        times += [each.stored_ns for _, each in stored.items()]
        for request in left:
            with contextlib.suppress(ValueError):
                times.append(time_of(request))
        since = min(times) - CLOCK_SKEW_NS
        async for entry in read(self._bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since):
            if entry.time_ns > self._since_ns + CLOCK_SKEW_NS:
                return
            request = request_of(entry.headers)
            if request in stored or request in left:
                self._ledger.add_job(request, entry.seq)

    async def _with_tokens(self) -> set[str]:
        """Requests with messages on a token subject of their own."""
        subjects = self._bus.subjects
        wanted = msgspec.json.encode({"subjects_filter": subjects.tokens_apart})
        verb = f"$JS.API.STREAM.INFO.{subjects.stream('TOKENS')}"
        reply: Any = msgspec.json.decode((await self._bus.nc.request(verb, wanted, timeout=5.0)).data)
        counts = reply.get("state", {}).get("subjects") or {}
        return {subject.rpartition(".")[2] for subject in counts}

    # Erasing

    async def erase_due(self, now_ns: int) -> bool:
        """Erase the next requests that are due. False: none is left."""
        due = self._ledger.due(now_ns, TOGETHER)
        if not due:
            return False
        await self._unerased.refresh()
        errors = [error for error in await asyncio.gather(*(self._erase(each, now_ns) for each in due)) if error]
        if errors:
            log.error("requests_not_erased", requests=len(errors), error=errors[0])
        return len(due) == TOGETHER

    async def _erase(self, due: Due, now_ns: int) -> str:
        """Returns: why it was not erased; it is tried again later."""
        try:
            await self._erase_all(self._bus.subjects.stream("WORK"), due.jobs)
            await self._erase_tokens(due.request)
            await self._erase_request(due.request)
        except Exception as error:
            if not isinstance(error, (ServingError, NatsError, OSError, TimeoutError)):
                log.exception("erasure_failed", request=due.request)
            self._ledger.failed(due, now_ns + int(RETRY_S * 1e9))
            return str(error) or repr(error)
        self._ledger.erased(due, now_ns)
        if not due.again:
            self._metrics.erased.inc()
            log.info("request_erased", request=due.request)
        return ""

    async def _erase_tokens(self, request: str) -> None:
        subjects = self._bus.subjects
        stored = read(self._bus, subjects.stream("TOKENS"), subjects.tokens_of(request))
        await self._erase_all(subjects.stream("TOKENS"), [entry.seq async for entry in stored])

    async def _erase_request(self, name: str) -> None:
        """Erase the request itself, which ends the task. Its summary for lists is stored first."""
        subjects, found = self._bus.subjects, self._unerased.get(name)
        stream = subjects.stream("REQUESTS")
        for seq in found.seqs if found is not None else ():
            entry = await get(self._bus, stream, seq)
            if entry is None or request_of(entry.headers) != name:  # another router was faster
                continue
            request = _decoded(entry)
            if request is not None:
                for owner in media_owners(request):
                    await self._erase_media(owner)
                remains = wire.encode(done.without_text(request))
                await self._publisher.publish(subjects.erased, remains, f"{name}:erased", timeout=5.0)
            await self._erase_all(stream, (seq,))
        self._unerased.drop(name)

    async def _erase_media(self, request: str) -> None:
        seqs = await private_sequences(self._bus, MEDIA, request)
        await self._erase_all(f"OBJ_{self._bus.subjects.bucket(MEDIA)}", seqs)

    async def _erase_unaccepted_media(self, now_ns: int) -> None:
        """Erase media of requests that were never accepted: their gateway died, or refused them."""
        unaccepted = (await private_owners(self._bus, MEDIA)).difference(self._unerased)
        if not unaccepted:
            return
        for _, each in self._unerased.items():
            unaccepted -= each.owners
        for owner in unaccepted:
            with contextlib.suppress(ValueError):
                if time_of(owner) + UNACCEPTED_NS < now_ns:
                    await self._erase_media(owner)
                    log.info("media_erased", request=owner)

    async def _erase_all(self, stream: str, seqs: Iterable[int]) -> None:
        async def one(seq: int) -> None:
            async with self._slots:
                await erase(self._bus, stream, seq)

        results = await asyncio.gather(*(one(seq) for seq in seqs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _model(entry: Entry) -> str:
    return token(entry.subject.split(".")[-2])


def _decoded(entry: Entry) -> requests.GenerateRequest | None:
    try:
        return requests.decode(entry.data)
    except msgspec.MsgspecError as error:  # of a later release
        log.warning("request_unreadable", subject=entry.subject, error=str(error))
        return None
