"""How the machines of one engine meet, agree, and notice that one of them is gone."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from unittest.mock import MagicMock

import msgspec
import pytest

from penstock.schemas.fleet import GpuUse
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo, NodeLost
from penstock.workers.engines.external import nodes as module
from penstock.workers.engines.external.engine import BlockCounts, ExternalEngine
from penstock.workers.engines.external.nodes import (
    JoinRequest,
    Leader,
    NodeFollower,
    Rendezvous,
    Start,
    address,
    environ,
    interface,
    meeting,
    objection,
    reached_at,
    towards,
)
from penstock.workers.engines.external.runtime import in_thread as future_of
from tests.infra.bus.support import eventually
from tests.pipeline.support import free_port

T = TypeVar("T")

OWN = JoinRequest(0, 3, "vllm", "0.33.0", "abc")


class Group:
    """A leader on loopback, and followers on demand."""

    def __init__(self) -> None:
        self.place = Rendezvous(3, "127.0.0.1", free_port(), 20.0)
        self.lost: Future[EngineError] = Future()
        self.asked: Future[bool] = Future()
        self.followers: list[NodeFollower] = []
        self.leader = Leader(OWN, self.place, self.lost.set_result, lambda: self.asked.set_result(True))

    def follower(self, node: int, gpus: Callable[[], tuple[GpuUse, ...]] = lambda: (), **other: Any) -> NodeFollower:
        made = NodeFollower(msgspec.structs.replace(OWN, node=node, **other), self.place, gpus)
        self.followers.append(made)
        return made


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.leader.close()
    for follower in made.followers:
        follower.close()


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    return asyncio.wrap_future(future_of(work, "node"))


def connected(place: Rendezvous) -> socket.socket:
    """A connection to a leader that is about to listen."""
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((place.host, place.port), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


async def start(group: Group) -> list[NodeFollower]:
    both = [group.follower(1), group.follower(2)]
    joined = [in_thread(each.join) for each in both]
    assert await in_thread(group.leader.gather) == "127.0.0.1"
    group.leader.start({"tensor_parallel_size": 6, "nested": {"a": [1, None]}})
    assert [(await each).arguments for each in joined] == [{"tensor_parallel_size": 6, "nested": {"a": [1, None]}}] * 2
    return both


async def test_followers_get_the_leader_s_arguments_and_end_with_it(group: Group) -> None:
    both = await start(group)
    group.leader.close()
    assert [each.over.result(10) for each in both] == ["", ""]
    assert not group.lost.done()


async def test_a_follower_that_ends_is_lost_and_one_that_fails_says_why(group: Group) -> None:
    first, second = await start(group)
    second.stop()
    assert group.asked.result(10)
    first.failed("out of memory")
    error = group.lost.result(10)
    assert str(error) == "node 1 of 3 (127.0.0.1) has failed: out of memory"
    assert not isinstance(error, NodeLost)  # what it ran may be the cause


async def test_the_leader_knows_the_gpus_of_the_other_machines(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    used = [10, 20]

    def of(node: int) -> tuple[GpuUse, ...]:
        return (GpuUse(f"GPU-{node}", 80, used[node - 1], 50),)

    both = [group.follower(node, gpus=partial(of, node)) for node in (2, 1)]
    joined = [in_thread(each.join) for each in both]
    await in_thread(group.leader.gather)
    group.leader.start({})
    await asyncio.gather(*joined)
    await eventually(lambda: [gpu.used_bytes for gpu in group.leader.gpus()] == [10, 20])
    used[0] = 70
    await eventually(lambda: [gpu.used_bytes for gpu in group.leader.gpus()] == [70, 20])
    info, counts = EngineInfo("vllm", 16, 9, 1, 99, 99, (), True), BlockCounts(0, 0, 9, 0)
    adapter = MagicMock(block_counts=lambda **_: counts)
    engine = ExternalEngine(info, MagicMock(), adapter, gpus=group.leader.gpus)
    assert engine.stats().gpus == tuple(
        msgspec.structs.replace(gpu, host=socket.gethostname()) for gpu in (*of(1), *of(2))
    )


async def test_a_connection_that_breaks_is_a_lost_machine(group: Group) -> None:
    _, second = await start(group)
    second.close()
    error = group.lost.result(10)
    assert isinstance(error, NodeLost)
    assert "node 2 of 3 (127.0.0.1) has ended" in str(error)
    with pytest.raises(NodeLost):
        group.leader.unless_lost(lambda: time.sleep(60))


async def test_a_follower_that_is_silent_is_lost(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, other = in_thread(group.leader.gather), group.follower(2)
    joined = in_thread(other.join)
    silent = await in_thread(lambda: connected(group.place))
    silent.sendall(msgspec.json.encode(msgspec.structs.replace(OWN, node=1)) + b"\n")
    await gathered
    monkeypatch.setattr(module, "SILENT_S", 3.0)  # the other one beats in time
    group.leader.start({})
    await joined
    silent.sendall(b'{"type":"beat"}\n')
    error = group.lost.result(30)
    silent.close()
    assert isinstance(error, NodeLost)
    assert "node 1 of 3 (127.0.0.1) sent nothing for 3 s" in str(error)


async def test_a_leader_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = NodeFollower(
            msgspec.structs.replace(OWN, node=1), Rendezvous(2, "127.0.0.1", int(server.getsockname()[1]), 20.0)
        )
        joined = in_thread(follower.join)
        link, _ = await in_thread(server.accept)
        with link:
            link.sendall(msgspec.json.encode(Start({})) + b"\n")
            await joined
            assert await in_thread(lambda: follower.over.result(20)) == "node 0 (127.0.0.1) sent nothing for 1 s"
        follower.close()


async def test_the_leader_waits_on_while_others_are_refused_or_talk_nonsense(group: Group) -> None:
    gathered = in_thread(group.leader.gather)
    wrong = group.follower(1, version="0.32.0")
    with pytest.raises(EngineError, match=r"node 1 has vllm 0\.32\.0, node 0 0\.33\.0; install the same version"):
        await in_thread(wrong.join)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * (module.MAX_MESSAGE_BYTES + 10)):
        with connected(group.place) as stranger:
            stranger.sendall(text)
            assert stranger.recv(1) == b""
    both = [group.follower(1), group.follower(2)]
    joined = [in_thread(each.join) for each in both]
    await gathered
    group.leader.start({})
    assert [(await each).arguments for each in joined] == [{}, {}]
    late = NodeFollower(msgspec.structs.replace(OWN, node=1), group.place._replace(wait_s=1.5))
    group.followers.append(late)
    with pytest.raises(NodeLost, match="node 0 has a node 1 already"):
        await in_thread(late.join)


async def test_an_address_of_another_machine_is_an_error_that_says_so() -> None:
    leader = Leader(OWN, Rendezvous(3, "192.0.2.1", free_port(), 5.0), lambda error: None, lambda: None)
    with pytest.raises(EngineError, match="--leader-address is an address of node 0"):
        await in_thread(leader.gather)
    leader.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"node": 3}, "the engine has the nodes 0 to 2"),
        ({"node": 0}, "the engine has the nodes 0 to 2"),
        ({"nodes": 2}, "the same --nodes"),
        ({"engine": "sglang"}, "the same --engine"),
        ({"model": "abd"}, "the same files of the model"),
    ],
)
def test_machines_must_be_alike(change: dict[str, Any], said: str) -> None:
    found = objection(msgspec.structs.replace(OWN, **{"node": 1} | change), OWN)
    assert said in found
    assert bool(found) == bool(said)


def test_ranks_are_told_by_which_interface_others_reach_them() -> None:
    assert interface("127.0.0.1") == "lo"
    assert interface("192.0.2.1") == ""
    assert interface("::1") in ("lo", "")  # "": no IPv6 here
    assert interface("2001:db8::1") == ""
    assert towards("127.0.0.1") == "127.0.0.1"
    assert reached_at("127.0.0.1", "OWN") == {"OWN": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert meeting(Rendezvous(2, "::1", 29500, 1.0)) == "[::1]:29501"


def test_variables_are_set_for_the_engine_s_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_A", "theirs")
    monkeypatch.delenv("PENSTOCK_B", raising=False)
    with environ({"PENSTOCK_A": "ours", "PENSTOCK_B": "ours"}):
        assert (os.environ["PENSTOCK_A"], os.environ["PENSTOCK_B"]) == ("theirs", "ours")
    assert os.environ["PENSTOCK_A"] == "theirs"
    assert "PENSTOCK_B" not in os.environ


def test_the_address_towards_the_broker_is_this_machine_s() -> None:
    assert address("nats://127.0.0.1:4222,nats://127.0.0.1:4223") == "127.0.0.1"
