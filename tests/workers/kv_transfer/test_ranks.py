"""Blocks whose heads are spread over ranks arrive whole in workers of any width. Each rank has memory of its own."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.schemas.transfer import Memory
from penstock.workers.kv_transfer.ranks import RankTransports, RemoteTransport, serve_transport
from penstock.workers.kv_transfer.staging import PART_BYTES, PARTS
from penstock.workers.kv_transfer.transport_protocol import TransferError, TransferResult, TransportUnavailable
from tests.workers.kv_transfer.loopback import LoopbackNetwork, open_loopback

LAYERS, SIZE, HEADS, DIM, BLOCKS = 3, 4, 4, 2, 6
WAIT_S = 20.0


class Lines:
    """``Channel`` over a socket: messages with their length before them."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._file = end, end.makefile("rb")

    def send(self, message: bytes) -> None:
        self._end.sendall(len(message).to_bytes(4, "big") + message)

    def receive(self) -> bytes:
        with contextlib.suppress(ValueError):  # closed by another thread
            return self._file.read(int.from_bytes(self._file.read(4), "big"))
        return b""

    def close(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._end.close()


class RankedWorker:
    """A worker of so many ranks, of which those behind the first are asked through channels."""

    def __init__(self, network: LoopbackNetwork, name: str, width: int, heads: int = HEADS) -> None:
        each = max(1, heads // width)
        firsts = [rank * heads // width for rank in range(width)]
        self.pools = [np.zeros((BLOCKS, LAYERS, 2, SIZE, each, DIM), np.float32) for _ in firsts]
        self.firsts = firsts
        self.generations = np.zeros(BLOCKS, np.uint32)
        self._channels: list[Lines] = []

        def memory(rank: int) -> dict[str, Memory]:
            pool, shape = self.pools[rank], f"{LAYERS},2,{SIZE},{each},{DIM}"
            counted = 0 if rank else self.generations.ctypes.data
            split = {"first_head": firsts[rank], "all_heads": heads} if width > 1 else {}
            return {
                "kv": Memory(
                    pool.ctypes.data, pool[0].nbytes, BLOCKS, generations=counted, layout=f"float32({shape})", **split
                )
            }

        def opened(backend: str, agent: str, pools: dict[str, Memory], **more: object) -> object:
            return open_loopback(network, agent, pools)

        others = []
        for rank in range(1, width):
            ours, theirs = (Lines(end) for end in socket.socketpair())
            threading.Thread(target=serve_transport, args=(theirs, memory(rank), opened), daemon=True).start()
            self._channels += [ours, theirs]
            others.append(RemoteTransport(ours, f"{name}:rank{rank}", lambda endpoint: None, 5.0))
        self.transport = RankTransports(open_loopback(network, name, memory(0)), others)

    def fill(self, whole: NDArray[np.float32]) -> None:
        for pool, first in zip(self.pools, self.firsts, strict=True):
            pool[:] = whole[..., first : first + pool.shape[-2], :]

    def holds(self, whole: NDArray[np.float32], blocks: list[int], of: list[int]) -> bool:
        return all(
            np.array_equal(pool[block], whole[source][..., first : first + pool.shape[-2], :])
            for pool, first in zip(self.pools, self.firsts, strict=True)
            for block, source in zip(blocks, of, strict=True)
        )

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.transport.close()


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def worker(network: LoopbackNetwork) -> Iterator[Callable[..., RankedWorker]]:
    made: list[RankedWorker] = []

    def make(name: str, width: int, heads: int = HEADS) -> RankedWorker:
        made.append(RankedWorker(network, name, width, heads))
        return made[-1]

    yield make
    for each in made:
        each.close()


def failure(future: "Future[TransferResult]") -> TransferError:
    error = future.exception(WAIT_S)
    assert isinstance(error, TransferError)
    return error


def values(heads: int = HEADS) -> NDArray[np.float32]:
    shape = (BLOCKS, LAYERS, 2, SIZE, heads, DIM)
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("owner", "reader"), [*product((1, 2, 4), repeat=2), (8, 2), (1, 8)])
def test_each_rank_gets_its_heads_from_ranks_that_have_them(
    owner: int, reader: int, worker: Callable[..., RankedWorker]
) -> None:
    """Eight ranks share four heads: two have the same one."""
    has, wants = worker("owner", owner), worker("reader", reader)
    whole = values()
    has.fill(whole)
    wants.transport.connect(has.transport.endpoint).result(WAIT_S)
    moved = wants.transport.read(has.transport.endpoint, "kv", [4, 1, 5], [0, 2, 3], generations=[0, 0, 0])
    assert moved.result(WAIT_S).bytes == sum(pool[0].nbytes for pool in wants.pools) * 3
    assert wants.holds(whole, [0, 2, 3], of=[4, 1, 5])
    assert not any(pool[[1, 4, 5]].any() for pool in wants.pools)


@pytest.mark.parametrize("reads", [True, False])
def test_all_ranks_have_the_memory_for_reads_if_they_connect_to_read(
    reads: bool, worker: Callable[..., RankedWorker]
) -> None:
    has, wants = worker("owner", 1), worker("reader", 2)
    wants.transport.connect(has.transport.endpoint, reads=reads).result(WAIT_S)
    assert (wants.transport.stats().buffer_bytes >= 2 * PARTS * PART_BYTES) is reads


def test_blocks_that_have_another_owner_by_then_are_stale(worker: Callable[..., RankedWorker]) -> None:
    has, wants = worker("owner", 2), worker("reader", 1)
    has.generations[3] = 7
    failed = wants.transport.read(has.transport.endpoint, "kv", [3], [0], generations=[6])
    error = failure(failed)
    assert error.cause == "stale"


@pytest.mark.parametrize("lost", ["owner:rank1", "owner"])
def test_a_lost_rank_fails_the_transfer_and_the_blocks_are_free_again(
    lost: str, network: LoopbackNetwork, worker: Callable[..., RankedWorker]
) -> None:
    has, wants = worker("owner", 2), worker("reader", 2)
    network.kill(lost)
    failed = wants.transport.read(has.transport.endpoint, "kv", [3], [0], generations=[0], timeout=2.0)
    error = failure(failed)
    assert error.cause == "peer_lost"
    error.settled.result(WAIT_S)


def test_a_stalled_rank_ends_in_a_timeout_and_its_blocks_are_free_only_when_it_is_over(
    network: LoopbackNetwork, worker: Callable[..., RankedWorker]
) -> None:
    has, wants = worker("owner", 2), worker("reader", 2)
    network.stall("owner:rank1")
    failed = wants.transport.read(has.transport.endpoint, "kv", [3], [0], generations=[0], timeout=0.3)
    error = failure(failed)
    assert error.cause == "timeout"
    assert not error.settled.done()
    network.resume("owner:rank1")
    error.settled.result(WAIT_S)


def test_blocks_of_other_models_and_ranks_that_are_not_all_there_are_refused(
    worker: Callable[..., RankedWorker],
) -> None:
    wants = worker("reader", 2)
    for other in (worker("of-eight-heads", 2, 8), worker("whole-of-two", 1, 2)):
        failed = wants.transport.read(other.transport.endpoint, "kv", [3], [0], generations=[0])
        error = failure(failed)
        assert error.cause == "refused"


def test_blocks_that_ranks_share_are_not_written(worker: Callable[..., RankedWorker]) -> None:
    has, wants = worker("owner", 2), worker("reader", 1)
    for one, other in ((has, wants), (wants, has)):
        failed = one.transport.write(other.transport.endpoint, "kv", [0], [0])
        error = failure(failed)
        assert error.cause == "refused"


def test_a_rank_that_cannot_open_an_agent_says_why() -> None:
    def fails(*args: object, **more: object) -> object:
        raise TransportUnavailable("install NIXL")

    ours, theirs = (Lines(end) for end in socket.socketpair())
    threading.Thread(target=serve_transport, args=(theirs, {}, fails), daemon=True).start()
    with pytest.raises(TransportUnavailable, match=r"w:rank1: .*install NIXL"):
        RemoteTransport(ours, "w:rank1", lambda endpoint: None, 5.0)
    for each in (ours, theirs):
        each.close()
