"""Following the streams of a real nats-server: what is sent, what is dropped, and where another one goes on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.traces import follow
from penstock.log_tools.traces.follow import Following, PositionStore, StreamReader, TracePosition, begin, share
from penstock.log_tools.traces.spans import Span
from penstock.schemas.done import KILLED, Done, Returned, Timings
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import Job, Stage
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from penstock.schemas.trace import Trace, trace_id
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end
from tests.penstock.log_tools.traces import samples

UNSAMPLED = samples.PARENT[:-1] + "0"


class Sent:
    """A collector in memory, that may be away."""

    why = "nobody is there"

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.batches = 0
        self.away = False
        self.takes = 10**9  # batches

    async def send(self, spans: Sequence[Span]) -> bool:
        self.batches += 1
        if self.away or self.batches > self.takes:
            return False
        self.spans += spans
        return True

    def close(self) -> None:
        """Nothing."""

    @property
    def requests(self) -> list[str]:
        """In the order in which they came."""
        return [str(span.attributes["penstock.request.id"]) for span in self.spans if not span.parent_id]


@pytest.fixture
def sent() -> Sent:
    return Sent()


def made(**more: Any) -> GenerateRequest:
    now = time.time_ns()
    return samples.request(**{"id": new_request_id(now), "created_ns": now} | more)


async def place(bus: Bus, asked: GenerateRequest) -> None:
    s = bus.subjects
    job = msgspec.structs.replace(samples.job(0, Stage("aggregated", "w-1")), request=msgspec.Raw(encode(asked)))
    assert isinstance(job, Job)
    await bus.js.publish(s.work("aggregated", "w-1"), encode(job), headers={HEADER_MSG_ID: f"{asked.id}:1"})


async def accept(bus: Bus, asked: GenerateRequest) -> None:
    subject = bus.subjects.request(asked.model, "standard", asked.id)
    await bus.js.publish(subject, encode(asked), headers={HEADER_MSG_ID: asked.id})


async def finish(bus: Bus, asked: GenerateRequest, worker: str = "w-1", code: str = "") -> None:
    times = Timings(asked.created_ns, ended_ns=time.time_ns())
    event = Done(asked.id, asked.model, 1, worker, timings=times, code=code)
    await bus.js.publish(
        bus.subjects.done(asked.tenant, asked.model, asked.id), encode(event), headers={HEADER_MSG_ID: asked.id}
    )


async def run(bus: Bus, count: int = 1, **more: Any) -> list[str]:
    """Whole requests; their ids."""
    all_ = [made(**more) for _ in range(count)]
    for asked in all_:
        await place(bus, asked)
        await finish(bus, asked)
    return [asked.id for asked in all_]


async def unreadable(until_ns: int = 0) -> AsyncIterator[Entry]:
    raise ServingError(Code.broker_unavailable, "away")
    yield


async def test_a_stream_that_has_lost_its_end_is_read_from_its_start_although_it_has_grown_again(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHECK_S", 0.0)
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        reader = StreamReader(bus, "WORK", subjects.all("work"))

        async def put(count: int) -> None:
            for _ in range(count):
                await bus.js.publish(subjects.work("aggregated", "w"), b"")

        async def seqs() -> list[int]:
            return [entry.seq async for entry in reader.entries()]

        await put(4)
        assert await seqs() == [1, 2, 3, 4]
        assert await seqs() == []
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, subjects.stream("WORK"), 2)
        await server.start()
        await eventually(lambda: bus.connected)
        await put(3)
        assert await seqs() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_ends_is_sent_after_the_streams_were_lost_and_recreated(
    bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    monkeypatch.setattr(follow, "CHECK_S", 0.0)
    following = Following(bus, sent, await begin(bus, None))
    old = await run(bus, 3)
    for _ in range(2):
        await following.look()
    assert sent.requests == old
    for name in ("DONE", "WORK", "HANDOFF"):
        assert await bus.js.delete_stream(bus.subjects.stream(name))
    await apply(bus.nc, topology(bus.subjects))
    if restarted:
        following = Following(bus, sent, following.position)
    new = await run(bus, 2)
    for _ in range(2):
        await following.look()
    assert sent.requests == old + new


async def test_what_ends_is_sent_once_and_what_has_not_ended_is_not(bus: Bus, sent: Sent) -> None:
    following = Following(bus, sent, await begin(bus, None))
    first, open_ = await run(bus, 3), made()
    await place(bus, open_)
    await following.once()
    assert sent.requests == first
    await finish(bus, open_)
    await following.once()
    await following.once()
    assert sent.requests == [*first, open_.id]
    assert {span.name for span in sent.spans} == {"chat tiny", "route", "aggregated"}
    assert following.counts == follow.TraceCounts(sent=4)


@pytest.mark.parametrize("fails", [False, True])
async def test_an_attempt_that_began_and_was_returned_between_two_looks_has_both(
    bus: Bus, sent: Sent, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Following(bus, sent, await begin(bus, None))
    asked = made()
    await place(bus, asked)
    report = Returned(asked.id, asked.model, 1, "w-1", "it was killed", crashed=KILLED)
    await bus.js.publish(bus.subjects.returned(asked.model), encode(report))
    if fails:  # the broker goes away between the streams
        with monkeypatch.context() as patch:
            patch.setattr(following.work, "entries", unreadable)
            with pytest.raises(ServingError):
                await following.look()
    await following.look()
    await finish(bus, asked, worker="w-2")
    await following.once()
    (attempt,) = [span for span in sent.spans if span.name == "aggregated"]
    assert (attempt.error, attempt.attributes["error.type"]) == ("worker lost: it was killed", "worker_lost")


async def test_it_begins_at_the_present_or_as_long_ago_as_asked(bus: Bus, sent: Sent) -> None:
    past = await run(bus, 2)
    following = Following(bus, sent, await begin(bus, None))
    now = await run(bus)
    await following.once()
    assert sent.requests == now
    everything = Sent()
    await Following(bus, everything, TracePosition(0, 1)).once()
    assert everything.requests == past + now
    none = Sent()
    await Following(bus, none, TracePosition(0, 1), not_before_ns=time.time_ns()).once()
    assert none.requests == []


async def test_another_continues_where_one_was_also_with_what_was_unfinished(bus: Bus, sent: Sent) -> None:
    kept = PositionStore(bus, "one")
    assert await kept.load() is None
    following = Following(bus, sent, await begin(bus, await kept.load()))
    before, open_ = await run(bus, 2), made()
    await place(bus, open_)
    await following.once()
    await kept.save(following.position)
    assert sent.requests == before
    await finish(bus, open_)
    between = await run(bus, 2)
    other = Sent()
    await Following(bus, other, await begin(bus, await kept.load())).once()
    assert other.requests == [open_.id, *between]
    assert [span.name for span in other.spans[:3]] == ["chat tiny", "route", "aggregated"], "its job was read, too"


async def test_a_position_beyond_the_streams_end_is_of_another_stream(bus: Bus) -> None:
    await run(bus)
    assert (await begin(bus, TracePosition(10**9, 1))).done_seq == 1
    assert await begin(bus, TracePosition(1, 5)) == TracePosition(1, 5)


async def test_only_as_many_as_asked_for_are_sent_but_the_callers_always(bus: Bus, sent: Sent) -> None:
    following = Following(bus, sent, await begin(bus, None), sample=0.5)
    own = await run(bus, 40) + await run(bus, 40, trace=Trace())
    called, _unsampled = await run(bus, 3, trace=Trace(samples.PARENT)), await run(bus, 3, trace=Trace(UNSAMPLED))
    await following.once()
    chosen = [each for each in own if share(trace_id(each)) < 0.5]
    assert 15 < len(chosen) < 65
    assert {str(s.attributes["penstock.request.id"]) for s in sent.spans if s.service == "gateway"} == {
        *chosen,
        *called,
    }
    assert following.counts.unsampled == 83 - len(chosen)
    assert not following.open_requests


async def test_what_no_worker_got_is_found_among_the_requests(bus: Bus, sent: Sent) -> None:
    following = Following(bus, sent, await begin(bus, None))
    late, unsampled, unknown = made(), made(trace=Trace(UNSAMPLED)), made()
    for asked in (late, unsampled):
        await accept(bus, asked)
    for asked in (late, unsampled, unknown):
        await finish(bus, asked, worker="", code="deadline_exceeded")
    await following.once()
    assert sent.requests == [late.id]
    assert [span.error for span in sent.spans] == ["deadline_exceeded"] * 2
    assert following.counts == follow.TraceCounts(sent=1, unsampled=1, forgotten=1)


async def test_a_dead_collector_costs_one_batch_at_a_time_and_the_rest_stays_in_the_log(
    bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "RETRY_S", 0.01)
    following = Following(bus, sent, await begin(bus, None), export_timeout_s=0.05)
    sent.away = True
    dropped = await run(bus, 2)
    await following.once()
    assert (following.counts.dropped, following.counts.sent) == (2, 0)
    assert sent.batches > 1
    sent.away = False
    after = await run(bus, 2)
    await following.once()
    assert sent.requests == after != dropped


async def test_who_is_cancelled_while_the_collector_is_away_has_sent_nothing(bus: Bus, sent: Sent) -> None:
    following = Following(bus, sent, await begin(bus, None))
    waiting = await run(bus, 2)
    await following.look()
    before = following.position.done_seq
    sent.away = True
    work = asyncio.create_task(following.once())
    await eventually(lambda: sent.batches)
    work.cancel()
    await asyncio.wait([work])
    assert following.position.done_seq == before
    sent.away = False
    await following.once()
    assert sent.requests == waiting


async def test_who_is_cancelled_between_two_batches_sends_only_the_second_again(
    bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BATCH_SPANS", 3)  # one request's
    following = Following(bus, sent, await begin(bus, None))
    all_ = [made(), made()]
    for asked in all_:
        await accept(bus, asked)
        await place(bus, asked)
        await finish(bus, asked)
    start = following.position.done_seq
    sent.takes = 1
    work = asyncio.create_task(following.once())
    await eventually(lambda: sent.batches == 2)
    work.cancel()
    await asyncio.wait([work])
    assert following.position.done_seq == start + 1
    sent.takes = 10**9
    await following.once()
    assert sent.requests == [asked.id for asked in all_]
    assert [span.name for span in sent.spans] == ["chat tiny", "route", "aggregated"] * 2
    assert following.counts == follow.TraceCounts(sent=2)


async def test_once_ends_though_requests_keep_ending(bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    following = Following(bus, sent, await begin(bus, None))
    first = await run(bus, 2)
    look = following.look

    async def busy() -> bool:
        await run(bus)
        return await look()

    monkeypatch.setattr(following, "look", busy)
    await asyncio.wait_for(following.once(), 10)
    assert sent.requests[:2] == first
    assert len(sent.requests) <= 4


async def test_far_behind_it_reads_no_more_than_it_sends(bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ENDS", 4)
    monkeypatch.setattr(follow, "CLOCK_SKEW_NS", 0)
    following = Following(bus, sent, await begin(bus, None))
    all_ = await run(bus, 30)
    most = 0
    while await following.look() or following.due:
        most = max(most, len(following.open_requests))
    assert sent.requests == all_
    assert most <= 8


async def test_what_never_ends_is_forgotten(bus: Bus, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_OPEN", 5)
    following = Following(bus, sent, await begin(bus, None))
    for _ in range(8):
        await place(bus, made())
    old = made(created_ns=time.time_ns() - follow.LOST_NS - 1)
    await following.once()
    assert len(following.open_requests) == 5
    assert following.counts.forgotten == 3
    await place(bus, old)
    await following.once()
    assert following.counts.forgotten == 4


async def test_rubbish_in_the_streams_stops_nothing(bus: Bus, sent: Sent) -> None:
    following = Following(bus, sent, await begin(bus, None))
    s = bus.subjects
    for subject in (s.work("aggregated", "w-1"), s.done("default", "tiny", "r"), s.handoff("w-1")):
        await bus.js.publish(subject, b"\xc1")
        await bus.js.publish(subject, encode({"type": "of a later version"}))
    after = await run(bus)
    await following.once()
    assert sent.requests == after
