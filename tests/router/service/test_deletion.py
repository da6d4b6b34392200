"""A deleted request stays deleted, on a real nats-server: whoever stores part of it again, and whatever a broker that
restarts has of it."""

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.errors import NoRespondersError

from penstock.infra.bus import forget as erasing
from penstock.infra.bus import forget as forgetting
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.forget import AWAY_S, DeletedRequests, Ended, ReplicaAway, erase
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.operate.forget import forget
from penstock.router.service import deletion
from penstock.schemas import control, deletions, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.cluster_support import LocalCluster, three_nodes
from tests.infra.bus.support import eventually
from tests.penstock.log_tools.requests.support import assign, end
from tests.penstock.log_tools.traces import samples
from tests.router.support import Routing, routing
from tests.workers.support import dial

STREAMS = ("REQUESTS", "WORK", "DONE")


async def has_ended(bus: Bus) -> GenerateRequest:
    """A request with everything that the log has of one. Its end first, so that no router places it."""
    now_ns = time.time_ns()
    request = samples.request(id=new_request_id(now_ns), created_ns=now_ns, deadline_ns=now_ns + 600_000_000_000)
    await end(bus, request, 1, 2)
    await assign(bus, request)
    await accept_again(bus, request, request.id)
    return request


async def accept_again(bus: Bus, request: GenerateRequest, name: str) -> None:
    subject = bus.subjects.request(request.model, request.priority.value, request.id)
    await bus.js.publish(subject, wire.encode(request), headers={HEADER_MSG_ID: name})


async def stored(bus: Bus, request: GenerateRequest) -> list[str]:
    """The streams that have something of a request."""
    return [
        name
        for name in STREAMS
        async for entry in read(bus, bus.subjects.stream(name), f"{bus.subjects.namespace}.>")
        if entry.headers[HEADER_MSG_ID].startswith(request.id)
    ]


async def delete(bus: Bus, request: GenerateRequest) -> str:
    """Ask as a gateway does; again, while the router's subscription is on its way to the broker."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(NoRespondersError):
                reply = await bus.nc.request(bus.subjects.erase, request.id.encode(), timeout=20)
                return control.decode_ok(reply.data).error
            await asyncio.sleep(0.02)


async def gone(bus: Bus, *requests: GenerateRequest) -> None:
    async def nothing() -> bool:
        return not [name for each in requests for name in await stored(bus, each)]

    await eventually(nothing)


async def publish_end_again(bus: Bus, request: GenerateRequest) -> None:
    """As a worker does that never read its acknowledgement, later than the broker remembers message ids."""
    before = await bus.js.stream_info(bus.subjects.stream("DONE"))
    subject = bus.subjects.done(request.tenant, request.model, request.id)
    headers = {HEADER_MSG_ID: f"{request.id}:later", "Nats-Expected-Last-Subject-Sequence": "0"}
    ack = await bus.js.publish(subject, wire.encode(request), headers=headers)
    assert ack.seq > before.state.last_seq, "the broker takes it, since its subject is empty"


async def looked(*routers: Routing) -> None:
    """They have looked for all deleted requests since their start, and look for single messages from now on."""
    await eventually(lambda: all(each.router.deletion.clean_server for each in routers))


@pytest.fixture
async def bus(broker: EmbeddedNats, pipeline: Subjects) -> Any:
    async with dial(broker, pipeline) as bus:
        yield bus


async def test_a_terminal_event_that_a_worker_stores_again_after_the_deletion_is_erased(
    bus: Bus, broker: EmbeddedNats, one: Routing
) -> None:
    async with routing(broker, bus.subjects, name="two") as two:
        await looked(one, two)
        request, other = await has_ended(bus), await has_ended(bus)
        assert await delete(bus, request) == ""
        assert await stored(bus, request) == []
        await publish_end_again(bus, request)
        await gone(bus, request)
        assert await stored(bus, other) == list(STREAMS)


async def test_a_job_and_a_request_that_are_stored_again_are_erased_and_not_run(bus: Bus, one: Routing) -> None:
    await looked(one)
    request = await has_ended(bus)
    assert await delete(bus, request) == ""
    await accept_again(bus, request, f"{request.id}:later")
    await assign(bus, request, attempt=2)
    await gone(bus, request)
    assert request.id not in one.unfinished
    assert one.waiting == []


async def test_it_is_erased_by_a_router_that_starts_when_the_one_that_deleted_it_is_gone(
    bus: Bus, broker: EmbeddedNats
) -> None:
    async with routing(broker, bus.subjects):
        request = await has_ended(bus)
        assert await delete(bus, request) == ""
    await publish_end_again(bus, request)
    async with routing(broker, bus.subjects, name="two"):
        await gone(bus, request)


async def test_it_is_erased_by_a_router_that_starts_though_its_snapshot_is_younger_than_what_came_back(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log before the snapshot is not read again."""
    async with routing(broker, bus.subjects) as first:
        await looked(first)
        request = await has_ended(bus)
        assert await delete(bus, request) == ""
        monkeypatch.setattr(first.router.cluster, "_came_back", lambda *args: None)  # it dies before it gets to it
        await publish_end_again(bus, request)
        end_of_done = (await bus.js.stream_info(bus.subjects.stream("DONE"))).state.last_seq
        await eventually(lambda: first.router.cluster.positions().done >= end_of_done)
        await first.router.cluster.save()
    async with routing(broker, bus.subjects):
        await gone(bus, request)


async def test_what_penstock_forget_deleted_stays_deleted(bus: Bus, one: Routing) -> None:
    await looked(one)
    requests = [await has_ended(bus) for _ in range(2)]
    subjects = [bus.subjects.done(each.tenant, each.model, each.id) for each in requests]
    ended = [Ended(each.id, at, time.time_ns(), False) for each, at in zip(requests, subjects, strict=True)]
    assert (await forget(bus, ended)).messages == 6
    for request in requests:
        await publish_end_again(bus, request)
    await gone(bus, *requests)


async def test_an_erasure_that_fails_once_the_deletion_is_noted_is_completed(
    bus: Bus, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "ERASE_AGAIN_S", 0.1)
    eraser = one.router.deletion.eraser
    really_erase, failures = eraser.erase, 0

    async def fail_twice(stream: str, seq: int, *, everywhere: bool) -> bool:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise ServingError(Code.broker_unavailable, "the broker does not answer")
        return await really_erase(stream, seq, everywhere=everywhere)

    monkeypatch.setattr(eraser, "erase", fail_twice)
    request = await has_ended(bus)
    assert "does not answer" in await delete(bus, request)
    await gone(bus, request)


async def test_what_is_left_while_a_replica_is_away_is_erased_later_at_the_latest_after_some_minutes(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another router than the one that was asked: the time runs from the note."""
    monkeypatch.setattr(deletion, "ERASE_AGAIN_S", 0.05)
    asked = []

    async def away(stream: str, seq: int, *, everywhere: bool) -> bool:
        asked.append(everywhere)
        if everywhere:
            raise ReplicaAway(stream, ["node-2"])
        return await erase(bus, stream, seq)

    async with routing(broker, bus.subjects) as first:
        monkeypatch.setattr(first.router.deletion.eraser, "erase", away)
        request = await has_ended(bus)
        assert await delete(bus, request) == "", "nobody is shown it any more"
        await eventually(lambda: len(asked) > 3)
        assert await stored(bus, request) == list(STREAMS)
    assert all(asked)
    async with routing(broker, bus.subjects, name="two") as second:
        monkeypatch.setattr(second.router.deletion.eraser, "erase", away)
        now_ns = second.bus.clock.now_ns
        later_ns = int(AWAY_S * 1e9)
        monkeypatch.setattr(second.bus.clock, "now_ns", lambda: now_ns() + later_ns)
        await gone(bus, request)


async def test_nothing_is_deleted_that_could_not_be_noted(bus: Bus, one: Routing) -> None:
    request = await has_ended(bus)
    config = (await bus.js.stream_info(f"KV_{bus.subjects.bucket('deleted')}")).config
    config.max_bytes = 1
    await bus.js.update_stream(config)
    assert "did not store the note" in await delete(bus, request)
    assert await stored(bus, request) == list(STREAMS)


async def test_without_the_bucket_for_notes_nothing_is_deleted(bus: Bus, broker: EmbeddedNats) -> None:
    await bus.js.delete_stream(f"KV_{bus.subjects.bucket('deleted')}")
    async with routing(broker, bus.subjects):
        request = await has_ended(bus)
        assert "run `penstock streams apply`" in await delete(bus, request)
        assert await stored(bus, request) == list(STREAMS)


async def test_a_bucket_that_is_made_later_is_used(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "FOLLOW_AGAIN_S", 0.05)
    await bus.js.delete_stream(f"KV_{bus.subjects.bucket('deleted')}")
    async with routing(broker, bus.subjects) as one:
        await apply(bus.nc, topology(bus.subjects))
        await looked(one)
        request = await has_ended(bus)
        assert await delete(bus, request) == ""
        await publish_end_again(bus, request)
        await gone(bus, request)


async def test_what_should_have_expired_is_not_known_and_leaves_the_bucket(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of a server, which may forget to remove what expires."""
    bucket = bus.subjects.bucket("deleted")
    deleted = DeletedRequests(bus)
    await deleted.start(bus.tasks)
    await bus.js.publish(f"$KV.{bucket}.old", wire.encode(deletions.Deletion("x")))
    await eventually(lambda: "old" in deleted)
    assert [request for request, _ in await deleted.read()] == ["old"]
    hour_ns = 3_600_000_000_000
    now_ns = bus.clock.now_ns
    monkeypatch.setattr(bus.clock, "now_ns", lambda: now_ns() + hour_ns)
    assert "old" not in deleted
    assert await deleted.read() == []

    async def empty() -> bool:
        return not (await bus.js.stream_info(f"KV_{bucket}")).state.messages

    await eventually(empty)
    await deleted.stop()


def copy(broker: EmbeddedNats, subjects: Subjects, there: Path, *, back: bool = False) -> None:
    """The files of the streams with requests, as they are on the disk of a broker that does not run."""
    for name in STREAMS:
        [folder] = broker.data_dir.rglob(f"streams/{subjects.stream(name)}")
        source, target = (there / name, folder) if back else (folder, there / name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


@pytest.mark.timeout(120)
async def test_what_a_broker_has_again_after_its_restart_is_erased_and_not_run(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, tmp_path: Path
) -> None:
    """With a full disk it confirms deletions that it cannot write. What is stored before is there."""
    broker = make_broker()
    await broker.start()
    async with dial(broker, subjects) as bus:
        await apply(bus.nc, topology(subjects))
        requests = [await has_ended(bus) for _ in range(3)]
        kept = await has_ended(bus)
        await broker.stop()
        await asyncio.to_thread(copy, broker, subjects, tmp_path)
        await broker.start()
        await eventually(lambda: bus.connected)
        async with routing(broker, subjects) as one:
            for request in requests:
                assert await delete(bus, request) == ""
            broker.kill()
            await asyncio.to_thread(copy, broker, subjects, tmp_path, back=True)
            await broker.start()
            await eventually(lambda: bus.connected)
            await gone(bus, *requests)
            assert await stored(bus, kept) == list(STREAMS)
            assert not {each.id for each in requests} & {*one.unfinished, *one.waiting}


def servers_with(cluster: LocalCluster, words: bytes) -> list[int]:
    """The nodes that have these words in a file of the streams with requests."""
    return [
        index
        for index, node in enumerate(cluster.nodes)
        for name in STREAMS
        for block in node.data_dir.rglob(f"streams/{cluster.subjects.stream(name)}/msgs/*.blk")
        if words in block.read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_replica_that_was_away_keeps_nothing_of_a_deleted_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "ERASE_AGAIN_S", 0.2)
    monkeypatch.setattr(erasing, "AGAIN_S", 0.2)
    async with three_nodes(tmp_path) as cluster:
        await apply_at(cluster.url(), cluster.subjects, replicas=3)
        done = cluster.subjects.stream("DONE")
        leader, (away, _) = await cluster.placement(done)
        async with dial(cluster.nodes[leader], cluster.subjects) as bus:
            await has_ended(bus)  # what was before all that is left in a stream would leave its file
            request = await has_ended(bus)
            words = request.id.encode()
            await eventually(lambda: servers_with(cluster, words) == [0, 0, 0, 1, 1, 1, 2, 2, 2])
            async with routing(cluster.nodes[leader], cluster.subjects):
                cluster.kill(away)

                async def deleted() -> bool:
                    return not await delete(bus, request)

                await eventually(deleted)  # it may have led the bucket of the notes
                for _ in range(24):  # so much that the leader takes a snapshot, and its log begins behind the deletion
                    subject = cluster.subjects.done("other", "model", new_request_id(time.time_ns()))
                    await bus.js.publish(subject, random.randbytes(900_000))
                await cluster.restart(away)
                async with asyncio.timeout(60):
                    while await asyncio.to_thread(servers_with, cluster, words):  # noqa: ASYNC110 - other processes
                        await asyncio.sleep(0.2)
