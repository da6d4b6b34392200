"""Requests and what the log says of them, made by hand."""

from typing import Any

import msgspec

from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.schemas.done import Done, Outcome, Returned, Timings, Usage
from penstock.schemas.jobs import Candidate, Decision, Job, Stage
from penstock.schemas.requests import GenerateRequest, Sampling, Stop, new_request_id
from penstock.schemas.trace import Stamps, Trace
from penstock.schemas.transfer import Encoded, Endpoint, Handoff, Prefilled, Ticket
from penstock.schemas.wire import encode, pack_tokens

T0 = 1_800_000_000_000_000_000
MS = 1_000_000
ID = new_request_id(T0, bytes(range(10)))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def at(ms: float) -> int:
    return T0 + int(ms * MS)


def request(trace: Trace | None = None, **more: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "id": ID,
        "model": "tiny",
        "gateway": "gw-1",
        "prompt": pack_tokens(range(100)),
        "stop": Stop(max_tokens=9),
        "created_ns": T0,
        "deadline_ns": at(600_000),
        "sampling": Sampling(temperature=0.5, seed=3),
        "endpoint": "chat",
        "trace": trace,
    }
    return GenerateRequest(**given | more)


def job(decided_ms: float, *route: Stage, attempt: int = 1, reason: str = "new", waited_ms: float = 1) -> Job:
    decision = Decision(
        mode="kv",
        chosen=route[0].worker,
        router="r-1",
        at_ns=at(decided_ms),
        candidates=tuple(Candidate(stage.worker, 2, role=stage.role, score=1.5) for stage in route),
        prompt_blocks=3,
        waited_ns=int(waited_ms * MS),
        reason=reason,
        route=route if len(route) > 1 else (),
    )
    return Job(msgspec.Raw(encode(1)), attempt, decision, route=route[1:])


def ticket(owner: str, reader: str, attempt: int = 1) -> Ticket:
    return Ticket(f"{ID}:{attempt}:{reader}", owner, Endpoint(owner, "nixl"), "kv", b"", b"", at(30_000))


def prefilled(owner: str, started: float, first: float, stamps: Stamps | None = None, attempt: int = 1) -> Prefilled:
    raw = msgspec.Raw(encode(1))
    return Prefilled(ID, attempt, raw, ticket(owner, "decode", attempt), 32, at(started), at(first), stamps=stamps)


def encoded(owner: str, started: float, reader: str = "prefill", attempt: int = 1) -> Encoded:
    return Encoded(ID, attempt, msgspec.Raw(encode(1)), ticket(owner, reader, attempt), at(started))


def line(state: str, ms: float, owner: str = "p-1", reader: str = "d-1", stage: str = "decode", **more: Any) -> Handoff:
    return Handoff(f"{ID}:1:{stage}", state, owner, reader, at(ms), **more)


def done(ms: float, worker: str = "d-1", attempt: int = 1, first: float = 20, **more: Any) -> Done:
    given: dict[str, Any] = {
        "choices": (Outcome(pack_tokens([1, 2]), "length"),),
        "usage": Usage(100, 2, 32),
        "timings": Timings(T0, at(2), at(5), at(first), at(ms)),
    }
    return Done(ID, "tiny", attempt, worker, **given | more)


def timeline(asked: GenerateRequest | None = None, compact: bool = True) -> RequestTimeline:
    """Of a request that was accepted, and nothing else."""
    made = RequestTimeline(ID, compact=compact)
    made.add_request(asked if asked is not None else request())
    return made


def split(trace: Trace | None = None, stamped: bool = False, compact: bool = True) -> RequestTimeline:
    """Prefill and decode, undisturbed."""
    before = Stamps(at(4), at(5), at(20)) if stamped else None
    after = Stamps(at(23), at(27), at(31), 1, {"queue_s": 0.25, "kv_transfer_bytes": 4096.0}) if stamped else None
    made = timeline(request(trace), compact)
    made.add_work("prefill", "p-1", at(3), job(2, Stage("prefill", "p-1"), Stage("decode", "d-1")))
    made.add_work("decode", "d-1", at(22), prefilled("p-1", 5, 20, before))
    for each in (
        line("offered", 21, blocks=4, bytes=4096),
        line("leased", 24),
        line("read", 26, blocks=4, bytes=4096, seconds=0.0015, pool="kv"),
        line("released", 26.5),
    ):
        made.add_handoff(each)
    made.add_end(done(50, stamps=after), at(50))
    return made


def returned(attempt: int, worker: str, reason: str, crashed: str = "") -> Returned:
    return Returned(ID, "tiny", attempt, worker, reason, crashed=crashed)
