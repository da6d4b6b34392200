"""Submissions and their repeats, on a real broker: each gets its answer, or is told why not."""

import asyncio
import json
from typing import Any

import pytest

from penstock.gateway.nats import submissions
from penstock.gateway.nats.acceptor import RequestAcceptor
from penstock.gateway.nats.delivery import AcceptedRequest, AnswerDelivery, ReplyPublisher
from penstock.gateway.nats.protocol import Origin
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.apply_streams import apply_submissions
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects
from penstock.schemas.tenants import Limits
from tests.gateway.nats.support import (
    BODY,
    WITHIN_S,
    Engine,
    Running,
    Submitter,
    answering,
    error_of,
    finals,
    gateway_on,
    number_of,
)
from tests.infra.bus.support import eventually


@pytest.fixture
def client(running: Running, bus: Bus) -> Submitter:
    return Submitter(bus)


async def test_a_repeat_at_the_moment_of_the_answer_is_answered_too(
    client: Submitter, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered, go_on = asyncio.Event(), asyncio.Event()
    deliver = AnswerDelivery.deliver

    async def deliver_and_pause(self: AnswerDelivery, accepted: AcceptedRequest, replies: ReplyPublisher) -> str:
        code = await deliver(self, accepted, replies)
        delivered.set()
        await go_on.wait()
        return code

    monkeypatch.setattr(AnswerDelivery, "deliver", deliver_and_pause)
    monkeypatch.setattr(submissions, "STORED_S", 60.0)  # on a loaded machine, the repeat comes late
    await client.listen(client.answer_subject("twice"))
    async with answering(engine):
        await client.submit(Nats_Msg_Id="twice")
        await delivered.wait()
        await client.got(finals)
        await client.submit(Nats_Msg_Id="twice")
        answers = await client.got(lambda messages: finals(messages) == 2)
        go_on.set()
    assert answers[0].data == answers[1].data


async def test_a_repeat_that_the_stream_delivers_is_answered_once(
    client: Submitter, engine: Engine, running: Running
) -> None:
    """Within a second of the end, it used to be answered as a repeat that the stream may have discarded, too."""
    names = ("first", "second", "third")
    await client.listen(*(f"_INBOX.{name}" for name in names))
    async with answering(engine):
        for name in names:
            assert not await client.submit(Nats_Msg_Id="again", Penstock_Reply_To=f"_INBOX.{name}")
            await client.got(lambda messages, name=name: any(m.subject == f"_INBOX.{name}" for m in messages))
            await asyncio.sleep(submissions.STORED_S + 0.05)  # a repeat sooner than that may have been discarded
    await client.settled()
    await eventually(lambda: not running.api.submissions.open_deliveries)
    assert [message.subject for message in client.received] == [f"_INBOX.{name}" for name in names]


async def test_a_repeat_during_a_streamed_answer_gets_it_from_the_number_that_it_names(
    client: Submitter, engine: Engine
) -> None:
    body = {**BODY, "stream": True}
    await client.listen(client.answer_subject("halfway"))
    await client.submit(body, Nats_Msg_Id="halfway")
    await eventually(lambda: engine.accepted)
    await engine.stream(engine.accepted[0], 0, 5)
    await client.got(lambda messages: len(messages) == 5)
    await client.submit(body, Nats_Msg_Id="halfway", Penstock_From="2")
    await client.got(lambda messages: [number_of(each) for each in messages[5:]] == [2, 3, 4])
    await engine.stream(engine.accepted[0], 5, 1, end=True)
    messages = await client.got(lambda messages: finals(messages) == 2)
    bodies: dict[int, set[bytes]] = {}
    for message in messages:
        bodies.setdefault(number_of(message), set()).add(message.data)
    assert sorted(bodies) == list(range(len(bodies)))
    assert {len(each) for each in bodies.values()} == {1}
    assert len(engine.accepted) == 1


async def test_a_repeat_of_a_refused_submission_is_refused_in_the_same_words(client: Submitter, bus: Bus) -> None:
    inboxes = [bus.nc.new_inbox().replace("_INBOX_operator", "_INBOX") for _ in range(4)]
    await client.listen(*inboxes)
    refused = {**BODY, "temperature": 9}
    await asyncio.gather(*(client.submit(refused, Nats_Msg_Id="no", Penstock_Reply_To=inbox) for inbox in inboxes))
    messages = await client.got(lambda messages: {each.subject for each in messages} == set(inboxes))
    assert {(number_of(each), error_of(each)) for each in messages} == {(0, "invalid_request")}
    assert len({each.data for each in messages}) == 1


async def test_a_repeat_is_told_why_its_own_headers_cannot_be_used(client: Submitter, engine: Engine) -> None:
    await client.listen(client.answer_subject("odd"))
    async with answering(engine):
        await client.submit(Nats_Msg_Id="odd")
        await client.got(finals)
        for count in (2, 3):  # the first is one that the stream discards, mostly
            while await client.submit(Nats_Msg_Id="odd", Penstock_Reply_To="$JS.API.INFO") and count == 3:
                pass
            messages = await client.got(lambda messages, count=count: finals(messages) >= count)
    answer, *refusals = messages
    assert (number_of(answer), error_of(answer)) == (0, "")
    assert {(number_of(each), error_of(each)) for each in refusals} == {(-1, "invalid_request")}


async def test_a_message_id_used_again_for_a_body_that_cannot_be_served_does_not_end_the_answer(
    client: Submitter, engine: Engine
) -> None:
    await client.listen(client.answer_subject("used"))
    await client.submit(Nats_Msg_Id="used")
    await eventually(lambda: engine.accepted)
    while await client.submit({**BODY, "temperature": 9}, Nats_Msg_Id="used"):
        pass
    [refusal, *_] = await client.got(finals)
    assert (number_of(refusal), error_of(refusal)) == (-1, "idempotency_conflict")
    await engine.stream(engine.accepted[0], 0, 1, end=True)
    messages = await client.got(lambda messages: 0 in map(number_of, messages))
    assert {error_of(each) for each in messages if number_of(each) == 0} == {""}


async def test_another_body_is_a_conflict_also_while_no_requests_are_taken(
    client: Submitter, engine: Engine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.listen(client.answer_subject("full"))
    async with answering(engine):
        await client.submit(Nats_Msg_Id="full")
        await client.got(finals)

    async def full(*_: Any, **__: Any) -> None:
        raise ServingError(Code.queue_full, "the queue is full")

    monkeypatch.setattr(running.gateway, "prepare", full)
    await client.settled()
    while await client.submit({**BODY, "max_tokens": 7}, Nats_Msg_Id="full"):
        pass
    await client.settled()
    assert {(number_of(each), error_of(each)) for each in client.received[1:]} == {(-1, "idempotency_conflict")}
    while await client.submit(Nats_Msg_Id="full"):
        pass
    await client.settled()
    assert client.received[-1].data == client.received[0].data


async def test_a_repeat_after_a_conflict_gets_the_answer(client: Submitter, engine: Engine) -> None:
    """The stream discards it, as a repeat of the submission with the other body."""
    await client.listen(client.answer_subject("back"))
    async with answering(engine):
        await client.submit(Nats_Msg_Id="back")
        await client.got(finals)
        while await client.submit({**BODY, "max_tokens": 7}, Nats_Msg_Id="back"):
            pass
        await client.got(lambda messages: error_of(messages[-1]) == "idempotency_conflict")
        await client.submit(Nats_Msg_Id="back")
        messages = await client.got(lambda messages: number_of(messages[-1]) == 0 and len(messages) > 2)
    assert messages[-1].data == messages[0].data


async def test_a_repeat_is_told_that_the_queue_is_full(
    client: Submitter, engine: Engine, running: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, full, arrived = running.gateway.prepare, asyncio.Event(), asyncio.Event()

    async def wait_and_refuse(*_: Any, **__: Any) -> None:
        arrived.set()
        await full.wait()
        monkeypatch.setattr(running.gateway, "prepare", prepare)
        raise ServingError(Code.queue_full, "the queue is full")

    monkeypatch.setattr(running.gateway, "prepare", wait_and_refuse)
    stream = (await bus.js.stream_info(bus.subjects.stream("SUBMIT"))).config
    await bus.js.update_stream(stream.evolve(duplicate_window=WITHIN_S))  # the repeat is surely discarded
    await client.listen("_INBOX.first", "_INBOX.repeat")
    await client.submit(Nats_Msg_Id="later", Penstock_Reply_To="_INBOX.first")
    await arrived.wait()
    await client.submit(Nats_Msg_Id="later", Penstock_Reply_To="_INBOX.repeat")
    full.set()
    async with answering(engine):
        messages = await client.got(lambda messages: {each.subject for each in messages if number_of(each) == 0})
    assert (messages[0].subject, number_of(messages[0]), error_of(messages[0])) == ("_INBOX.repeat", -1, "queue_full")
    assert len(engine.accepted) == 1


async def test_a_repeat_that_asks_for_more_than_there_is_is_told_so(client: Submitter, engine: Engine) -> None:
    await client.listen(client.answer_subject("beyond"))
    async with answering(engine):
        await client.submit(Nats_Msg_Id="beyond")
        await client.got(finals)
        await client.submit(Nats_Msg_Id="beyond", Penstock_From="7")
        messages = await client.got(lambda messages: finals(messages) == 2)
    assert (number_of(messages[1]), error_of(messages[1])) == (-1, "answer_ended")


async def test_repeats_are_answered_while_the_gateway_stops(
    client: Submitter, engine: Engine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "STORED_S", 60.0)  # on a loaded machine, the repeat comes late
    await client.listen("_INBOX.repeat")
    await client.submit(Nats_Msg_Id="stopping")
    await eventually(lambda: engine.accepted)
    closing = asyncio.create_task(running.stop(WITHIN_S))
    await asyncio.sleep(0)
    await client.submit(Nats_Msg_Id="stopping", Penstock_Reply_To="_INBOX.repeat")
    await engine.stream(engine.accepted[0], 0, 1, end=True)
    await client.got(finals)
    await closing


async def test_more_repeats_than_are_answered_at_a_time_are_told_so(
    client: Submitter, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "MAX_OPEN", 1)
    await client.listen(client.answer_subject("many"))
    await client.submit(Nats_Msg_Id="many")
    await eventually(lambda: engine.accepted)
    for _ in range(8):
        await client.submit(Nats_Msg_Id="many")
    messages = await client.got(lambda messages: messages)
    assert {(number_of(each), error_of(each)) for each in messages} == {(-1, "queue_full")}


async def test_repeats_leave_no_headers_in_memory(bus: Bus, running: Running) -> None:
    """Every gateway keeps, for a second, what it sees of submissions that others answer, or the stream refuses."""
    seen = running.api.submissions
    for message_id in ("z", "x" * 60_000):
        headers = {"Nats-Msg-Id": message_id, "Penstock-Reply-To": "_INBOX." + "y" * 60_000, "Other": "y" * 200_000}
        await bus.nc.publish(bus.subjects.submit("tiny"), b"{}", headers=headers)
    await eventually(lambda: seen.repeats)
    await bus.nc.flush()
    held = [*seen.repeats.values(), *seen.recent.values()]
    assert len(str(held)) < 10_000


async def test_a_refusal_arrives_whichever_number_was_wanted(client: Submitter, bus: Bus) -> None:
    refused = {**BODY, "temperature": 9}
    await client.listen(client.answer_subject("refused"), "_INBOX.asked")
    for _ in range(2):
        await client.submit(refused, Nats_Msg_Id="refused", Penstock_From="3")
    messages = await client.got(lambda messages: finals(messages) == 2)
    headers = {"Penstock-From": "3"}
    await bus.nc.publish(
        f"{bus.subjects.namespace}.ask.tiny", json.dumps(refused).encode(), reply="_INBOX.asked", headers=headers
    )
    messages = await client.got(lambda messages: finals(messages) == 3)
    assert {(number_of(each), error_of(each)) for each in messages} == {(0, "invalid_request")}


async def test_a_repeat_with_no_store_is_overwritten_although_the_first_submission_is_stored(
    client: Submitter, engine: Engine, bus: Bus, broker: EmbeddedNats
) -> None:
    await client.submit(Nats_Msg_Id="runs on")  # the broker removes a file without messages
    await eventually(lambda: engine.accepted)
    await client.submit(Nats_Msg_Id="private")
    await eventually(lambda: len(engine.accepted) == 2)
    await engine.stream(engine.accepted[1], 0, 1, end=True)
    async with asyncio.timeout(WITHIN_S):
        again = {**BODY, "user": "overwritten"}
        while await client.submit(again, Nats_Msg_Id="private", Penstock_No_Store="1"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # the broker itself discards repeats for a moment
        stream = bus.subjects.stream("SUBMIT")
        while (await bus.js.stream_info(stream)).state.messages > 1:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.005)
    assert b"overwritten" not in b"".join(path.read_bytes() for path in broker.data_dir.rglob("*.blk"))


async def test_submissions_of_one_tenant_do_not_keep_out_those_of_another(
    client: Submitter, engine: Engine, running: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "MAX_OPEN", 2)
    for _ in range(8):
        await client.submit()
    await eventually(lambda: len(engine.accepted) >= 4)
    await apply_submissions(bus.nc, bus.subjects, "acme", 100)
    running.api.submissions.add_tenant("acme")
    other = Submitter(bus, "acme")
    for _ in range(4):
        await other.submit()
    await eventually(lambda: [each.tenant for each in engine.accepted].count("acme") == 4)


async def test_a_burst_behind_a_short_queue_takes_each_place_as_soon_as_it_is_free_and_never_more(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, bus: Bus, engine: Engine
) -> None:
    requests, limit, burst = subjects.stream("REQUESTS"), 3, 20
    async with gateway_on(broker, subjects, model, max_queue=limit) as running:
        client = Submitter(bus)
        for number in range(burst):
            await client.submit(Nats_Msg_Id=f"burst-{number}")

        async def waiting() -> int:
            info = await bus.js.consumer_info(requests, "router-standard")
            return (info.num_pending or 0) + (info.num_ack_pending or 0)

        placing = await bus.js.pull_subscribe_bind("router-standard", requests)
        line = running.api.submissions.line
        for placed in range(burst):
            free = min(burst, placed + limit)
            await eventually(lambda free=free: len(engine.accepted) >= free and len(line) == burst - free)  # type: ignore[misc]
            assert len(engine.accepted) == free
            assert await waiting() <= limit
            (request,) = await placing.fetch(1, timeout=WITHIN_S)
            await request.ack()
            await engine.stream(engine.accepted[placed], 0, 1, end=True)
        submitted = await bus.js.consumer_info(subjects.stream("SUBMIT"), "gateway")
        assert submitted.delivered is not None
        assert submitted.delivered.consumer_seq == burst, "none was sent back to its stream meanwhile"


async def test_what_a_tenant_submits_beyond_its_bound_stays_in_its_stream(
    broker: EmbeddedNats,
    subjects: Subjects,
    model: ModelDir,
    engine: Engine,
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is prepared, refused and delivered again meanwhile."""
    tried = 0
    accept = RequestAcceptor.accept

    async def count_and_accept(self: RequestAcceptor, message: Any, origin: Origin, name: str) -> AcceptedRequest:
        nonlocal tried
        tried += 1
        return await accept(self, message, origin, name)

    def bound(gateway: Gateway) -> None:
        gateway.tenants.known[DEFAULT_TENANT] = Limits(max_waiting=2)
        gateway.tenants.on_changed()

    monkeypatch.setattr(RequestAcceptor, "accept", count_and_accept)
    client, ids = Submitter(bus), [f"id-{number}" for number in range(8)]
    async with gateway_on(broker, subjects, model, change=bound):
        await client.listen(*map(client.answer_subject, ids))
        for name in ids:
            await client.submit(Nats_Msg_Id=name)
        await eventually(lambda: len(engine.accepted) == 2)
        info = await bus.js.consumer_info(subjects.stream("SUBMIT"), "gateway")
        assert (info.num_ack_pending, info.num_pending) == (2, 6)
        async with answering(engine):
            await client.got(lambda messages: finals(messages) == 8)
    assert tried == 8
