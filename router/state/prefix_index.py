"""The prefix index: a deterministic fold of the workers' KV events. No NATS, no clock.

Only device blocks (tier 0) of layer group 0 are indexed, since they save prompt work. Group 0 must be the one that
keeps the longest history.

The prefix index as bytes and back. Pure.

A snapshot is of one moment, and is encoded in steps while the index goes on changing. It has the order of eviction
too, so an index that was restored and one that was not stay equal.
"""

import sys
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.router.state.depths import Depths, TargetId, bits_of
from penstock.router.state.holders import Holders, Holding
from penstock.router.state.radix_tree import Node
from penstock.schemas import wire
from penstock.schemas.blocks import DIGEST_BYTES
from penstock.schemas.kv import Cleared, KvBatch, KvDump, KvEvent, Stored

PENDING_BATCHES = 1024  # kept per target while its dump is awaited
STEP_BYTES = 2048 * DIGEST_BYTES  # of a dump per step: 1 ms


@dataclass(slots=True)
class _Feed:
    """The position in the event log of one target. ``holding`` None: events are missing, a dump is needed."""

    epoch: int
    seq: int
    holding: Holding | None
    pending: deque[KvBatch] = field(default_factory=lambda: deque(maxlen=PENDING_BATCHES))


class PrefixIndex:
    """Which (worker, rank) holds which prefix.

    Args:
        max_blocks: hard cap of distinct blocks; beyond it, those that were stored or continued longest ago are evicted.
    """

    def __init__(self, max_blocks: int) -> None:
        self.holders = Holders(max_blocks)
        self._feeds: dict[TargetId, _Feed] = {}
        self._ranks: dict[str, list[int]] = {}  # by worker, of those in ``_feeds``

    def feeds(self) -> Iterator[tuple[Holding, int, int]]:
        """The completely known holdings, each with its target's epoch and last sequence."""
        for feed in self._feeds.values():
            if feed.holding is not None:
                yield feed.holding, feed.epoch, feed.seq

    def restore(self, holding: Holding, epoch: int, seq: int) -> None:
        """Add a holding whose blocks are in ``holders``, as of just after batch ``seq`` of its target."""
        self.holders.restore(holding)
        self._put(holding.target_id, _Feed(epoch, seq, holding))

    def workers(self) -> set[str]:
        """Workers that have sent any event, until ``forget``."""
        return set(self._ranks)

    def is_complete(self, worker: str, ranks: int) -> bool:
        """Whether the caches of all ``ranks`` of a worker are known."""
        feeds = (self._feeds.get((worker, rank)) for rank in range(ranks))
        return all(feed is not None and feed.holding is not None for feed in feeds)

    def apply(self, batch: KvBatch) -> bool:
        """Fold one batch; repeated batches are ignored.

        Returns: False while the target needs a dump, after a gap or a start in the middle of its log. Its blocks are
            forgotten, and its last ``PENDING_BATCHES`` batches are kept and replayed on top of the dump.
        """
        target_id = (batch.worker, batch.rank)
        feed = self._feeds.get(target_id)
        if feed is None or batch.epoch > feed.epoch:
            feed = self._begin(target_id, batch.epoch)
        elif batch.epoch < feed.epoch:
            return True
        holding = feed.holding
        if holding is None:
            feed.pending.append(batch)
            return False
        if batch.seq != feed.seq + 1:
            if batch.seq <= feed.seq:
                return True
            self.holders.retire(target_id)
            feed.holding = None
            feed.pending.append(batch)
            return False
        feed.seq = batch.seq
        store = self.holders.store_digests
        for event in batch.events:
            if type(event) is Stored and not event.tier and not event.group:
                store(holding, event.digests, event.parent)
            else:
                feed.holding = holding = self._fold(holding, event)
        return True

    def loading(self, pages: Sequence[KvDump]) -> Generator[None, None, bool]:
        """Replace the holding of a target by its dump (all pages, in order), then replay the batches kept meanwhile.

        It runs in steps; other methods may be called in between. A dump older than a complete holding changes nothing.

        Returns: False: a dump is still needed, since the pages do not belong together, the target has a newer epoch
            or was forgotten, or batches between the dump and those kept are missing.
        """
        if not pages:
            return False
        head = pages[0]
        if any((p.worker, p.rank, p.epoch, p.seq) != (head.worker, head.rank, head.epoch, head.seq) for p in pages):
            return False
        target_id = (head.worker, head.rank)
        known = self._feeds.get(target_id)
        if known is not None and head.epoch < known.epoch:
            return known.holding is not None
        if known is not None and known.holding is not None and (head.epoch, head.seq) < (known.epoch, known.seq):
            return True
        feed = self._put(target_id, _Feed(head.epoch, head.seq, None))
        if known is not None:
            feed.pending.extend(known.pending)
        holding = self.holders.open(target_id)
        for page in pages:
            for event in page.events:
                for part in _parts(event):
                    holding = self._fold(holding, part)
                    yield
                    if self._feeds.get(target_id) is not feed:
                        return False
        feed.holding, pending = holding, list(feed.pending)
        feed.pending.clear()
        whole = True
        for batch in pending:
            whole = self.apply(batch)
        return whole

    def forget(self, worker: str) -> None:
        """Forget all ranks of ``worker`` at once; ``sweep`` removes their blocks."""
        for rank in self._ranks.pop(worker, ()):
            del self._feeds[worker, rank]
            self.holders.retire((worker, rank))

    def sweep(self, limit: int) -> bool:
        """Remove blocks of forgotten targets, visiting at most ``limit``; True: nothing is left to do."""
        return self.holders.sweep(limit)

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Number of leading blocks of a prompt held, by target; targets without any are absent.

        Args:
            keys: of the prompt's blocks in order; ``holders.keys_view(digests)`` is the cheapest form.
        """
        return self.holders.match(keys)

    def depths(self, keys: Sequence[int]) -> Depths:
        """``match`` as masks, to be read at once."""
        return self.holders.depths(keys)

    def holds(self, target_id: TargetId, key: int) -> bool:
        """Whether a target is known to hold a block."""
        feed = self._feeds.get(target_id)
        return feed is not None and feed.holding is not None and self.holders.holds(feed.holding, key)

    def awaiting_dump(self) -> list[TargetId]:
        """Targets whose events have a gap."""
        return sorted(target_id for target_id, feed in self._feeds.items() if feed.holding is None)

    @property
    def blocks(self) -> int:
        """Distinct blocks."""
        return len(self.holders)

    def held(self, target_id: TargetId) -> int:
        """Number of blocks that ``target_id`` holds."""
        feed = self._feeds.get(target_id)
        return feed.holding.blocks if feed is not None and feed.holding is not None else 0

    def checksum(self) -> int:
        """48 bits, equal for two replicas that know the same blocks of the same targets; 0.3 ms with 1,000 targets.

        Replicas that have folded the KV stream to the same sequence know the same, with the same workers registered.
        At the cap they may differ for a while after a worker left or cleared its cache, since what is not swept yet
        takes room: until as many blocks were stored.
        """
        return self.holders.checksum()

    def _begin(self, target_id: TargetId, epoch: int) -> _Feed:
        """The first batch of a target's epoch; nothing is missing if its number is 0."""
        self.holders.retire(target_id)
        return self._put(target_id, _Feed(epoch, -1, self.holders.open(target_id)))

    def _put(self, target_id: TargetId, feed: _Feed) -> _Feed:
        if target_id not in self._feeds:
            worker, rank = target_id
            self._ranks.setdefault(worker, []).append(rank)
        self._feeds[target_id] = feed
        return feed

    def _fold(self, holding: Holding, event: KvEvent) -> Holding:
        if isinstance(event, Cleared):
            return self.holders.open(holding.target_id)
        if not event.tier and not event.group:
            if isinstance(event, Stored):
                self.holders.store_digests(holding, event.digests, event.parent)
            else:
                self.holders.remove_digests(holding, event.digests)
        return holding


def _parts(event: KvEvent) -> Iterator[KvEvent]:
    """Split a long chain of a dump, so that no step takes long."""
    if not isinstance(event, Stored) or len(event.digests) <= STEP_BYTES:
        yield event
        return
    parent = event.parent
    for start in range(0, len(event.digests), STEP_BYTES):
        part = event.digests[start : start + STEP_BYTES]
        yield msgspec.structs.replace(event, digests=part, parent=parent)
        parent = part[-DIGEST_BYTES:]


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
    """The header before the parts. ``checksum`` and ``blocks`` are those of the whole index."""

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
    held_by = []
    for holding, epoch, seq in index.feeds():
        live |= holding.bit
        target_id = holding.target_id
        slot = holding.bit.bit_length() - 1
        held_by.append(HeldBy(*target_id, epoch, seq, slot, holding.cut, target_id in ragged))
    head = IndexHead(
        *(taken_ns, kv_seq, index.checksum(), index.blocks, holders.max_blocks, holders.tree.clock, tuple(held_by))
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
