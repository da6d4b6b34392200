"""LoadedPeers that are killed, stopped, restarted: real processes over NIXL, by direct copy and over TCP."""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.inflight import digest
from penstock.workers.kv_transfer.transport_protocol import TransferError, Transport, host_identity, path_between
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.workers.kv_transfer.support import WAIT_S, Pool, Start, Worker, needs_nixl, until, workers

pytestmark = needs_nixl

MIB = 1 << 20
BIG = {"blocks": 128, "block_bytes": 2 * MIB}  # moved in some tens of milliseconds
ALL = list(range(BIG["blocks"]))

needs_direct_copy = pytest.mark.skipif(
    not host_identity({}), reason="the sandbox forbids copying between processes (process_vm_readv)"
)
PATHS = ["tcp", pytest.param("", id="direct", marks=needs_direct_copy)]


@pytest.fixture
def start() -> Iterator[Start]:
    with workers(f"faults-{secrets.token_hex(3)}") as start:
        yield start


Open = Callable[..., tuple[Transport, Pool]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open this process's own transport over the given path."""
    transports: list[Transport] = []

    def open_here(tls: str, quarantine_s: float = 60.0, endpoints: list[Endpoint] | None = None, **pool: int) -> Any:
        if tls:
            monkeypatch.setenv("UCX_TLS", tls)
        else:
            monkeypatch.delenv("UCX_TLS", raising=False)
        mine = Pool(**pool)
        callback = endpoints.append if endpoints is not None else lambda _: None
        name = f"faults-{secrets.token_hex(4)}"
        transport = open_transport("nixl", name, {"kv": mine.memory}, on_renewed=callback, quarantine_s=quarantine_s)
        transports.append(transport)
        return transport, mine

    yield open_here
    for transport in transports:
        transport.close()


def failure(future: "Future[Any]") -> TransferError:
    error = future.exception(WAIT_S)
    assert isinstance(error, TransferError), error
    return error


def unchanged(pool: Pool, value: int) -> bool:
    return bool((pool.blocks == value).all())


@pytest.mark.parametrize("tls", PATHS)
def test_killed_before_during_and_after(start: Start, opened: Open, tls: str) -> None:
    victim, other = start(tls, "victim", **BIG), start(tls, "other", **BIG)
    transport, pool = opened(tls, **BIG)
    transport.connect(victim.endpoint).result(WAIT_S)

    def killed_during() -> TransferError:
        pool.blocks[:] = 0
        future = transport.read(victim.endpoint, "kv", ALL, ALL, timeout=WAIT_S)
        until(lambda: bool(pool.blocks[0].any()), "the first bytes")
        victim.signal(signal.SIGKILL)
        return failure(future) if future.exception(WAIT_S) else failure(transport.connect(victim.endpoint))

    error = killed_during()
    assert error.cause == "peer_lost"
    error.settled.result(WAIT_S)
    pool.blocks[:] = 0x33
    began = time.monotonic()
    after = failure(transport.read(victim.endpoint, "kv", [1], [1]))  # metadata of a dead process
    assert (after.cause, after.settled.done()) == ("peer_lost", True)
    assert time.monotonic() - began < 4.0  # not the deadline
    assert unchanged(pool, 0x33)
    transport.read(other.endpoint, "kv", [4], [1], generations=[1]).result(WAIT_S)
    assert pool.values([1]) == [[5]]
    assert transport.stats().quarantined_transfers == 0


def test_a_restarted_worker_is_a_new_peer(start: Start, opened: Open) -> None:
    first = start("tcp", "worker.1")
    transport, pool = opened("tcp")
    transport.read(first.endpoint, "kv", [1], [1]).result(WAIT_S)
    first.signal(signal.SIGKILL)
    second = start("tcp", "worker.2")
    transport.read(second.endpoint, "kv", [2], [2]).result(WAIT_S)
    assert failure(transport.read(first.endpoint, "kv", [3], [3])).cause == "peer_lost"
    transport.read(second.endpoint, "kv", [4], [4]).result(WAIT_S)
    assert pool.values([1, 2, 3, 4]) == [[2], [3], [0], [5]]


def test_a_name_that_is_used_again_works_once_the_first_was_lost(start: Start, opened: Open) -> None:
    first = start("tcp", "same")
    transport, pool = opened("tcp")
    transport.read(first.endpoint, "kv", [1], [1]).result(WAIT_S)
    first.signal(signal.SIGKILL)
    second = start("tcp", "same")
    early = failure(transport.read(second.endpoint, "kv", [1], [1]))
    assert (early.cause, "a name is used once" in str(early)) == ("refused", True)
    transport.forget(first.endpoint.agent)
    transport.read(second.endpoint, "kv", [1], [1]).result(WAIT_S)
    assert pool.values([1]) == [[2]]


def test_metadata_that_were_damaged_before_they_were_signed_harm_that_peer_only(start: Start, opened: Open) -> None:
    peer, other = start("tcp"), start("tcp", "other")
    transport, pool = opened("tcp")
    short = peer.endpoint.metadata[:-100]
    damaged = msgspec.structs.replace(peer.endpoint, metadata=short, digest=digest(short))
    assert failure(transport.read(damaged, "kv", [1], [1])).cause in ("refused", "peer_lost")
    transport.read(other.endpoint, "kv", [1], [1]).result(WAIT_S)
    foreign = msgspec.structs.replace(
        peer.endpoint, metadata=other.endpoint.metadata, digest=other.endpoint.digest
    )  # another's, under its name
    assert failure(transport.read(foreign, "kv", [1], [1])).cause == "refused"
    transport.read(other.endpoint, "kv", [2], [2]).result(WAIT_S)
    assert pool.values([1, 2]) == [[2], [3]]


@needs_direct_copy
def test_a_stopped_peer_is_read_directly_and_its_generations_checked(start: Start, opened: Open) -> None:
    peer = start()
    transport, pool = opened("")
    assert path_between(transport.endpoint, peer.endpoint) == "read"
    for _ in range(5):  # UCX goes on setting up a new connection behind its first transfers, with the peer's help
        transport.read(peer.endpoint, "kv", [4, 6], [1, 2], generations=[1, 1]).result(WAIT_S)
    peer.ask("new_owner", 5)
    peer.signal(signal.SIGSTOP)
    transport.read(peer.endpoint, "kv", [4, 6], [1, 2], generations=[1, 1]).result(WAIT_S)
    assert pool.values([1, 2]) == [[5], [7]]
    assert failure(transport.read(peer.endpoint, "kv", [4, 5], [1, 2], generations=[1, 1])).cause == "stale"


def test_late_bytes_of_a_stopped_peer_come_before_settled(start: Start, opened: Open) -> None:
    peer = start("tcp", **BIG)
    transport, pool = opened("tcp", **BIG)
    assert path_between(transport.endpoint, peer.endpoint) == "write"
    transport.connect(peer.endpoint).result(WAIT_S)
    pool.blocks[:] = 0
    future = transport.read(peer.endpoint, "kv", ALL, ALL, timeout=0.4)
    until(lambda: bool(pool.blocks[0].any()), "the first bytes")
    peer.signal(signal.SIGSTOP)
    error = failure(future)
    assert (error.cause, error.settled.done()) == ("timeout", False)
    assert transport.stats().quarantined_blocks == len(ALL)
    assert failure(transport.read(peer.endpoint, "kv", [1], [1])).cause == "peer_lost"  # at once, it stands still
    peer.signal(signal.SIGCONT)
    error.settled.result(WAIT_S)
    pool.blocks[:] = 0x44  # the next owner's
    until(lambda: transport.read(peer.endpoint, "kv", [3], [3]).exception(WAIT_S) is None, "usable again")
    pool.blocks[3] = 0x44
    assert unchanged(pool, 0x44)
    assert transport.stats().quarantined_blocks == 0


def test_late_bytes_never_come_once_the_agent_was_renewed(start: Start, opened: Open) -> None:
    endpoints: list[Endpoint] = []
    peer, other = start("tcp", **BIG), start("tcp", "other", **BIG)
    transport, pool = opened("tcp", quarantine_s=0.3, endpoints=endpoints, **BIG)
    before = transport.endpoint.agent
    transport.connect(peer.endpoint).result(WAIT_S)
    transport.connect(other.endpoint).result(WAIT_S)
    peer.signal(signal.SIGSTOP)
    error = failure(transport.read(peer.endpoint, "kv", ALL, ALL, timeout=0.2))
    assert error.cause == "timeout"
    error.settled.result(WAIT_S)
    pool.blocks[:] = 0x55
    until(lambda: bool(endpoints), "the callback gets the new endpoint")
    assert [each.agent for each in endpoints] == [before + ".1"]
    peer.signal(signal.SIGCONT)  # UCX may end it now, as a reader that closes in the middle does to an owner over TCP
    transport.read(other.endpoint, "kv", [7], [0]).result(WAIT_S)
    assert pool.values([0]) == [[8]]
    assert other.ask("write", endpoints[0], [3], [1], WAIT_S) == BIG["block_bytes"]  # by its new name
    assert pool.values([1]) == [[4]]
    assert bool((pool.blocks[2:] == 0x55).all())


def test_a_writer_that_gives_up_leaves_bytes_that_its_receiver_waits_for(start: Start, opened: Open) -> None:
    receiver = start("tcp", **BIG)
    transport, pool = opened("tcp", quarantine_s=0.3, **BIG)
    pool.blocks[:] = 0x11
    transport.connect(receiver.endpoint).result(WAIT_S)
    receiver.ask("fill", 0x77)
    receiver.signal(signal.SIGSTOP)
    error = failure(transport.write(receiver.endpoint, "kv", ALL, ALL, timeout=0.2))
    error.settled.result(WAIT_S)  # for the writer all is over
    receiver.signal(signal.SIGCONT)
    receiver.ask("drain")
    late = receiver.ask("changed", 0x77)
    assert 0 < late < len(ALL)  # what was in the kernels did come: these blocks were not free before
    receiver.ask("fill", 0x78)
    renewed = transport.endpoint
    transport.write(receiver.endpoint, "kv", [9], [9]).result(WAIT_S)
    assert receiver.ask("read", renewed, [0], [10], WAIT_S) == BIG["block_bytes"]
    assert receiver.ask("changed", 0x78) == 2


@pytest.mark.parametrize("op", ["write", pytest.param("read", marks=needs_direct_copy)])
def test_who_dies_in_the_middle_does_not_take_the_other_along(start: Start, opened: Open, op: str) -> None:
    tls = "tcp" if op == "write" else ""  # as path_between would have it
    victim = start(tls, **BIG)
    transport, pool = opened(tls, **BIG)
    pool.number()
    assert path_between(transport.endpoint, victim.endpoint) == op
    assert victim.ask(op, transport.endpoint, [0], [0], WAIT_S)
    pool.blocks[:] = 0
    for _ in range(20):
        victim.send(op, transport.endpoint, ALL, ALL, WAIT_S)
    if op == "write":
        until(lambda: bool(pool.blocks[0].any()), "the first bytes")
    victim.signal(signal.SIGKILL)
    if op == "write":
        transport.drained().result(WAIT_S)
        pool.blocks[:] = 0
    other = start(tls, "other", **BIG)
    assert other.ask("write", transport.endpoint, [5], [6], WAIT_S)
    transport.read(other.endpoint, "kv", [7], [7]).result(WAIT_S)
    assert pool.values([6, 7]) == [[6], [8]]


def test_an_idle_agent_costs_less_than_three_hundredths_of_a_core(start: Start) -> None:
    worker: Worker = start()
    cpu, began = worker.ask("cpu_s"), time.monotonic()
    until(lambda: time.monotonic() - began > 1.5, "a while")  # the thing measured is the time itself
    assert (worker.ask("cpu_s") - cpu) / (time.monotonic() - began) < 0.03


def test_descriptors_do_not_leak_while_peers_stay_connected(start: Start, opened: Open) -> None:
    peer = start("tcp")
    transport, pool = opened("tcp")
    transport.read(peer.endpoint, "kv", [1], [1], generations=[1]).result(WAIT_S)
    before = len(os.listdir("/proc/self/fd"))
    rng = np.random.default_rng(1)
    for _ in range(200):
        ids = rng.permutation(64)[:5].tolist()
        transport.read(peer.endpoint, "kv", ids, ids, generations=[1] * 5).result(WAIT_S)
    assert len(os.listdir("/proc/self/fd")) == before
    assert bool(pool.blocks.any())
