"""Deadlines, quarantine and renewal with a clock of our own and a peer that stalls on request."""

from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer import agent as blocks
from penstock.workers.kv_transfer.agent import PeerLost
from penstock.workers.kv_transfer.inflight import DRAIN_S, TICK_S, InflightTransfers, Op, TransferRequest
from penstock.workers.kv_transfer.transport_protocol import TransferError
from tests.workers.kv_transfer.loopback import LoopbackAgent, LoopbackNetwork
from tests.workers.kv_transfer.support import BLOCK_BYTES, BLOCKS, Pool

QUARANTINE_S = 10.0


class World(NamedTuple):
    network: LoopbackNetwork
    pool: Pool
    transfers: InflightTransfers
    peer: Endpoint
    peer_pool: Pool
    renewed: list[Endpoint]

    def request(
        self, op: Op = "READ", ids: tuple[int, ...] = (1, 2), timeout: float = 1.0, now: float = 0.0
    ) -> TransferRequest:
        generations = tuple(int(self.peer_pool.generations[each]) for each in ids) if op == "READ" else ()
        request = TransferRequest(
            op=op, peer=self.peer, pool="kv", local=ids, remote=ids, generations=generations,
            started=now, deadline=now + timeout,
        )  # fmt: skip
        self.transfers.start(request, now)
        return request

    def steps(self, now: float, number: int = 5) -> None:
        for _ in range(number):
            self.transfers.step(now, lambda: now)


@pytest.fixture
def world() -> World:
    network, pool, peer_pool, renewed = LoopbackNetwork(), Pool(), Pool(), list[Endpoint]()
    peer_pool.number()
    peer = LoopbackAgent(network, "peer", {"kv": peer_pool.memory}).endpoint

    def make(name: str) -> LoopbackAgent:
        return LoopbackAgent(network, name, {"kv": pool.memory})

    return World(network, pool, InflightTransfers(make, "me", renewed.append, QUARANTINE_S), peer, peer_pool, renewed)


def failure(request: TransferRequest) -> TransferError:
    assert request.future.done(), "it has not ended"
    error = request.future.exception()
    assert isinstance(error, TransferError)
    return error


def held(world: World) -> tuple[int, int]:
    stats = world.transfers.stats()
    return stats.quarantined_transfers, stats.quarantined_blocks


def test_a_stalled_transfer_fails_at_its_deadline_and_not_before(world: World) -> None:
    world.network.stall("peer")
    request = world.request(timeout=1.0)
    world.steps(0.999)
    assert not request.future.done()
    world.steps(1.0)
    assert failure(request).cause == "timeout"
    assert not failure(request).settled.done()
    assert held(world) == (1, 2)


def test_late_bytes_come_before_settled_and_never_after(world: World) -> None:
    world.network.stall("peer")
    request = world.request()
    world.steps(1.0)
    world.steps(5.0)
    assert not failure(request).settled.done()
    assert not world.pool.blocks.any()
    world.network.resume("peer")
    world.steps(5.1)
    assert failure(request).settled.done()
    assert world.pool.values([1, 2]) == [[2], [3]]  # which is why nobody may have had these blocks before
    world.pool.blocks[:] = 0
    world.steps(20.0)
    assert not world.pool.blocks.any()
    assert held(world) == (0, 0)
    assert world.renewed == []


def test_a_peer_that_stands_still_is_refused_at_once_until_it_continues(world: World) -> None:
    world.network.stall("peer")
    world.request()
    world.steps(1.0)
    second = world.request(ids=(5,), now=1.1)
    assert failure(second).cause == "peer_lost"
    assert failure(second).settled.done()
    world.network.resume("peer")
    world.steps(1.2)
    third = world.request(ids=(5,), now=1.3)
    world.steps(1.3)
    assert third.future.result().bytes == BLOCK_BYTES


def test_a_quarantine_that_lasts_too_long_ends_with_the_agent(world: World) -> None:
    world.network.stall("peer")
    first = world.request(timeout=1.0)
    second = world.request(ids=(7, 8, 9), timeout=50.0)
    world.steps(1.0)
    world.steps(1.0 + QUARANTINE_S)
    assert not failure(first).settled.done()
    world.steps(1.01 + QUARANTINE_S, number=1)
    assert failure(first).settled.done()
    assert failure(second).cause == "peer_lost"  # what was alive goes with it
    assert failure(second).settled.done()
    assert [each.agent for each in world.renewed] == ["me.1"]
    assert sorted(world.network.agents) == ["me.1", "peer"]
    world.network.resume("peer")
    world.steps(12.0)
    assert not world.pool.blocks.any()  # the late bytes did not come
    third = world.request(ids=(7,), now=12.0)
    world.steps(12.0)
    assert third.future.result().bytes == BLOCK_BYTES
    assert world.transfers.stats().renewals == 1


def test_forgetting_a_stalled_peer_fails_its_transfers_but_frees_nothing_yet(world: World) -> None:
    world.network.stall("peer")
    request = world.request(timeout=60.0)
    world.steps(0.1)
    world.transfers.forget("peer", 0.1)
    assert failure(request).cause == "peer_lost"
    assert not failure(request).settled.done()  # it may only have been thought dead
    assert failure(world.request(now=0.2)).cause == "peer_lost"
    world.network.kill("peer")
    world.steps(0.3)
    assert failure(request).settled.done()
    assert world.transfers.stats().peers == 0


def test_a_killed_peer_fails_all_its_transfers_and_frees_their_blocks(world: World) -> None:
    world.network.stall("peer")
    orders = [world.request(ids=(each,), timeout=60.0) for each in range(4)]
    world.steps(0.1)
    world.network.kill("peer")
    world.steps(0.2)
    assert [(failure(each).cause, failure(each).settled.done()) for each in orders] == [("peer_lost", True)] * 4
    assert world.transfers.stats().peers == 0


def test_a_peer_lost_between_two_pieces_is_lost_and_not_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", BLOCK_BYTES)
    request, other = world.request(ids=(1, 2, 3)), world.request(ids=(4, 5, 6))
    world.steps(0.1, number=1)
    assert world.pool.values([1, 2, 4, 5]) == [[2], [0], [5], [0]]  # in turns, a piece each
    world.network.kill("peer")
    world.steps(0.2)
    assert [failure(each).cause for each in (request, other)] == ["peer_lost", "peer_lost"]


def test_a_transfer_that_stalls_in_its_check_has_its_blocks_free_at_once(world: World) -> None:
    request = world.request()
    world.steps(0.1, number=1)
    assert world.pool.values([1, 2]) == [[2], [3]]  # here; the generations are still to come
    world.network.stall("peer")
    world.steps(0.2)
    world.steps(1.0)
    assert failure(request).cause == "timeout"
    assert failure(request).settled.done()
    assert held(world) == (1, 0)


def test_a_block_that_gets_a_new_owner_while_it_is_copied_is_stale(world: World) -> None:
    request = world.request()
    world.steps(0.1, number=1)
    world.peer_pool.generations[2] += 1
    world.steps(0.2)
    assert failure(request).cause == "stale"
    assert "[2]" in str(failure(request))


def test_generations_are_compared_again_in_a_buffer_that_was_used_before(world: World) -> None:
    for now, block in enumerate((1, 60, 1, 33)):
        world.peer_pool.generations[:] = np.arange(BLOCKS) * 7 + now
        request = world.request(ids=(block,), now=float(now))
        world.steps(float(now))
        assert request.future.result().bytes == BLOCK_BYTES


def test_ending_frees_everything_and_closes_the_agent(world: World) -> None:
    world.network.stall("peer")
    first, second = world.request(timeout=1.0), world.request(timeout=60.0)
    world.steps(1.0)
    world.transfers.end("unavailable", "it was closed", 2.0)
    assert (failure(first).cause, failure(second).cause) == ("timeout", "unavailable")
    assert failure(first).settled.done()
    assert failure(second).settled.done()
    world.network.resume("peer")
    assert not world.pool.blocks.any()
    assert list(world.network.agents) == ["peer"]


def test_draining_counts_only_time_in_which_progress_was_made(world: World) -> None:
    from concurrent.futures import Future

    future: Future[None] = Future()
    world.transfers.step(100.0, lambda: 100.0)
    world.transfers.drain(future)
    world.transfers.step(100.0 + 10 * DRAIN_S, lambda: 0.0)  # stopped for long: counts as one tick
    assert not future.done()
    steps = round(DRAIN_S / TICK_S)
    for step in range(steps - 2):
        world.transfers.step(200.0 + TICK_S * step, lambda: 0.0)
    assert not future.done()
    for step in range(steps - 2, steps + 1):
        world.transfers.step(200.0 + TICK_S * step, lambda: 0.0)
    assert future.done()


def test_a_connection_that_died_unnoticed_is_opened_again_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    post = LoopbackAgent.post

    def failing(agent: LoopbackAgent, op: str, peer: str, move: blocks.CopyOp) -> object:
        tried.append(op)
        if len(tried) == 1 or len(tried) > 3:
            raise PeerLost("an old connection")
        return post(agent, op, peer, move)

    monkeypatch.setattr(LoopbackAgent, "post", failing)
    request = world.request()
    world.steps(0.1)
    assert request.future.result().bytes == 2 * BLOCK_BYTES
    assert len(tried) == 3  # the blocks twice, then their generations
    second = world.request(now=0.2)
    world.steps(0.2)
    assert failure(second).cause == "peer_lost"
    assert len(tried) == 5


def test_buffers_of_checks_that_stalled_are_used_again(world: World) -> None:
    assert isinstance(world.transfers.agent, LoopbackAgent)
    known = []
    for now in range(5):
        request = world.request(now=float(now))
        world.steps(now + 0.1, number=1)
        world.network.stall("peer")
        world.steps(now + 0.2)
        world.steps(now + 0.9999)
        world.transfers.forget("nobody", now + 0.9999)
        if now % 2:
            world.steps(now + 1.0)
            assert failure(request).cause == "timeout"
        world.network.resume("peer")
        world.steps(now + 1.0)
        assert world.transfers.stats().quarantined_transfers == 0
        known.append(len(world.transfers.agent._memory))
    assert known == known[:1] * 5


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_only_what_moves_between_gpus_is_polled_without_a_pause_and_only_at_its_beginning(kind: str) -> None:
    class Gpu(LoopbackAgent):
        def _knows(self, _: object) -> bool:
            return True

    network, pool, peer_pool = LoopbackNetwork(), Pool(), Pool()
    mine, theirs = (msgspec.structs.replace(each.memory, kind=kind) for each in (pool, peer_pool))
    peer = Gpu(network, "peer", {"kv": theirs}).endpoint
    transfers = InflightTransfers(lambda name: Gpu(network, name, {"kv": mine}), "me", lambda _: None, QUARANTINE_S)
    network.stall("peer")
    request = TransferRequest(op="READ", peer=peer, pool="kv", local=(1,), remote=(1,), started=2.0, deadline=9.0)
    transfers.start(request, 2.0)
    transfers.step(2.0, lambda: 2.0)
    assert (transfers.spins(1.9), transfers.spins(2.1), transfers.busy) == (kind == "cuda", False, True)
    network.resume("peer")
    transfers.step(2.1, lambda: 2.1)
    assert (request.future.done(), transfers.spins(1.9)) == (True, False)
