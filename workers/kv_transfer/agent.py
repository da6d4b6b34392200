"""The interface to a library that moves bytes (``Agent``), and the memory ranges that an agent copies.

An agent is called from one thread. Each library implements these few calls; deadlines, quarantine, checks and renewal
are implemented once, above them.

Pure functions check block ids and turn them into memory ranges. The checks come before an agent gets an address: a
wrong address could kill the peer.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.transport_protocol import TransferError

MOST_BLOCKS = 4096  # in a staging buffer
PIECE_BYTES = 64 << 20  # a direct copy blocks the agent's thread: about 10 ms each
WORD_BYTES = 4  # of a generation


class MemoryRanges(NamedTuple):
    """Ranges of one kind of memory. ``rows``: (n, 3) uint64 of address, bytes, device."""

    kind: str
    rows: NDArray[np.uint64]


class CopyOp(NamedTuple):
    """One copy by an agent; both sides have the same number of rows, of equal lengths."""

    local: MemoryRanges
    remote: MemoryRanges


def pools_bytes(endpoint: Endpoint) -> int:
    """Of the memory that an agent registers for its pools."""
    return sum(
        pool.blocks * (pool.block_bytes + (WORD_BYTES if pool.generations else 0)) for pool in endpoint.pools.values()
    )


def check_peer(own: Endpoint, peer: Endpoint) -> None:
    """
    Raises:
        TransferError: refused; nothing can ever move between these two.
    """
    if peer.backend != own.backend:
        raise _refused(peer, f"its transport is {peer.backend!r}, ours {own.backend!r}")
    if _series(peer.version) != _series(own.version):
        raise _refused(peer, f"{peer.backend} {peer.version!r} there, {own.version!r} here: they must be one series")
    if peer.agent == own.agent:
        raise _refused(peer, "it is this worker itself")


def check_pool(own: Endpoint, peer: Endpoint, pool: str) -> None:
    """
    Raises:
        TransferError: refused; blocks of this pool can never move between these two.
    """
    check_peer(own, peer)
    for endpoint, whose in ((own, "this worker has"), (peer, "the peer has")):
        if pool not in endpoint.pools:
            raise _refused(peer, f"{whose} no pool {pool!r}; it has {sorted(endpoint.pools)}")
    own_pool, peer_pool = own.pools[pool], peer.pools[pool]
    if own_pool.all_heads or peer_pool.all_heads:
        if not common_heads(own_pool, peer_pool):
            parts = f"{_part(peer_pool)} there, {_part(own_pool)} here"
            raise _refused(peer, f"pool {pool!r} holds {parts}, which have nothing in common")
        if _head_bytes(own_pool) != _head_bytes(peer_pool):
            raise _refused(peer, f"pool {pool!r} has blocks of {peer_pool.block_bytes} bytes, which its layout has not")
        return
    if own_pool.block_bytes != peer_pool.block_bytes:
        raise _refused(
            peer, f"pool {pool!r} has blocks of {peer_pool.block_bytes} bytes there, {own_pool.block_bytes} here"
        )
    if own_pool.layout != peer_pool.layout:
        raise _refused(peer, f"pool {pool!r} holds {peer_pool.layout!r} there, {own_pool.layout!r} here")


def check_ids(
    own_pool: Memory, peer_pool: Memory, local: Sequence[int], remote: Sequence[int], written: Sequence[int]
) -> None:
    """
    Raises:
        TransferError: refused; ``local`` and ``remote`` do not pair, lie outside, or write one block twice.
    """
    if len(local) != len(remote):
        raise TransferError("refused", f"{len(local)} local blocks for {len(remote)} remote ones")
    for ids, memory, whose in ((local, own_pool, "local"), (remote, peer_pool, "remote")):
        if len(ids) and not (min(ids) >= 0 and max(ids) < memory.blocks):
            raise TransferError(
                "refused", f"{whose} block ids {min(ids)}..{max(ids)} are not in 0..{memory.blocks - 1}"
            )
    if len(set(written)) != len(written):
        raise TransferError("refused", "a block is the target of two others")


def check_generations(peer_pool: Memory, remote: Sequence[int], generations: Sequence[int]) -> None:
    """
    Raises:
        TransferError: refused; they cannot be compared.
    """
    if len(generations) != len(remote):
        raise TransferError("refused", f"{len(generations)} generations for {len(remote)} blocks")
    if not peer_pool.generations:
        raise TransferError("refused", "the peer does not show the generations of its blocks")


class BlockSpan(NamedTuple):
    """A part of each block, in bytes from its start."""

    start: int
    end: int


def span_of(pool: Memory, layers: tuple[int, int] | None) -> BlockSpan:
    """Where layers lie in a block, from the first to before the second; None: all of it.

    Raises:
        TransferError: refused; it has no such layers.
    """
    if layers is None:
        return BlockSpan(0, pool.block_bytes)
    (first, end), count = layers, pool.layers
    if not 0 <= first < end <= count:
        raise TransferError("refused", f"layers {first} to {end - 1} of blocks of {pool.layout!r}, which has {count}")
    size = pool.block_bytes // count
    return BlockSpan(first * size, end * size)


def copy_ops(
    own_pool: Memory,
    peer_pool: Memory,
    local: Sequence[int],
    remote: Sequence[int],
    *,
    in_one_piece: bool,
    span: BlockSpan | None = None,
) -> Iterator[CopyOp]:
    """The copies for a span of these blocks, with neighbours merged; one copy, or pieces of ``PIECE_BYTES``."""
    span = span or BlockSpan(0, own_pool.block_bytes)
    step = max(1, len(local) if in_one_piece else PIECE_BYTES // own_pool.block_bytes)
    for first in range(0, len(local), step):
        local_part, remote_part = local[first : first + step], remote[first : first + step]
        yield merge_runs(own_pool, peer_pool, np.array(local_part, np.int64), np.array(remote_part, np.int64), span)


class _Part(NamedTuple):
    """The heads of each block that a pool has."""

    dtype: str
    rows: int  # of heads in a block: layers, keys and values, tokens
    size: int  # of a head
    first: int
    heads: int
    all: int

    def __str__(self) -> str:
        heads = f"heads {self.first} to {self.first + self.heads - 1} of {self.all}"
        return f"{heads}, {self.rows} rows of {self.dtype}({self.size})"


def _part(pool: Memory) -> _Part | None:
    """None: its layout has no heads."""
    dtype, _, sizes = pool.layout.rstrip(")").partition("(")
    try:
        *outer, heads, size = (int(each) for each in sizes.split(","))
    except ValueError:
        return None
    return _Part(dtype, math.prod(outer), size, pool.first_head, heads, pool.all_heads or heads)


def _head_bytes(pool: Memory) -> float:
    part = _part(pool)
    return pool.block_bytes / (part.rows * part.heads) if part is not None and part.rows * part.heads else 0.0


def common_heads(own_pool: Memory, peer_pool: Memory) -> range:
    """The heads of a block that both pools have; also empty if their blocks differ otherwise."""
    own, peer = _part(own_pool), _part(peer_pool)
    if own is None or peer is None or own[:3] != peer[:3] or own.all != peer.all:
        return range(0)
    return range(max(own.first, peer.first), min(own.first + own.heads, peer.first + peer.heads))


def differ_in_heads(own_pool: Memory, peer_pool: Memory) -> bool:
    """Whether two pools have common heads, but not all, so that blocks cannot be read into place."""
    return (
        bool(own_pool.all_heads or peer_pool.all_heads)
        and (own_pool.first_head, own_pool.layout) != (peer_pool.first_head, peer_pool.layout)
        and bool(common_heads(own_pool, peer_pool))
    )


class HeadCopy(NamedTuple):
    """Heads of blocks that were read whole, and where they belong. Both blocks are (rows, heads, bytes of a head)."""

    blocks: NDArray[np.int64]  # of the own pool, in the order of those that were read
    rows: int
    size: int
    heads: int  # of a block that was read
    start: int  # the first of them that is taken
    own_heads: int  # of a block of the own pool
    own_start: int  # the first of them that is replaced
    taken: int


class StagedPiece(NamedTuple):
    """Blocks of a peer that are read into one staging buffer. ``remote``: their ids there."""

    remote: NDArray[np.int64]
    copy: HeadCopy


def staged_pieces(
    own_pool: Memory, peer_pool: Memory, local: Sequence[int], remote: Sequence[int], room: int
) -> tuple[Iterator[StagedPiece], int]:
    """What is read to get the heads of these blocks that both pools have, and how many bytes of heads these are.

    Args:
        room: bytes of a staging buffer.
    Raises:
        TransferError: refused; one of the peer's blocks is longer than a block of all heads.
    """
    if peer_pool.block_bytes > room:
        raise TransferError("refused", f"blocks of {peer_pool.block_bytes} bytes; {room} are read at once")
    own, peer, heads = _part(own_pool), _part(peer_pool), common_heads(own_pool, peer_pool)
    assert own is not None
    assert peer is not None
    size = own_pool.block_bytes // (own.rows * own.heads)  # bytes of a head
    copy = HeadCopy(
        np.empty(0, np.int64), own.rows, size, peer.heads, heads.start - peer.first, own.heads,
        heads.start - own.first, len(heads),
    )  # fmt: skip
    return _staged_pieces(copy, local, remote, max(1, min(room // peer_pool.block_bytes, MOST_BLOCKS))), (
        len(local) * own.rows * len(heads) * size
    )


def _staged_pieces(copy: HeadCopy, local: Sequence[int], remote: Sequence[int], step: int) -> Iterator[StagedPiece]:
    for first in range(0, len(local), step):
        ids, theirs = (np.array(each[first : first + step], np.int64) for each in (local, remote))
        yield StagedPiece(theirs, copy._replace(blocks=ids))


def whole_blocks(staged: Memory, peer_pool: Memory, remote: NDArray[np.int64]) -> CopyOp:
    """Blocks of a peer, one after the other in a staging buffer."""
    return merge_runs(staged, peer_pool, np.arange(len(remote)), remote, BlockSpan(0, peer_pool.block_bytes))


def whole_block_bytes(pool: Memory) -> int:
    """Bytes of a block with the heads of all ranks: the most that a peer's block of the same model can have."""
    part = _part(pool)
    return pool.block_bytes if part is None else pool.block_bytes // part.heads * part.all


def merge_runs(
    own_pool: Memory, peer_pool: Memory, local: NDArray[np.int64], remote: NDArray[np.int64], span: BlockSpan
) -> CopyOp:
    """One row per run of whole blocks that are neighbours on both sides, or per part of a block."""
    if span == (0, own_pool.block_bytes):
        cuts = np.flatnonzero((local[1:] != local[:-1] + 1) | (remote[1:] != remote[:-1] + 1))
        bounds = np.concatenate(([0], cuts + 1, [len(local)]))
    else:
        bounds = np.arange(len(local) + 1)
    starts, lengths = bounds[:-1], (bounds[1:] - bounds[:-1]) * (span.end - span.start)

    def ranges(pool: Memory, ids: NDArray[np.int64]) -> MemoryRanges:
        addresses = pool.base + ids[starts] * pool.block_bytes + span.start
        return MemoryRanges(pool.kind, _rows(addresses, lengths, pool.device))

    return CopyOp(ranges(own_pool, local), ranges(peer_pool, remote))


def generation_read(peer_pool: Memory, remote: Sequence[int], scratch: int) -> CopyOp:
    """Read the generations of all blocks from the lowest to the highest id into ``scratch``."""
    low, high = min(remote), max(remote)
    size = np.array([(high - low + 1) * WORD_BYTES])
    source = np.array([peer_pool.generations + low * WORD_BYTES])
    return CopyOp(MemoryRanges("cpu", _rows(np.array([scratch]), size, 0)), MemoryRanges("cpu", _rows(source, size, 0)))


def first_bytes(peer_pool: Memory, scratch: int, size: int) -> CopyOp:
    """Read the first bytes of a pool into ``scratch``."""
    length = np.array([size])
    return CopyOp(
        MemoryRanges("cpu", _rows(np.array([scratch]), length, 0)),
        MemoryRanges(peer_pool.kind, _rows(np.array([peer_pool.base]), length, peer_pool.device)),
    )


def span_bytes(remote: Sequence[int]) -> int:
    """Room that ``generation_read`` needs."""
    return (max(remote) - min(remote) + 1) * WORD_BYTES


def stale_blocks(read: NDArray[np.uint32], remote: Sequence[int], expected: Sequence[int]) -> list[int]:
    """The blocks whose generation, as read by ``generation_read``, is not the expected one."""
    now = read[np.array(remote) - min(remote)]
    return list(np.array(remote)[now != np.array(expected, np.uint32)].tolist())


def _rows(addresses: NDArray[np.int64], lengths: NDArray[np.int64], device: int) -> NDArray[np.uint64]:
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device
    return rows


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


def _refused(peer: Endpoint, reason: str) -> TransferError:
    return TransferError("refused", f"agent {peer.agent}: {reason}")


class PeerLost(Exception):
    """The peer or the connection to it has ended."""


class TransferRejected(Exception):
    """The library rejects the peer's metadata or these addresses; nothing was moved."""


class Agent(Protocol):
    endpoint: Endpoint
    events: tuple[int, ...]  # file descriptors, readable when ``progress`` has something to do; may be empty

    def add(self, peer: Endpoint) -> None:
        """Load a peer that is not loaded.

        Raises:
            PeerLost: it cannot be reached.
            TransferRejected: its metadata does not match its name.
        """

    def remove(self, name: str) -> None:
        """Forget a peer, known or not. Its transfers must have ended: their end could not be observed afterwards."""

    def post(self, op: str, peer: str, move: CopyOp) -> Any:
        """Start a "READ" or "WRITE"; may copy everything before it returns. Returns its handle.

        Raises:
            PeerLost, TransferRejected: nothing of it was started.
        """

    def done(self, handle: Any) -> bool:
        """Whether it has completed.

        Raises:
            PeerLost: it has failed; no more bytes are moved.
        """

    def release(self, handle: Any) -> None:
        """Release a handle. A transfer that is not done keeps moving bytes until the agent is closed."""

    def register(self, address: int, size: int, kind: str = "cpu", device: int = 0) -> None:
        """Register memory as a target of own reads, until the agent is closed.

        Raises:
            TransferError: unavailable; the library registers no more.
        """

    def progress(self) -> None:
        """Drive peers' transfers and connections."""

    def close(self) -> None:
        """Close the agent and its connections. Then no transfer moves bytes, and no peer reaches its pools."""
