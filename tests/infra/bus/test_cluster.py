"""Reading, following and staying connected on a cluster of three nodes, one of which lags, hangs or dies."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock.infra.bus import direct_get
from penstock.infra.bus import forget as erasing
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import Entry, get, get_last, read
from penstock.infra.bus.forget import Eraser, ReplicaAway, erase, replicas_away
from penstock.infra.bus.log_tail import LogTail
from penstock.launch.nats import apply_at
from penstock.schemas.errors import ServingError
from tests.cluster_support import NODES, LocalCluster
from tests.conftest import outside
from tests.infra.bus.support import eventually

ROUNDS = 40
READERS = 8
COUNT = 500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("cluster"))
    outside(made.start())
    try:
        outside(apply_at(made.url(), made.subjects, replicas=NODES))
        yield made
    finally:
        outside(made.stop())


@contextlib.asynccontextmanager
async def on_nodes(cluster: LocalCluster, *nodes: int, **options: Any) -> AsyncIterator[Bus]:
    ended: list[int] = []
    bus = await connect(
        cluster.url(nodes=nodes),
        role="operator",
        name="test",
        end_process=ended.append,  # type: ignore[arg-type]  # os._exit would end the test run
        **options,
    )
    try:
        yield bus
    finally:
        await bus.close()
    assert not ended


class Raw:
    """Direct gets sent to a node while it is stopped, and what it says when it goes on."""

    def __init__(self, bus: Bus, stream: str, subject: str) -> None:
        self._bus, self._stream, self._subject = bus, stream, subject
        self.answers: list[int] = []

    async def ask(self) -> None:
        inbox = self._bus.nc.new_inbox()
        await self._bus.nc.subscribe(inbox, cb=self._on_answer)
        query = json.dumps({"last_by_subj": self._subject}).encode()
        for _ in range(READERS):
            await self._bus.nc.publish(f"$JS.API.DIRECT.GET.{self._stream}", query, reply=inbox)

    async def answered(self) -> None:
        await eventually(lambda: len(self.answers) == READERS)

    async def _on_answer(self, message: Any) -> None:
        self.answers.append(int((message.headers or {}).get("Nats-Sequence", "0")))


async def test_what_a_lagging_follower_does_not_have_yet_is_neither_missing_nor_the_end(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = {"ping_interval": 60}  # the reader stays at the follower, however long it is stopped
    monkeypatch.setattr(direct_get, "ASK_S", 30.0)
    monkeypatch.setattr(direct_get, "STALL_S", 30.0)
    stream = cluster.subjects.stream("TOKENS")
    leader, followers = await cluster.placement(stream)
    stale = 0
    async with on_nodes(cluster, leader) as writer, on_nodes(cluster, followers[0], **patient) as bus:
        for number in range(ROUNDS):
            subject = cluster.subjects.tokens(f"lag{number}")
            raw = Raw(bus, stream, subject)
            cluster.freeze(followers[0])
            try:
                for _ in range(COUNT // 10):
                    await asyncio.gather(*(writer.js.publish(subject, bytes(2000)) for _ in range(10)))
                await raw.ask()
                found = [asyncio.create_task(get_last(bus, stream, subject)) for _ in range(READERS)]
                whole = [asyncio.create_task(all_of(bus, stream, subject)) for _ in range(READERS)]
                await asyncio.sleep(0.05)  # the questions are on the wire
            finally:
                cluster.thaw(followers[0])
            assert None not in await asyncio.gather(*found)
            assert {len(entries) for entries in await asyncio.gather(*whole)} == {COUNT}
            await raw.answered()
            last = (await all_of(bus, stream, subject))[-1].seq
            stale += sum(answer != last for answer in raw.answers)
            if stale:
                break
    assert stale, "the follower was never behind: nothing was tried"


async def all_of(bus: Bus, stream: str, subject: str) -> list[Entry]:
    return [entry async for entry in read(bus, stream, subject)]


async def test_what_is_not_there_is_not_found_and_the_leader_s_answer_reads_like_a_replica_s(
    cluster: LocalCluster,
) -> None:
    stream, subject = cluster.subjects.stream("TOKENS"), cluster.subjects.tokens("one")
    async with on_nodes(cluster, 0) as bus:
        assert bus.clustered
        assert await get_last(bus, stream, subject) is None
        headers = {"Some-Header": "a: b", "Nats-Msg-Id": "x"}
        ack = await bus.js.publish(subject, b"\x00\xff", headers=headers)
        assert await get(bus, stream, ack.seq + 1000) is None
        for entry in (await get_last(bus, stream, subject, newest=True), await get(bus, stream, ack.seq)):
            assert entry is not None
            assert (entry.subject, entry.seq, entry.data) == (subject, ack.seq, b"\x00\xff")
            assert entry.headers.items() >= headers.items()
            assert abs(entry.time_ns - time.time_ns()) < 60e9


async def test_a_tail_finds_what_was_stored_and_never_republished(cluster: LocalCluster) -> None:
    stream, subject = cluster.subjects.stream("TOKENS"), cluster.subjects.tokens("silent")
    seen: list[bytes] = []
    async with on_nodes(cluster, 0) as bus:
        tail = LogTail(bus, stream, subject, lambda entry: seen.append(entry.data), live="ps.live.nobody")
        await tail.start()
        await bus.js.publish(subject, b"last")
        await eventually(lambda: seen == [b"last"])
        await tail.stop()


async def test_a_client_that_was_given_one_node_of_the_cluster_continues_at_another(cluster: LocalCluster) -> None:
    async with on_nodes(cluster, 0) as bus:
        cluster.kill(0)
        try:
            await eventually(lambda: bus.reconnects == 1 and bus.connected)
            assert bus.nc.connected_url.port in {cluster.nodes[1].port, cluster.nodes[2].port}
        finally:
            await cluster.restart(0)


async def test_a_hanging_node_is_left_before_an_election_can_be_over(cluster: LocalCluster) -> None:
    async with on_nodes(cluster, 0, 1, 2) as bus:
        stuck = next(i for i, node in enumerate(cluster.nodes) if node.port == bus.nc.connected_url.port)
        cluster.freeze(stuck)
        began = time.monotonic()
        try:
            await eventually(lambda: bus.reconnects and bus.connected)
            took = time.monotonic() - began
        finally:
            cluster.thaw(stuck)
    assert took < 10.0  # 2 to 3 s on an idle machine; 10 to 15 s with the pings of a single server


async def all_there(bus: Bus, stream: str) -> None:
    """Wait for what earlier tests stopped: without one of two followers, and one that lags, nothing is stored."""
    async with asyncio.timeout(30):
        away = True
        while away:
            with contextlib.suppress(ServingError):  # no leader for a moment
                away = bool(await replicas_away(bus, stream))


async def erased_when_all_are_there(eraser: Eraser, stream: str, seq: int) -> None:
    """As routers do: on a loaded machine, a replica that comes back takes longer than ``NEWEST_S`` to be up to date."""
    async with asyncio.timeout(30):
        while True:
            try:
                assert await eraser.erase(stream, seq, everywhere=True)
            except ServingError:  # ReplicaAway, or no leader for a moment
                await asyncio.sleep(erasing.LOOK_S)
            else:
                return


async def test_nothing_is_erased_while_a_replica_is_away_unless_nobody_waits_for_it(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, subject = cluster.subjects.stream("TOKENS"), cluster.subjects.tokens("erased")
    async with on_nodes(cluster, 0, 1, 2) as bus:
        await all_there(bus, stream)
    leader, followers = await cluster.placement(stream)  # an earlier test may have ended in an election
    monkeypatch.setattr(erasing, "NEWEST_S", 0.3)
    monkeypatch.setattr(erasing, "AGAIN_S", 0.0)
    async with on_nodes(cluster, leader) as bus:
        eraser = Eraser(bus)
        first, second, third = [(await bus.js.publish(subject, b"x")).seq for _ in range(3)]
        cluster.freeze(followers[0])
        try:
            with pytest.raises(
                ReplicaAway, match=f"node-[{followers[0]}{followers[1]}]"
            ):  # a slow one may be late, too
                await eraser.erase(stream, first, everywhere=True)
            assert await get(bus, stream, first) is not None
            assert await eraser.erase(stream, second)
            monkeypatch.setattr(erasing, "AWAY_S", 0.0)
            assert await eraser.erase(stream, third, everywhere=True)
            monkeypatch.undo()
            monkeypatch.setattr(erasing, "AGAIN_S", 0.0)
        finally:
            cluster.thaw(followers[0])
        await erased_when_all_are_there(eraser, stream, first)
        for seq in (first, second, third):
            assert await erase(bus, stream, seq) is False, "it was gone"
