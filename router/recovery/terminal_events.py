"""Terminal events that a router makes: of requests that no worker will run, or whose terminal event is missing."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import ACK
from penstock.router.ownership.intake import BackgroundTasks, read_again
from penstock.router.placement.pending import PendingRequest
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import done, requests, summary, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import EarlierWorker
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.token_dedup import ChoiceProgress
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, Logprob, TokenBatch, TokenItem

log = structlog.get_logger("router")


class InterruptedAttempt(msgspec.Struct):
    """An attempt that cannot finish. ``fence`` fills the fields with defaults.

    Attributes:
        work_seq: of its job in WORK, or of its newest handoff.
        raw: the request as it was stored.
        progress: per choice, what was streamed before the fence.
        revision: of the model, that the attempt ran in.
        reason: why this attempt was placed.
        scores: log-probabilities of the prompt's tokens 1 .., as far as they were streamed.
        streamed_ns: when its first token was stored, Unix time; 0: none was.
        earlier_workers: those of all earlier attempts.
        since_ns: no token of the request was stored earlier.
    """

    request_id: str
    attempt: int
    worker: str
    token_address: str
    work_seq: int
    raw: bytes = b""
    request: GenerateRequest | None = None
    progress: list[ChoiceProgress] = []
    revision: str = ""
    scores: tuple[Logprob, ...] = ()
    reason: str = ""
    streamed_ns: int = 0
    since_ns: int = 0
    earlier_workers: tuple[EarlierWorker, ...] = ()


_FAILED = ("error", "cancelled")


def last_item(request: GenerateRequest, attempt: int, code: Code, message: str) -> TokenItem:
    """The token item that the gateway reads in place of further tokens."""
    finish = Finish(_reason(code), None, 0, code.value, message)
    return TokenItem(request.id, attempt, WHOLE_REQUEST, 0, b"", finish)


def refused(
    request: GenerateRequest,
    raw: bytes,
    attempt: int,
    streamed: Sequence[bytes],
    *,
    code: Code,
    message: str,
    now_ns: int,
    streamed_ns: int = 0,
    earlier_workers: tuple[EarlierWorker, ...] = (),
) -> done.Done:
    """The terminal event of a request that gets no worker, or no further one.

    Args:
        raw: the request as it was stored.
        streamed: tokens per choice, packed u32.
        streamed_ns: when the first of them was stored.
    """
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=attempt,
        choices=tuple(done.Outcome(tokens, _reason(code)) for tokens in streamed),
        usage=done.usage_of(request, streamed),
        timings=done.Timings(
            created_ns=request.created_ns,
            ended_ns=now_ns,
            streamed_ns=streamed_ns,
            earlier_workers=earlier_workers,
            made_with=done.MadeWith(fallback=request.fallback) if request.fallback else None,
        ),
        code=code.value,
        message=message,
        user=request.user,
        submitted=_recorded(raw),
        left_out=done.not_recorded(request)
        + (("logprobs",) if request.sampling.logprobs is not None and any(streamed) else ()),
    )


def completed(
    request: GenerateRequest,
    raw: bytes,
    attempt: int,
    worker: str,
    *,
    progress: Sequence[ChoiceProgress],
    scores: Sequence[Logprob],
    now_ns: int,
    streamed_ns: int = 0,
    earlier_workers: tuple[EarlierWorker, ...] = (),
    revision: str = "",
) -> done.Done:
    """The terminal event that a lost worker did not publish: all choices had finished in the token log."""
    finishes = [part.finish or Finish("") for part in progress]
    failed = next((finish for finish in finishes if finish.reason in _FAILED), Finish(""))
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=attempt,
        worker=worker,
        choices=tuple(
            done.Outcome(part.tokens, finish.reason, finish.stop, finish.files, part.logprobs)
            for part, finish in zip(progress, finishes, strict=True)
        ),
        usage=done.usage_of(
            request,
            [part.tokens for part in progress],
            max((finish.cached_tokens for finish in finishes), default=0),
        ),
        timings=done.Timings(
            created_ns=request.created_ns,
            ended_ns=now_ns,
            streamed_ns=streamed_ns,
            earlier_workers=earlier_workers,
            made_with=done.MadeWith(revision, fallback=request.fallback),
        ),
        code=failed.code,
        message=failed.message,
        user=request.user,
        submitted=_recorded(raw),
        scores=tuple(scores),
        left_out=done.not_recorded(request),
    )


def _recorded(raw: bytes) -> bytes:
    return done.recorded(requests.decode_head(raw)) if raw else b""


def _reason(code: Code) -> str:
    return "cancelled" if code is Code.cancelled else "error"


TIMEOUT_S = 600.0  # to store an end: as long as a broker may be away
POLL_S = 0.1


class TerminalPublisher:
    """Publishes in the background.

    Attributes:
        ending: requests whose end is being published.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        router: str,
        *,
        cluster: ClusterState,
        background: BackgroundTasks,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._router = router
        self._cluster = cluster
        self._background = background
        self._metrics = metrics
        self.ending: set[str] = set()

    def end(self, pending: PendingRequest, code: Code, message: str) -> None:
        """End a request with an error, in the background."""
        request_id = pending.request.id
        if request_id not in self.ending:
            self.ending.add(request_id)
            self._background.spawn(self._publish_end(pending, code, message), f"end-{request_id}")

    def complete(self, attempt: InterruptedAttempt) -> None:
        """Publish the terminal event that a lost worker could not: all choices had finished in the token log."""
        if attempt.request_id not in self.ending:
            self.ending.add(attempt.request_id)
            self._background.spawn(self._publish_completed(attempt), f"end-{attempt.request_id}")

    async def drain(self, seconds: float) -> None:
        """Wait until all ends are stored, or for ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.ending and time.monotonic() < deadline:  # noqa: ASYNC110 - rare, and bounded
            await asyncio.sleep(POLL_S)

    async def _publish_end(self, pending: PendingRequest, code: Code, message: str) -> None:
        """Terminal event, terminal token item, acknowledgement, each stored before the next.

        The event first: only one end of a request is stored, and if a worker's came before this one, no client may
        read another. A router that dies in between leaves readers to the record.
        """
        request, attempt = pending.request, pending.attempt
        try:
            await read_again(self._bus, pending)
        except ServingError as error:  # its record has no more of it than that it ended
            log.warning("ended_request_not_read", request=request.id, error=error.message)
        batch = TokenBatch(self._router, 0, 0, (last_item(request, attempt, code, message),))
        event = refused(
            request,
            pending.raw,
            attempt,
            pending.resume,
            code=code,
            message=message,
            now_ns=self._bus.clock.now_ns(),
            streamed_ns=pending.streamed_ns,
            earlier_workers=pending.earlier_workers,
        )
        try:
            subject, msg_id = self._bus.subjects.tokens(request.token_address), f"{request.id}:{attempt}:end"
            if await self._publish_event(request, event):
                await self._publisher.publish(subject, wire.encode(batch), msg_id, timeout=TIMEOUT_S)
            if pending.reply:
                await self._bus.nc.publish(pending.reply, ACK)
        finally:
            self.ending.discard(request.id)
        self._cluster.tracker.finish(request.id)
        self._metrics.ended.labels(code.value).inc()
        log.info("request_ended_by_router", request=request.id, code=code.value)

    async def _publish_completed(self, attempt: InterruptedAttempt) -> None:
        assert attempt.request is not None
        try:
            event = completed(
                attempt.request,
                attempt.raw,
                attempt.attempt,
                attempt.worker,
                progress=attempt.progress,
                scores=attempt.scores,
                now_ns=self._bus.clock.now_ns(),
                streamed_ns=attempt.streamed_ns,
                earlier_workers=attempt.earlier_workers,
                revision=attempt.revision,
            )
            await self._publish_event(attempt.request, event)
        finally:
            self.ending.discard(attempt.request_id)

    async def _publish_event(self, request: GenerateRequest, event: done.Done) -> bool:
        """False: the request had another end already."""
        headers = summary.headers_of(event, request)
        if request.no_store:
            event = done.without_content(event)
        payload = done.encode_within(event, self._bus.max_message)
        subject = self._bus.subjects.done(request.tenant, request.recorded_under, request.id)
        ack = await self._publisher.publish(subject, payload, request.id, headers=headers, timeout=TIMEOUT_S, once=True)
        if not ack.duplicate:
            return True
        # The same end may have been stored by an earlier try, or by another router.
        entry = await get_last(self._bus, self._bus.subjects.stream("DONE"), subject)
        stored = done.decode(entry.data) if entry is not None else None
        return isinstance(stored, done.Done) and (stored.code, stored.attempt) == (event.code, event.attempt)
