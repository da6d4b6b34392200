"""Requests with several stages, on a real nats-server: placed, moved on, and mended when one of their workers dies."""

import time
from typing import Any

import msgspec
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.placement import decide
from penstock.router.recovery import recovery
from penstock.router.state import cluster_state
from penstock.router.state.target_loads import ExpectedLoad, RoutingTarget
from penstock.schemas import jobs, wire
from penstock.schemas.errors import Code
from penstock.schemas.jobs import LoadHeader, Stage
from penstock.schemas.requests import GenerateRequest, Media, Priority
from penstock.schemas.subjects import Subjects
from penstock.schemas.transfer import Memory
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, Stub, endpoint, routing
from tests.workers.support import LogClient, answer, ids, request

LONG = list(range(1, 402))  # 100 full blocks, and more than a decode worker computes itself
EMBEDS = endpoint("h", embeds=Memory(0, 100, 10))


async def fleet(clients: Clients, *routers: Routing, **roles: str) -> dict[str, Stub]:
    """Registered workers by name; ``roles``: name = role."""
    stubs = {name: await clients.stub(name, role=role, transfer=EMBEDS) for name, role in roles.items()}
    for router in routers:
        await router.knows(*roles)
    return stubs


async def lose(clients: Clients, stub: Stub) -> None:
    await stub.stop()
    await clients.log.remove_key(stub.id)


def load(router: Routing, worker: str, rank: int = 0) -> tuple[int, int]:
    """Requests and full blocks; a router that did not place a request counts its partly filled block, too."""
    router.fold()
    found = router.router.cluster.tracker.load((worker, rank), time.time_ns())
    return found.requests, found.active_blocks - found.active_blocks % 100


def echoed(router: Routing, asked: GenerateRequest, attempt: int = 1) -> bool:
    router.fold()
    entry = router.router.cluster.tracker.request(asked.id)
    return entry is not None and entry.echoed and entry.attempt == attempt


def picture(**options: Any) -> GenerateRequest:
    return request(LONG, media=(Media(b"i" * 32, "image/png", 1000, 2, 4),), **options)


# -- placing ------------------------------------------------------------------------------------------------------


async def test_a_long_prompt_is_split_and_counts_at_both_workers_in_every_router(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, one: Routing
) -> None:
    async with routing(broker, pipeline) as two:
        stubs = await fleet(clients, one, two, p1="prefill", d2="decode")
        asked = request(LONG)
        await clients.ask(asked)
        worker, job = await clients.placed(asked)
        route = (Stage("prefill", "p1"), Stage("decode", "d2"))
        assert (worker, job.route, job.decision.route, job.decision.chosen) == ("p1", route[1:], route, "p1")
        assert job.decision.how.startswith("split: 100 of 100 blocks to compute")
        assert [(c.worker, c.role) for c in job.decision.candidates] == [("p1", "prefill"), ("d2", "decode")]
        expected = LoadHeader(401, 0, asked.gateway, asked.deadline_ns, "standard", 1, route)
        assert await clients.header(asked) == expected
        await clients.acknowledged(1)
        for each in (one, two):
            await eventually(lambda each=each: echoed(each, asked))  # type: ignore[misc]
            assert [load(each, name) for name in ("p1", "d2")] == [(1, 100), (1, 100)]
        seq = await stubs["p1"].hand_off(job, (wire.pack_tokens([5]),))
        for each in (one, two):
            await eventually(lambda each=each: each.unfinished == {asked.id: (1, "d2")})  # type: ignore[misc]
            assert [load(each, name) for name in ("p1", "d2")] == [(0, 0), (1, 100)]
            entry = each.router.cluster.tracker.request(asked.id)
            assert entry is not None
            assert (entry.seq, entry.later) == (seq, ())
            assert each.router.cluster.tracker.load(("d2", 0), 0).prefill_tokens == 0, "it is handed what was computed"
        await stubs["d2"].finish(asked)
        await eventually(lambda: one.unfinished == two.unfinished == {})
        assert load(one, "d2") == load(two, "d2") == (0, 0)


async def test_short_and_known_prompts_stay_on_a_decode_worker(clients: Clients, one: Routing) -> None:
    stubs = await fleet(clients, one, p="prefill", d="decode")
    short, long = request(LONG[:200]), request(LONG)
    await clients.ask(short)
    worker, job = await clients.placed(short)
    assert (worker, job.route, job.decision.route) == ("d", (), ())
    assert job.decision.how == "local: 200 tokens to compute, limit 256"
    assert (await clients.header(short)).route == ()
    kv_seq = await stubs["d"].store(long.digests[: 16 * 80])
    await eventually(lambda: one.router.cluster.positions()[0] >= kv_seq)
    await clients.ask(long)
    worker, job = await clients.placed(long)
    assert (worker, job.decision.how) == ("d", "local: 81 tokens to compute, limit 256")
    assert (await clients.header(long)).cached_tokens == 320
    routes = one.router.metrics.routes
    assert routes.labels("local", "no").value == 2
    assert routes.labels("split", "no").value == 0


async def test_an_empty_pool_is_replaced_by_the_other_and_a_full_one_is_waited_for(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    stubs = await fleet(clients, one, p="prefill")
    first, second, third = request(LONG), request(LONG), request(LONG)
    await clients.ask(first)
    worker, job = await clients.placed(first)
    assert (worker, job.route, job.decision.how) == ("p", (), "no decode worker")
    await fleet(clients, one, d="decode")
    await stubs["p"].change(slots=1)
    await eventually(lambda: one.router.cluster.tracker.capacity("p") == 0)
    await clients.ask(second)
    await eventually(lambda: one.waiting == [second.id])
    short = request(LONG[:50])
    await clients.ask(short)
    assert (await clients.placed(short))[0] == "d", "what needs no prefill worker does not wait for one"
    await stubs["p"].finish(first)
    assert [stage.worker for stage in (await clients.placed(second))[1].decision.route] == ["p", "d"]
    await lose(clients, stubs["p"])
    await clients.ask(third)
    worker, job = await clients.placed(third)
    assert (worker, job.decision.how) == ("d", "no prefill worker")


async def test_without_cache_events_a_prompt_is_guessed_to_be_at_both_its_workers(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline, kv_events=False) as one:
        stubs = await fleet(clients, one, p1="prefill", p2="prefill", d1="decode", d2="decode")
        asked, again, longer = request(LONG), request(LONG), request([*LONG, *range(500, 900)])
        await clients.ask(asked)
        first = [stage.worker for stage in (await clients.placed(asked))[1].decision.route]
        await clients.ask(again)
        worker, job = await clients.placed(again)
        assert (worker, job.decision.how) == (first[1], "local: 1 tokens to compute, limit 256")
        for each in (asked, again):
            await stubs["p1"].finish(each)
        await eventually(lambda: one.unfinished == {})
        await clients.ask(longer)
        _, job = await clients.placed(longer)
        assert [stage.worker for stage in job.decision.route] == first
        assert job.decision.how.startswith("split: 100 of 200 blocks")
        assert job.decision.candidates[0].overlap_blocks == 100


async def test_decisions_and_loads_name_the_rank_that_holds_the_prompt(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    """Four attention data-parallel ranks, each with a cache of its own: learnt from a dump and from events."""
    prompts = [request([50 + rank] * 41) for rank in range(4)]
    stub = await clients.stub("w", dp_size=4, slots=4)
    for rank in (0, 2):
        await stub.store(prompts[rank].digests, rank=rank)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        index = [each.router.cluster.caches.index for each in (one, two)]
        await eventually(lambda: all(i is not None and i.held(("w", 2)) == 10 for i in index))
        for rank in (1, 3):
            await stub.store(prompts[rank].digests, rank=rank)
        await eventually(lambda: all(i is not None and i.held(("w", 3)) == 10 for i in index))
        assert stub.dumps == 2, "one for each router, with all ranks"
        for rank in (3, 2, 1, 0):
            asked = request([50 + rank] * 41)
            await clients.ask(asked)
            worker, job = await clients.placed(asked)
            assert (worker, job.decision.rank, job.decision.candidates[0].rank) == ("w", rank, rank)
            assert job.decision.candidates[0].overlap_blocks == 10
            assert (await clients.header(asked)).route == ((Stage("aggregated", "w", rank),) if rank else ())
        for each in (one, two):
            await eventually(lambda each=each: len(each.unfinished) == 4)  # type: ignore[misc]
            assert [load(each, "w", rank)[0] for rank in range(4)] == [1, 1, 1, 1]


async def test_ranks_of_a_split_request_are_in_its_route(clients: Clients, one: Routing) -> None:
    prefill = await clients.stub("p", role="prefill", transfer=EMBEDS, dp_size=2)
    await clients.stub("d", role="decode", transfer=EMBEDS, dp_size=2)
    await one.knows("p", "d")
    asked = request(LONG)
    kv_seq = await prefill.store(asked.digests[:160], rank=1)
    await eventually(lambda: one.router.cluster.positions()[0] >= kv_seq)
    await clients.ask(asked)
    _, job = await clients.placed(asked)
    source, target = job.decision.route
    assert source == Stage("prefill", "p", 1)
    assert (job.decision.rank, (await clients.header(asked)).route) == (1, (source, target))
    await eventually(lambda: echoed(one, asked))
    assert (load(one, "p", 1), load(one, "p", 0)) == ((1, 100), (0, 0))
    assert load(one, "d", target.rank) == (1, 100)


# -- media --------------------------------------------------------------------------------------------------------


async def test_an_image_begins_at_an_encode_worker_and_moves_on(clients: Clients, one: Routing) -> None:
    stubs = await fleet(clients, one, e1="encode", e2="encode", p="prefill", d="decode")
    asked = picture()
    members = [RoutingTarget((name, 0), stubs[name].registration, ExpectedLoad()) for name in ("e1", "e2")]
    home = decide.by_preference(asked.media[0].digest, members)[0].id[0]
    await clients.ask(asked)
    worker, job = await clients.placed(asked)
    assert (worker, [stage.worker for stage in job.route]) == (home, ["p", "d"])
    assert [load(one, name) for name in (home, "p", "d")] == [(1, 0), (1, 100), (1, 100)]
    await stubs[home].hand_off(job)
    await eventually(lambda: one.unfinished == {asked.id: (1, "p")})
    assert [load(one, name) for name in (home, "p", "d")] == [(0, 0), (1, 100), (1, 100)]
    await stubs["p"].hand_off(_onward(job))
    await eventually(lambda: one.unfinished == {asked.id: (1, "d")})
    assert [load(one, name) for name in (home, "p", "d")] == [(0, 0), (0, 0), (1, 100)]
    again, text = picture(), request(LONG)
    await clients.ask(again, text)
    assert (await clients.placed(again))[0] == home, "it may have the embeddings still"
    assert (await clients.placed(text))[0] == "p"
    assert one.router.metrics.routes.labels("split", "yes").value == 2


def _onward(job: jobs.Job) -> jobs.Job:
    return jobs.Job(job.request, job.attempt, job.decision, route=job.route[1:])


async def test_an_image_that_no_worker_accepts_is_refused_with_the_reason(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    await clients.stub("a")
    await one.knows("a")
    asked = picture()
    await clients.ask(asked)
    end = await log.end(asked)
    assert end.code == Code.unsupported
    assert "start an encode worker" in end.message
    await clients.stub("v", vision=True)
    await one.knows("v")
    again = picture()
    await clients.ask(again)
    worker, job = await clients.placed(again)
    assert (worker, job.route) == ("v", ())


async def test_an_image_waits_for_the_encode_worker_of_a_fleet_that_is_built_for_one(
    clients: Clients, one: Routing
) -> None:
    await fleet(clients, one, a="aggregated")
    asked, text = picture(), request(LONG)
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])
    await clients.ask(text)
    assert (await clients.placed(text))[0] == "a"
    await fleet(clients, one, e="encode")
    worker, job = await clients.placed(asked)
    assert (worker, job.route) == ("e", (Stage("aggregated", "a"),))


# -- what dead workers leave behind -------------------------------------------------------------------------------


@pytest.fixture
def only_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sweep for orphans."""
    monkeypatch.setattr(recovery, "SCAN_S", 3600.0)


@pytest.mark.usefixtures("only_at_once")
async def test_a_decode_worker_that_dies_while_its_prefill_runs_costs_one_attempt(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline) as one, routing(broker, pipeline, seed=2) as two:
        stubs = await fleet(clients, one, two, p="prefill", d1="decode")
        asked = request(LONG)
        await clients.ask(asked)
        await clients.placed(asked)
        for each in (one, two):
            await eventually(lambda each=each: echoed(each, asked))  # type: ignore[misc]
        await fleet(clients, one, two, d2="decode")
        await lose(clients, stubs["d1"])
        worker, job = await clients.placed(asked, 2)
        assert (worker, job.decision.reason) == ("p", "worker_lost")
        assert [stage.worker for stage in job.decision.route] == ["p", "d2"]
        await eventually(lambda: echoed(one, asked, 2) and echoed(two, asked, 2))
        assert await clients.revoked() == [("p", jobs.Revoke(asked.id, 1))], "once, by whichever router"
        assert [load(one, name)[0] for name in ("p", "d1", "d2")] == [1, 0, 1]
        (fence,) = [item for item in log.items if item.attempt == 2]
        assert fence.request == asked.id


@pytest.mark.usefixtures("only_at_once")
async def test_a_prefill_worker_that_dies_after_its_handoff_does_not_matter_to_the_routers(
    clients: Clients, one: Routing
) -> None:
    stubs = await fleet(clients, one, p="prefill", d="decode")
    asked = request(LONG)
    await clients.ask(asked)
    _, job = await clients.placed(asked)
    await stubs["p"].hand_off(job)
    await eventually(lambda: one.unfinished == {asked.id: (1, "d")})
    await lose(clients, stubs["p"])
    await eventually(lambda: len(one.router.cluster.tracker.workers()) == 1)
    other = request(LONG)
    await clients.ask(other)
    assert (await clients.placed(other))[1].decision.how == "no prefill worker"
    assert one.unfinished[asked.id] == (1, "d")
    assert await clients.revoked() == []


@pytest.mark.usefixtures("only_at_once")
async def test_a_handoff_to_a_worker_that_left_is_recovered_at_once(
    log: LogClient, clients: Clients, one: Routing
) -> None:
    """The router did not know of the attempt when the worker died: it was another router's."""
    stubs = await fleet(clients, one, p="prefill", d1="decode", d2="decode")
    asked = request(LONG)
    decision = jobs.Decision("kv", "p", "another", time.time_ns())
    job = jobs.Job(msgspec.Raw(wire.encode(asked)), 1, decision, route=(Stage("decode", "d1"),))
    await lose(clients, stubs["d1"])
    await eventually(lambda: len(one.router.cluster.tracker.workers()) == 2)
    await log.publish_tokens(asked, 1, answer(asked, 1))
    await stubs["p"].hand_off(job, (wire.pack_tokens(answer(asked, 1)),))
    _, again = await clients.placed(asked, 2)
    assert [stage.worker for stage in again.decision.route] == ["p", "d2"]
    assert again.decision.reason == "worker_lost"
    assert [ids(part) for part in again.resume] == [answer(asked, 1)], "read from the log behind the fence"
    assert bytes(again.request) == wire.encode(asked)
    await eventually(lambda: one.unfinished[asked.id] == (2, "p"))


async def test_a_router_that_starts_finds_what_was_handed_to_a_dead_worker(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "SETTLE_S", 0.3)
    monkeypatch.setattr(recovery, "SCAN_S", 0.1)
    asked, kept = request(LONG), request([7, *LONG])
    async with routing(broker, pipeline) as one:
        stubs = await fleet(clients, one, p="prefill", d1="decode")
        await clients.ask(asked)
        _, job = await clients.placed(asked)
        await stubs["p"].hand_off(job)
        await eventually(lambda: one.unfinished == {asked.id: (1, "d1")})
        await fleet(clients, one, d2="decode")
        await stubs["d1"].change(state="draining")
        await eventually(lambda: one.router.cluster.tracker.capacity("d1") == 0)
        await clients.ask(kept)
        await clients.placed(kept)
        await eventually(lambda: echoed(one, kept))
        await one.router.cluster.save()
        await one.kill()
    await lose(clients, stubs["d1"])
    async with routing(broker, pipeline) as two:
        _, again = await clients.placed(asked, 2)
        assert [stage.worker for stage in again.decision.route] == ["p", "d2"]
        assert two.unfinished == {asked.id: (2, "p"), kept.id: (1, "p")}
        assert [load(two, name)[0] for name in ("p", "d2")] == [2, 2]
        assert await clients.revoked() == []


# -- waiting ------------------------------------------------------------------------------------------------------


async def test_what_waits_for_one_pool_does_not_hold_up_what_waits_for_another(clients: Clients, one: Routing) -> None:
    stubs = await fleet(clients, one, p="prefill", d="decode")
    await stubs["p"].change(slots=1)
    await stubs["d"].change(slots=2)
    tracker = one.router.cluster.tracker
    await eventually(lambda: (tracker.capacity("p"), tracker.capacity("d")) == (1, 2))
    running, other = request(LONG), request(LONG[:9])
    for asked in (running, other):
        await clients.ask(asked)
        await clients.placed(asked)
    long, image, short = request([2, *LONG]), picture(), request(LONG[:9])
    for asked in (long, image, short):
        await clients.ask(asked)
        await eventually(lambda asked=asked: asked.id in one.waiting)  # type: ignore[misc]
    await stubs["d"].finish(other)
    assert (await clients.placed(short))[0] == "d", "only the prefill worker and an encode worker are missing"
    assert set(one.waiting) == {long.id, image.id}


async def test_a_freed_slot_goes_to_the_next_of_all_held_requests(clients: Clients, one: Routing) -> None:
    stub = await clients.stub("w", slots=1, vision=True)
    await one.knows("w")
    first = request()
    await clients.ask(first)
    await clients.placed(first)
    batch, standard, interactive = Priority.batch, Priority.standard, Priority.interactive
    later = [
        request(priority=batch),
        picture(priority=standard),
        request(LONG, priority=interactive),
        request(priority=standard),
        request(LONG, priority=batch),
    ]
    for asked in later:
        await clients.ask(asked)
        await eventually(lambda asked=asked: asked.id in one.waiting)  # type: ignore[misc]
    expected = [first, later[2], later[1], later[3], later[0], later[4]]
    for asked in expected:
        await clients.placed(asked)
        await stub.finish(asked)
    assert await clients.order() == [asked.id for asked in expected]
