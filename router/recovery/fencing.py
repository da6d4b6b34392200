"""Interrupted attempts: stop their output at one place in the token log, then read how far they had come.

A fence is a token item of the next attempt, stored in the stream of the tokens. For every reader, the old attempt ends
at the fence: the client has received, or will receive, exactly the tokens before it.
"""

import asyncio
import time

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get, read
from penstock.infra.bus.publisher import Publisher
from penstock.schemas import jobs, requests, tokens, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.reassembly import Progress, replay, scores
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import HEADER_MSG_ID
from penstock.schemas.tokens import WHOLE_REQUEST, Logprob, TokenBatch, TokenItem

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
        lost: earlier attempts that were lost with their worker, and that worker.
        since_ns: no token of the request was stored earlier.
    """

    request_id: str
    attempt: int
    worker: str
    gateway: str
    work_seq: int
    raw: bytes = b""
    request: GenerateRequest | None = None
    progress: list[Progress] = []
    revision: str = ""
    scores: tuple[Logprob, ...] = ()
    reason: str = ""
    streamed_ns: int = 0
    since_ns: int = 0
    lost: tuple[tuple[int, str], ...] = ()


async def fence(
    bus: Bus, publisher: Publisher, router: str, attempts: list[InterruptedAttempt]
) -> list[InterruptedAttempt]:
    """Fence the attempts and fill in what each had streamed. Attempts whose job cannot be found are left out.

    Raises:
        ServingError: the broker did not answer. Nothing is lost; try again.
    """
    loaded = [attempt for attempt in attempts if await _load_job(bus, attempt)]
    gateways: dict[str, list[InterruptedAttempt]] = {}
    for attempt in loaded:
        gateways.setdefault(attempt.gateway, []).append(attempt)
    for gateway, group in gateways.items():
        until_seq = await _publish_fences(bus, publisher, router, gateway, group)
        await _read_progress(bus, gateway, group, until_seq)
    return loaded


async def _load_job(bus: Bus, attempt: InterruptedAttempt) -> bool:
    """Read the job from WORK, as it was published or handed off between stages; False: it cannot be found."""
    if not attempt.work_seq:
        return False
    try:
        entry = await get(bus, bus.subjects.stream("WORK"), attempt.work_seq)
        if entry is None:
            log.error("job_not_found", request=attempt.request_id, seq=attempt.work_seq)
            return False
        work = jobs.decode(entry.data)
        named = entry.headers.get(HEADER_MSG_ID, "").split(":")[:2]
        if named == [attempt.request_id, str(attempt.attempt)] and not isinstance(work, jobs.Revoke):
            job = work if isinstance(work, jobs.Job) else jobs.decode_job(bytes(work.job))
            attempt.raw = bytes(job.request)
            attempt.revision = job.decision.revision
            attempt.reason = job.decision.reason
            attempt.lost = job.lost
            attempt.request = request = requests.decode(attempt.raw)
            attempt.since_ns = request.created_ns - CLOCK_SKEW_NS
            if attempt.since_ns > entry.time_ns:  # the gateway's clock is ahead of the broker's
                attempt.since_ns = entry.time_ns - (request.deadline_ns - request.created_ns)
            return True
        log.error("job_not_found", request=attempt.request_id, seq=attempt.work_seq)
    except msgspec.MsgspecError as error:  # perhaps of a newer version; the other attempts must not wait for it
        log.error("job_unreadable", request=attempt.request_id, seq=attempt.work_seq, error=str(error))
    return False


async def _publish_fences(
    bus: Bus, publisher: Publisher, router: str, gateway: str, group: list[InterruptedAttempt]
) -> int:
    """Returns the sequence of the last fence: later items of these attempts are void."""
    subject = bus.subjects.tokens(gateway)
    waits = []
    for attempt in group:
        item = TokenItem(attempt.request_id, attempt.attempt + 1, WHOLE_REQUEST, 0)
        batch = TokenBatch(router, 0, time.time_ns(), (item,))
        msg_id = f"{attempt.request_id}:{attempt.attempt + 1}:fence"
        waits.append(await publisher.send(subject, wire.encode(batch), msg_id, timeout=10.0))
    return max(ack.seq for ack in await asyncio.gather(*waits))


async def _read_progress(bus: Bus, gateway: str, group: list[InterruptedAttempt], until_seq: int) -> None:
    items: dict[str, list[TokenItem]] = {attempt.request_id: [] for attempt in group}
    streamed_ns: dict[str, int] = {}
    since = min(attempt.since_ns for attempt in group)
    stream, subject = bus.subjects.tokens_stream(gateway), bus.subjects.tokens(gateway)
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
                    streamed_ns.setdefault(item.request, entry.time_ns)
    for attempt in group:
        assert attempt.request is not None
        progress = items[attempt.request_id]
        if not any(item.attempt == attempt.attempt + 1 for item in progress):
            raise ServingError(Code.broker_unavailable, f"the fence of {attempt.request_id} cannot be read back yet")
        attempt.progress = replay(progress, attempt.request.n)
        attempt.streamed_ns = streamed_ns.get(attempt.request_id, 0)
        if attempt.request.sampling.prompt_logprobs is not None:
            attempt.scores = scores(progress)
