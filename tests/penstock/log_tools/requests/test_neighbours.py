"""What ran beside a request, on a real nats-server: jobs and records with times that are known."""

import io

import msgspec
import pytest
from rich.console import Console

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get
from penstock.log_tools.requests.neighbours import counts_only, read_neighbours, show
from penstock.log_tools.timeline.read import UnknownRequest, ids_of, only, read_timeline, times_of
from penstock.schemas.done import Done, Outcome, Timings, Usage
from penstock.schemas.jobs import Candidate, DecisionInputs, Stage
from penstock.schemas.requests import GenerateRequest, time_of
from penstock.schemas.subjects import HEADER_MSG_ID
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.requests.support import accept
from tests.penstock.log_tools.traces import samples

MS = 1_000_000


async def send(
    bus: Bus, request: GenerateRequest, *, worker: str = "w-1", ahead: int = 0, held_ms: float = 0, held: int = 0
) -> int:
    """Send a request to a worker; returns when its job was stored."""
    job = samples.job(0, Stage("aggregated", worker))
    now = request.created_ns + int(held_ms * MS)
    decision = msgspec.structs.replace(
        job.decision,
        at_ns=now,
        waited_ns=int(held_ms * MS),
        candidates=(Candidate(worker, prefill_tokens=ahead, running=2, slots=8),),
    )
    job = msgspec.structs.replace(
        job, request=msgspec.Raw(encode(request)), decision=decision, inputs=DecisionInputs(held=held)
    )
    subject, headers = bus.subjects.work("aggregated", worker), {HEADER_MSG_ID: f"{request.id}:1"}
    stored = await bus.js.publish(subject, encode(job), headers=headers)
    entry = await get(bus, stored.stream, stored.seq)
    assert entry is not None
    return entry.time_ns


async def finish(bus: Bus, request: GenerateRequest, routed: int, first: int, ended: int, worker: str = "w-1") -> None:
    event = Done(
        request.id,
        request.model,
        1,
        worker,
        (Outcome(pack_tokens(range(10)), "length"),),
        Usage(request.prompt_tokens, 10, 36),
        Timings(request.created_ns, routed, routed, first, ended),
        submitted=encode(request),
    )
    await bus.js.publish(
        bus.subjects.done(request.tenant, request.recorded_under, request.id),
        encode(event),
        headers={HEADER_MSG_ID: request.id},
    )


async def test_those_ahead_and_those_beside_are_told_apart_by_the_times_of_their_records(bus: Bus) -> None:
    gone, running, ahead, elsewhere = [await accept(bus, tenant=name) for name in ("a", "b", "c", "d")]
    before = [await send(bus, each) for each in (gone, running, ahead)]
    await send(bus, elsewhere, worker="w-2")
    asked = await accept(bus, tenant="e")
    at = await send(bus, asked, ahead=70)
    late = await accept(bus, tenant="b")
    after = await send(bus, late)
    await finish(bus, gone, before[0], before[0] + 1, at - 1)
    await finish(bus, running, before[1], at - 100, at + 100 * MS)
    await finish(bus, ahead, before[2], at + 50 * MS, at + 60 * MS)
    await finish(bus, elsewhere, at, at, at + 100 * MS, "w-2")
    await finish(bus, asked, at, at + 200 * MS, at + 400 * MS)
    await finish(bus, late, after, at + 300 * MS, at + 500 * MS)
    timeline = await read_timeline(bus, asked.id)
    neighbours = await read_neighbours(bus, timeline)
    (worker,) = neighbours.workers
    assert [(each.id, each.part, each.to_compute) for each in worker.requests] == [
        (ahead.id, "ahead", 64),
        (running.id, "running", 64),
        (late.id, "later", 64),
    ]
    assert (worker.ahead_tokens, worker.counted_tokens, worker.most) == (64, 70, 3)
    assert worker.by_tenant == {"c": 1, "b": 2}
    assert worker.parts == {"ahead": 1, "running": 1, "later": 1}
    # All of that ahead, and 200 of 300 ms of the later one's prompt; then all, all, and 100 of 200 ms of its answer.
    whole = (at + 200 * MS - after) / (at + 300 * MS - after)
    share = min(1.0, (at + 50 * MS - at) / (at + 50 * MS - before[2]))
    assert worker.computed_tokens == pytest.approx(64 * whole + 64 * share, abs=2)
    assert worker.generated_tokens == pytest.approx(10 + 10 + 5, abs=1)
    assert not worker.older_unread
    assert neighbours.routers == ()


async def test_the_record_of_one_that_ran_as_a_fallback_is_found_under_the_model_that_was_asked_for(bus: Bus) -> None:
    other = msgspec.structs.replace(await accept(bus, tenant="a"), model="small", asked="tiny", fallback=1)
    before = await send(bus, other)
    asked = await accept(bus, tenant="b")
    at = await send(bus, asked)
    await finish(bus, other, before, at - 1, at + 100 * MS)
    await finish(bus, asked, at, at + 200 * MS, at + 400 * MS)
    (worker,) = (await read_neighbours(bus, await read_timeline(bus, asked.id))).workers
    assert [(each.id, each.model, each.part) for each in worker.requests] == [(other.id, "small", "running")]


async def test_a_router_s_held_requests_are_those_that_waited_at_the_same_time(bus: Bus) -> None:
    soon, other, asked = [await accept(bus, tenant=name) for name in ("a", "b", "c")]
    began = asked.created_ns
    for request, waited_ms in ((soon, 0.5), (other, 900.0), (asked, 800.0)):
        await send(bus, request, held_ms=waited_ms, held=1)
        routed = request.created_ns + int(waited_ms * MS)
        await finish(bus, request, routed, routed + 5 * MS, routed + 9 * MS)
    neighbours = await read_neighbours(bus, await read_timeline(bus, asked.id))
    (router,) = neighbours.routers
    assert (router.held, router.found, router.by_tenant) == (1, 1, {"b": 1})
    assert [each.id for each in router.requests] == [other.id]
    assert (router.since_ns, router.until_ns) == (began, began + 800 * MS)
    out = io.StringIO()
    show(neighbours, Console(file=out, width=80), began)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert other.id in out.getvalue()
    hidden = counts_only(neighbours)
    out = io.StringIO()
    show(hidden, Console(file=out, width=80), began)
    assert not {other.id, "1 of b"} & set(out.getvalue().split())
    assert b"tenant" not in msgspec.json.encode(hidden)
    assert hidden.routers[0].found == 1


async def test_a_request_that_waits_is_beside_those_that_wait(bus: Bus) -> None:
    before, asked, later, placed = [await accept(bus, tenant=name) for name in "abcd"]
    await send(bus, placed)
    neighbours = await read_neighbours(bus, await read_timeline(bus, asked.id), stopped=True)
    (router,) = neighbours.routers
    assert [(each.id, each.part) for each in router.requests] == [(before.id, "ahead"), (later.id, "later")]
    assert (router.found, router.until_ns, neighbours.workers) == (2, 0, ())
    out = io.StringIO()
    show(neighbours, Console(file=out, width=200), asked.created_ns)
    assert "It waits for a worker. 2 other requests as well, with 200 prompt tokens (1 of a, 1 of c)." in out.getvalue()


async def test_an_unambiguous_beginning_of_an_id_is_enough(bus: Bus) -> None:
    now = [await accept(bus) for _ in range(2)]
    begin, end = times_of(now[0].id[:12])
    assert begin <= time_of(now[0].id) < end
    same = next(at for at in range(36) if now[0].id[at] != now[1].id[at])
    assert await ids_of(bus, now[0].id[: same + 1]) == [now[0].id]
    assert only(await ids_of(bus, now[1].id[: same + 1]), now[1].id[: same + 1]) == now[1].id
    with pytest.raises(ValueError, match="the beginning of several ids"):
        only(await ids_of(bus, now[0].id[:8]), now[0].id[:8])
    with pytest.raises(UnknownRequest, match="no request whose id begins with"):
        only(await ids_of(bus, "01a22687-544d"), "01a22687-544d")
    for text in ("01a226", "nonsense", "01a2-2687"):
        with pytest.raises(ValueError, match=r"too short|not a request id"):
            times_of(text)
