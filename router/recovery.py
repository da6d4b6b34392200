"""Taking over what a lost worker was doing: fence it, then read how far it had come.

The fence is a token item of the next attempt, stored in the same stream as the tokens, so that for every reader
the old attempt ends at the same place. What lies before it is what the client has or will get.
"""

import asyncio
import time

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import get, read
from infra.bus.publisher import Publisher
from schemas import jobs, requests, tokens, wire
from schemas.errors import Code, ServingError
from schemas.reassembly import Progress, replay, scores
from schemas.requests import GenerateRequest
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import HEADER_MSG_ID
from schemas.tokens import WHOLE_REQUEST, Logprob, TokenBatch, TokenItem

log = structlog.get_logger("router")


class Orphan(msgspec.Struct):
    """An attempt that cannot come to its end. The fields with defaults are filled by ``recover``."""

    request_id: str
    attempt: int
    worker: str
    gateway: str
    work_seq: int  # of its job, or of its newest hand-over, in WORK
    raw: bytes = b""
    request: GenerateRequest | None = None
    progress: list[Progress] = []
    revision: str = ""  # of the model, that it ran in
    scores: tuple[Logprob, ...] = ()  # of the prompt's tokens 1 .., as far as they were streamed


async def recover(bus: Bus, publisher: Publisher, router: str, orphans: list[Orphan]) -> list[Orphan]:
    """Fence the attempts and find out what each had streamed; those whose job cannot be found are left out.

    Raises:
        ServingError: the broker did not answer; nothing is lost, try again.
    """
    found = []
    for orphan in orphans:
        if await _load_job(bus, orphan):
            found.append(orphan)
    gateways: dict[str, list[Orphan]] = {}
    for orphan in found:
        gateways.setdefault(orphan.gateway, []).append(orphan)
    for gateway, group in gateways.items():
        await _read_progress(bus, gateway, group, await _fence(bus, publisher, router, gateway, group))
    return found


async def _load_job(bus: Bus, orphan: Orphan) -> bool:
    """The job as it was published, or handed over between stages, from its place in WORK."""
    if not orphan.work_seq:
        return False
    stream = bus.subjects.stream("WORK")
    try:
        entry = await get(bus, stream, orphan.work_seq)
        if entry is None:
            log.error("job_not_found", request=orphan.request_id, seq=orphan.work_seq)
            return False
        work = jobs.decode(entry.data)
        named = entry.headers.get(HEADER_MSG_ID, "").split(":")[:2]
        if named == [orphan.request_id, str(orphan.attempt)] and not isinstance(work, jobs.Revoke):
            job = work if isinstance(work, jobs.Job) else jobs.decode_job(bytes(work.job))
            orphan.raw = bytes(job.request)
            orphan.revision = job.decision.revision
            orphan.request = requests.decode(orphan.raw)
            return True
        log.error("job_not_found", request=orphan.request_id, seq=orphan.work_seq)
    except msgspec.MsgspecError as error:  # of a newer version, perhaps; the others must not wait for it
        log.error("job_unreadable", request=orphan.request_id, seq=orphan.work_seq, error=str(error))
    return False


async def _fence(bus: Bus, publisher: Publisher, router: str, gateway: str, group: list[Orphan]) -> int:
    """Void the attempts' further output; returns the sequence behind which nothing of them counts."""
    subject = bus.subjects.tokens(gateway)
    waits = []
    for orphan in group:
        item = TokenItem(orphan.request_id, orphan.attempt + 1, WHOLE_REQUEST, 0)
        batch = TokenBatch(router, 0, time.time_ns(), (item,))
        msg_id = f"{orphan.request_id}:{orphan.attempt + 1}:fence"
        waits.append(await publisher.send(subject, wire.encode(batch), msg_id, timeout=10.0))
    return max(ack.seq for ack in await asyncio.gather(*waits))


async def _read_progress(bus: Bus, gateway: str, group: list[Orphan], until_seq: int) -> None:
    wanted: dict[str, list[TokenItem]] = {orphan.request_id: [] for orphan in group}
    since = min(orphan.request.created_ns for orphan in group if orphan.request is not None) - CLOCK_SKEW_NS
    stream, subject = bus.subjects.stream("TOKENS"), bus.subjects.tokens(gateway)
    async for entry in read(bus, stream, subject, since_ns=since, until_seq=until_seq):
        try:
            items = tokens.decode(entry.data).items
        except msgspec.MsgspecError as error:
            log.error("token_batch_unreadable", subject=subject, seq=entry.seq, error=str(error))
            continue
        for item in items:
            if item.request in wanted:
                wanted[item.request].append(item)
    for orphan in group:
        assert orphan.request is not None
        found = wanted[orphan.request_id]
        if not any(item.attempt == orphan.attempt + 1 for item in found):
            raise ServingError(Code.broker_unavailable, f"the fence of {orphan.request_id} cannot be read back yet")
        orphan.progress = replay(found, orphan.request.n)
        if orphan.request.sampling.prompt_logprobs is not None:
            orphan.scores = scores(found)


__all__ = ["Orphan", "recover"]
