"""Erases requests with ``no_store`` from the log, a grace period after their end.

The task itself is in the log, so no process can lose it: such requests have their own subject in REQUESTS, and stay
there until everything else about them is erased. A router that starts reads that subject and erases ended requests,
whichever router or worker died before.

Order: jobs, tokens, media, the request. A router that starts in between finds no job without its end, and the record
in DONE has no content (``done.without_content``).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get_last, get_last_of, read
from infra.bus.erase import erase
from infra.bus.private_objects import private_owners, private_sequences
from infra.bus.publisher import Publisher
from infra.bus.tasks import Tasks
from router.erasure.ledger import Due, ErasureLedger
from router.metrics import Metrics
from schemas import done, requests, wire
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from schemas.subjects import request_of, token

log = structlog.get_logger("router")

TICK_S = 0.25
MEDIA = "media"
UNACCEPTED_NS = 600 * 10**9  # media of a request that REQUESTS does not have so long after it was made are erased
SCAN_S = 30.0  # between two scans for requests that no message announced
RETRY_S = 2.0
TOGETHER = 64  # requests erased in one round
AT_ONCE = 16  # concurrent deletions
LOOKED_UP = 200  # records looked up at once


class Eraser:
    """
    Args:
        ledger: filled by the fold of WORK.
        since_ns: WORK was folded from this Unix time on. For older requests the stream is searched.
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

    def on_done(self, entry: Entry) -> None:
        """Handle the end of a request with ``no_store``, read from DONE. ``scan`` finds earlier ends."""
        if (entry.time_ns or self._since_ns) >= self._since_ns:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        request = request_of(entry.headers)
        try:
            created_ns = time_of(request)
        except ValueError:
            return
        ended_ns = entry.time_ns or time.time_ns()
        if created_ns > ended_ns:  # its gateway's clock is ahead of the broker's
            created_ns = ended_ns - int(LONGEST_DEADLINE_S * 1e9)
        self._ledger.end(request, created_ns, ended_ns, own=self._owns(_model(entry)))

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
            except Exception:  # of one message; the others must be erased nevertheless
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
        subjects = self._bus.subjects
        stored: dict[str, Entry] = {}
        async for entry in read(self._bus, subjects.stream("REQUESTS"), subjects.to_be_erased):
            stored.setdefault(request_of(entry.headers), entry)
        left = [request for request in await self._with_tokens() if request not in stored]
        self._ledger.left_over([*left, *stored])
        for request in left:  # sent late, after another router had erased it
            if request not in self._ledger:
                record = await get_last(self._bus, subjects.stream("DONE"), subjects.done_of(request))
                if record is not None:
                    self._add(record)
        unknown = [entry for request, entry in stored.items() if request not in self._ledger]
        for start in range(0, len(unknown), LOOKED_UP):
            accepted = [_decoded(entry) for entry in unknown[start : start + LOOKED_UP]]
            subjects_of_ends = [
                subjects.done(each.tenant, each.model, each.id) for each in accepted if each is not None
            ]
            for record in await get_last_of(self._bus, subjects.stream("DONE"), subjects_of_ends):
                self._add(record)
        try:
            await self._erase_unaccepted_media(stored, time.time_ns())
        except (ServingError, NatsError, OSError, TimeoutError) as error:  # as with rights of an earlier release
            log.warning("media_not_erased", error=str(error) or repr(error))

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
        due, work = self._ledger.due(now_ns, TOGETHER), self._bus.subjects.stream("WORK")
        if not due:
            return False
        try:
            jobs = await self._jobs(due)
            for each in due:
                await self._erase_all(work, each.jobs | jobs.get(each.request, frozenset()))
                await self._erase_tokens(each.request)
            await self._erase_requests(due)
        except (ServingError, NatsError, OSError, TimeoutError) as error:
            log.error("requests_not_erased", requests=len(due), error=str(error))
            for each in due:
                self._ledger.failed(each, now_ns + int(RETRY_S * 1e9))
            return False
        for each in due:
            self._ledger.erased(each, now_ns)
            if not each.again:
                self._metrics.erased.inc()
                log.info("request_erased", request=each.request)
        return len(due) == TOGETHER

    async def _jobs(self, due: Iterable[Due]) -> dict[str, frozenset[int]]:
        """Find jobs from before this router started, and those published by an earlier build."""
        old = [
            each for each in due if each.created_ns - CLOCK_SKEW_NS < self._since_ns or not (each.jobs or each.again)
        ]
        if not old:
            return {}
        sequences: dict[str, set[int]] = {each.request: set() for each in old}
        subjects, since = self._bus.subjects, min(each.created_ns for each in old) - CLOCK_SKEW_NS
        until = max(each.ended_ns for each in old) + CLOCK_SKEW_NS
        async for entry in read(self._bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since):
            if entry.time_ns > until:
                break
            of = sequences.get(request_of(entry.headers))
            if of is not None:
                of.add(entry.seq)
        return {request: frozenset(seqs) for request, seqs in sequences.items()}

    async def _erase_tokens(self, request: str) -> None:
        subjects = self._bus.subjects
        stored = read(self._bus, subjects.stream("TOKENS"), subjects.tokens_of(request))
        await self._erase_all(subjects.stream("TOKENS"), [entry.seq async for entry in stored])

    async def _erase_requests(self, due: Iterable[Due]) -> None:
        """Erase the requests themselves, which ends the task. Their summaries for lists are stored first."""
        names = {each.request for each in due}
        subjects = self._bus.subjects
        seqs = []
        async for entry in read(self._bus, subjects.stream("REQUESTS"), subjects.to_be_erased):
            name = request_of(entry.headers)
            request = _decoded(entry) if name in names else None
            if name not in names:
                continue
            if request is not None:
                for owner in _owners(request):
                    await self._erase_media(owner)
                remains = wire.encode(done.without_text(request))
                await self._publisher.publish(subjects.erased, remains, f"{name}:erased", timeout=5.0)
            seqs.append(entry.seq)
        await self._erase_all(subjects.stream("REQUESTS"), seqs)

    async def _erase_media(self, request: str) -> None:
        seqs = await private_sequences(self._bus, MEDIA, request)
        await self._erase_all(f"OBJ_{self._bus.subjects.bucket(MEDIA)}", seqs)

    async def _erase_unaccepted_media(self, accepted: Mapping[str, Entry], now_ns: int) -> None:
        """Erase media of requests that were never accepted: their gateway died, or refused them."""
        owners = await private_owners(self._bus, MEDIA)
        if not owners:
            return
        for entry in accepted.values():
            request = _decoded(entry)
            owners -= _owners(request) if request is not None else set()
        for owner in owners.difference(accepted):
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


def _owners(request: requests.GenerateRequest) -> set[str]:
    """Under which ids its media are stored: another than its own, if it took the id of an idempotency key's claim."""
    return {request.id, *(medium.private for medium in request.media if medium.private)} if request.media else set()


def _model(entry: Entry) -> str:
    return token(entry.subject.split(".")[-2])


def _decoded(entry: Entry) -> requests.GenerateRequest | None:
    try:
        return requests.decode(entry.data)
    except msgspec.MsgspecError as error:  # of a later release
        log.warning("request_unreadable", subject=entry.subject, error=str(error))
        return None
