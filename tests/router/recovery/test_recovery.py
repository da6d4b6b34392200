"""Requests of lost workers are recovered: no token is lost or repeated, and attempts are bounded."""

import asyncio
import contextlib
import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

import msgspec
import pytest
from nats.errors import Error as NatsError
from structlog.testing import capture_logs

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.infra.bus.worker_leases import EXPIRED
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.timeline.read import read_timeline
from penstock.router.ownership.intake import PassedOn
from penstock.router.placement.pending import PendingRequest
from penstock.router.recovery import recovery
from penstock.router.recovery.recovery import Recovery, fence
from penstock.router.recovery.terminal_events import InterruptedAttempt
from penstock.router.state import cluster_state
from penstock.router.state.lost_workers import RegistrationRemoval
from penstock.schemas import deletions, done, jobs, requests, tokens, wire
from penstock.schemas.cells import cell_target
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import WorkerState
from penstock.schemas.jobs import Job
from penstock.schemas.requests import Fallback, GenerateRequest, new_request_id
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, KEPT, Subjects
from penstock.schemas.token_dedup import replay
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end
from tests.router.support import MODEL, Clients, Routing, Stub, routing
from tests.workers.support import (
    DRAWN,
    GATEWAY,
    LogClient,
    WorkerHarness,
    answer,
    engine,
    ids,
    log_client,
    request,
    run_worker,
)

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SCAN_S", 0.1)


async def lose(clients: Clients, stub: Stub) -> None:
    await stub.stop()
    await clients.log.remove_key(stub.id)


async def streamed(log: LogClient, asked: GenerateRequest, token_items: list[int], choice: int = 0) -> None:
    """Attempt 1 has streamed so much, and it is in the log."""
    await log.publish_tokens(asked, 1, token_items, choice)
    await eventually(lambda: log.streamed(asked, choice) == token_items)


async def on(clients: Clients, one: Routing, worker: str, asked: GenerateRequest, **fields: Any) -> Stub:
    """A worker that was given a request."""
    stub = await clients.stub(worker, **fields)
    await one.knows(worker)
    await clients.ask(asked)
    assert (await clients.placed(asked))[0] == worker
    await eventually(lambda: _echoed(one, asked))
    return stub


def _echoed(one: Routing, asked: GenerateRequest) -> bool:
    entry = one.router.cluster.tracker.request(asked.id)
    return entry is not None and entry.echoed


# -- one router ---------------------------------------------------------------------------------------------------


async def test_a_drained_worker_is_not_lost_and_one_whose_engine_failed_is_also_if_it_was_idle(
    clients: Clients, one: Routing
) -> None:
    busy = await on(clients, one, "w1", request(max_tokens=20))
    drained, failed = await clients.stub("w2", state=WorkerState.draining), await clients.stub("w3")
    for each in (drained, failed):
        await one.knows(each.id)
    await lose(clients, drained)
    await eventually(lambda: one.router.cluster.tracker.worker(drained.id) is None)
    assert one.metric("penstock_router_workers_lost_total") == 0
    for number, each in enumerate((failed, busy), 1):
        await lose(clients, each)
        await eventually(lambda number=number: one.metric("penstock_router_workers_lost_total") == number)


async def test_the_request_of_a_lost_worker_continues_behind_what_was_streamed(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, one: Routing
) -> None:
    asked = request(max_tokens=20)
    stub = await on(clients, one, "w1", asked)
    await streamed(log, asked, answer(asked, 7))
    async with run_worker(broker, pipeline) as worker:
        await one.knows(worker.id)
        await lose(clients, stub)
        end = await log.end(asked)
        name, job = await clients.placed(asked, 2)
        assert name == worker.id
        assert (job.decision.reason, job.decision.chosen) == ("worker_lost", worker.id)
        assert [ids(part) for part in job.resume] == [answer(asked, 7)]
        assert (job.finished, job.endings) == ((), ())
        assert bytes(job.request) == wire.encode(asked)
        assert (end.attempt, end.worker, end.code) == (2, worker.id, "")
        assert ids(end.choices[0].tokens) == log.streamed(asked) == answer(asked)
        assert job.streamed_ns == end.timings.streamed_ns == end.timings.client_first_token_ns
        assert end.timings.created_ns < end.timings.streamed_ns < end.timings.ended_ns
        await eventually(lambda: one.unfinished == {})


async def test_tokens_of_a_lost_worker_after_the_fence_are_void(log: LogClient, clients: Clients, one: Routing) -> None:
    asked = request(max_tokens=20)
    stub = await on(clients, one, "w1", asked)
    second = await clients.stub("w2")
    await one.knows("w2")
    await streamed(log, asked, answer(asked, 3))
    await lose(clients, stub)
    _, job = await clients.placed(asked, 2)
    await log.publish_tokens(asked, 1, [1] * 20)  # the zombie: longer than what counts, and wrong
    assert ids(job.resume[0]) == answer(asked, 3)
    await lose(clients, second)
    third = await clients.stub("w3")
    worker, job = await clients.placed(asked, 3)
    assert (worker, ids(job.resume[0])) == (third.id, answer(asked, 3))
    assert log.streamed(asked) == answer(asked, 3)


async def test_choices_that_had_ended_are_not_run_again(log: LogClient, clients: Clients, one: Routing) -> None:
    asked = request(n=3, sampling=DRAWN)
    stub = await on(clients, one, "w1", asked)
    ending = Finish("stop", "x", 4)
    items = (
        TokenItem(asked.id, 1, 1, 0, wire.pack_tokens([5, 6]), ending),
        TokenItem(asked.id, 1, 2, 0, wire.pack_tokens([7])),
    )
    subject = log.bus.subjects.tokens(GATEWAY)
    await log.bus.js.publish(subject, wire.encode(TokenBatch("w1", 0, 0, items)))
    await lose(clients, stub)
    await clients.stub("w2")
    _, job = await clients.placed(asked, 2)
    assert [ids(part) for part in job.resume] == [[], [5, 6], [7]]
    assert (job.finished, job.endings) == ((1,), (ending,))


async def test_a_request_that_misses_only_its_terminal_event_gets_it_without_a_worker(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    asked = request(n=2, user="ann")
    stub = await on(clients, one, "w1", asked)
    items = tuple(
        TokenItem(asked.id, 1, choice, 0, wire.pack_tokens([choice + 5]), Finish("length", None, 4))
        for choice in range(2)
    )
    subject = log.bus.subjects.tokens(GATEWAY)
    await log.bus.js.publish(subject, wire.encode(TokenBatch("w1", 0, 0, items)))
    await lose(clients, stub)
    end = await log.end(asked)
    assert (end.attempt, end.worker, end.code, end.user) == (1, "w1", "", "ann")
    assert end.choices == tuple(done.Outcome(wire.pack_tokens([c + 5]), "length") for c in range(2))
    assert end.usage == done.Usage(prompt=5, completion=2, cached=4)
    assert len(await clients.work()) == 1
    await eventually(lambda: one.unfinished == {})


async def test_a_request_that_outlives_too_many_workers_ends(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_attempts=2) as one:
        asked = request(max_tokens=20)
        stub = await on(clients, one, "w1", asked)
        await streamed(log, asked, answer(asked, 3))
        second = await clients.stub("w2")
        await one.knows("w2")
        await lose(clients, stub)
        await clients.placed(asked, 2)
        await eventually(lambda: _echoed(one, asked))
        await lose(clients, second)
        end = await log.end(asked)
        assert end.code == Code.worker_lost
        assert "2 workers" in end.message
        assert ids(end.choices[0].tokens) == log.streamed(asked) == answer(asked, 3)
        assert end.choices[0].reason == "error"
        finish = log.progress(asked)[0].finish
        assert finish is not None
        assert finish.code == Code.worker_lost
        await eventually(lambda: one.unfinished == {})
        assert len(log.ends(asked)) == 1
        assert [job.attempt for _, job in await clients.work()] == [1, 2]


async def test_cells_that_return_a_request_use_up_none_of_its_attempts(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    """Workers of two cells that come and go would fail requests that no worker has ever had."""
    async with routing(broker, pipeline, max_attempts=1) as one:
        asked = request()
        await clients.ask(asked)
        await eventually(lambda: one.waiting == [asked.id])
        for attempt in (1, 2, 3):
            pending = one.router.held.remove(asked.id)
            assert pending is not None
            assert pending.attempt == attempt
            await one.router.migrate(pending, 7, "no worker in this cell")
            await clients.placed(asked, attempt)
            event = done.Returned(asked.id, asked.model, attempt, cell_target(7), "cell 7: no worker")
            headers = done.returned_headers(event) | {HEADER_MSG_ID: done.returned_id(event)}
            await log.bus.js.publish(pipeline.returned(asked.model), wire.encode(event), headers=headers)
            await eventually(lambda: one.waiting == [asked.id])
        assert log.ends(asked) == []
        stub = await clients.stub("w1")
        await clients.placed(asked, 4)
        await eventually(lambda: _echoed(one, asked))
        await lose(clients, stub)
        end = await log.end(asked)
        assert end.code == Code.worker_lost
        assert end.message.startswith("1 worker was lost")


async def test_a_request_that_was_not_started_in_time_and_has_no_other_model_uses_up_no_attempt(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, max_attempts=1) as one:
        asked = request(fallbacks=(Fallback("absent"),), fallback_after_s=5.0)
        stub = await on(clients, one, "w1", asked)
        await stub.hand_back(asked, reason=f"{jobs.WAITED}: no worker of it started the request within 5 s")
        _, job = await clients.placed(asked, 2)
        assert jobs.waited(jobs.earlier_workers(job), 0) == 1
        await eventually(lambda: _echoed(one, asked))
        await lose(clients, stub)
        assert (await log.end(asked)).message.startswith("1 worker was lost")


async def test_a_returned_request_is_requeued(log: LogClient, clients: Clients, one: Routing) -> None:
    asked = request()
    stub = await on(clients, one, "w1", asked)
    await streamed(log, asked, answer(asked, 2))
    await stub.change(state="draining")
    await clients.stub("w2")
    await one.knows("w2")
    await stub.hand_back(asked)
    worker, job = await clients.placed(asked, 2)
    assert (worker, job.decision.reason, ids(job.resume[0])) == ("w2", "returned: draining", answer(asked, 2))
    assert one.unfinished == {asked.id: (2, "w2")}
    await stub.hand_back(asked)  # stored once
    assert len(await clients.work()) == 2


@pytest.mark.parametrize(("crashed", "suspect"), [("killed", ""), ("shared", "suspect")])
async def test_a_request_does_not_go_back_to_a_dead_worker_that_is_registered_yet(
    clients: Clients, one: Routing, crashed: str, suspect: str
) -> None:
    """Its end is reported before its connection is known to be broken."""
    asked = request()
    dead = await on(clients, one, "w1", asked)
    await dead.hand_back(asked, reason="it ended", crashed=crashed)
    await eventually(lambda: one.waiting == [asked.id])
    await clients.stub("w2")
    worker, job = await clients.placed(asked, 2)
    assert (worker, job.suspect) == ("w2", suspect)
    assert job.decision.reason == "worker_lost: it ended"


async def test_a_worker_whose_process_is_reported_to_have_ended_is_given_nothing_more(
    clients: Clients, one: Routing
) -> None:
    """Its lease has not expired, and its connection is not known to be broken."""
    asked, other = request(), request((9, 9))
    dead = await on(clients, one, "w1", asked)
    await dead.stop()
    await dead.hand_back(asked, reason="it was killed", crashed="killed", gone=True)
    await clients.ask(other)
    await eventually(lambda: {*one.waiting} == {asked.id, other.id})
    assert one.router.cluster.tracker.worker("w1") is None
    await clients.stub("w2")
    assert (await clients.placed(asked, 2))[0] == "w2"
    assert (await clients.placed(other))[0] == "w2"


async def test_a_client_is_told_of_no_end_but_the_one_that_is_stored(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    """A worker that was taken for lost had stored the end of its request."""
    asked, other = request(), request((9, 9))
    stub = await on(clients, one, "w1", asked)
    await stub.finish(asked)
    await eventually(lambda: log.ends(asked))
    terminal = one.router.terminal
    for ended in (asked, other):
        terminal.end(
            PendingRequest(ended, wire.encode(ended), "", 0, attempt=4), Code.worker_lost, "4 workers were lost"
        )
    await terminal.drain(20)
    assert (await log.end(other)).code == Code.worker_lost
    assert not log.progress(asked)[0].finish, "nothing of the end that was refused"


async def test_what_two_crashes_name_runs_alone_and_a_third_ends_it(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    asked, other, beside = request(max_tokens=20), request((9, 9)), request((8, 8))
    first = await on(clients, one, "w1", asked)
    second, third = await clients.stub("w2"), await clients.stub("w3")
    await one.knows("w2", "w3")
    stubs = {stub.id: stub for stub in (first, second, third)}
    await first.hand_back(asked, crashed="shared")
    await lose(clients, first)
    worker, job = await clients.placed(asked, 2)
    assert job.suspect == "suspect"
    await stubs[worker].hand_back(asked, 2, crashed="shared")
    await lose(clients, stubs[worker])
    last, job = await clients.placed(asked, 3)
    assert job.suspect == "alone"
    await eventually(lambda: _echoed(one, asked))
    await clients.ask(other)
    await eventually(lambda: one.waiting == [other.id])  # its worker takes nothing else
    await clients.stub("w4")
    assert (await clients.placed(other))[0] == "w4"
    await clients.ask(beside)
    assert (await clients.placed(beside))[0] == "w4"
    await stubs[last].hand_back(asked, 3, crashed="alone")
    end = await log.end(asked)
    assert end.code == Code.poisoned_request
    assert "3 workers crashed" in end.message
    await eventually(lambda: asked.id not in one.unfinished)
    assert one.router.cluster.tracker.capacity(last) > 0


async def test_a_requeued_request_waits_for_a_worker_and_can_be_cancelled(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    asked = request()
    stub = await on(clients, one, "w1", asked)
    await streamed(log, asked, answer(asked, 2))
    await lose(clients, stub)
    await eventually(lambda: one.waiting == [asked.id])
    await one.router.on_cancel(asked.id, "gone")
    end = await log.end(asked)
    assert (end.code, end.attempt) == (Code.cancelled, 2)
    assert ids(end.choices[0].tokens) == answer(asked, 2)
    (item,) = [item for item in log.items if item.finish is not None]
    assert (item.choice, item.attempt) == (WHOLE_REQUEST, 2)


async def test_a_return_that_could_not_be_handled_is_handled_later(
    log: LogClient, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker may live on for long: nobody else would look after the request."""
    asked = request()
    stub = await on(clients, one, "w1", asked)
    tries = 0

    async def fails_first(*args: Any) -> list[InterruptedAttempt]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ServingError(Code.broker_unavailable, "not now")
        return await fence(*args)

    monkeypatch.setattr(recovery, "fence", fails_first)
    await stub.hand_back(asked)
    worker, _ = await clients.placed(asked, 2)
    assert worker == "w1"
    assert tries >= 2


async def test_a_router_that_starts_handles_a_return_from_before_its_start(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    asked = request()
    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked)
        await one.kill()
    await stub.hand_back(asked)
    async with routing(broker, pipeline):
        assert (await clients.placed(asked, 2))[0] == "w1"


# -- several routers, and restarts --------------------------------------------------------------------------------


async def test_replicas_recover_a_request_together_and_it_runs_once(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, one: Routing
) -> None:
    async with routing(broker, pipeline, seed=2) as two:
        asked = [request(max_tokens=20) for _ in range(10)]
        stub = await clients.stub("w1", slots=50)
        for each in (one, two):
            await each.knows("w1")
        await clients.ask(*asked)
        for each_asked in asked:
            await clients.placed(each_asked)
            await streamed(log, each_asked, answer(each_asked, 3))
        for name in ("w2", "w3"):
            await clients.stub(name, slots=50)
        for each in (one, two):
            await each.knows("w2", "w3")
        await lose(clients, stub)
        homes = {a.id: (await clients.placed(a, 2))[0] for a in asked}
        await eventually(lambda: one.unfinished == two.unfinished == {i: (2, home) for i, home in homes.items()})
        assert len(await clients.work()) == 20
        fences = [item for item in log.items if item.attempt == 2]
        assert sorted(item.request for item in fences) == sorted(each.id for each in asked)


async def test_orphans_of_before_its_start_are_found(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    asked = request()
    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked)
        await streamed(log, asked, answer(asked, 2))
        await one.kill()
    await lose(clients, stub)  # while no router runs
    await clients.stub("w2")
    async with routing(broker, pipeline):
        worker, job = await clients.placed(asked, 2)
        assert (worker, ids(job.resume[0])) == ("w2", answer(asked, 2))


async def test_a_request_is_found_again_though_its_next_job_was_never_stored(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WORK has no leader, say: the router has decided on the next attempt, it stores a snapshot, and is killed."""
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    asked, other = request(), request()
    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked)
        await lose(clients, stub)
        await eventually(lambda: one.waiting == [asked.id])
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def not_stored(*args: Any, **more: Any) -> "asyncio.Future[Any]":
            return never

        monkeypatch.setattr(one.publisher, "send", not_stored)
        await clients.stub("w2")
        await eventually(lambda: one.folded == {asked.id: (2, "w2")})
        await Stub(clients.bus, "w1").finish(other)
        await eventually(lambda: one.router.cluster.tracker.ended(other.id))
        await one.router.cluster.save()
        await one.kill()
    async with routing(broker, pipeline) as two:
        worker, job = await clients.placed(asked, 2)
        assert (worker, job.decision.reason) == ("w2", "worker_lost")
        await eventually(lambda: two.unfinished == {asked.id: (2, "w2")})


async def test_a_returned_request_is_found_again_though_its_recovery_had_only_begun(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router has read that its live worker returned it, it stores a snapshot, and is killed before the fence."""
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    asked = request()

    async def no_fence(*args: Any) -> list[InterruptedAttempt]:
        raise ServingError(Code.broker_unavailable, "TOKENS has no leader")

    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked)
        with monkeypatch.context() as patched:
            patched.setattr(recovery, "fence", no_fence)
            await stub.change(state="draining")
            await stub.hand_back(asked)
            await eventually(lambda: one.router.cluster.returned.of(asked.id) != {})
            await one.router.cluster.save()
            await one.kill()
    await clients.stub("w2")
    async with routing(broker, pipeline):
        worker, job = await clients.placed(asked, 2)
        assert (worker, job.decision.reason) == ("w2", "returned: its worker gave it back")


@pytest.mark.parametrize("knows", ["the log", "a router that did not own it"])
async def test_a_revoked_request_is_found_again_though_who_revoked_it_is_gone(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    """Its worker's engine hung, no other one had room, and the worker has dropped it: it runs nowhere."""
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    asked = request()
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(routing(broker, pipeline))
        stub = await on(clients, one, "w1", asked)
        await stub.change(state="draining")
        if knows != "the log":
            two = await stack.enter_async_context(routing(broker, pipeline))
            await two.knows("w1")
        entry = one.router.cluster.tracker.request(asked.id)
        assert entry is not None
        one.router.recovery.on_stalled(entry, "no step")
        await eventually(lambda: one.waiting == [asked.id])
        await eventually(lambda: one.publisher.waiting == 0)
        await one.kill()
        if knows == "the log":
            await stack.enter_async_context(routing(broker, pipeline))
        await clients.stub("w2")
        worker, job = await clients.placed(asked, 2)
        assert (worker, job.decision.reason) == ("w2", "returned: it was revoked")


async def test_a_worker_that_has_not_registered_yet_is_given_time(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    """After a broker's restart the leases come back later than the logs."""
    asked = request()
    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked)
        await one.kill()
    await lose(clients, stub)
    async with routing(broker, pipeline) as two:
        await asyncio.sleep(0.5)  # well within SETTLE_S, some looks long
        await stub.register()
        await two.knows("w1")
        assert two.unfinished == {asked.id: (1, "w1")}
        assert len(await clients.work()) == 1


@pytest.mark.parametrize("when", ["it runs", "it starts"])
async def test_a_router_that_never_read_the_end_of_a_deleted_request_does_not_count_it(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, when: str
) -> None:
    """Its terminal event was erased before. It would count at its worker, or be looked for, until its deadline."""
    note, bucket = wire.encode(deletions.Deletion("x")), log.bus.subjects.bucket("deleted")
    asked, other = request(), request()
    async with routing(broker, pipeline) as one:
        await on(clients, one, "w1", asked)
        if when == "it starts":
            await one.router.cluster.save()
            await one.kill()
        await log.bus.js.publish(f"$KV.{bucket}.{asked.id}", note)
        if when == "it runs":
            await eventually(lambda: one.unfinished == {})
            return
    async with routing(broker, pipeline) as two:
        assert two.unfinished == {}
        await clients.ask(other)
        await eventually(lambda: two.unfinished == {other.id: (1, "w1")})


async def test_a_request_whose_job_is_lost_continues_as_it_was_accepted(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    """A broker passes over a job that its disk has damaged. Such a request had no end before its deadline."""
    asked = request(max_tokens=20, id=new_request_id())
    stub = await on(clients, one, "w1", asked)
    await streamed(log, asked, answer(asked, 4))
    entry = one.router.cluster.tracker.request(asked.id)
    assert entry is not None
    await log.bus.js.delete_msg(log.bus.subjects.stream("WORK"), entry.seq)
    with capture_logs() as lines:
        await lose(clients, stub)
        await clients.stub("w2")
        worker, job = await clients.placed(asked, 2)
    assert (worker, bytes(job.request)) == ("w2", wire.encode(asked))
    assert [ids(part) for part in job.resume] == [answer(asked, 4)]
    assert [line["request"] for line in lines if line["event"] == "job_not_found"] == [asked.id]


async def test_a_request_whose_job_is_gone_is_reported_once_and_its_copy_is_found(
    log: LogClient, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.0)
    asked = request()
    stub = await on(clients, one, "w1", asked)
    entry = one.router.cluster.tracker.request(asked.id)
    assert entry is not None
    stream, job = log.bus.subjects.stream("WORK"), (await clients.work())[0][1]
    header = jobs.load_header(5, 0, GATEWAY, asked.deadline_ns, "standard", 1)
    await log.bus.js.delete_msg(stream, entry.seq)
    with capture_logs() as lines:
        await lose(clients, stub)
        await eventually(lambda: any(line["event"] == "job_not_found" for line in lines))
        await asyncio.sleep(0.5)  # some looks
        assert [line["request"] for line in lines if line["event"] == "job_not_found"] == [asked.id]
    await log.bus.js.publish(
        log.bus.subjects.kept("aggregated", "w1"),
        wire.encode(job),
        headers={HEADER_MSG_ID: f"{asked.id}:1:{KEPT}:{entry.seq}", HEADER_LOAD: header},
    )
    await clients.stub("w2")
    assert (await clients.placed(asked, 2))[0] == "w2"


async def test_a_job_that_is_stored_while_others_of_its_lost_worker_are_fenced_is_placed_again(
    log: LogClient, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is away as the worker is lost, and stores the job as it comes back. The job was taken for one that
    the log has lost: no router looked for it again, and its client waited until the deadline."""
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.0)
    first, late = request(), request()
    stub = await on(clients, one, "w1", first)
    send, fenced = one.publisher.send, asyncio.Event()
    withheld: list[tuple[Any, ...]] = []

    async def send_later(subject: str, payload: bytes, msg_id: str, **more: Any) -> Any:
        if msg_id != f"{late.id}:1" or fenced.is_set():
            return await send(subject, payload, msg_id, **more)
        withheld.append((subject, payload, msg_id, more))
        return asyncio.get_running_loop().create_future()

    async def fence_meanwhile(*args: Any) -> list[InterruptedAttempt]:
        found = await fence(*args)
        if not fenced.is_set():
            fenced.set()
            ((subject, payload, msg_id, more),) = withheld
            await (await send(subject, payload, msg_id, **more))
            await eventually(lambda: _echoed(one, late))
        return found

    monkeypatch.setattr(one.publisher, "send", send_later)
    monkeypatch.setattr(recovery, "fence", fence_meanwhile)
    await clients.ask(late)
    await eventually(lambda: late.id in one.folded)
    await lose(clients, stub)
    await clients.stub("w2")
    for asked in (first, late):
        assert (await clients.placed(asked, 2))[0] == "w2"


async def test_one_request_that_cannot_be_recovered_keeps_no_other_of_its_worker(
    clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of one gateway cannot be stored, say, and an error of ours meets another request."""
    monkeypatch.setattr(recovery, "AGAIN_S", 0.1)
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.0)
    refused, wrong, good = request(gateway="full"), request(), request()
    stub = await on(clients, one, "w1", refused)
    await clients.ask(wrong, good)
    await eventually(lambda: _echoed(one, wrong) and _echoed(one, good))
    tries, proceed = Counter[str](), one.router.recovery._continue

    async def fence_of(*args: Any) -> list[InterruptedAttempt]:
        address = args[3][0].token_address
        tries[address] += 1
        if address == "full" and tries[address] < 3:
            raise ServingError(Code.broker_unavailable, "maximum bytes exceeded")
        return await fence(*args)

    async def fails_first(attempt: InterruptedAttempt, reason: str) -> None:
        tries[attempt.request_id] += 1
        if attempt.request_id == wrong.id and tries[wrong.id] < 3:
            raise RuntimeError("wrong")
        await proceed(attempt, reason)

    monkeypatch.setattr(recovery, "fence", fence_of)
    monkeypatch.setattr(one.router.recovery, "_continue", fails_first)
    await clients.stub("w2")
    await lose(clients, stub)
    for asked in (good, wrong, refused):
        assert (await clients.placed(asked, 2))[0] == "w2"
    assert tries["full"] == tries[wrong.id] == 3


async def test_a_job_that_the_tail_has_passed_over_is_read_again_when_it_is_acknowledged(
    clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = one.router.cluster._work

    async def looks_right() -> None:
        return

    monkeypatch.setattr(tail, "_check_end", looks_right)
    tail.position = 100
    asked = request()
    await on(clients, one, "w1", asked)
    assert _echoed(one, asked)


@pytest.mark.parametrize("others", [0, 4])
@pytest.mark.parametrize("owner", ["alive", "hanging"])
async def test_jobs_that_a_broker_has_lost_are_placed_again_though_their_worker_is_alive(
    make_broker: Callable[..., EmbeddedNats],
    subjects: Subjects,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    others: int,
) -> None:
    """The worker had not got them, and others may have taken their places: nothing else would have found them."""
    server = make_broker()
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(opened(server, subjects))
        clients = Clients(LogClient(bus))
        stack.push_async_callback(clients.stop)
        one = await stack.enter_async_context(routing(server, subjects))
        stub = await clients.stub("w1")
        await one.knows("w1")
        kept, *lost = (request(id=new_request_id()) for _ in range(3))
        for asked in (kept, *lost):
            await clients.ask(asked)
            await clients.placed(asked)
            await eventually(lambda asked=asked: _echoed(one, asked))
        two = await stack.enter_async_context(routing(server, subjects))
        await two.knows("w1")
        if owner == "hanging":

            async def look_never() -> None:
                return

            monkeypatch.setattr(one.router.recovery, "scan_now", look_never)
        server.kill()
        await eventually(lambda: not bus.connected and not one.bus.connected)
        lose_end(server.data_dir, subjects.stream("WORK"), 2)
        await server.start()
        async with opened(server, subjects) as fresh:
            client = LogClient(fresh)
            for _ in range(others):
                await client.send_job("w9", request(id=new_request_id()))
        for asked in lost:
            worker, job = await clients.placed(asked, 2)
            assert (worker, job.decision.reason, bytes(job.request)) == (stub.id, "job_lost", wire.encode(asked))
        assert {revoke.request for _, revoke in await clients.revoked()} == {asked.id for asked in lost}
        found = [
            (requests.decode(job.request).id, job.attempt) for name, job in await clients.work() if name == stub.id
        ]
        assert sorted(found) == sorted([(kept.id, 1), *((asked.id, 2) for asked in lost)])


@pytest.mark.parametrize("others", [0, 4])
async def test_jobs_that_a_broker_has_lost_are_placed_again_by_a_router_that_starts(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, others: int
) -> None:
    """Their requests are acknowledged, so only its predecessor's snapshot knows of them."""
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus, contextlib.AsyncExitStack() as stack:
        clients = Clients(LogClient(bus))
        stack.push_async_callback(clients.stop)
        stub = await clients.stub("w1")
        kept, *lost = (request(id=new_request_id()) for _ in range(3))
        async with routing(server, subjects) as one:
            await one.knows("w1")
            for asked in (kept, *lost):
                await clients.ask(asked)
                await clients.placed(asked)
                await eventually(lambda asked=asked: _echoed(one, asked))
            await one.router.cluster.save()
            await one.kill()
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, subjects.stream("WORK"), 2)
        await server.start()
        async with opened(server, subjects) as fresh:
            for _ in range(others):
                await LogClient(fresh).send_job("w9", request(id=new_request_id()))
        two = await stack.enter_async_context(routing(server, subjects))
        for asked in lost:
            worker, job = await clients.placed(asked, 2)
            assert (worker, job.decision.reason, bytes(job.request)) == (stub.id, "job_lost", wire.encode(asked))
        assert two.router.cluster.tracker.request(kept.id).attempt == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("router", ["lives", "starts"])
@pytest.mark.parametrize("left", [13, 0])
async def test_a_streaming_request_whose_records_and_worker_are_lost_continues_once_it_is_stored_again(
    make_broker: Callable[..., EmbeddedNats],
    subjects: Subjects,
    monkeypatch: pytest.MonkeyPatch,
    router: str,
    left: int,
) -> None:
    """Its client waited until the deadline: only its tokens were left in the log."""
    monkeypatch.setattr(recovery, "AGAIN_S", 0.3)
    server = make_broker()
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(opened(server, subjects))
        log = await stack.enter_async_context(log_client(server, subjects))
        clients = Clients(log)
        stack.push_async_callback(clients.stop)
        one = await stack.enter_async_context(routing(server, subjects))
        asked = request(max_tokens=20, id=new_request_id())
        stub = await on(clients, one, "w1", asked)
        expected = answer(asked, 20)[: 20 - left]
        item = TokenItem(asked.id, 1, 0, 0, wire.pack_tokens(expected), None if left else Finish("length"))
        await bus.js.publish(subjects.tokens(GATEWAY), wire.encode(TokenBatch("w1", 0, 0, (item,))))
        if router == "starts":
            await one.kill()
        server.kill()
        await eventually(lambda: not bus.connected and (router == "starts" or not one.bus.connected))
        for lost in ("REQUESTS", "WORK"):
            lose_end(server.data_dir, subjects.stream(lost), 1)
        await server.start()
        await eventually(lambda: bus.connected)
        with capture_logs() as lines:
            await lose(clients, stub)
            if router == "starts":
                one = await stack.enter_async_context(routing(server, subjects))
            else:
                await eventually(lambda: any(line["event"] == "job_not_found" for line in lines))
            second = await clients.stub("w2")
            await one.knows(second.id)
            again = msgspec.structs.replace(asked, interrupted_attempt=1)
            await clients.ask(again)
            if left:
                worker, job = await clients.placed(asked, 2)
                assert (worker, [ids(part) for part in job.resume]) == (second.id, [expected])
                assert bytes(job.request) == wire.encode(again)
            else:
                end = await log.end(asked)
                assert (end.attempt, [ids(each.tokens) for each in end.choices]) == (1, [expected])
        await clients.acknowledged(1)
        assert len(await clients.work()) == bool(left)


@pytest.mark.parametrize("streamed_by", ["", "w1", "prefill"])
async def test_a_worker_that_still_has_the_first_attempt_does_not_mix_its_answer_into_the_second(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, one: Routing, streamed_by: str
) -> None:
    """Request and job are lost, and a router that knows neither reads the request again.

    Tokens name the worker. Without any, each of the model or of a fallback may have the job, as each decode worker may
    have that of a prefill worker.
    """
    asked, streamed = request(max_tokens=20, id=new_request_id(), fallbacks=(Fallback("other"),)), bool(streamed_by)
    models = {"w1": MODEL, "w2": MODEL, "w3": "other", "w4": "another"}
    for name, model in models.items():
        await clients.stub(name, model=model)
    await clients.stub("prefill", role="prefill")
    await one.knows(*models, "prefill")
    if streamed:
        item = TokenItem(asked.id, 1, 0, 0, wire.pack_tokens([6]), None)
        await clients.bus.js.publish(pipeline.tokens(GATEWAY), wire.encode(TokenBatch(streamed_by, 0, 0, (item,))))
    await clients.ask(msgspec.structs.replace(asked, interrupted_attempt=1))
    _, job = await clients.placed(asked, 2)
    assert [ids(part) for part in job.resume] == [[6] * streamed]
    revoke = jobs.Revoke(asked.id, 1)
    names = ["w1"] if streamed_by == "w1" else ["prefill", "w1", "w2", "w3"]
    assert await clients.revoked() == [(name, revoke) for name in names]
    late = TokenItem(asked.id, 1, 0, streamed, wire.pack_tokens([7]), None)
    new = TokenItem(asked.id, 2, 0, streamed, wire.pack_tokens([8]), None)
    stored = [
        item
        async for entry in read(clients.bus, pipeline.stream("TOKENS"), pipeline.tokens(GATEWAY))
        for item in tokens.decode(entry.data).items
    ]
    assert [ids(part.tokens) for part in replay([*stored, late, new], 1)] == [[*[6] * streamed, 8]]


async def test_a_broker_that_fails_while_a_request_stored_again_is_read_does_not_stop_the_next_ones(
    pipeline: Subjects, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A puller ends with what its handler raises."""

    async def fails(*args: Any) -> None:
        raise NatsError("the link broke")

    monkeypatch.setattr(recovery, "_read_progress", fails)
    again = request(id=new_request_id(), interrupted_attempt=1)
    subject = pipeline.request(again.model, again.priority.value, again.id)
    with capture_logs() as lines:
        await one.router.on_request(PassedOn(subject, wire.encode(again), "$JS.ACK.s.c.1.1.1.1.0"))
        await eventually(lambda: not one.router.recovery.resuming)
    assert [line["error"] for line in lines if line["event"] == "resumption_postponed"] == ["the link broke"]


async def test_requests_that_resume_are_read_together_and_one_that_cannot_be_read_delays_no_other(
    pipeline: Subjects, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass reads everything that their gateway got meanwhile: one for each request took minutes."""
    passes: list[list[str]] = []
    reads = recovery._read_progress

    async def counted(bus: Bus, gateway: str, group: list[InterruptedAttempt], until: int | None) -> dict[str, str]:
        passes.append([attempt.request_id for attempt in group])
        unread = await reads(bus, gateway, group, until)
        return unread if len(passes) > 1 else unread | {all_asked[3].id: "not yet"}

    all_asked = [request(id=new_request_id(), max_tokens=20) for _ in range(40)]
    for asked in all_asked[::2]:
        item = TokenItem(asked.id, 1, 0, 0, wire.pack_tokens([7, 8]), None)
        await clients.bus.js.publish(pipeline.tokens(GATEWAY), wire.encode(TokenBatch("w9", 0, 0, (item,))))
    async with one.router.recovery._resume_turn:  # all come while the first is being read
        await clients.ask(*(msgspec.structs.replace(asked, interrupted_attempt=1) for asked in all_asked))
        await eventually(lambda: len(one.router.recovery.resuming) == len(all_asked))
        monkeypatch.setattr(recovery, "_read_progress", counted)
    stub = await clients.stub("w1", slots=len(all_asked))
    await one.knows(stub.id)
    for number, asked in enumerate(all_asked):
        _, job = await clients.placed(asked, 2)
        assert [ids(part) for part in job.resume] == [[] if number % 2 else [7, 8]]
    await clients.acknowledged(len(all_asked))
    assert passes == [[asked.id for asked in all_asked], [all_asked[3].id]]


async def test_a_request_that_comes_again_while_others_of_its_batch_are_placed_stays_known(
    pipeline: Subjects, clients: Clients, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was placed without space for it, and delivered again."""
    resuming, later = one.router.recovery, asyncio.Event()
    first, second = (request(id=new_request_id(), interrupted_attempt=1) for _ in range(2))
    subject = pipeline.request(first.model, first.priority.value, first.id)
    deferred, known = PassedOn(subject, wire.encode(first), "$JS.ACK.s.c.1.1.1.1.0"), list[bool]()

    async def place(pending: PendingRequest) -> bool:
        if pending.request.id == first.id and not later.is_set():
            later.set()
            await one.router.on_request(deferred)
        return True

    async def read_again(*args: Any) -> dict[str, str]:
        known.append(first.id in resuming.resuming)
        return {first.id: "not yet"}

    async with resuming._resume_turn:
        for asked in (first, second):
            await one.router.on_request(deferred._replace(data=wire.encode(asked)))
        monkeypatch.setattr(resuming, "_place", place)
    await asyncio.wait_for(later.wait(), 10)
    monkeypatch.setattr(recovery, "_read_progress", read_again)
    await eventually(lambda: bool(known))
    assert known == [True]


class Cut(Generic[T]):
    """Runs a coroutine that is cancelled where it would wait for the time numbered ``at``; None: it ended before."""

    def __init__(self, work: Coroutine[Any, Any, T], at: int) -> None:
        self._work = work
        self._left = at

    def __await__(self) -> Generator[Any, Any, T | None]:
        step: Callable[[], Any] = functools.partial(self._work.send, None)
        while True:
            try:
                waits = step()
            except StopIteration as end:
                return cast("T", end.value)
            except asyncio.CancelledError:
                return None
            if self._left == 0:
                step = functools.partial(self._work.throw, asyncio.CancelledError())
            else:
                step = functools.partial(self._work.send, (yield waits))
            self._left -= 1


@pytest.mark.parametrize("finder", ["the same router", "another router"])
async def test_a_request_whose_recovery_is_cut_off_wherever_it_waits_is_found_again(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch, finder: str
) -> None:
    """Also behind the point where the router has ended the attempt, and has not decided on the next one."""
    monkeypatch.setattr(recovery, "SCANS_UNHELD", 2)
    monkeypatch.setattr(Recovery, "_recover_owned", lambda *args: None)
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.0)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        finds = one if finder == "the same router" else two
        looks = finds.router.recovery.scan_now

        async def look_never() -> None:
            return

        send = one.publisher.send

        async def send_slowly(*args: Any, **more: Any) -> Any:
            await asyncio.sleep(0)
            sent = await send(*args, **more)
            await asyncio.sleep(0)
            return sent

        monkeypatch.setattr(one.publisher, "send", send_slowly)
        for each in (one, two):
            monkeypatch.setattr(each.router.recovery, "scan_now", look_never)
        await clients.stub("w", slots=100)
        for at in range(100):
            asked, gone = request(), f"w{at}"
            stub = await clients.stub(gone)
            await one.knows(gone)
            await two.knows(gone)
            seq = await clients.log.send_job(gone, asked)
            await eventually(lambda asked=asked: asked.id in one.unfinished and asked.id in two.unfinished)
            await lose(clients, stub)
            for each in (one, two):
                await eventually(lambda each=each, gone=gone: each.router.cluster.tracker.worker(gone) is None)
            attempt = InterruptedAttempt(asked.id, 1, gone, GATEWAY, seq)
            whole: list[bool] = []

            async def recover(attempt: InterruptedAttempt = attempt, whole: list[bool] = whole) -> None:
                await one.router.recovery._recover_of(GATEWAY, [attempt], "worker_lost")
                whole.append(True)

            await Cut(recover(), at)
            for _ in range(recovery.SCANS_UNHELD + 2):
                await looks()
            assert (await clients.placed(asked, 2))[0] == "w", at
            if whole:
                break
        assert at >= 8  # more if the router yields to others in between


@pytest.fixture
def registered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers fence the attempts of a worker they take for dead at once; here the removal of its key never arrives."""

    async def not_removed(self: RegistrationRemoval, name: str, revision: int) -> None:
        return

    monkeypatch.setattr(RegistrationRemoval, "_remove_key", not_removed)


@pytest.mark.usefixtures("registered_yet")
async def test_a_fenced_attempt_whose_worker_is_registered_yet_and_continues_ends_once(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    """Its connection was back right after the routers had given it up."""
    asked = request(id=new_request_id(), max_tokens=20)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        zombie = await on(clients, one, "w1", asked, connection="c1")
        await streamed(log, asked, answer(asked, 3))
        await clients.stub("w2")
        await one.knows("w2")
        one.router.cluster.removal.remove_connections(frozenset({"c1"}))
        worker, job = await clients.placed(asked, 2)
        assert (worker, ids(job.resume[0])) == ("w2", answer(asked, 3))
        await two.knows("w1", "w2")
        await eventually(lambda: two.unfinished == one.unfinished == {asked.id: (2, "w2")})
        await zombie.change(slots=9)
        await one.knows("w1")
        await log.publish_tokens(asked, 1, answer(asked))
        whole = done.Outcome(wire.pack_tokens(answer(asked)), "length")
        await zombie.finish(asked, 1, [whole])
        await eventually(lambda: one.unfinished == two.unfinished == {})
        await eventually(lambda: log.ends(asked))
        assert log.streamed(asked) == answer(asked, 3), "the rest comes from the record"
        (end,) = log.ends(asked)
        found = await read_timeline(log.bus, asked.id)
        assert [(stage.attempt, stage.worker) for stage in found.stages] == [(1, "w1"), (2, "w2")]
        assert found.done == end
        await lose(clients, zombie)
        await eventually(lambda: "w1" not in {each.worker for each in one.router.cluster.registrations()})
        assert len(await clients.work()) == 2


@pytest.mark.usefixtures("registered_yet")
async def test_a_fenced_attempt_whose_router_died_is_recovered_once_its_worker_is_given_up_again(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another router, which still has the worker's registration. The second fence is the first one."""
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    asked = request(max_tokens=20)
    async with routing(broker, pipeline) as one:
        stub = await on(clients, one, "w1", asked, connection="c1")
        async with routing(broker, pipeline) as two:
            await two.knows("w1")
            await streamed(log, asked, answer(asked, 3))
            await stub.stop()
            one.router.cluster.removal.remove_connections(frozenset({"c1"}))
            await eventually(lambda: one.waiting == [asked.id])
            await one.kill()
            await log.publish_tokens(asked, 1, [1] * 20)  # had been under way: void for all
            await clients.stub("w2")
            await two.knows("w1", "w2")
            assert two.unfinished == {asked.id: (1, "w1")}
            two.router.cluster.removal.remove_connections(frozenset({"c1"}))
            worker, job = await clients.placed(asked, 2)
            assert (worker, ids(job.resume[0])) == ("w2", answer(asked, 3))
            assert [item.attempt for item in log.items if item.choice == WHOLE_REQUEST] == [2]


# -- real workers -------------------------------------------------------------------------------------------------


async def test_a_broken_connection_is_noticed_long_before_the_lease_ends(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with (
        routing(broker, pipeline, sys_nats_url=broker.sys_url) as one,
        run_worker(broker, pipeline) as worker,
    ):
        await one.knows(worker.id)
        worker.engine.hold()
        asked = request(max_tokens=30)
        await clients.ask(asked)
        worker.engine.allow(1)
        await log.has_streamed(asked)
        await eventually(lambda: _echoed(one, asked))
        async with run_worker(broker, pipeline) as other:
            await one.knows(other.id)
            began = time.monotonic()
            worker.bus.closing = True
            await worker.bus.nc.close()
            end = await log.end(asked)
            assert time.monotonic() - began < 2.0
            assert (end.worker, end.attempt) == (other.id, 2)
            assert log.streamed(asked) == answer(asked)
        worker.engine.resume()


async def test_no_answer_suffers_when_workers_die_and_drain_under_load(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(routing(broker, pipeline, seed=i + 1)) for i in range(2)]
        workers: list[WorkerHarness] = []
        for _ in range(3):
            held = engine(max_running=4, speedup=3)
            workers.append(await stack.enter_async_context(run_worker(broker, pipeline, held)))
        for each in routers:
            await each.knows(*(worker.id for worker in workers))
        asked = [request([i, i % 3, 7], max_tokens=40 + i % 20, n=1 + i % 2, sampling=DRAWN) for i in range(24)]
        await clients.ask(*asked)
        await eventually(lambda: len({item.request for item in log.items}) >= 8)
        dead, drained = workers[0], workers[1]
        await dead.die()
        await log.remove_key(dead.id)
        await drained.session.drain(0.05)
        for each_asked in asked:
            end = await log.end(each_asked, 30)
            assert end.code == ""
            for choice in range(each_asked.n):
                expected = answer(each_asked, choice=choice)
                assert log.streamed(each_asked, choice) == expected
                assert ids(end.choices[choice].tokens) == expected
        assert sorted(event.request for event in log.done) == sorted(each.id for each in asked)
        assert max(event.attempt for event in log.done) >= 2
        await eventually(lambda: all(each.unfinished == {} for each in routers))
        await clients.acknowledged(24)
        await workers[2].frees_everything()


class Storm:
    """Two routers on a broker of their own, and what happens to them at once: a function of a seed, but for times."""

    def __init__(self, server: EmbeddedNats, bus: Bus, routers: list[Routing], seed: int) -> None:
        self._server = server
        self._routers = routers
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._storing: set[asyncio.Task[None]] = set()
        self._away = False
        self.clients = Clients(LogClient(bus))
        self.live: dict[str, Stub] = {}
        self.asked: list[GenerateRequest] = []
        for each in routers:
            self._store_late(each.publisher)

    def _store_late(self, publisher: Publisher) -> None:
        """As if the stream of jobs were slow, or refused half of them for a while."""
        send = publisher.send

        async def send_late(subject: str, *args: Any, **more: Any) -> "asyncio.Future[Ack]":
            if ".work." not in subject or self._rng.random() < 0.5:
                return await send(subject, *args, **more)
            stored: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()

            async def later() -> None:
                await asyncio.sleep(self._rng.uniform(0.05, 0.6))
                try:
                    stored.set_result(await (await send(subject, *args, **more)))
                except ServingError as error:
                    stored.set_exception(error)
                    stored.exception()

            task = asyncio.create_task(later())
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
            return stored

        publisher.send = send_late  # type: ignore[method-assign,assignment]

    async def act(self) -> None:
        acts = (
            self._ask,
            self._ask,
            self._ask,
            self._lose,
            self._flip,
            self._kill,
            self._crash,
            self._crash,
            self.join,
        )
        await self._rng.choice(acts)()

    async def join(self) -> None:
        name = f"w{next(self._numbers)}"
        self.live[name] = await patiently(lambda: self.clients.stub(name))

    async def _ask(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            asked = request(id=new_request_id())
            await patiently(functools.partial(self.clients.ask, asked))
            self.asked.append(asked)

    async def _lose(self) -> None:
        if len(self.live) < 2:
            await self.join()
            return
        stub = self.live.pop(self._rng.choice(sorted(self.live)))
        for each in self._routers:
            each.router.cluster.registry.remove(stub.id, EXPIRED)
        await patiently(stub.stop)
        await patiently(lambda: self.clients.log.remove_key(stub.id))

    async def _flip(self) -> None:
        """Each router takes the other for lost, until its next renewal."""
        for each in self._routers:
            membership = each.router.intake.membership
            membership._drop(list(membership.others), "its lease expired")

    async def _kill(self) -> None:
        if not self._away:
            self._away = True
            self._server.kill()
            await asyncio.sleep(self._rng.uniform(0.0, 0.4))
            await self._server.start()
            self._away = False

    async def _crash(self) -> None:
        await asyncio.gather(self._lose(), self._kill())

    async def finish(self) -> set[str]:
        """Live workers end what they have got; which requests have no end yet."""
        newest: dict[str, tuple[str, Job]] = {}
        for worker, job in await self.clients.work():
            newest[requests.decode(job.request).id] = worker, job
        left = {asked.id: asked for asked in self.asked}
        for name, (worker, job) in newest.items():
            if worker in self.live:
                await self.live[worker].finish(left.pop(name), job.attempt)
        return {*left}


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Do something although the broker may be away."""
    until = time.monotonic() + 30.0
    while True:
        try:
            return await work()
        except (NatsError, ServingError, TimeoutError, OSError):
            assert time.monotonic() < until
            await asyncio.sleep(0.03)


@pytest.mark.slow  # the cases that it has found are tests of their own above
@pytest.mark.parametrize("seed", range(8))
async def test_every_request_is_placed_although_brokers_workers_and_ownership_are_lost_at_once(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(recovery, "AGAIN_S", 0.5)
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.5)
    server = make_broker()
    await server.start()
    async with (
        opened(server, subjects) as bus,
        routing(server, subjects, name="a", max_attempts=100) as one,
        routing(server, subjects, name="b", max_attempts=100) as two,
    ):
        storm, rng = Storm(server, bus, [one, two], seed), random.Random(-seed)
        await storm.join()
        await storm.join()
        acts = []
        for _ in range(25):
            acts.append(asyncio.create_task(storm.act()))
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05, 0.2)))
        await asyncio.gather(*acts)
        await storm.join()
        until = time.monotonic() + 20.0
        while left := await patiently(storm.finish):
            assert time.monotonic() < until, left
            await asyncio.sleep(0.1)
        await eventually(lambda: one.unfinished == two.unfinished == {})
        await storm.clients.stop()


# -- recover itself -----------------------------------------------------------------------------------------------


async def test_fencing_leaves_out_attempts_without_a_job(log: LogClient, clients: Clients, one: Routing) -> None:
    asked, other = request(), request()
    seq = await log.send_job("w1", asked)
    await log.publish_tokens(asked, 1, [1, 2])
    orphans = [
        InterruptedAttempt(asked.id, 1, "w1", GATEWAY, seq),
        InterruptedAttempt(other.id, 1, "w1", GATEWAY, 0),  # not in the log yet
        InterruptedAttempt(other.id, 1, "w1", GATEWAY, seq),  # another request's job
    ]
    found = await fence(one.bus, one.publisher, "r", orphans)
    assert [orphan.request_id for orphan in found] == [asked.id]
    assert found[0].request == asked
    assert found[0].raw == wire.encode(asked)
    assert [ids(part.tokens) for part in found[0].progress] == [[1, 2]]
    again = await fence(one.bus, one.publisher, "r2", orphans[:1])  # by another replica
    assert [ids(part.tokens) for part in again[0].progress] == [[1, 2]]
    stream, subject = log.bus.subjects.stream("TOKENS"), log.bus.subjects.tokens(GATEWAY)
    token_items = [item async for entry in read(log.bus, stream, subject) for item in tokens.decode(entry.data).items]
    assert [(item.attempt, item.choice, item.tokens) for item in token_items[1:]] == [(2, WHOLE_REQUEST, b"")]


async def test_progress_is_read_although_the_gateways_clock_is_minutes_ahead(log: LogClient, one: Routing) -> None:
    created_ns = time.time_ns() + 600_000_000_000
    asked = request(created_ns=created_ns, deadline_ns=created_ns + 60_000_000_000)
    seq = await log.send_job("w1", asked)
    await log.publish_tokens(asked, 1, [1, 2])
    (found,) = await fence(one.bus, one.publisher, "r", [InterruptedAttempt(asked.id, 1, "w1", GATEWAY, seq)])
    assert [ids(part.tokens) for part in found.progress] == [[1, 2]]


async def test_one_unreadable_message_keeps_no_other_request_from_recovery(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    asked, odd = request(gateway="g9"), request()
    stub = await on(clients, one, "w1", asked)
    subjects = log.bus.subjects
    await log.bus.js.publish(subjects.tokens("g9"), b"\xc1 not tokens")
    load = jobs.load_header(5, 0, GATEWAY, odd.deadline_ns, "standard", 1)
    headers = {HEADER_MSG_ID: f"{odd.id}:1", HEADER_LOAD: load}
    await log.bus.js.publish(subjects.work("aggregated", "w1"), b"\xc1 not a job", headers=headers)
    await eventually(lambda: odd.id in one.unfinished)
    await lose(clients, stub)
    await clients.stub("w2")
    assert (await clients.placed(asked, 2))[0] == "w2"
    assert one.unfinished[odd.id] == (1, "w1")
