"""Requests in a real broker's log, at every point of their way."""

import time
from typing import Any

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.schemas.done import Done, Outcome, Timings, Usage, not_recorded, recorded
from penstock.schemas.jobs import Stage
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_NO_STORE, HEADER_SUMMARY
from penstock.schemas.summary import header_of
from penstock.schemas.tokens import TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces import samples


async def accept(bus: Bus, **more: Any) -> GenerateRequest:
    now = time.time_ns()
    request = samples.request(**{"id": new_request_id(now), "created_ns": now, "deadline_ns": now + 600 * 10**9} | more)
    subject = bus.subjects.request(request.model, request.priority.value, request.id)
    await bus.js.publish(subject, encode(request), headers={HEADER_MSG_ID: request.id})
    return request


async def assign(bus: Bus, request: GenerateRequest, worker: str = "w-1", attempt: int = 1) -> None:
    job = samples.job(0, Stage("aggregated", worker), attempt=attempt)
    job = msgspec.structs.replace(job, request=msgspec.Raw(encode(request)))
    name = f"{request.id}:{attempt}"
    await bus.js.publish(bus.subjects.work("aggregated", worker), encode(job), headers={HEADER_MSG_ID: name})


async def stream(bus: Bus, request: GenerateRequest, *tokens: int, worker: str = "w-1") -> None:
    item = TokenItem(request.id, 1, 0, 0, pack_tokens(tokens))
    await bus.js.publish(bus.subjects.tokens(request.gateway), encode(TokenBatch(worker, 1, 0, (item,))))


async def end(
    bus: Bus,
    request: GenerateRequest,
    *tokens: int,
    worker: str = "w-1",
    code: str = "",
    took_ms: float = 50,
    attempt: int = 1,
) -> None:
    created = request.created_ns
    event = Done(
        request.id,
        request.model,
        attempt,
        worker,
        choices=() if code else (Outcome(pack_tokens(tokens), "stop"),),
        usage=Usage(len(request.prompt) // 4, len(tokens)),
        timings=Timings(created, created, created, created + 10_000_000, created + int(took_ms * 1e6)),
        code=code,
        submitted=recorded(request),
        left_out=not_recorded(request),
    )
    subject = bus.subjects.done(request.tenant, request.model, request.id)
    headers = {HEADER_MSG_ID: request.id, HEADER_SUMMARY: header_of(event, request)}
    headers |= {HEADER_NO_STORE: "1"} if request.no_store else {}
    await bus.js.publish(subject, encode(event), headers=headers)
