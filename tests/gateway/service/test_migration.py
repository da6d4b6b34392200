"""A request as it runs in another cell, and what comes back of it."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.gateway.service import migration
from penstock.gateway.service.migration import Carrier, event_of, guest_id, guest_of, moved_back, streamed_before
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.puller import ACK, TERM
from penstock.infra.bus.tasks import Tasks
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import control, done, jobs, requests, tokens, wire
from penstock.schemas.cells import returned_by
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import cell_in, time_of
from penstock.schemas.streams import MIGRATION_ACK_WAIT_S
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from penstock.schemas.token_dedup import TokenReassembler
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.nats.support import gateway_on
from tests.penstock.log_tools.traces import samples

REQUEST = samples.request(n=2, id=requests.new_request_id(cell=1))
AT_NS = 1_800_000_000_000_000_000
STREAMED = (wire.pack_tokens([1, 2, 3]), wire.pack_tokens([4]))


def job_of(attempt: int = 2, **more: object) -> jobs.Job:
    decision = jobs.Decision("kv", "cell-0", "r", AT_NS, revision="v1")
    return jobs.Job(msgspec.Raw(wire.encode(REQUEST)), attempt, decision, **more)  # type: ignore[arg-type]


def test_whoever_carries_an_attempt_finds_it_under_the_same_id() -> None:
    first = guest_id(job_of(), REQUEST.id, 0)
    assert first == guest_id(job_of(), REQUEST.id, 0)
    assert first != guest_id(job_of(3), REQUEST.id, 0)
    assert cell_in(first) == 0
    assert time_of(first) == AT_NS


def test_it_continues_after_what_was_streamed() -> None:
    job = job_of(resume=STREAMED, finished=(1,), endings=(Finish("stop"),))
    guest = guest_id(job, REQUEST.id, 0)
    items = streamed_before(job, guest)
    fold = TokenReassembler(2)
    for item in items:
        fold.push(item)
    assert (fold.position(0), fold.position(1), fold.open) == (3, 1, 1)
    assert fold.push(TokenItem(guest, 1, 0, 3, wire.pack_tokens([9])))
    visitor = guest_of(job, REQUEST, guest, "gateway")
    assert visitor.resumes
    assert visitor.revision == "v1"
    assert not guest_of(job_of(1), REQUEST, guest, "gateway").resumes


def test_what_may_have_ended_workers_runs_alone_there() -> None:
    guest = guest_id(job_of(), REQUEST.id, 0)
    suspect = guest_of(job_of(suspect=jobs.SUSPECT), REQUEST, guest, "gateway")
    alone = guest_of(job_of(suspect=jobs.ALONE), REQUEST, guest, "gateway")
    assert (suspect.watched, suspect.repeats_poison) == (True, False)
    assert (alone.watched, alone.repeats_poison) == (True, True)


def test_its_record_is_one_of_the_first_cell() -> None:
    job = job_of(streamed_ns=7, lost=((1, "w1"),))
    guest = guest_id(job, REQUEST.id, 0)
    times = done.Timings(earlier_workers=(jobs.EarlierWorker(1, "v", "worker_lost"),))
    there = done.Done(
        guest, REQUEST.model, 2, "w", (done.Outcome(STREAMED[0], "stop"),), timings=times, submitted=b"other"
    )
    event = event_of(job, REQUEST, there)
    assert (event.request, event.attempt, event.worker, event.choices) == (REQUEST.id, 2, "w", there.choices)
    assert event.timings.streamed_ns == 7
    assert event.timings.earlier_workers == (
        jobs.EarlierWorker(1, "w1", "worker_lost"),
        jobs.EarlierWorker(2, "v", "worker_lost"),
    )
    recorded = done.request_of(event)
    without = msgspec.structs.replace(REQUEST, prompt=b"", prompt_length=REQUEST.prompt_tokens, digests=b"")
    assert recorded == msgspec.structs.replace(without, ran_as=guest)
    assert event.left_out == ("prompt",)
    assert recorded is not None
    assert not recorded.origin


def test_its_record_names_it_in_every_cell_that_had_it() -> None:
    """Deleting it deletes what each of them has stored of it."""
    returned, ran = guest_id(job_of(), REQUEST.id, 0), guest_id(job_of(3), REQUEST.id, 2)
    why = f"returned: {returned_by(0, returned, 'no worker')}"
    earlier = (jobs.EarlierWorker(1, "w", f"worker_lost: {returned_by(3, ran, 'text')}"),)
    earlier += (jobs.EarlierWorker(2, "cell-0", why), jobs.EarlierWorker(3, "cell-1", "returned: no room"))
    inputs = jobs.DecisionInputs(earlier_workers=earlier)
    event = event_of(job_of(4, inputs=inputs), REQUEST, done.Done(ran, REQUEST.model, 1, "w"))
    assert done.guests_of(event) == (returned, ran)
    assert done.guests_of(done.Done("r", "m", 1)) == ()


@pytest.mark.parametrize("code", [Code.model_unavailable, Code.shutting_down])
def test_an_end_that_returns_it_is_no_end_for_its_readers(code: Code) -> None:
    failed = Finish("error", code=code, message="this cell has no worker")
    items = [TokenItem("g", 1, 0, 4, STREAMED[1]), TokenItem("g", 2, 0, 5, b"", failed)]
    assert moved_back(items, "r", 3) == (TokenItem("r", 3, 0, 4, STREAMED[1]),)
    for final in (Code.deadline_exceeded, Code.worker_lost):
        item = TokenItem("g", 2, 0, 5, b"", Finish("error", code=final))
        assert moved_back([item], "r", 3) == (TokenItem("r", 3, 0, 5, b"", item.finish),)


async def test_what_was_streamed_is_there_for_each_gateway_that_submits_it(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends between the tokens and the request: routers read the tokens at the address of the second."""
    now_ns = time.time_ns()
    request = samples.request(
        n=2, id=requests.new_request_id(cell=1), created_ns=now_ns, deadline_ns=now_ns + 60_000_000_000
    )
    job = job_of(resume=STREAMED)
    guest = guest_id(job, request.id, 0)
    async with gateway_on(broker, subjects, model) as one, gateway_on(broker, subjects, model) as two:
        first, second = one.gateway.cells[0], two.gateway.cells[0]
        publish = first.publisher.publish

        async def tokens_only(subject: str, *args: object, **more: object) -> object:
            if subject.startswith(subjects.all("request").rstrip(">")):
                raise ServingError(Code.broker_unavailable, "it ends here")
            return await publish(subject, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(first.publisher, "publish", tokens_only)
        streamed = streamed_before(job, guest)
        visitor = guest_of(job, request, guest, one.gateway.id)
        with pytest.raises(ServingError, match="it ends here"):
            await first.submit(visitor, owner=False, streamed=streamed)
        visitor = guest_of(job, request, guest, two.gateway.id)
        second.release(await second.submit(visitor, owner=False, streamed=streamed))
        stored = [
            item
            async for entry in read(second.bus, subjects.stream("TOKENS"), subjects.tokens(visitor.token_address))
            for item in tokens.decode(entry.data).items
        ]
    assert stored == streamed


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_gateway_that_was_stopped_while_it_waited_for_room_gives_nothing_back(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Another one may have submitted the attempt meanwhile: given back, it would run twice."""
    monkeypatch.setattr(migration, "ACCEPT_S", 0.0)
    given_back, verdicts = list[bytes](), list[bytes]()
    wakes_s = MIGRATION_ACK_WAIT_S * 2 if stopped else 0.0
    monotonic, slept = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + slept[0])

    async def no_record(request_id: str) -> None:
        return None

    async def is_full(request: object, **how: object) -> None:
        slept[0] = wakes_s
        raise ServingError(Code.queue_full, "no room")

    async def publish(subject: str, payload: bytes, *args: object, **how: object) -> None:
        given_back.append(payload)

    async def nothing(*args: object) -> None:
        return None

    records = SimpleNamespace(find=no_record)
    nc = SimpleNamespace(post=lambda reply, verdict: verdicts.append(verdict))
    tasks = Tasks("test")
    clock = SimpleNamespace(now_ns=lambda: REQUEST.created_ns)
    bus = SimpleNamespace(subjects=Subjects("ps-1"), nc=nc, max_message=1 << 20, tasks=tasks, clock=clock)
    own = SimpleNamespace(number=1, bus=bus, records=records, publisher=SimpleNamespace(publish=publish))
    host = SimpleNamespace(number=0, opened=True, records=records, submit=is_full)
    carrier = Carrier(cast(Any, own), cast(Any, [host, own]), "g", 0, cast(Any, None), cast(Any, None), tasks)
    monkeypatch.setattr(carrier._puller, "top_up", nothing)
    await carrier._carry(migration._Carried("reply", 2, cast(Any, host)), job_of(), REQUEST, "")
    assert len(given_back) == (0 if stopped else 1)
    assert (verdicts == [ACK]) is not stopped


@pytest.mark.parametrize("no_store", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_what_runs_in_a_cell_whose_broker_is_away_ends_in_its_own_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch, late: bool, no_store: bool
) -> None:
    request = msgspec.structs.replace(REQUEST, no_store=no_store)
    job = jobs.Job(msgspec.Raw(wire.encode(request)), 2, jobs.Decision("kv", "cell-0", "r", AT_NS), STREAMED)
    stored, verdicts = list[done.Done](), list[bytes]()

    async def none_yet(request_id: str) -> None:
        return None

    async def away(request_id: str) -> None:
        raise ServingError(Code.broker_unavailable, "it is away")

    async def publish(subject: str, payload: bytes, *args: object, **how: object) -> None:
        stored.append(cast(done.Done, done.decode(payload)))

    tasks = Tasks("test")
    nc = SimpleNamespace(post=lambda reply, verdict: verdicts.append(verdict))
    clock = SimpleNamespace(now_ns=lambda: request.deadline_ns + (60_000_000_000 if late else -1))
    bus = SimpleNamespace(subjects=Subjects("ps-1"), nc=nc, max_message=1 << 20, tasks=tasks, clock=clock)
    publisher = SimpleNamespace(publish=publish)
    own = SimpleNamespace(number=1, bus=bus, records=SimpleNamespace(find=none_yet), publisher=publisher)
    host = SimpleNamespace(number=0, opened=True, records=SimpleNamespace(find=away))
    carrier = Carrier(cast(Any, own), cast(Any, [host, own]), "g", 0, cast(Any, None), cast(Any, None), tasks)
    monkeypatch.setattr(carrier._puller, "top_up", lambda: asyncio.sleep(0))
    await carrier._carry(migration._Carried("reply", 2, cast(Any, host)), job, request, "")
    assert verdicts == [ACK if late else migration.LATER]
    assert [each.code for each in stored] == (["deadline_exceeded"] if late else [])
    for record in stored:
        assert (record.request, record.attempt) == (request.id, 2)
        assert "tokens" in record.left_out
        assert [each.tokens for each in record.choices] == ([b"", b""] if no_store else list(STREAMED))


async def test_an_attempt_that_a_killed_gateway_has_given_back_is_not_submitted_again(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the returned attempt and its acknowledgement, and the other cell has room again."""
    monkeypatch.setattr(migration, "ACCEPT_S", 0.0)
    now_ns = time.time_ns()
    request = samples.request(id=requests.new_request_id(), created_ns=now_ns, deadline_ns=now_ns + 60_000_000_000)
    job = jobs.Job(msgspec.Raw(wire.encode(request)), 1, jobs.Decision("kv", "cell-1", "r", now_ns))
    submitted, verdicts = list[str](), list[bytes]()

    async def no_record(request_id: str) -> None:
        return None

    async def is_full(visitor: requests.GenerateRequest, **how: object) -> None:
        submitted.append(visitor.id)
        raise ServingError(Code.queue_full, "no room")

    host = SimpleNamespace(number=1, opened=True, records=SimpleNamespace(find=no_record), submit=is_full)
    async with gateway_on(broker, subjects, model) as one:
        own = one.gateway.cells[0]
        await own.bus.js.publish(subjects.work("cell", "cell-1"), wire.encode(job), headers={HEADER_MSG_ID: "j:1"})
        subscription = await own.bus.js.pull_subscribe("", "gateway", subjects.stream("WORK"))
        tasks, post = Tasks("test"), own.bus.nc.post

        async def carry(acknowledges: bool) -> None:
            (message,) = await subscription.fetch(1, timeout=4 * MIGRATION_ACK_WAIT_S)

            def noted(subject: str, *args: Any) -> bool:
                if subject != message.reply:
                    return post(subject, *args)
                if acknowledges:
                    verdicts.append(args[0])
                return True

            monkeypatch.setattr(own.bus.nc, "post", noted)
            carrier = Carrier(own, cast(Any, [own, host]), "g", 0, cast(Any, None), cast(Any, None), tasks)
            monkeypatch.setattr(carrier._puller, "top_up", lambda: asyncio.sleep(0))
            await carrier._carry(migration._Carried(message.reply, 1, cast(Any, host)), job, request, "")

        await carry(acknowledges=False)  # it is killed
        assert len(submitted) == 1
        await carry(acknowledges=True)
        returned = [entry async for entry in read(own.bus, subjects.stream("DONE"), subjects.all("returned"))]
    assert len(submitted) == 1
    assert verdicts == [ACK]
    assert len(returned) == 1


def test_a_job_that_was_delivered_before_is_known_by_what_acknowledges_it() -> None:
    plain, domain = (
        "$JS.ACK.ps_WORK.gateway.{}.5.9.1700000000.0",
        "$JS.ACK.hub.acc.ps_WORK.gateway.{}.5.9.1700000000.0.x",
    )
    assert [migration.redelivered(each.format(count)) for each in (plain, domain) for count in (1, 2)] == [
        False, True, False, True
    ]  # fmt: skip


async def test_a_job_is_delivered_again_where_it_can_be_read_but_its_cell_is_not_known() -> None:
    """A gateway that has not been restarted since the deployment got that cell leaves it to one that has."""
    published = list[tuple[str, bytes]]()

    async def publish(subject: str, payload: bytes) -> None:
        published.append((subject, payload))

    now_ns = [REQUEST.deadline_ns - 1]
    clock = SimpleNamespace(now_ns=lambda: now_ns[0])
    nc = SimpleNamespace(publish=publish)
    bus = SimpleNamespace(subjects=Subjects("ps-1"), nc=nc, tasks=Tasks("test"), clock=clock)
    own = SimpleNamespace(number=1, bus=bus)
    carrier = Carrier(cast(Any, own), cast(Any, [own]), "g", 0, cast(Any, None), cast(Any, None), bus.tasks)

    async def verdict(subject: str, data: bytes) -> bytes:
        published.clear()
        await carrier._take(cast(Any, SimpleNamespace(subject=subject, data=data, reply="reply", headers=None)))
        ((reply, said),) = published
        assert reply == "reply"
        return said

    whole = wire.encode(job_of())
    assert await verdict("ps-1.work.cell.cell-0", b"\xc1") == TERM
    assert await verdict("ps-1.work.cell.cell-0", whole[:-3]) == TERM
    assert await verdict("ps-1.work.cell.worker", whole) == TERM
    assert await verdict("ps-1.work.cell.cell-7", whole) == migration.LATER
    now_ns[0] += 2
    assert await verdict("ps-1.work.cell.cell-7", whole) == TERM


async def test_a_cancellation_is_repeated_for_as_long_as_the_request_is_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker of the cell that runs it may be away for longer than any number of attempts takes."""
    monkeypatch.setattr(migration, "CLAIM_S", 0.0)
    often, sent = 100, list[str]()
    enough = asyncio.Event()

    async def cancel(request_id: str, reason: str) -> None:
        sent.append(f"{request_id} {reason}")
        if len(sent) == often:
            enough.set()

    tasks = Tasks("test")
    nc = SimpleNamespace(post=lambda reply, verdict: None)
    bus = SimpleNamespace(subjects=Subjects("ps-1"), nc=nc, tasks=tasks)
    own, host = SimpleNamespace(number=1, bus=bus), SimpleNamespace(number=0, cancel=cancel)
    carrier = Carrier(cast(Any, own), cast(Any, [host, own]), "g", 0, cast(Any, None), cast(Any, None), tasks)
    carried = carrier._carried["r"] = migration._Carried("reply", 2, cast(Any, host))
    carried.guest = "guest"
    order = SimpleNamespace(data=wire.encode(control.Cancel("r", "gone")))
    await carrier._on_cancel(order)
    await carrier._on_cancel(order)
    claiming = asyncio.create_task(carrier._claim_forever())
    async with asyncio.timeout(20):
        await enough.wait()
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    await tasks.aclose()
    assert set(sent) == {"guest gone"}
