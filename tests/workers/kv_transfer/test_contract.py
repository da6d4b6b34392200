"""What every transport does, whatever moves its bytes: the same tests over the loopback and over NIXL."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.transport_protocol import TransferError, Transport
from penstock.workers.kv_transfer.transport_thread import TransportThread, open_transport
from tests.properties import examples
from tests.workers.kv_transfer.loopback import LoopbackNetwork, open_loopback
from tests.workers.kv_transfer.support import BLOCK_BYTES, BLOCKS, WAIT_S, Pool, needs_nixl, until

NUMBERS = count()


class Side(NamedTuple):
    pool: Pool
    transport: Transport
    renewed: list[Endpoint]


class Pair(NamedTuple):
    """``reader`` has empty blocks, ``owner`` numbered ones."""

    reader: Side
    owner: Side


Open = Callable[[], Side]


@pytest.fixture(scope="module", params=["loopback", pytest.param("nixl", marks=needs_nixl)])
def opener(request: pytest.FixtureRequest) -> Iterator[Open]:
    network = LoopbackNetwork()
    opened: list[Side] = []

    def side() -> Side:
        pool, renewed = Pool(), list[Endpoint]()
        name = f"contract-{next(NUMBERS)}"
        open_it = partial(open_loopback, network) if request.param == "loopback" else partial(open_transport, "nixl")
        transport = open_it(name, {"kv": pool.memory}, on_renewed=renewed.append, quarantine_s=60)
        opened.append(Side(pool, transport, renewed))
        return opened[-1]

    yield side
    for each in opened:
        each.transport.close()


@pytest.fixture(scope="module")
def shared(opener: Open) -> Pair:
    """One pair for all the tests that leave it as it was."""
    return Pair(opener(), opener())


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.reader.pool.blocks[:] = 0
    shared.owner.pool.number()
    return shared


@pytest.fixture
def own(opener: Open) -> Pair:
    """A pair for one test."""
    pair = Pair(opener(), opener())
    pair.owner.pool.number()
    return pair


def failure(future: "Future[Any]") -> TransferError:
    error = future.exception(WAIT_S)
    assert isinstance(error, TransferError), error
    return error


def test_a_read_brings_these_blocks_and_touches_no_other(pair: Pair) -> None:
    moved = pair.reader.transport.read(pair.owner.transport.endpoint, "kv", [5, 6, 7, 20, 3], [1, 2, 3, 9, 8])
    assert moved.result(WAIT_S).bytes == 5 * BLOCK_BYTES
    expected = np.zeros(BLOCKS, int)
    expected[[1, 2, 3, 9, 8]] = [6, 7, 8, 21, 4]
    assert pair.reader.pool.values() == [[value] for value in expected]


def test_a_read_of_layers_brings_these_layers_only(pair: Pair) -> None:
    """The last of them with a check whose blocks they are, which then is of all."""
    reader, endpoint, half = pair.reader, pair.owner.transport.endpoint, BLOCK_BYTES // 2
    first = reader.transport.read(endpoint, "kv", [5, 6], [1, 2], layers=(0, 1))
    assert first.result(WAIT_S).bytes == 2 * half
    assert reader.pool.blocks[1:3].tolist() == [[block] * half + [0] * half for block in (6, 7)]
    rest = reader.transport.read(endpoint, "kv", [5, 6], [1, 2], layers=(1, 2), generations=[1, 1])
    assert rest.result(WAIT_S).bytes == 2 * half
    expected = np.zeros(BLOCKS, int)
    expected[[1, 2]] = [6, 7]
    assert reader.pool.values() == [[value] for value in expected]
    stale = reader.transport.read(endpoint, "kv", [5, 6], [1, 2], layers=(1, 2), generations=[1, 9])
    assert failure(stale).cause == "stale"
    assert failure(reader.transport.read(endpoint, "kv", [5], [1], layers=(0, 3))).cause == "refused"


def test_a_write_pushes_these_blocks_and_touches_no_other(pair: Pair) -> None:
    moved = pair.owner.transport.write(pair.reader.transport.endpoint, "kv", [0, 1, 40], [63, 62, 0])
    assert moved.result(WAIT_S).bytes == 3 * BLOCK_BYTES
    expected = np.zeros(BLOCKS, int)
    expected[[63, 62, 0]] = [1, 2, 41]
    assert pair.reader.pool.values() == [[value] for value in expected]


@examples(25)
@given(data=st.data())
def test_any_pairing_of_blocks_is_moved_as_asked(shared: Pair, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, BLOCKS))
    remote = data.draw(st.permutations(range(BLOCKS)))[:number]
    local = data.draw(st.permutations(range(BLOCKS)))[:number]
    shared.owner.pool.number()
    shared.reader.pool.blocks[:] = 0
    shared.reader.transport.read(shared.owner.transport.endpoint, "kv", remote, local).result(WAIT_S)
    assert shared.reader.pool.values(local) == [[block + 1] for block in remote]
    assert int((shared.reader.pool.blocks != 0).any(axis=1).sum()) == number


def test_no_blocks_are_moved_at_once(pair: Pair) -> None:
    assert pair.reader.transport.read(pair.owner.transport.endpoint, "kv", [], []).result(WAIT_S).bytes == 0


def test_packed_ids_are_taken_as_they_come_from_a_ticket(pair: Pair) -> None:
    ids = memoryview(np.array([4, 5], "<u4").tobytes()).cast("I")
    ones = memoryview(np.array([1, 1], "<u4").tobytes()).cast("I")
    future = pair.reader.transport.read(pair.owner.transport.endpoint, "kv", ids, [0, 1], generations=ones)
    assert future.result(WAIT_S).bytes == 2 * BLOCK_BYTES
    assert pair.reader.pool.values([0, 1]) == [[5], [6]]


def test_blocks_whose_owner_changed_are_stale_and_the_local_ones_free(pair: Pair) -> None:
    peer, transport = pair.owner.transport.endpoint, pair.reader.transport
    now = pair.owner.pool.generations
    now[:] = np.arange(BLOCKS) + 2**31
    ticket = [int(now[block]) for block in (10, 50, 11)]
    transport.read(peer, "kv", [10, 50, 11], [0, 1, 2], generations=ticket).result(WAIT_S)
    now[50] += 1
    error = failure(transport.read(peer, "kv", [10, 50, 11], [0, 1, 2], generations=ticket))
    assert error.cause == "stale"
    assert "[50]" in str(error)
    assert error.settled.done()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"remote": [BLOCKS]}, "remote block ids"),
        ({"local": [-1]}, "local block ids"),
        ({"local": [1, 2]}, "2 local blocks for 1"),
        ({"remote": [1, 2], "local": [4, 4]}, "target of two"),
        ({"pool": "embeds"}, "no pool 'embeds'"),
        ({"generations": [1, 2]}, "2 generations for 1"),
        ({"remote": ["one"]}, "TypeError"),
        ({"remote": [None]}, "TypeError"),
    ],
)
def test_a_wrong_request_is_refused_and_moves_nothing(pair: Pair, change: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"pool": "kv", "remote": [1], "local": [1]} | change
    error = failure(pair.reader.transport.read(pair.owner.transport.endpoint, **asked))
    assert (error.cause, error.settled.done()) == ("refused", True)
    assert says in str(error)
    assert not pair.reader.pool.blocks.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("backend", "carrier pigeon"), ("version", "0.1"), ("metadata", b""), ("metadata", b"x"), ("digest", b"\0" * 16)],
)
def test_a_peer_that_does_not_fit_is_refused_and_the_right_one_still_taken(own: Pair, field: str, value: Any) -> None:
    right = own.owner.transport.endpoint
    wrong = msgspec.structs.replace(right, **{field: value})
    assert failure(own.reader.transport.read(wrong, "kv", [1], [1])).cause == "refused"
    assert failure(own.reader.transport.connect(wrong)).cause == "refused"
    own.reader.transport.read(right, "kv", [1], [1]).result(WAIT_S)
    assert own.reader.pool.values([1]) == [[2]]


def test_truncated_metadata_never_reach_the_agent(own: Pair) -> None:
    """NIXL would refuse the name for the rest of its life."""
    right = own.owner.transport.endpoint
    wrong = msgspec.structs.replace(right, metadata=right.metadata[:-9])
    error = failure(own.reader.transport.connect(wrong))
    assert (error.cause, "damaged" in str(error)) == ("refused", True)
    own.reader.transport.connect(right).result(WAIT_S)


@pytest.mark.parametrize(("field", "value"), [("layout", "bfloat16 (4,)"), ("block_bytes", BLOCK_BYTES // 2)])
def test_blocks_of_another_layout_are_refused(pair: Pair, field: str, value: Any) -> None:
    right = pair.owner.transport.endpoint
    other = msgspec.structs.replace(right.pools["kv"], **{field: value})
    wrong = msgspec.structs.replace(right, pools={"kv": other})
    error = failure(pair.reader.transport.read(wrong, "kv", [1], [1]))
    assert (error.cause, str(value) in str(error)) == ("refused", True)


def test_memory_that_the_peer_never_registered_is_refused(own: Pair) -> None:
    right = own.owner.transport.endpoint
    elsewhere = msgspec.structs.replace(right.pools["kv"], base=own.reader.pool.generations.ctypes.data)
    wrong = msgspec.structs.replace(right, pools={"kv": elsewhere})
    assert failure(own.reader.transport.read(wrong, "kv", [1], [1])).cause == "refused"
    own.reader.transport.read(right, "kv", [1], [1]).result(WAIT_S)


def test_without_generation_words_a_check_is_refused(pair: Pair) -> None:
    right = pair.owner.transport.endpoint
    silent = msgspec.structs.replace(right, pools={"kv": msgspec.structs.replace(right.pools["kv"], generations=0)})
    assert failure(pair.reader.transport.read(silent, "kv", [1], [1], generations=[1])).cause == "refused"
    pair.reader.transport.read(silent, "kv", [1], [1]).result(WAIT_S)


def test_an_endpoint_survives_the_wire(pair: Pair) -> None:
    peer = msgspec.msgpack.decode(msgspec.msgpack.encode(pair.owner.transport.endpoint), type=Endpoint)
    pair.reader.transport.connect(peer).result(WAIT_S)
    pair.reader.transport.connect(peer).result(WAIT_S)  # as often as one likes
    pair.reader.transport.read(peer, "kv", [1], [1]).result(WAIT_S)
    assert pair.reader.transport.stats().peers == 1


def test_a_worker_does_not_connect_to_itself(pair: Pair) -> None:
    assert failure(pair.reader.transport.connect(pair.reader.transport.endpoint)).cause == "refused"


def test_a_forgotten_peer_can_be_used_again_if_it_still_runs(own: Pair) -> None:
    peer = own.owner.transport.endpoint
    own.reader.transport.read(peer, "kv", [1], [1]).result(WAIT_S)
    for _ in range(3):
        own.reader.transport.forget(peer.agent)
        own.reader.transport.read(peer, "kv", [2], [1]).result(WAIT_S)
    own.reader.transport.forget("nobody")
    until(lambda: own.reader.transport.stats().peers == 1, "one peer")
    assert own.reader.pool.values([1]) == [[3]]


def test_a_closed_peer_is_lost_and_others_are_not(own: Pair, opener: Open) -> None:
    other = opener()
    other.pool.number()
    gone = own.owner.transport.endpoint
    own.reader.transport.read(gone, "kv", [1], [1]).result(WAIT_S)
    own.owner.transport.close()
    own.reader.transport.forget(gone.agent)
    error = failure(own.reader.transport.read(gone, "kv", [1], [1]))
    assert (error.cause, error.settled.done()) == ("peer_lost", True)
    own.reader.transport.read(other.transport.endpoint, "kv", [4], [1]).result(WAIT_S)
    assert own.reader.pool.values([1]) == [[5]]


def test_a_deadline_that_has_passed_before_anything_was_posted_leaves_the_blocks_free(pair: Pair) -> None:
    error = failure(pair.reader.transport.read(pair.owner.transport.endpoint, "kv", [1], [1], timeout=-1))
    assert error.cause == "timeout"
    assert error.settled.result(WAIT_S) is None


def test_nobody_can_cancel_a_transfer(pair: Pair) -> None:
    future = pair.reader.transport.read(pair.owner.transport.endpoint, "kv", [1], [1])
    assert not future.cancel()
    assert future.result(WAIT_S).bytes == BLOCK_BYTES


def test_many_transfers_at_once_all_arrive(own: Pair) -> None:
    peer = own.owner.transport.endpoint
    futures = [
        own.reader.transport.read(peer, "kv", [block], [BLOCKS - 1 - block], generations=[1]) for block in range(BLOCKS)
    ]
    assert sum(future.result(WAIT_S).bytes for future in futures) == BLOCKS * BLOCK_BYTES
    assert own.reader.pool.values() == [[BLOCKS - block] for block in range(BLOCKS)]


def test_what_happened_is_counted(own: Pair) -> None:
    transport, peer = own.reader.transport, own.owner.transport.endpoint
    transport.read(peer, "kv", [1, 2], [1, 2]).result(WAIT_S)
    transport.write(peer, "kv", [1], [1]).result(WAIT_S)
    failure(transport.read(peer, "kv", [1], [BLOCKS]))
    failure(transport.read(peer, "kv", [1], [1], generations=[9]))
    stats = transport.stats()
    assert (stats.transfers, stats.bytes_read, stats.bytes_written) == (2, 2 * BLOCK_BYTES, BLOCK_BYTES)
    assert (stats.failures["refused"], stats.failures["stale"], stats.failures["timeout"]) == (1, 1, 0)
    assert (stats.live, stats.quarantined_transfers, stats.quarantined_blocks, stats.peers) == (0, 0, 0, 1)
    assert 0 < stats.seconds < WAIT_S
    assert stats.registered_bytes == BLOCKS * (BLOCK_BYTES + 4), "the pool and the generations of its blocks"
    assert stats.buffer_bytes >= 4096, "what generations were read into"


def test_a_renewed_agent_has_a_new_name_and_the_same_blocks(own: Pair) -> None:
    assert isinstance(own.owner.transport, TransportThread)
    before = own.owner.transport.endpoint
    own.reader.transport.read(before, "kv", [1], [1]).result(WAIT_S)
    own.owner.transport.renew()
    until(lambda: bool(own.owner.renewed), "the callback gets the new endpoint")
    [after] = own.owner.renewed
    assert (after.agent, after.pools) == (before.agent + ".1", before.pools)
    assert own.owner.transport.endpoint == after
    own.reader.transport.read(after, "kv", [7], [1]).result(WAIT_S)
    own.owner.transport.write(own.reader.transport.endpoint, "kv", [8], [2]).result(WAIT_S)
    assert own.reader.pool.values([1, 2]) == [[8], [9]]
    assert own.owner.transport.stats().renewals == 1


def test_after_closing_everything_fails_at_once(own: Pair) -> None:
    peer = own.owner.transport.endpoint
    draining = own.reader.transport.drained()
    own.reader.transport.close()
    own.reader.transport.close()
    assert failure(own.reader.transport.read(peer, "kv", [1], [1])).cause == "unavailable"
    assert failure(own.reader.transport.connect(peer)).cause == "unavailable"
    own.reader.transport.forget(peer.agent)
    for each in (draining, own.reader.transport.drained()):
        assert each.result(WAIT_S) is None
