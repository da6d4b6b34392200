"""Heads of blocks that were read whole find their place; a part of the buffer is used again only when it can be."""

import ctypes
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from structlog.testing import capture_logs

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer import agent, staging
from penstock.workers.kv_transfer.inflight import RETRY_S, SMALLEST_BYTES, InflightTransfers, TransferRequest
from penstock.workers.kv_transfer.staging import PARTS, StagingBuffer
from penstock.workers.kv_transfer.transport_protocol import TransferError
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.workers.kv_transfer.loopback import LoopbackAgent, LoopbackNetwork
from tests.workers.kv_transfer.support import WAIT_S, needs_nixl

BLOCKS, LAYERS, SIZE, DIM, ALL = 24, 2, 3, 4, 4
QUARANTINE_S = 10.0


class Heads:
    """A pool with some of the heads of each block."""

    def __init__(self, first: int, heads: int, every: int = ALL, dim: int = DIM, kind: str = "cpu") -> None:
        self.data = np.zeros((BLOCKS, LAYERS, 2, SIZE, heads, dim), np.uint16)
        self.generations = np.ones(BLOCKS, np.uint32)
        self.range = slice(first, first + heads)
        self.memory = Memory(
            self.data.ctypes.data, self.data[0].nbytes, BLOCKS, kind, generations=self.generations.ctypes.data,
            layout=f"bfloat16({LAYERS},2,{SIZE},{heads},{dim})", first_head=first, all_heads=every,
        )  # fmt: skip


def values(every: int = ALL, dim: int = DIM) -> NDArray[np.uint16]:
    return np.arange(1, 1 + BLOCKS * LAYERS * 2 * SIZE * every * dim, dtype=np.uint16).reshape(
        BLOCKS, LAYERS, 2, SIZE, every, dim
    )


@pytest.fixture(params=["cpu", "cuda"], scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """With "cuda", the GPU's copies by torch on a CPU, without streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PART_BYTES", 1)  # as large as a block of all heads
        if request.param == "cuda":
            emulate_gpu(patch)
        yield request.param


def emulate_gpu(patch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, _: object) -> None: ...

        def query(self) -> bool:
            return True

    def as_tensor(found: Any, device: object) -> torch.Tensor:
        [size], (base, _) = found.__cuda_array_interface__["shape"], found.__cuda_array_interface__["data"]
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(base), dtype=torch.uint8)

    empty, cpu = torch.empty, torch.device("cpu")
    patch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    patch.setattr(torch, "device", lambda *name: cpu)
    patch.setattr(torch, "as_tensor", as_tensor)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "set_stream", lambda stream: None)
    patch.setattr(torch.cuda, "Stream", lambda *device, priority: None)
    patch.setattr(torch.cuda, "current_stream", lambda device: None)
    patch.setattr(torch.cuda, "default_stream", lambda device: None)
    patch.setattr(torch.cuda, "Event", Event)


@given(
    st.integers(1, 8).flatmap(
        lambda every: st.tuples(st.just(every), *(st.tuples(st.integers(0, every - 1), st.integers(1, 8)),) * 2)
    ),
    st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=9, unique_by=lambda p: p[0]),
    st.integers(1, 4),
    st.sampled_from([1, 3, 4, 8]),
)
def test_heads_that_both_have_are_copied_and_no_others(
    kind: str, ranges: tuple[int, tuple[int, int], tuple[int, int]], pairs: list[tuple[int, int]], blocks: int, dim: int
) -> None:
    every, *sides = ranges
    own, peer = (Heads(first, min(heads, every - first), every, dim, kind) for first, heads in sides)
    common = agent.common_heads(own.memory, peer.memory)
    if not common:
        return
    whole, local, remote = values(every, dim), [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    peer.data[:] = whole[..., peer.range, :]
    buffer = StagingBuffer(own.memory)
    room = min(blocks * peer.memory.block_bytes, buffer.part_bytes)
    pieces, size = agent.staged_pieces(own.memory, peer.memory, local, remote, room)
    for piece in pieces:
        assert len(piece.remote) * peer.memory.block_bytes <= room
        part = buffer.take(0.0)
        assert part is not None
        read = np.ascontiguousarray(peer.data[piece.remote])
        move = agent.whole_blocks(buffer.blocks(part, peer.memory.block_bytes), peer.memory, piece.remote)
        assert int(move.local.rows[:, 1].sum()) == int(move.remote.rows[:, 1].sum()) == read.nbytes
        ctypes.memmove(int(move.local.rows[0, 0]), read.ctypes.data, read.nbytes)
        buffer.start(part, own.memory, piece.copy)
        assert buffer.wait(part)
        buffer.free(part)
    expected = np.zeros((BLOCKS, LAYERS, 2, SIZE, every, dim), np.uint16)
    expected[local, ..., common.start : common.stop, :] = whole[remote, ..., common.start : common.stop, :]
    assert np.array_equal(own.data, expected[..., own.range, :])
    assert size == len(pairs) * LAYERS * 2 * SIZE * len(common) * dim * 2


class World(NamedTuple):
    network: LoopbackNetwork
    own: Heads
    transfers: InflightTransfers
    peers: dict[str, tuple[Heads, Endpoint]]
    whole: NDArray[np.uint16]
    names: list[str]

    def read(
        self, peer: str = "peer", ids: list[int] | None = None, timeout: float = 1.0, now: float = 0.0, stale: int = 0
    ) -> TransferRequest:
        """Blocks into those of the same numbers."""
        ids = list(range(12)) if ids is None else ids
        pool, endpoint = self.peers[peer]
        generations = [int(pool.generations[each]) + stale for each in ids]
        request = TransferRequest(
            op="READ", peer=endpoint, pool="kv", local=ids, remote=ids, generations=generations,
            started=now, deadline=now + timeout,
        )  # fmt: skip
        self.transfers.start(request, now)
        return request

    def run(self, start: float, seconds: float) -> float:
        """Steps without a pause; returns when they end."""
        for number in range(int(seconds * 100)):
            self.steps(start + number / 100, 1)
        return start + seconds

    def steps(self, now: float, number: int = 60) -> None:
        for _ in range(number):
            self.transfers.step(now, lambda: now)

    def has(self, ids: list[int]) -> bool:
        return np.array_equal(self.own.data[ids], self.whole[ids][..., self.own.range, :])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Peers with all heads, a worker with two of them, and parts of two blocks."""
    network, own, whole, names = LoopbackNetwork(), Heads(1, 2), values(), list[str]()
    peers = {}
    for name in ("peer", "other"):
        pool = Heads(0, ALL, 0)
        pool.data[:] = whole
        peers[name] = (pool, LoopbackAgent(network, name, {"kv": pool.memory}).endpoint)
    monkeypatch.setattr(staging, "PART_BYTES", 2 * peers["peer"][0].memory.block_bytes)

    def make(name: str) -> LoopbackAgent:
        names.append(name)
        return LoopbackAgent(network, name, {"kv": own.memory})

    return World(network, own, InflightTransfers(make, "me", lambda _: None, QUARANTINE_S), peers, whole, names)


def failure(request: TransferRequest) -> TransferError:
    assert request.future.done(), "it has not ended"
    error = request.future.exception()
    assert isinstance(error, TransferError)
    return error


def test_reads_at_once_share_the_parts_and_all_arrive(world: World) -> None:
    ids = [list(range(at, at + 8)) for at in (0, 8, 16)]
    requests = [world.read(peer, each) for peer, each in zip(("peer", "other", "peer"), ids, strict=True)]
    world.steps(0.1)
    assert [request.future.result().bytes for request in requests] == [8 * world.own.data[0].nbytes] * 3
    assert world.has(list(range(24)))
    stats = world.transfers.stats()
    assert stats.buffer_bytes >= PARTS * staging.PART_BYTES
    assert stats.bytes_read == world.own.data.nbytes


def test_blocks_are_free_at_once_when_a_peer_stalls_and_others_are_still_read(world: World) -> None:
    """What is posted writes into the buffer alone, whose parts stay taken until it has ended."""
    world.network.stall("peer")
    request = world.read()
    world.steps(1.0)
    assert failure(request).cause == "timeout"
    assert failure(request).settled.done()
    stats = world.transfers.stats()
    assert (stats.quarantined_transfers, stats.quarantined_blocks) == (staging.READS, 0)
    other = world.read("other", now=1.0)
    world.steps(1.1)
    assert other.future.result()
    assert world.has(list(range(12)))
    world.own.data[:] = 0
    world.network.resume("peer")
    world.steps(1.2)
    assert not world.own.data.any(), "late bytes are not copied"
    assert world.transfers.stats().quarantined_transfers == 0
    again = [world.read(peer, now=1.3) for peer in ("peer", "other")]
    world.steps(1.3)
    assert all(each.future.result() for each in again)


def test_a_stopped_peer_that_holds_all_parts_holds_up_others_for_half_a_second(world: World) -> None:
    """They are read into another buffer, as long as there is memory."""
    world.network.stall("peer")
    holding = [world.read(ids=ids, timeout=5.0) for ids in (list(range(6)), list(range(6, 12)))]
    now = world.run(0.0, 0.2)
    waiting = world.read("other", ids=list(range(12, 24)), timeout=5.0, now=now)
    now = world.run(now, 0.2)
    assert not waiting.future.done()
    now = world.run(now, staging.STUCK_S)
    assert waiting.future.result()
    assert world.has(list(range(12, 24)))
    assert len(world.transfers._staging["cpu", 0]) == 2
    later = world.read("other", ids=[20], timeout=5.0, now=now)
    now = world.run(now, 0.1)
    assert later.future.result()
    world.network.resume("peer")
    world.run(now, 2.0)
    assert all(each.future.result() for each in holding)
    world.network.stall("peer")
    [world.read(ids=ids, timeout=0.5, now=now) for ids in (list(range(6)), list(range(6, 12)))]
    now = world.run(now, QUARANTINE_S + 1)
    assert world.names == ["me", "me.1"]
    assert len(world.transfers._staging["cpu", 0]) == 1, "a new agent has one"


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_stopped_peer_takes_parts_of_one_buffer_however_many_reads_wait_for_it(world: World, ranks: int) -> None:
    """The ranks of an engine stop together."""
    pool, _ = world.peers["peer"]
    names = ["peer", *(f"peer:rank{number}" for number in range(1, ranks))]
    for name in names[1:]:
        world.peers[name] = (pool, LoopbackAgent(world.network, name, {"kv": pool.memory}).endpoint)
    for name in names:
        world.network.stall(name)
    holding = [world.read(names[block % ranks], ids=[block], timeout=5.0) for block in range(10)]
    now = world.run(0.0, staging.STUCK_S + 0.1)
    others = [world.read("other", ids=[block], timeout=5.0, now=now) for block in range(10, 20)]
    now = world.run(now, 2 * staging.STUCK_S)
    assert all(each.future.result() for each in others)
    for name in names:
        world.network.resume(name)
    world.run(now, 2.0)
    assert all(each.future.result() for each in holding)
    assert world.has(list(range(20)))


@pytest.mark.parametrize("short", ["memory", "memory for parts as large as the first buffer's", "buffers"])
def test_reads_for_which_stopped_peers_leave_no_part_fail_long_before_their_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """So that their prompts are computed."""
    for each in ("peer", "other"):
        world.network.stall(each)
    holding = [world.read(timeout=5.0), world.read(timeout=5.0)]
    now = world.run(0.0, staging.STUCK_S + 0.1)
    if short.startswith("memory"):
        make, (made,) = staging._CpuCopier, world.transfers._staging["cpu", 0]

        def full(device: int, part_bytes: int) -> Any:
            return (
                no_memory(device, part_bytes)
                if short == "memory" or part_bytes >= made.part_bytes
                else make(device, part_bytes)
            )

        monkeypatch.setattr(staging, "_CpuCopier", full)
        reason = "no buffer of"
    else:
        holding += [world.read("other", timeout=5.0, now=now) for _ in range(2)]
        now = world.run(now, 0.1)
        reason = r"stopped peers hold all staging buffers; one or more of \['other', 'peer'\]"
    waiting = world.read("other", ids=[20], timeout=5.0, now=now)
    now = world.run(now, staging.STUCK_S + 0.1)
    assert failure(waiting).cause == "unavailable"
    assert re.search(reason, failure(waiting).message)
    assert failure(waiting).settled.done()
    for each in ("peer", "other"):
        world.network.resume(each)
    world.run(now, 2.0)
    assert all(each.future.result() for each in holding)


def test_a_pause_of_this_process_says_nothing_about_peers(world: World) -> None:
    world.network.stall("peer")
    holding = [world.read(timeout=50.0), world.read(timeout=50.0)]
    world.run(0.0, 0.1)
    waiting = world.read("other", ids=[20], timeout=50.0, now=0.1)
    now = world.run(9.0, 0.1)
    assert not waiting.future.done()
    world.network.resume("peer")
    world.run(now, 2.0)
    assert all(each.future.result() for each in [*holding, waiting])
    assert len(world.transfers._staging["cpu", 0]) == 1


def no_memory(device: int, part_bytes: int) -> None:
    raise staging.NoMemory(part_bytes, "on GPU 0")


def test_where_memory_is_short_parts_are_smaller(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = world.peers["peer"][0].memory.block_bytes
    monkeypatch.setattr(staging, "PART_BYTES", 8 * whole)
    make = staging._CpuCopier

    def short(device: int, part_bytes: int) -> Any:
        return make(device, part_bytes) if part_bytes < 4 * whole else no_memory(device, part_bytes)

    monkeypatch.setattr(staging, "_CpuCopier", short)
    request = world.read()
    with capture_logs() as logs:
        world.read("other")
    assert not logs, "made once"
    world.steps(0.1)
    assert request.future.result()
    assert world.has(list(range(12)))
    assert world.transfers._staging["cpu", 0][0].part_bytes == 2 * whole
    with capture_logs() as logs:
        assert StagingBuffer(world.own.memory).part_bytes == 2 * whole
        assert StagingBuffer(world.own.memory, whole).part_bytes == whole
    assert [each["event"] for each in logs] == ["transfer_buffer_without_memory"]


def test_a_peer_that_is_lost_between_two_pieces_leaves_no_part_taken(world: World) -> None:
    request = world.read()
    world.steps(0.1, number=1)
    world.network.stall("peer")
    world.steps(0.2, number=3)
    world.network.kill("peer")
    world.steps(0.3)
    assert failure(request).cause == "peer_lost"
    assert failure(request).settled.done()
    others = [world.read("other", now=0.4) for _ in range(PARTS)]
    world.steps(0.4)
    assert all(each.future.result() for each in others)


def test_a_new_agent_reads_into_the_same_buffer(world: World) -> None:
    world.network.stall("peer")
    request = world.read()
    world.steps(1.0)
    world.steps(1.1 + QUARANTINE_S)
    assert failure(request).settled.done()
    assert world.names == ["me", "me.1"]
    again = world.read("other", now=12.0)
    world.steps(12.0)
    assert again.future.result()
    assert world.has(list(range(12)))


def test_blocks_that_get_another_owner_meanwhile_are_stale(world: World) -> None:
    request = world.read(stale=1)
    world.steps(0.1)
    assert failure(request).cause == "stale"


def test_a_running_copy_keeps_its_blocks_until_it_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = False
    monkeypatch.setattr(StagingBuffer, "copied", lambda self, part: ends)
    request = world.read(ids=[1, 2])
    world.steps(0.1)
    world.steps(1.0)
    assert failure(request).cause == "timeout"
    assert not failure(request).settled.done()
    assert world.transfers.stats().quarantined_blocks == 2
    ends = True
    world.steps(1.1)
    assert failure(request).settled.done()


def test_blocks_that_are_not_as_long_as_their_layout_are_refused(world: World) -> None:
    pool, right = world.peers["peer"]
    wrong = msgspec.structs.replace(pool.memory, block_bytes=2 * pool.memory.block_bytes, blocks=1)
    world.peers["peer"] = (pool, msgspec.structs.replace(right, pools={"kv": wrong}))
    assert failure(world.read(ids=[0])).cause == "refused"


def test_memory_for_the_buffer_that_is_not_there_fails_the_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pool: Memory, part_bytes: int) -> StagingBuffer:
        raise TransferError("unavailable", "no 256 MiB of GPU 0")

    monkeypatch.setattr("penstock.workers.kv_transfer.inflight.StagingBuffer", full)
    request = world.read(ids=[0])
    assert failure(request).cause == "unavailable"
    assert failure(request).settled.done()


def test_memory_that_cannot_be_registered_fails_these_reads_only_and_is_tried_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(self: LoopbackAgent, address: int, size: int, kind: str = "cpu", device: int = 0) -> None:
        if size >= PARTS * staging.PART_BYTES:
            tries.append(size)
            raise TransferError("unavailable", "it cannot be registered")
        register(self, address, size, kind, device)

    register = LoopbackAgent.register
    monkeypatch.setattr(LoopbackAgent, "register", full)
    for now in (0.0, RETRY_S - 1):
        assert failure(world.read(now=now)).cause == "unavailable"
    assert len(tries) == 1
    connecting = TransferRequest(op="CONNECT", peer=world.peers["peer"][1], started=0.0, deadline=1.0)
    monkeypatch.setattr(LoopbackAgent, "register", register)
    again = world.read(now=RETRY_S)
    world.steps(RETRY_S)
    assert again.future.result()
    monkeypatch.setattr(LoopbackAgent, "register", full)
    world.transfers.renew(40.0)
    assert failure(world.read(now=41.0)).cause == "unavailable"
    assert len(tries) == 3
    world.transfers.start(connecting, 0.5)
    assert failure(connecting).cause == "unavailable"


def test_a_peer_whose_blocks_are_not_to_be_read_takes_no_buffer(world: World) -> None:
    _, near = world.peers["peer"]
    taken = []
    for peer, reads in ((msgspec.structs.replace(near, host="elsewhere"), True), (near, False), (near, True)):
        request = TransferRequest(op="CONNECT", peer=peer, reads=reads, started=0.0, deadline=1.0)
        world.transfers.start(request, 0.0)
        world.steps(0.1)
        assert request.future.result()
        taken.append(world.transfers.stats().buffer_bytes)
    assert taken == [SMALLEST_BYTES, SMALLEST_BYTES, SMALLEST_BYTES + PARTS * staging.PART_BYTES]


def test_a_gpu_that_fails_during_a_copy_leaves_no_answer_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, part: int) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("penstock.workers.kv_transfer.staging._CpuCopier.copied", broken)
    request = world.read()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        world.steps(0.1)
    world.transfers.end("unavailable", "it broke", 0.2)
    assert failure(request).settled.done()
    assert failure(world.read(now=0.3)).cause == "unavailable"


@given(st.randoms(use_true_random=False))
def test_whatever_happens_no_part_is_lost_and_nothing_is_written_late(rng: random.Random) -> None:
    """Peers stall, resume, end and are forgotten, agents are renewed, and copies end when they do."""
    network, own, whole = LoopbackNetwork(), Heads(1, 2), values()
    copies: dict[tuple[StagingBuffer, int], Callable[[], None]] = {}
    numbers, held, peers, kept = itertools.count(), dict[int, TransferRequest](), dict[int, Endpoint](), list[Heads]()
    start, now = StagingBuffer.start, 0.0

    def join(place: int) -> None:
        pool = Heads(0, ALL, 0) if rng.random() < 0.7 else Heads(0, 3)
        pool.data[:] = whole[..., pool.range, :]
        kept.append(pool)
        peers[place] = LoopbackAgent(network, f"peer{next(numbers)}", {"kv": pool.memory}).endpoint

    def begin(self: StagingBuffer, part: int, pool: Memory, copy: agent.HeadCopy) -> None:
        copies[self, part] = partial(start, self, part, pool, copy)

    def end(self: StagingBuffer, part: int) -> bool:
        copies.pop((self, part), lambda: None)()
        return True

    def step(number: int) -> None:
        for _ in range(number):
            transfers.step(now, lambda: now)

    def check() -> None:
        for block, request in list(held.items()):
            error = request.future.exception() if request.future.done() else None
            if not request.future.done() or (isinstance(error, TransferError) and not error.settled.done()):
                continue
            assert error or np.array_equal(own.data[block], whole[block][..., own.range, :])
            del held[block]
            own.data[block] = 7
        assert all((own.data[block] == 7).all() for block in range(BLOCKS) if block not in held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PART_BYTES", 4 * own.memory.block_bytes)  # two blocks of all heads
        patch.setattr(StagingBuffer, "start", begin)
        patch.setattr(StagingBuffer, "copied", lambda self, part: (self, part) not in copies)
        patch.setattr(StagingBuffer, "wait", end)
        transfers = InflightTransfers(
            lambda name: LoopbackAgent(network, name, {"kv": own.memory}), "me", lambda _: None, 2.0
        )
        own.data[:] = 7
        for place in range(3):
            join(place)
        for _ in range(60):
            peer = peers[place := rng.randrange(3)]
            match rng.choice(
                ["read", "step"] * 2 + ["copy", "wait", "time", "stall", "resume", "end", "forget", "new"]
            ):
                case "read":
                    ids = [block for block in range(BLOCKS) if block not in held and rng.random() < 0.3]
                    request = TransferRequest(
                        op="READ", peer=peer, pool="kv", local=ids, remote=ids, generations=[1] * len(ids),
                        started=now, deadline=now + rng.choice([0.05, 0.5, 3.0]),
                    )  # fmt: skip
                    held |= dict.fromkeys(ids, request)
                    transfers.start(request, now)
                case "step":
                    step(rng.randrange(1, 6))
                case "copy":
                    for each in [each for each in copies if rng.random() < 0.6]:
                        end(*each)
                case "wait":  # until parts that are taken count as stuck
                    for _ in range(30):
                        now += 0.02
                        step(1)
                case "time":
                    now += rng.choice([0.01, 0.1, 1.0])
                case "stall":
                    network.stall(peer.agent)
                case "resume":
                    network.resume(peer.agent)
                case "end":
                    network.kill(peer.agent)
                    join(place)
                case "forget":
                    transfers.forget(peer.agent, now)
                case "new" if rng.random() < 0.3:
                    transfers.renew(now)
            check()
        for peer in peers.values():
            network.resume(peer.agent)
        for _ in range(200):
            for each in list(copies):
                end(*each)
            now += 0.1
            step(1)
        check()
    assert not held
    assert not transfers.busy
    assert all(sorted(each._free) == list(range(PARTS)) for made in transfers._staging.values() for each in made)


@needs_nixl
@pytest.mark.parametrize(("own_heads", "peer_heads"), [((1, 2), (0, 4)), ((0, 4), (2, 2))])
def test_heads_arrive_over_nixl(
    own_heads: tuple[int, int], peer_heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, peer, whole = Heads(*own_heads), Heads(*peer_heads), values()
    peer.data[:] = whole[..., peer.range, :]
    monkeypatch.setattr(staging, "PART_BYTES", 3 * peer.memory.block_bytes)
    has, wants = (
        open_transport("nixl", f"{name}-{time.time_ns()}", {"kv": pool.memory})
        for name, pool in (("has", peer), ("wants", own))
    )
    wants.connect(has.endpoint).result(WAIT_S)
    remote, local = list(range(2, 22)), list(range(20))
    moved = [
        wants.read(has.endpoint, "kv", remote[half], local[half], generations=[1] * 10)
        for half in (slice(10), slice(10, 20))
    ]
    assert all(each.result(WAIT_S).bytes for each in moved)
    common = agent.common_heads(own.memory, peer.memory)
    expected = np.zeros_like(whole)
    expected[local, ..., common.start : common.stop, :] = whole[remote, ..., common.start : common.stop, :]
    assert np.array_equal(own.data, expected[..., own.range, :])
    for each in (wants, has):
        each.close()
