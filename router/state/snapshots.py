"""A router's state as bytes in the object store: a restart reads the tail of the logs instead of their last hour.

A snapshot is of one moment, and is encoded in steps while its source keeps changing; the event loop runs in
between. Each part is stored after its length. That of the prefix index has the order of eviction too, so an index that
was restored and one that was not stay equal.
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get as get_message
from penstock.infra.bus.direct_get import lifetime, server_ns
from penstock.infra.bus.object_store import get, replace
from penstock.router.state.holders import Holding, bits_of
from penstock.router.state.load_tracker import LoadState, merge
from penstock.router.state.prefix_index import PrefixIndex
from penstock.router.state.radix_tree import Node
from penstock.schemas import wire
from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("router")


_TIMEOUT_S = 5.0
_INDEX_TIMEOUT_S = 30.0  # it has 8 bytes a block
_MOST_BYTES = 1 << 30  # as much as the bucket holds
_LENGTH = 4  # bytes


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The head of a snapshot: the fold of WORK and DONE up to these sequences, and perhaps somewhat further."""

    taken_ns: int
    work_seq: int
    done_seq: int
    returned_seq: int


_decode_loads = wire.decoder(LoadState)
_decode_snapshot = wire.decoder(Snapshot)


class Snapshots:
    """One object per router name, replaced by newer ones. Losing it only makes the next start slower."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"fleet-{router or 'router'}"

    async def load(self) -> tuple[Snapshot, LoadState] | None:
        """The last snapshot, or of one that is ahead of its streams, which have lost their ends, what was unfinished,
        at sequence 0."""
        try:
            stored = await get(self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_TIMEOUT_S)
            head, *parts = _split(stored)
            at, state = _decode_snapshot(head), merge(map(_decode_loads, parts))
            try:
                await _check_stream(self._bus, "WORK", at.work_seq, at.taken_ns)
                await _check_stream(self._bus, "DONE", max(at.done_seq, at.returned_seq), at.taken_ns)
            except ValueError as error:
                log.warning("snapshot_ahead", reason=str(error), unfinished=len(state.unfinished))
                return Snapshot(at.taken_ns, 0, 0, 0), LoadState(state.unfinished)
            return at, state
        except (ServingError, msgspec.MsgspecError, ValueError) as error:
            log.info("no_snapshot", reason=repr(error)[:200])
            return None

    async def save(self, head: Snapshot, state: Iterable[LoadState]) -> None:
        """
        Args:
            state: ``LoadTracker.parts``.
        """
        parts = [_prefixed(wire.encode(head))]
        for part in state:
            parts.append(_prefixed(wire.encode(only_logged(part))))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_TIMEOUT_S)
        except ServingError as error:
            log.warning("snapshot_not_saved", error=error.message)


class IndexSnapshots:
    """The prefix index, one object per router name. Losing it only makes the next start ask all workers for dumps.

    Workers with lower tiers are left out, and asked.
    """

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"index-{router or 'router'}"

    async def load(self, max_blocks: int) -> tuple[PrefixIndex, int] | None:
        """The stored index and the KV sequence up to which it was folded.

        None: there is none, or it is damaged, or the stream does not have everything after it any more.
        """
        began = time.monotonic()
        try:
            data = await get(
                self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_INDEX_TIMEOUT_S
            )
            parts = _split(data)
            head = read_head(next(parts))
            await _check_stream(self._bus, "KV", head.kv_seq, head.taken_ns)
            await self._check_start(head.kv_seq)
            index = PrefixIndex(max_blocks)
            if await run_in_steps(restoring(index, head, parts)):
                log.info("index_restored", kv_seq=head.kv_seq, blocks=index.blocks, seconds=time.monotonic() - began)
                return index, head.kv_seq
            log.warning("index_snapshot_wrong", kv_seq=head.kv_seq, expected=head.checksum, found=index.checksum())
        except (ServingError, msgspec.MsgspecError, ValueError, LookupError) as error:
            log.info("no_index_snapshot", reason=repr(error)[:200])
        return None

    async def save(self, index: PrefixIndex, kv_seq: int) -> None:
        parts = []
        for part in encoding(index, kv_seq, self._bus.clock.now_ns()):
            parts.append(_prefixed(part))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_INDEX_TIMEOUT_S)
        except ServingError as error:
            log.warning("index_snapshot_not_saved", error=error.message)

    async def _check_start(self, kv_seq: int) -> None:
        try:
            state = (await self._bus.js.stream_info(self._bus.subjects.stream("KV"))).state
        except Exception as error:
            raise ServingError(Code.broker_unavailable, f"the KV stream cannot be read: {error!r}") from error
        if state.first_seq > kv_seq + 1:
            raise ValueError(f"the KV stream has {state.first_seq} to {state.last_seq}, the snapshot ends at {kv_seq}")


async def _check_stream(bus: Bus, name: str, seq: int, taken_ns: int) -> None:
    """
    Raises:
        ServingError: the stream cannot be read.
        ValueError: the snapshot is of a stream that was lost, or has lost its end since: the stream was made after the
            snapshot, ends before it, or has a later message at its position.
    """
    stream = await lifetime(bus, bus.subjects.stream(name))
    if not stream.has(seq, taken_ns):
        raise ValueError(f"{name} was lost and recreated: it ends at {stream.end}, the snapshot at {seq}")
    entry = await get_message(bus, bus.subjects.stream(name), seq) if seq else None
    if entry is not None and server_ns(entry) > taken_ns:
        raise ValueError(f"{name} has lost its end: message {seq} was stored after the snapshot")


async def run_in_steps(steps: Generator[None, None, bool]) -> bool:
    """Run a generator to its end, and everything else that is due after each of its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)
        await asyncio.sleep(0)


def _prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH, "little") + part


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data) or not at:
        size = int.from_bytes(data[at : at + _LENGTH], "little")
        at += _LENGTH + size
        if not size or at > len(data):
            raise ValueError(f"no snapshot: {len(data)} bytes, a part ends at {at}")
        yield data[at - size : at]


def only_logged(part: LoadState) -> LoadState:
    """Without decisions of this router that were not read from the log: their jobs may never be stored."""
    if all(entry.echoed for entry in part.unfinished):
        return part
    return msgspec.structs.replace(part, unfinished=tuple(entry for entry in part.unfinished if entry.echoed))


PART_BLOCKS = 8192  # encoded at once, in 1 ms
_LOADED_BLOCKS = 4096  # at once
_NODE_BLOCKS = 16  # what a node costs beside its blocks
_MASKS = 500  # summed up at once


class HeldBy(msgspec.Struct, frozen=True, array_like=True):
    """A target: its position in the KV stream, and its bit in the masks (1 << slot)."""

    worker: str
    rank: int
    epoch: int
    seq: int
    slot: int
    cut: bool = False
    ragged: bool = False


class IndexHead(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header before the parts. ``checksum`` is that of the targets in ``held_by``, ``blocks`` of the whole tree."""

    taken_ns: int
    kv_seq: int
    checksum: int
    blocks: int
    max_blocks: int
    clock: int
    held_by: tuple[HeldBy, ...]


class IndexPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some nodes of the tree. Numbers are packed little-endian, 8 bytes each.

    Attributes:
        numbers: of the nodes.
        sizes: blocks of each node.
        parents: -1: none.
        mask_at: each node's place in ``masks``.
        masks: packed little-endian.
        keys: of all blocks.
        partial: (node, slot, number of blocks), for who has only the first blocks of a node.
    """

    numbers: bytes
    sizes: bytes
    parents: bytes
    ages: bytes
    mask_at: bytes
    masks: tuple[bytes, ...]
    keys: bytes
    partial: tuple[tuple[int, int, int], ...] = ()


_decode_head = wire.decoder(IndexHead)
_decode_part = wire.decoder(IndexPart)


def encoding(index: PrefixIndex, kv_seq: int, taken_ns: int) -> Iterator[bytes]:
    """The head and the parts of a snapshot of ``index`` at the moment of the first step. One at a time."""
    holders = index.holders
    live, ragged = 0, set(holders.ragged)
    held_by, holdings = [], []
    for holding, epoch, seq in index.feeds():
        live |= holding.bit
        holdings.append(holding)
        target_id = holding.target_id
        slot = holding.bit.bit_length() - 1
        held_by.append(HeldBy(*target_id, epoch, seq, slot, holding.cut, target_id in ragged))
    head = IndexHead(
        *(
            taken_ns,
            kv_seq,
            holders.checksum(holdings),
            index.blocks,
            holders.max_blocks,
            holders.tree.clock,
            tuple(held_by),
        )
    )
    frozen = holders.tree.freeze()
    try:
        yield wire.encode(head)
        nodes: list[tuple[int, Node]] = []
        blocks = 0
        for number, node in frozen:
            nodes.append((number, node))
            blocks += len(node.chunk) + _NODE_BLOCKS
            if blocks >= PART_BLOCKS:
                yield wire.encode(_part(nodes, live))
                nodes, blocks = [], 0
        if nodes:
            yield wire.encode(_part(nodes, live))
    finally:
        holders.tree.thaw()


def restoring(index: PrefixIndex, head: IndexHead, parts: Iterable[bytes]) -> Generator[None, None, bool]:
    """Load a snapshot into a new index, in steps.

    Returns: False: it is not the index that was stored, or one with another cap. Do not use the index.
    Raises:
        msgspec.MsgspecError, ValueError, IndexError: the parts are damaged.
    """
    tree = index.holders.tree
    if head.max_blocks != index.holders.max_blocks:
        return False
    tree.clock = head.clock
    by_slot = {}
    for each in head.held_by:
        by_slot[each.slot] = holding = Holding((each.worker, each.rank), 1 << each.slot)
        holding.cut = each.cut
        index.restore(holding, each.epoch, each.seq)
        if each.ragged:
            index.holders.mark_ragged(holding)
    totals: dict[int, tuple[int, int]] = {}  # blocks and sum of keys by mask
    for data in parts:
        yield from _load(index, _decode_part(data), totals)
    yield from tree.link()
    index.holders.link()
    for number, (mask, (blocks, key_sum)) in enumerate(totals.items()):
        if number % _MASKS == 0:
            yield
        for bit in bits_of(mask):
            holding = by_slot[bit.bit_length() - 1]
            holding.blocks += blocks
            holding.key_sum += key_sum
    return index.blocks == head.blocks and index.checksum() == head.checksum


def read_head(data: bytes) -> IndexHead:
    """
    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _decode_head(data)


def _part(nodes: Sequence[tuple[int, Node]], live: int) -> IndexPart:
    keys = array("q")
    masks: dict[int, int] = {}
    mask_at, partial = array("q"), []
    for number, node in nodes:
        keys.extend(node.chunk)
        mask_at.append(masks.setdefault(node.mask & live, len(masks)))
        for count, bits in node.partial.items():
            partial += [(number, bit.bit_length() - 1, count) for bit in bits_of(bits & live)]
    width = max(mask.bit_length() for mask in masks) // 8 + 1
    return IndexPart(
        _packed(array("q", [number for number, _ in nodes])),
        _packed(array("q", [len(node.chunk) for _, node in nodes])),
        _packed(array("q", [node.parent for _, node in nodes])),
        _packed(array("q", [node.age for _, node in nodes])),
        _packed(mask_at),
        tuple(mask.to_bytes(width, "little") for mask in masks),
        _packed(keys),
        tuple(partial),
    )


def _load(index: PrefixIndex, part: IndexPart, totals: dict[int, tuple[int, int]]) -> Iterator[None]:
    tree, at, loaded = index.holders.tree, 0, 0
    keys, masks = _unpacked(part.keys), [int.from_bytes(mask, "little") for mask in part.masks]
    columns = map(_unpacked, (part.numbers, part.sizes, part.parents, part.ages, part.mask_at))
    for node, size, parent, age, mask_at in zip(*columns, strict=True):
        chunk, mask = tuple(keys[at : at + size]), masks[mask_at]
        if len(chunk) != size or not chunk:
            raise ValueError(f"node {node} has {len(chunk)} of {size} keys")
        at += size
        tree.load(node, chunk, mask, parent, age)
        blocks, key_sum = totals.get(mask, (0, 0))
        totals[mask] = (blocks + size, key_sum + sum(chunk))
        loaded += size + _NODE_BLOCKS
        if loaded >= _LOADED_BLOCKS:
            yield
            loaded = 0
    for node, slot, count in part.partial:
        chunk = tree.chunks[node][:count]
        tree.set_held(node, 1 << slot, count)
        blocks, key_sum = totals.get(1 << slot, (0, 0))
        totals[1 << slot] = (blocks + count, key_sum + sum(chunk))
    yield


def _packed(values: "array[int]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpacked(data: bytes) -> list[int]:
    values = array("q", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
