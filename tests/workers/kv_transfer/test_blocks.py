"""Ids to ranges of memory: nothing is lost, nothing is added, and wrong ids never become addresses."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer import agent
from penstock.workers.kv_transfer.transport_protocol import TransferError

HERE = Memory(base=1 << 40, block_bytes=4096, blocks=64, kind="cpu", layout="x")
THERE = Memory(base=1 << 41, block_bytes=4096, blocks=64, kind="cuda", device=3, layout="x", generations=1 << 20)

pairs = st.integers(0, 64).flatmap(
    lambda n: st.tuples(
        st.permutations(range(64)).map(lambda p: p[:n]), st.permutations(range(64)).map(lambda p: p[:n])
    )
)


def expand(move: agent.CopyOp) -> list[tuple[int, int]]:
    """The pairs of block ids that a move stands for."""
    found = []
    for (here, size, _), (there, other, device) in zip(
        move.local.rows.tolist(), move.remote.rows.tolist(), strict=True
    ):
        assert (size, size % HERE.block_bytes, device) == (other, 0, THERE.device)
        for at in range(0, size, HERE.block_bytes):
            found.append(((here + at - HERE.base) // 4096, (there + at - THERE.base) // 4096))
    return found


@given(pairs, st.booleans())
def test_a_move_is_exactly_the_pairs_of_blocks_asked_for(ids: tuple[list[int], list[int]], whole: bool) -> None:
    local, remote = ids
    found = [pair for move in agent.copy_ops(HERE, THERE, local, remote, in_one_piece=whole) for pair in expand(move)]
    assert found == list(zip(local, remote, strict=True))


def test_neighbours_on_both_sides_become_one_row_and_others_do_not() -> None:
    [move] = agent.copy_ops(HERE, THERE, [0, 1, 2, 3, 9, 10], [5, 6, 7, 9, 10, 11], in_one_piece=True)
    assert (move.local.rows[:, 1] // 4096).tolist() == [3, 1, 2]
    assert (move.local.kind, move.remote.kind) == ("cpu", "cuda")


@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True),
    st.sampled_from([1, 2, 3, 32]),
    st.booleans(),
    st.data(),
)
def test_blocks_that_are_copied_by_layers_are_copied_once(
    ids: list[int], layers: int, whole: bool, data: st.DataObject
) -> None:
    """Whatever the layers are cut into: each byte of each block, and no other."""
    pool = Memory(base=0, block_bytes=96, blocks=64, layout=f"bfloat16({layers},2,4,1,2)")
    cuts = sorted({0, layers, *data.draw(st.lists(st.integers(0, layers), max_size=4))})
    parts = [agent.span_of(pool, (first, end)) for first, end in pairwise(cuts)]
    copied = [
        (ids.index(start // 96), start % 96, size)
        for part in parts
        for move in agent.copy_ops(pool, pool, range(len(ids)), ids, in_one_piece=whole, span=part)
        for start, size, _ in move.remote.rows.tolist()
    ]
    if len(parts) == 1:  # of whole blocks, neighbours are one row
        assert sum(size for _, _, size in copied) == len(ids) * 96
        return
    bytes_of = [sorted((start, start + size) for block, start, size in copied if block == at) for at in range(len(ids))]
    expected = [(part.start, part.end) for part in parts]
    assert bytes_of == [expected] * len(ids)


@pytest.mark.parametrize("layers", [(0, 3), (1, 1), (2, 1), (-1, 1)])
@pytest.mark.parametrize("layout", ["bfloat16(2,2,4,1,2)", "x", ""])
def test_layers_that_blocks_do_not_have_are_refused(layers: tuple[int, int], layout: str) -> None:
    with pytest.raises(TransferError, match=r"refused: layers .* which has \d"):
        agent.span_of(Memory(base=0, block_bytes=96, blocks=64, layout=layout), layers)


def test_a_direct_copy_is_cut_into_pieces_of_bounded_size() -> None:
    big = Memory(base=1 << 40, block_bytes=40 << 20, blocks=5)
    pieces = list(agent.copy_ops(big, big, range(5), range(5), in_one_piece=False))
    assert [int(piece.local.rows[:, 1].sum()) for piece in pieces] == [40 << 20] * 5
    small = Memory(base=1 << 40, block_bytes=1 << 20, blocks=200)
    sizes = [
        int(piece.local.rows[:, 1].sum())
        for piece in agent.copy_ops(small, small, range(200), range(200), in_one_piece=False)
    ]
    assert sizes == [64 << 20, 64 << 20, 64 << 20, 8 << 20]


@given(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True), st.data())
def test_exactly_the_blocks_with_another_generation_are_stale(remote: list[int], data: st.DataObject) -> None:
    generations = np.array(data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64)), np.uint32)
    expected = [int(generations[block]) for block in remote]
    wrong = data.draw(st.sets(st.integers(0, len(remote) - 1)))
    expected = [(value + 1) % 2**32 if at in wrong else value for at, value in enumerate(expected)]
    move = agent.generation_read(THERE, remote, 1 << 30)
    [(start, size, _)] = move.remote.rows.tolist()
    assert (size, size) == (agent.span_bytes(remote), move.local.rows[0, 1])
    first = (start - THERE.generations) // 4
    found = generations[first : first + size // 4]  # what a read of these words brings
    assert set(agent.stale_blocks(found, remote, expected)) == {remote[at] for at in wrong}


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([0, 1], [0], "2 local blocks for 1"),
        ([0, 64], [0, 1], "local block ids 0..64"),
        ([0, 1], [-1, 1], "remote block ids -1..1"),
        ([3, 3], [0, 1], "target of two"),
    ],
)
def test_wrong_ids_are_refused(local: list[int], remote: list[int], says: str) -> None:
    with pytest.raises(TransferError, match=says) as caught:
        agent.check_ids(HERE, THERE, local, remote, local)
    assert caught.value.cause == "refused"
    assert caught.value.settled.done()


def test_one_source_block_may_go_to_two_targets() -> None:
    agent.check_ids(HERE, THERE, [0, 1], [5, 5], [0, 1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"backend": "loopback"}, "its transport is 'loopback'"),
        ({"version": "1.4.1"}, "one series"),
        ({"version": ""}, "one series"),
        ({"agent": "me"}, "itself"),
        ({"pools": {}}, "the peer has no pool 'kv'"),
        ({"pools": {"kv": Memory(base=1, block_bytes=8192, blocks=1, layout="x")}}, "8192 bytes there, 4096 here"),
        ({"pools": {"kv": Memory(base=1, block_bytes=4096, blocks=1, layout="y")}}, "holds 'y' there, 'x' here"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_reason(change: dict[str, object], says: str) -> None:
    mine = Endpoint(agent="me", backend="nixl", version="1.5.1", pools={"kv": HERE})
    fields: dict[str, object] = {"agent": "peer", "backend": "nixl", "version": "1.5.2", "pools": {"kv": HERE}}
    agent.check_pool(mine, Endpoint(**fields), "kv")  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=says):
        agent.check_pool(mine, Endpoint(**(fields | change)), "kv")  # type: ignore[arg-type]
