"""Router replicas on a real nats-server: each request is placed once, or ended once, whatever happens to routers."""

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.infra.bus import memory_storage
from penstock.infra.bus.puller import ACK, NAK, sequence
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.held.held_requests import CLAIM_S, HELD_BYTES
from penstock.router.placement.decision_inputs import Decisions
from penstock.router.placement.pending import PendingRequest
from penstock.router.placement.routing import RoutingDecision, RoutingRequest
from penstock.router.service import router as router_module
from penstock.router.service.router import READ_AT_ONCE, Router
from penstock.router.state.holders import keys_view
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import contents, control, done, fleet, jobs, kv, requests, wire
from penstock.schemas.block_hashes import keys_of
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import Stage
from penstock.schemas.requests import GenerateRequest, Priority, new_request_id
from penstock.schemas.streams import CLOCK_SKEW_NS, ROUTER_ACK_WAIT_S
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, Subjects
from penstock.schemas.tenants import Limits
from penstock.schemas.tokens import WHOLE_REQUEST
from tests.infra.bus.support import eventually
from tests.router.dumps import load_dump
from tests.router.support import Clients, Routing, room, routing
from tests.workers.support import MODEL, LogClient, answer, request, run_worker


async def is_ended_by_the_router(log: LogClient, asked: GenerateRequest, code: Code) -> str:
    """Exactly one terminal event and one item for all choices; its message."""
    end = await log.end(asked)
    assert (end.code, end.worker) == (code, "")
    (item,) = [item for item in log.items if item.request == asked.id]
    assert item.choice == WHOLE_REQUEST
    assert item.finish is not None
    assert (item.finish.code, item.finish.message) == (code, end.message)
    assert item.finish.reason == ("cancelled" if code is Code.cancelled else "error")
    return end.message


# -- placing ------------------------------------------------------------------------------------------------------


async def test_requests_wait_for_the_first_worker(clients: Clients, one: Routing) -> None:
    asked = request()
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])
    assert await clients.work() == []
    assert await clients.unacknowledged() == 1
    await clients.stub("w1")
    worker, job = await clients.placed(asked)
    assert worker == "w1"
    assert job.decision.waited_ns > 0
    assert bytes(job.request) == wire.encode(asked), "the request travels as it was stored"
    await clients.acknowledged(1)
    assert one.unfinished == {asked.id: (1, "w1")}


async def test_a_packed_prompt_stays_packed_on_its_way_to_the_worker(clients: Clients, one: Routing) -> None:
    asked = request(list(range(1, 14)))
    await clients.stub("w1")
    await one.knows("w1")
    stored = wire.encode(requests.packed(asked))
    subject = clients.bus.subjects.request(asked.model, asked.priority.value, asked.id)
    await clients.bus.js.publish(subject, stored, headers={HEADER_MSG_ID: asked.id})
    _, job = await clients.placed(asked)
    assert bytes(job.request) == stored
    assert (await clients.header(asked)).prompt_tokens == 13


async def test_a_job_records_why_its_worker_was_chosen(clients: Clients, one: Routing) -> None:
    asked = request(list(range(1, 14)))  # three full blocks
    warm, cold = await clients.stub("warm"), await clients.stub("cold")
    await one.knows("warm", "cold")
    kv_seq = await warm.store(asked.digests[:32])
    await eventually(lambda: one.router.cluster.positions()[0] >= kv_seq)
    await clients.ask(asked)
    worker, job = await clients.placed(asked)
    decision = job.decision
    assert (worker, decision.chosen, decision.mode, decision.reason) == (warm.id, warm.id, "kv", "new")
    assert (decision.router, decision.prompt_blocks, decision.kv_seq) == (one.router.id, 3, kv_seq)
    assert [(c.worker, c.overlap_blocks, c.slots) for c in decision.candidates] == [(warm.id, 2, 8), (cold.id, 0, 8)]
    assert decision.candidates[0].score < decision.candidates[1].score
    stored = await clients.bus.js.get_last_msg(
        clients.bus.subjects.stream("WORK"), clients.bus.subjects.work("aggregated", worker), direct=True
    )
    load = jobs.read_load_header((stored.headers or {})[HEADER_LOAD])
    assert load == jobs.LoadHeader(13, 8, asked.gateway, asked.deadline_ns, "standard", 1)

    await eventually(lambda: one.router.cluster.positions()[1] == 1)
    await warm.finish(asked)
    await eventually(lambda: one.router.cluster.positions()[2] == 1)
    after = request()
    await clients.ask(after)
    _, job = await clients.placed(after)
    assert (job.decision.kv_seq, job.decision.work_seq, job.decision.done_seq) == (kv_seq, 1, 1)


async def test_after_a_lone_brokers_restart_only_requests_from_before_wait_for_their_content(
    clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory streams are gone then, and each process declares them again."""
    monkeypatch.setattr(memory_storage, "SETTLE_S", 3600.0)
    before, stored, after = request(no_store=True), request(), request(no_store=True)
    await clients.ask(before)
    await eventually(lambda: one.waiting == [before.id])
    for name in ("MEMORY_CONTENTS", "MEMORY_TOKENS"):
        assert await clients.bus.js.delete_stream(clients.bus.subjects.stream(name))
    await one.router.memory.declare(memory_storage.DECLARE_S, again=True)
    worker = await clients.stub("w1")
    await one.knows("w1")
    for asked in (stored, after):
        await clients.ask(asked)
        assert (await clients.placed(asked))[0] == worker.id
    assert one.waiting == [before.id]
    # What was streamed is read before a fence. By a request's id only its gateway's time is known.
    now, skew = time.time_ns(), 2 * CLOCK_SKEW_NS
    ids = ("r1", new_request_id(now - skew), new_request_id(now + skew))
    assert [one.router._misses_output(each) for each in ids] == [True, True, False]
    monkeypatch.setattr(memory_storage, "SETTLE_S", 0.0)
    await clients.placed(before)


async def test_the_content_of_a_request_is_sent_to_its_worker_beside_the_job(clients: Clients, one: Routing) -> None:
    came: list[tuple[str, bytes]] = []

    async def note(message: Any) -> None:
        came.append((message.subject, message.data))

    await clients.bus.nc.subscribe("inbox.>", cb=note)
    plain = request(worker="w1")
    asked, lost = request(no_store=True, worker="w1"), request(no_store=True, worker="w1")
    subject = clients.bus.subjects.contents(asked.gateway, asked.id, contents.REQUEST)
    await clients.bus.js.publish(subject, b"what it says")
    await clients.stub("w1", inbox="inbox.w1")
    await one.knows("w1")
    await clients.ask(plain, asked, lost)
    for each in (plain, asked, lost):
        assert (await clients.placed(each))[0] == each.worker
    await eventually(lambda: len(came) == 2)
    assert sorted(came) == sorted([(f"inbox.w1.{asked.id}", b"what it says"), (f"inbox.w1.{lost.id}", b"")])


async def test_a_class_takes_no_more_out_of_the_log_than_its_room(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_held_bytes=room(5)) as one:
        asked = [request(priority=priority) for priority in (Priority.standard, Priority.batch) for _ in range(20)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 10)
        await asyncio.sleep(0.3)  # three sweeps more
        assert len(one.waiting) == 10
        assert [await clients.unacknowledged(c) for c in ("standard", "batch", "interactive")] == [5, 5, 0]
        urgent = request(priority=Priority.interactive)
        await clients.ask(urgent)  # not behind the full rooms of other classes
        await eventually(lambda: urgent.id in one.waiting)
        await clients.stub("w1", slots=100)
        for each in (*asked, urgent):
            await clients.placed(each)
        await clients.acknowledged(20)
        await clients.acknowledged(20, "batch")
        assert one.waiting == []


LONG: dict[str, Any] = {"prompt": list(range(1, 4001)), "digests": b""}  # its prompt takes 16 kB
LITTLE = 4 * HELD_BYTES  # to hold requests in, and none of these prompts
BIG: dict[str, Any] = {"slots": 100, "total_blocks": 100_000, "max_model_len": 100_000}  # a worker that takes them


async def test_a_request_whose_prompt_was_left_in_the_log_is_placed_as_it_was_stored(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_held_bytes=LITTLE) as one:
        asked = [request(**LONG, client_body=b"{}") for _ in range(3)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 3)
        assert not any(pending.raw or pending.request.prompt for pending in one.router.held)
        await clients.stub("w1", **BIG)
        for each in asked:
            _, job = await clients.placed(each)
            assert bytes(job.request) == wire.encode(each)
        await clients.acknowledged(3)
        assert one.unfinished == {each.id: (1, "w1") for each in asked}


async def test_few_requests_are_read_again_at_once(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with room for all of them comes: a thousand questions at once would be answered too late."""
    reading: set[str] = set()
    go_on = asyncio.Event()
    read_again = router_module.read_again

    async def waiting(bus: Any, pending: Any) -> bool:
        reading.add(pending.request.id)
        await go_on.wait()
        return await read_again(bus, pending)

    monkeypatch.setattr(router_module, "read_again", waiting)
    async with routing(broker, pipeline, max_held_bytes=room(30)) as one:
        asked = [request(**LONG) for _ in range(25)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 25)
        assert sum(not pending.raw for pending in one.router.held) > READ_AT_ONCE
        await clients.stub("w1", **BIG)
        await eventually(lambda: not one.waiting and len(reading) >= READ_AT_ONCE)
        assert len(reading) == READ_AT_ONCE
        go_on.set()
        for each in asked:
            await clients.placed(each)


async def test_a_cancelled_request_whose_prompt_was_left_in_the_log_is_whole_in_its_record(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_held_bytes=LITTLE) as one:
        asked = request(**LONG)
        await clients.ask(asked)
        await eventually(lambda: one.waiting == [asked.id])
        await one.router.on_cancel(asked.id, "client_disconnected")
        await is_ended_by_the_router(log, asked, Code.cancelled)
        end = await log.end(asked)
        assert (end.submitted, end.left_out) == (done.recorded(asked), ("prompt",))
        await clients.acknowledged(1)


async def test_a_request_that_the_log_lost_while_it_waited_is_ended(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_held_bytes=LITTLE) as one:
        lost, kept = request(**LONG), request(**LONG)
        await clients.ask(lost, kept)
        await eventually(lambda: len(one.waiting) == 2)
        (found,) = [pending for pending in one.router.held if pending.request.id == lost.id]
        assert await clients.bus.js.delete_msg(clients.bus.subjects.stream("REQUESTS"), sequence(found.reply))
        await clients.stub("w1", **BIG)
        await clients.placed(kept)
        message = await is_ended_by_the_router(log, lost, Code.broker_unavailable)
        assert "send it again" in message
        await eventually(lambda: one.unfinished == {kept.id: (1, "w1")})


async def test_a_request_whose_prompt_cannot_be_read_now_is_held_again(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routing(broker, pipeline, max_held_bytes=LITTLE) as one:
        asked, tries = request(**LONG), 0

        async def away(*_: Any) -> bool:
            nonlocal tries
            tries += 1
            raise ServingError(Code.broker_unavailable, "no leader")

        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(router_module, "read_again", away)
            await clients.ask(asked)
            await eventually(lambda: one.waiting == [asked.id])
            await clients.stub("w1", **BIG)
            await eventually(lambda: tries >= 2)
            assert one.folded == {} or asked.id not in one.waiting, "it counts at the worker or as held, never as both"
        await clients.placed(asked)
        assert "placement_postponed" in [entry["event"] for entry in logs]


async def test_a_held_request_is_not_delivered_again(clients: Clients, one: Routing) -> None:
    asked = request()
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])

    async def deliveries() -> int:
        info = await clients.bus.js.consumer_info(clients.bus.subjects.stream("REQUESTS"), "router-standard")
        assert info.delivered is not None
        return int(info.delivered.consumer_seq or 0)

    for _ in range(3):  # a router that has just started rejects what it finds, twice
        before = await deliveries()
        await asyncio.sleep(ROUTER_ACK_WAIT_S + 0.3)  # the broker would deliver it by itself
        if await deliveries() == before:
            break
    else:
        raise AssertionError("it is delivered again and again")
    assert await clients.unacknowledged() == 1
    await clients.stub("w1")
    await clients.placed(asked)
    await clients.acknowledged(1)


async def test_a_freed_slot_goes_to_the_highest_class(clients: Clients, one: Routing) -> None:
    worker = await clients.stub("w1", slots=1)
    await one.knows("w1")
    first = request()
    await clients.ask(first)
    await clients.placed(first)
    later = [request(priority=p) for p in (Priority.batch, Priority.standard, Priority.interactive)]
    for asked in later:
        await clients.ask(asked)
    await eventually(lambda: len(one.waiting) == 3)
    expected = [first, *reversed(later)]
    for asked in expected:
        await clients.placed(asked)
        assert len(await clients.work()) == expected.index(asked) + 1
        await worker.finish(asked)
    assert await clients.order() == [asked.id for asked in expected]


async def test_requests_for_a_model_without_workers_hold_up_no_others(clients: Clients, one: Routing) -> None:
    missing, present = request(model="other"), request()
    await clients.ask(missing)
    await eventually(lambda: one.waiting == [missing.id])
    await clients.stub("w1", slots=1)
    await clients.ask(present)
    await clients.placed(present)
    assert one.waiting == [missing.id]


async def test_a_models_waiting_requests_leave_room_for_those_of_others(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    """40 of a model without workers, 40 of one whose worker is full, a room of 16: a third model's are placed."""
    async with routing(broker, pipeline, max_held_bytes=room(16)) as one:
        busy = await clients.stub("busy", model="busy", slots=1)
        await clients.stub("w1", slots=100)
        await one.knows("busy", "w1")
        missing = [request(model="missing") for _ in range(40)]
        many = [request(model="busy") for _ in range(40)]
        await clients.ask(*missing, *many)
        await eventually(lambda: len(one.waiting) == 4 + 8)
        asked = [request() for _ in range(20)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        await busy.change(slots=100)
        await clients.stub("late", model="missing", slots=100)
        for each in (*missing, *many):  # those that were sent away come again within 2 s
            await clients.placed(each)
        await clients.acknowledged(100)


async def test_what_fails_while_a_request_is_placed_fails_for_that_request_only(
    log: LogClient, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clients.stub("w1", slots=100)
    await one.knows("w1")
    bad, good = request(), request()
    decide = Decisions.decide

    def failing(self: Decisions, request: RoutingRequest, *args: Any, **options: Any) -> RoutingDecision:
        if request.prompt_tokens == len(bad.prompt) // 4 and one.router.decider._decisions == 1:
            raise ZeroDivisionError("by a bug")
        return decide(self, request, *args, **options)

    monkeypatch.setattr(Decisions, "decide", failing)
    await clients.ask(bad, good)
    message = await is_ended_by_the_router(log, bad, Code.internal)
    assert "ZeroDivisionError" in message
    await clients.placed(good)
    await clients.acknowledged(2)


async def test_a_routers_task_that_fails_ends_the_process_in_order(
    one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[BaseException] = []
    monkeypatch.setattr(one.router.tasks, "_on_fatal", failures.append)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr(one.router.cluster, "maintain", broken)
    await eventually(lambda: failures)
    assert isinstance(failures[0], ZeroDivisionError)


async def test_an_unreadable_request_is_discarded_and_logged(clients: Clients, one: Routing) -> None:
    await clients.stub("w1")
    with capture_logs() as logs:
        await clients.bus.js.publish(clients.bus.subjects.request(MODEL, "standard", "r"), b"\xc1")
        asked = request()
        await clients.ask(asked)
        await clients.placed(asked)
    assert "request_unreadable" in [entry["event"] for entry in logs]
    await clients.acknowledged(2)


async def test_without_cache_events_past_decisions_stand_for_them(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline, kv_events=False) as one:
        stubs = {name: await clients.stub(name) for name in ("w1", "w2", "w3")}
        await one.knows(*stubs)
        prompts = [[i] * 41 for i in range(3)]
        homes = []
        for prompt in prompts:
            asked = request(prompt)
            await clients.ask(asked)
            homes.append((await clients.placed(asked))[0])
        for prompt, home in zip(prompts, homes, strict=True):
            asked = request(prompt)
            await clients.ask(asked)
            worker, job = await clients.placed(asked)
            assert worker == home
            assert job.decision.candidates[0].overlap_blocks == 10
        assert sum(stub.dumps for stub in stubs.values()) == 0


async def test_what_a_worker_without_cache_events_holds_is_predicted_beside_what_others_tell(
    clients: Clients, one: Routing
) -> None:
    """Of each worker: the prompt goes back to where it was, by events or by prediction, and a new one elsewhere."""
    telling, silent = await clients.stub("telling"), await clients.stub("silent", kv_events=False, silent_cache=True)
    await clients.stub("cacheless", kv_events=False)
    await one.knows("telling", "silent", "cacheless")
    held = [7] * 41
    await telling.store(request(held).digests)
    await eventually(lambda: one.router.cluster.caches.overlaps(keys_view(request(held).digests)))
    predicted = request([8] * 41, worker="silent")
    await clients.ask(predicted)
    await clients.placed(predicted)
    uncached = request([9] * 41, worker="cacheless")
    await clients.ask(uncached)
    await clients.placed(uncached)
    for each, stub in ((predicted, silent), (uncached, silent)):
        await stub.finish(each)
    await eventually(lambda: one.unfinished == {})
    for prompt, home in ((held, "telling"), ([8] * 41, "silent")):
        asked = request(prompt)
        await clients.ask(asked)
        worker, job = await clients.placed(asked)
        assert (worker, job.decision.candidates[0].overlap_blocks) == (home, 10)
    asked = request([9] * 41)
    await clients.ask(asked)
    _, job = await clients.placed(asked)
    assert {candidate.overlap_blocks for candidate in job.decision.candidates} == {0}
    assert silent.dumps == 0


async def test_while_requests_wait_tenants_share_by_the_weights_in_their_bucket(clients: Clients, one: Routing) -> None:
    bus = clients.bus
    bucket = bus.subjects.bucket("tenants")
    for tenant, weight in (("acme", 3.0), ("gone", 9.0)):
        await bus.js.publish(f"$KV.{bucket}.{tenant}", wire.encode(Limits(weight=weight)))
    await bus.js.publish(f"$KV.{bucket}.gone", b"", headers={"KV-Operation": "DEL"})
    await bus.js.publish(f"$KV.{bucket}.broken", b"\xc1")
    asked = [request([number] * 41, tenant=("default", "acme")[number % 2]) for number in range(16)]
    await clients.ask(*asked)
    await eventually(lambda: len(one.waiting) == 16 and one.router.tenants.weights == {"acme": 3.0})
    await clients.stub("w1", slots=8)
    await eventually(lambda: len(one.unfinished) == 8)
    placed = [each.tenant for each in asked if each.id in one.unfinished]
    assert (placed.count("acme"), placed.count("default")) == (6, 2)


# -- requests that routers end ------------------------------------------------------------------------------------


async def test_the_deadline_of_a_held_request_ends_it_once(log: LogClient, clients: Clients, one: Routing) -> None:
    asked = request(deadline_s=0.3, n=2)
    await clients.ask(asked)
    message = await is_ended_by_the_router(log, asked, Code.deadline_exceeded)
    assert "deadline" in message
    assert time.time_ns() >= asked.deadline_ns
    await clients.acknowledged(1)
    await clients.stub("w1")
    other = request()
    await clients.ask(other)
    await clients.placed(other)
    assert await clients.order() == [other.id]
    await eventually(lambda: len(log.ends(asked)) == 1)


async def test_a_request_that_is_cancelled_while_it_waits_ends(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, one: Routing
) -> None:
    async with routing(broker, pipeline) as other:
        asked, kept = request(), request()
        await clients.ask(asked, kept)
        await eventually(lambda: len(one.waiting + other.waiting) == 2)
        for _ in range(2):  # gateways repeat themselves
            for routing_ in (one, other):
                await routing_.router.on_cancel(asked.id, "gone")
        assert await is_ended_by_the_router(log, asked, Code.cancelled) == "gone"
        assert one.waiting + other.waiting == [kept.id]
        await clients.stub("w1")
        await clients.placed(kept)
        await clients.acknowledged(2)
        assert await clients.order() == [kept.id]


async def test_a_cancel_may_overtake_its_request(log: LogClient, clients: Clients, one: Routing) -> None:
    await clients.stub("w1")
    await one.knows("w1")
    asked = request()
    await one.router.on_cancel(asked.id, "gone")
    await clients.ask(asked)
    await is_ended_by_the_router(log, asked, Code.cancelled)
    assert await clients.work() == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [(900, 200, Code.context_length_exceeded), (450, 8, Code.out_of_blocks)],
)
async def test_what_no_worker_can_ever_run_is_ended_at_once(
    log: LogClient, clients: Clients, one: Routing, prompt: int, max_tokens: int, code: Code
) -> None:
    await clients.stub("w1", total_blocks=100)
    await one.knows("w1")
    asked = request([1] * prompt, max_tokens)
    await clients.ask(asked)
    await is_ended_by_the_router(log, asked, code)
    await clients.acknowledged(1)


async def test_direct_mode_goes_to_the_named_worker_or_nowhere(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, mode="direct") as one:
        for name in ("w1", "w2"):
            await clients.stub(name, name=f"name-of-{name}")
        await one.knows("w1", "w2")
        known, by_name, unknown, unnamed = (request(worker=w) for w in ("w2", "name-of-w1", "w9", ""))
        await clients.ask(known, by_name, unknown, unnamed)
        assert (await clients.placed(known))[0] == "w2"
        assert (await clients.placed(by_name))[0] == "w1"
        for asked in (unknown, unnamed):
            await is_ended_by_the_router(log, asked, Code.invalid_request)
        await clients.acknowledged(4)


async def test_a_job_that_fits_no_message_ends_its_request(
    log: LogClient, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clients.stub("w1")
    await one.knows("w1")
    asked = request([1] * 400)
    monkeypatch.setattr(type(one.bus), "max_message", property(lambda bus: 1000))
    await clients.ask(asked)
    await is_ended_by_the_router(log, asked, Code.body_too_large)
    assert one.unfinished == {}


# -- several replicas, and the end of one -------------------------------------------------------------------------


async def test_one_replica_places_every_request_once_and_the_other_agrees(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline, seed=1) as one, routing(broker, pipeline, seed=2) as two:
        stubs = [await clients.stub(f"w{i}", slots=50) for i in range(3)]
        for each in (one, two):
            await each.knows(*(stub.id for stub in stubs))
        for i, stub in enumerate(stubs):
            for _ in range(3):
                await stub.store(request([i] * 40).digests if not stub.cache else request([9, i] * 20).digests)
        asked = [request([i % 7] * 30) for i in range(80)]
        await clients.ask(*asked)
        for each_asked in asked:
            await clients.placed(each_asked)
        assert sorted(await clients.order()) == sorted(each_asked.id for each_asked in asked)
        await clients.acknowledged(80)
        assert len({job.decision.router for _, job in await clients.work()}) == 1
        for each_asked in asked[:30]:
            await stubs[0].finish(each_asked)
        await eventually(lambda: len(one.unfinished) == len(two.unfinished) == 50)
        assert one.unfinished == two.unfinished
        for each in (one, two):
            assert all(entry.echoed for entry in each.router.cluster.tracker.active())
        assert one.router.cluster.caches.index is not None
        assert two.router.cluster.caches.index is not None
        assert one.router.cluster.caches.index.blocks > 0
        await eventually(lambda: one.router.cluster.positions() == two.router.cluster.positions())
        assert one.router.cluster.caches.index.checksum() == two.router.cluster.caches.index.checksum()


async def test_a_router_that_dies_before_its_acknowledgement_does_not_double_the_request(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clients.stub("w1")
    swallowed: list[str] = []
    asked = request()
    async with routing(broker, pipeline) as one:
        await one.knows("w1")
        post = one.bus.nc.post

        def forgetful(subject: str, payload: bytes = b"", *args: Any) -> bool:
            if payload == ACK:
                swallowed.append(subject)
                return True
            return bool(post(subject, payload, *args))

        monkeypatch.setattr(one.bus.nc, "post", forgetful)
        await clients.ask(asked)
        await clients.placed(asked)
        await eventually(lambda: swallowed)
        await one.kill()
    async with routing(broker, pipeline) as two:
        assert two.unfinished == {asked.id: (1, "w1")}
        assert await clients.unacknowledged() == 1
        await clients.bus.nc.publish(swallowed[0], NAK)  # as its ack_wait would do
        await clients.acknowledged(2)
        assert len(await clients.work()) == 1


async def test_a_request_is_not_acknowledged_while_its_job_is_on_the_way(
    clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second delivery must not be taken for placed before the job is stored, or it dies with this router."""
    await clients.stub("w1")
    await one.knows("w1")
    on_the_way: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def send(*args: Any, **more: Any) -> "asyncio.Future[Any]":
        return on_the_way

    monkeypatch.setattr(one.publisher, "send", send)
    asked = request()
    await clients.ask(asked)
    await eventually(lambda: asked.id in one.unfinished)
    received: list[bytes] = []

    async def receive(message: Any) -> None:
        received.append(message.data)

    reply = clients.bus.nc.new_inbox()
    await clients.bus.nc.subscribe(reply, cb=receive)
    await clients.bus.nc.flush()
    await one.router.on_request(SimpleNamespace(data=wire.encode(asked), subject="again", reply=reply))
    await one.bus.nc.publish(reply, b"end")
    await eventually(lambda: received)
    assert received == [b"end"]
    on_the_way.cancel()


async def test_what_waits_in_a_closing_router_is_taken_by_another_at_once(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    asked = [request() for _ in range(20)]
    async with routing(broker, pipeline) as one:
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 20)
        await one.close()
        async with routing(broker, pipeline) as two:
            await eventually(lambda: len(two.waiting) == 20)
    await clients.stub("w1", slots=100)
    async with routing(broker, pipeline):
        for each in asked:
            await clients.placed(each)
    assert len(await clients.work()) == 20


@pytest.mark.parametrize("survivor", [False, True], ids=["restarted", "two"])
async def test_what_a_killed_router_held_is_placed_within_two_seconds(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, survivor: bool
) -> None:
    for kill in range(3):
        async with contextlib.AsyncExitStack() as stack:
            one = await stack.enter_async_context(routing(broker, pipeline))
            asked = [request() for _ in range(10)]
            await clients.ask(*asked)
            await eventually(lambda one=one: len(one.waiting) == 10)
            two = await stack.enter_async_context(routing(broker, pipeline)) if survivor else None
            await asyncio.sleep(2 * CLAIM_S)  # its claims are renewed by now
            assert two is None or not two.waiting
            await one.kill()
            killed = time.monotonic()
            two = two or await stack.enter_async_context(routing(broker, pipeline))
            await eventually(lambda two=two: len(two.waiting) == 10)
            assert time.monotonic() - killed < ROUTER_ACK_WAIT_S + 1.5  # 0.5 s, and a slow machine
            worker = await clients.stub(f"w{kill}", slots=100)
            for each in asked:
                await clients.placed(each)
                await worker.finish(each)
            await worker.stop()
            await clients.log.remove_key(worker.id)
    assert len(await clients.work()) == 30


async def test_a_copy_that_waited_here_does_not_end_a_request_that_ran_elsewhere(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    """Two replicas may hold one request; what the log says of it goes before what this one remembers."""
    asked = request(deadline_s=1.0)
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])
    await log.send_job("w9", asked)  # by another replica
    other = await clients.stub("w9", model="elsewhere")
    await other.finish(asked)
    await eventually(lambda: one.waiting == [])
    await clients.acknowledged(1)
    assert log.items == []
    await eventually(lambda: len(log.ends(asked)) == 1)
    assert len(await clients.work()) == 1


@pytest.mark.parametrize("snapshot", [False, True])
async def test_a_router_that_starts_knows_the_loads_from_the_logs(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, snapshot: bool
) -> None:
    stub = await clients.stub("w1")
    asked = [request([i] * 20) for i in range(6)]
    async with routing(broker, pipeline) as one:
        await one.knows("w1")
        await clients.ask(*asked[:4])
        for each in asked[:4]:
            await clients.placed(each)
        await stub.finish(asked[0])
        await eventually(lambda: len(one.unfinished) == 3)
        await eventually(lambda: all(e.echoed for e in one.router.cluster.tracker.active()))
        if snapshot:
            # One more is decided here and not stored: no later router may believe in it.
            ghost = request()
            load = jobs.LoadHeader(len(ghost.prompt) // 4, 0, ghost.gateway, ghost.deadline_ns, "standard")
            route = (Stage("aggregated", "w2"),)
            one.router.cluster.admit(ghost.id, 1, route, load, keys_of(ghost.digests), time.time_ns())
            await one.router.cluster.save()
            one.router.cluster.tracker.release(ghost.id, 1)
        await clients.ask(*asked[4:])
        for each in asked[4:]:
            await clients.placed(each)
        await stub.finish(asked[1])
        await eventually(lambda: len(one.unfinished) == 4)
        loads = one.router.cluster.tracker.load(("w1", 0), 0)
        async with routing(broker, pipeline) as two:
            assert two.unfinished == one.unfinished == {each.id: (1, "w1") for each in asked[2:]}
            again = two.router.cluster.tracker.load(("w1", 0), 0)
            assert (again.requests, again.active_blocks) == (loads.requests, loads.active_blocks) == (4, 20)


# -- the index ----------------------------------------------------------------------------------------------------


def index_of(router: Router) -> PrefixIndex:
    assert router.cluster.caches.index is not None
    return router.cluster.caches.index


async def test_a_gap_in_the_cache_events_is_closed_by_a_dump(clients: Clients, one: Routing) -> None:
    stub = await clients.stub("w1")
    await one.knows("w1")
    prompts = [request([i] * 41) for i in range(3)]
    index = index_of(one.router)
    await eventually(lambda: stub.dumps == 1)
    await stub.store(prompts[0].digests)
    await eventually(lambda: index.held(("w1", 0)) == 10)
    loads = one.router.cluster.tracker.loads
    await clients.ask(prompts[1])
    await clients.placed(prompts[1])
    assert [task.request for task in loads.uncomputed(("w1", 0))] == [prompts[1].id]
    await stub.store(prompts[1].digests, lost=True)
    await stub.store(prompts[2].digests)
    await eventually(lambda: index.held(("w1", 0)) == 30)
    await eventually(lambda: not loads.uncomputed(("w1", 0)))
    assert stub.dumps == 2
    assert index.awaiting_dump() == []
    whole = PrefixIndex(1000)
    pages = [await _dump(clients, "w1")]
    assert load_dump(whole, pages)
    assert index.checksum() == whole.checksum()


async def _dump(clients: Clients, worker: str) -> Any:
    reply = await clients.bus.nc.request(clients.bus.subjects.control(worker), wire.encode(control.DumpKv()), timeout=5)
    return kv.decode_dump(reply.data)


async def test_a_router_that_comes_late_learns_a_worker_by_its_dump(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with run_worker(broker, pipeline) as worker, routing(broker, pipeline) as early:
        await early.knows(worker.id)
        for i in range(3):
            asked = request([i] * 41)
            await clients.ask(asked)
            await log.end(asked)
            assert log.streamed(asked) == answer(asked)
        async with routing(broker, pipeline) as late:
            await eventually(lambda: index_of(late.router).held((worker.id, 0)) > 0)
            for i in range(3, 6):
                asked = request([i] * 41)
                await clients.ask(asked)
                await log.end(asked)
            held = len({d for event in (await worker.session.runner.dump(0)).events for d in _names(event)})
            both = [index_of(each.router) for each in (early, late)]
            await eventually(lambda: [index.held((worker.id, 0)) for index in both] == [held, held])
            await eventually(lambda: both[0].checksum() == both[1].checksum())
            assert held >= 60


async def test_workers_that_publish_no_events_compute_a_prompt_once(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    """Each prompt goes back to the worker that computed it, which says that it reused it."""
    silent = {"publish_events_and_metrics": False}
    async with (
        run_worker(broker, pipeline, **silent) as first,
        run_worker(broker, pipeline, **silent) as second,
        routing(broker, pipeline) as one,
    ):
        await one.knows(first.id, second.id)
        cached = []
        for number in (0, 1, 2, 0, 1, 2):
            asked = request([number] * 41)
            await clients.ask(asked)
            cached.append((await log.end(asked)).usage.cached)
        assert cached == [0, 0, 0, 40, 40, 40]
        assert index_of(one.router).match(keys_view(asked.digests)) == {}


def _names(event: Any) -> list[bytes]:
    return [event.digests[i : i + 16] for i in range(0, len(event.digests), 16)]


async def test_a_worker_that_leaves_takes_its_blocks_out_of_the_index(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    stub = await clients.stub("w1")
    await one.knows("w1")
    await stub.store(request([1] * 41).digests)
    await eventually(lambda: index_of(one.router).held(("w1", 0)) == 10)
    await stub.stop()
    await log.remove_key("w1")
    await eventually(lambda: not one.router.cluster.tracker.workers())
    assert index_of(one.router).held(("w1", 0)) == 0


async def test_a_draining_worker_is_given_nothing_more(clients: Clients, one: Routing) -> None:
    stub = await clients.stub("w1")
    await one.knows("w1")
    await stub.change(state=fleet.WorkerState.draining)
    await eventually(lambda: one.router.cluster.tracker.workers()[0].state is fleet.WorkerState.draining)
    asked = request()
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])
    await clients.stub("w2")
    assert (await clients.placed(asked))[0] == "w2"


async def test_a_held_request_that_its_owner_has_placed_is_not_decided_on_again(clients: Clients, one: Routing) -> None:
    """The owner's job was read, and left unfolded: this router decided for another worker, and reserved it."""
    asked, cluster = request(), one.router.cluster
    cluster.owns = lambda model: False
    cluster.owners_changed()
    await clients.stub("w1")
    await clients.stub("w2")
    await one.knows("w1", "w2")
    await clients.log.send_job("w2", asked)
    await eventually(lambda: asked.id in cluster._unowned)
    assert await one.router.place(PendingRequest(asked, wire.encode(asked), "", time.time_ns()), held=True)
    assert one.folded == {asked.id: (1, "w2")}
    assert one.publisher.waiting == 0
