"""Which targets have which prefix of a prompt, as KV events say, as it was predicted, or will have. No NATS, no clock.

``PrefixIndex`` is a deterministic fold of the workers' KV events about blocks of layer group 0, which must be the one
that keeps the longest history. What a target has on the device (tier 0) is one holding, which is closed towards the
front. What it has in host memory (1) or on disk (2) is not: blocks leave the device from the last to the first. So
there is a holding for each lower tier with the blocks of all faster ones, too, from the first event of that tier on.

``ApproximateIndex`` does without events: it predicts the cache of a target from the requests sent to it. A target is
assumed to keep the prompts it was sent last, as many as its KV cache holds, each for at most ``ttl_s`` from the last
request that used it. A block is never removed before the blocks that follow it in its prompt, so holdings stay closed.
What a target generates is not predicted.

``ActivePrefixes`` has the prompts of active requests. A block that was sent to a target with one request can be reused
there by the next, before the target's KV events say so: the events of a prompt lag behind by the whole queue in front
of it.
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from penstock.router.state.holders import (
    CHECKSUM,
    Depths,
    Holders,
    Holding,
    Levels,
    TargetBits,
    TargetId,
    TierDepths,
)
from penstock.schemas.block_hashes import DIGEST_BYTES, keys_of
from penstock.schemas.kv import Cleared, KvBatch, KvDump, KvEvent, Stored

LOWER_TIERS = (1, 2)  # host memory, disk
PENDING_BATCHES = 1024  # kept per target while its dump is awaited
STEP_BYTES = 2048 * DIGEST_BYTES  # of a dump per step: 1 ms


_NO_HOLDERS = Holders(0)


@dataclass(slots=True)
class _Feed:
    """The position in the event log of one target. ``holding`` None: events are missing, a dump is needed."""

    epoch: int
    seq: int
    holding: Holding | None
    lower: dict[int, Holding] = field(default_factory=dict)  # by tier: blocks of it, or of a faster one
    copies: dict[int, int] = field(default_factory=dict)  # a bit for each tier of a block, where it is on several
    pending: deque[KvBatch] = field(default_factory=lambda: deque(maxlen=PENDING_BATCHES))


class PrefixIndex:
    """Which (worker, rank) holds which prefix.

    Args:
        max_blocks: hard cap of distinct blocks; beyond it, those that were stored or continued longest ago are evicted.
    """

    def __init__(self, max_blocks: int) -> None:
        self.holders = Holders(max_blocks)
        self._lower: dict[int, Holders] = {}  # by tier, as ``_Feed.lower``; each has the cap to itself
        self._feeds: dict[TargetId, _Feed] = {}
        self._ranks: dict[str, list[int]] = {}  # by worker, of those in ``_feeds``

    def feeds(self) -> Iterator[tuple[Holding, int, int]]:
        """The completely known holdings on one tier, each with its target's epoch and last sequence."""
        for feed in self._feeds.values():
            if feed.holding is not None and not feed.lower:
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
            self._retire(target_id)
            feed.holding, feed.lower, feed.copies = None, {}, {}
            feed.pending.append(batch)
            return False
        feed.seq = batch.seq
        store = self.holders.store_digests
        for event in batch.events:
            if type(event) is Stored and not event.tier and not event.group and not feed.lower:
                store(holding, event.digests, event.parent)
            else:
                feed.holding = holding = self._fold(feed, holding, event)
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
        self._retire(target_id)
        holding = self.holders.open(target_id)
        for page in pages:
            for event in page.events:
                for part in _parts(event):
                    holding = self._fold(feed, holding, part)
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
            self._retire((worker, rank))

    def sweep(self, limit: int) -> bool:
        """Remove blocks of forgotten targets, visiting at most ``limit``; True: nothing is left to do."""
        return all(each.sweep(limit) for each in (self.holders, *self._lower.values()))

    def match(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        """Number of leading blocks of a prompt held, by target; targets without any are absent.

        Args:
            keys: of the prompt's blocks in order; ``holders.keys_view(digests)`` is the cheapest form.
        Returns: ``TierDepths`` if any target has lower tiers.
        """
        found = self.holders.match(keys)
        return TierDepths(found, [each.match(keys) for each in self._tiers()]) if self._lower else found

    def depths(self, keys: Sequence[int]) -> Depths | TierDepths:
        """``match`` as masks, to be read at once."""
        found = self.holders.depths(keys)
        return TierDepths(found, [each.depths(keys) for each in self._tiers()]) if self._lower else found

    def _tiers(self) -> Iterator[Holders]:
        """Those of the lower tiers, in order."""
        empty = _NO_HOLDERS
        return (self._lower.get(tier, empty) for tier in LOWER_TIERS)

    def holds(self, target_id: TargetId, key: int) -> bool:
        """Whether a target is known to hold a block on the device."""
        feed = self._feeds.get(target_id)
        return feed is not None and feed.holding is not None and self.holders.holds(feed.holding, key)

    def awaiting_dump(self) -> list[TargetId]:
        """Targets whose events have a gap."""
        return sorted(target_id for target_id, feed in self._feeds.items() if feed.holding is None)

    @property
    def blocks(self) -> int:
        """Distinct blocks on devices."""
        return len(self.holders)

    def held(self, target_id: TargetId) -> int:
        """Number of blocks that ``target_id`` holds on the device."""
        feed = self._feeds.get(target_id)
        return feed.holding.blocks if feed is not None and feed.holding is not None else 0

    def checksum(self) -> int:
        """48 bits, equal for two replicas that know the same blocks of the same targets; 0.3 ms with 1,000 targets.

        Replicas that have folded the KV stream to the same sequence know the same, with the same workers registered.
        At the cap they may differ for a while after a worker left or cleared its cache, since what is not swept yet
        takes room: until as many blocks were stored.
        """
        lower = (tier * self._lower[tier].checksum() for tier in sorted(self._lower))
        return (self.holders.checksum() + sum(lower)) & CHECKSUM

    def _begin(self, target_id: TargetId, epoch: int) -> _Feed:
        """The first batch of a target's epoch; nothing is missing if its number is 0."""
        self._retire(target_id)
        return self._put(target_id, _Feed(epoch, -1, self.holders.open(target_id)))

    def _retire(self, target_id: TargetId) -> None:
        for each in (self.holders, *self._lower.values()):
            each.retire(target_id)

    def _put(self, target_id: TargetId, feed: _Feed) -> _Feed:
        if target_id not in self._feeds:
            worker, rank = target_id
            self._ranks.setdefault(worker, []).append(rank)
        self._feeds[target_id] = feed
        return feed

    def _fold(self, feed: _Feed, holding: Holding, event: KvEvent) -> Holding:
        if isinstance(event, Cleared):
            self._retire(holding.target_id)
            feed.lower, feed.copies = {}, {}
            return self.holders.open(holding.target_id)
        if event.group:
            return holding
        if event.tier in LOWER_TIERS and event.tier not in feed.lower and isinstance(event, Stored):
            self._open_lower(feed, holding, event.tier)
        stored = isinstance(event, Stored)
        if feed.lower and (not event.tier or event.tier in feed.lower):
            keys = keys_of(event.digests)
            self._copied(feed, holding, event.tier, keys) if stored else self._lost(feed, holding, event.tier, keys)
        if isinstance(event, Stored):
            if not event.tier:
                self.holders.store_digests(holding, event.digests, event.parent)
            for tier, below in feed.lower.items():
                if tier >= event.tier:
                    self._lower[tier].store_digests(below, event.digests, event.parent)
        elif not event.tier:
            self.holders.remove_digests(holding, event.digests)
        return holding

    def _open_lower(self, feed: _Feed, holding: Holding, tier: int) -> None:
        """The first block on a lower tier of a target: what it has on faster ones belongs there, too."""
        holders = self._lower.setdefault(tier, Holders(self.holders.max_blocks))
        own = holders.open(holding.target_id)
        faster = max((each for each in feed.lower if each < tier), default=0)
        holders.copy(own, self._lower[faster] if faster else self.holders, feed.lower.get(faster, holding))
        feed.lower[tier] = own

    def _on(self, feed: _Feed, holding: Holding, key: int) -> int:
        """The tiers that have a block, a bit for each. The holdings show a block that is on one tier only."""
        found = feed.copies.get(key, 0)
        if not found:
            if self.holders.holds(holding, key):
                return 1
            for tier in LOWER_TIERS:
                if tier in feed.lower and self._lower[tier].holds(feed.lower[tier], key):
                    return 1 << tier
        return found

    def _copied(self, feed: _Feed, holding: Holding, tier: int, keys: Sequence[int]) -> None:
        """Blocks came to a tier. To be called before they are stored there."""
        for key in keys:
            before = self._on(feed, holding, key)
            if before & ~(1 << tier):
                feed.copies[key] = before | 1 << tier

    def _lost(self, feed: _Feed, holding: Holding, tier: int, keys: Sequence[int]) -> None:
        """Blocks left a tier: those that no other one has are removed from the holdings of lower tiers."""
        gone: dict[int, list[int]] = {each: [] for each in feed.lower if each >= tier}
        for key in keys:
            before = self._on(feed, holding, key)
            left = before & ~(1 << tier)
            if left == before:
                continue
            if left & left - 1:
                feed.copies[key] = left
            else:
                feed.copies.pop(key, None)
            for below, removed in gone.items():
                if not left & (2 << below) - 1:
                    removed.append(key)
        for below, removed in gone.items():
            self._lower[below].remove(feed.lower[below], removed)


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


TTL_S = 600.0


class _Record(NamedTuple):
    """A prompt that was sent to a target."""

    at: float
    target_id: TargetId
    keys: tuple[int, ...]


class _Target:
    """What one target is assumed to hold."""

    __slots__ = ("holding", "numbers", "used")

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.used: dict[int, int] = {}  # by block: number of the last record with it
        self.numbers: deque[int] = deque()  # of its records, oldest first; some may be gone


class ApproximateIndex:
    """``PrefixIndex.match`` fed by past decisions.

    Args:
        max_blocks: hard cap of (target, block) pairs, repeats included.
        ttl_s: until a prompt is forgotten that no request used.
    """

    def __init__(self, max_blocks: int, ttl_s: float = TTL_S) -> None:
        self.max_blocks = max_blocks
        self.ttl_s = ttl_s
        self._holders = Holders(max_blocks)
        self._targets: dict[TargetId, _Target] = {}
        self._records: OrderedDict[int, _Record] = OrderedDict()  # by number, oldest first
        self._recorded = 0
        self._recorded_keys = 0  # in all records, repeats included

    def record(self, target_id: TargetId, keys: Sequence[int], now: float, capacity: int = 1 << 62) -> None:
        """A prompt was sent to ``target_id`` at ``now`` (seconds, any epoch, never going back).

        Args:
            capacity: blocks that the target's KV cache holds.
        """
        self.expire(now)
        part = tuple(keys[: min(self.max_blocks, capacity)])
        while self._records and self._recorded_keys + len(part) > self.max_blocks:
            self._remove(next(iter(self._records)))
        target = self._targets.get(target_id)
        if target is None:
            target = self._targets[target_id] = _Target(self._holders.open(target_id))
        self._recorded += 1
        self._recorded_keys += len(part)
        self._holders.store(target.holding, part, None)
        target.used.update(dict.fromkeys(part, self._recorded))
        target.numbers.append(self._recorded)
        self._records[self._recorded] = _Record(now, target_id, part)
        while len(target.used) > capacity:
            self._remove(target.numbers.popleft())

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Number of leading blocks of a prompt probably held, by target; targets without any are absent."""
        return self._holders.match(keys)

    def expire(self, now: float) -> None:
        """Remove blocks last used ``ttl_s`` ago or earlier."""
        while self._records:
            number, oldest = next(iter(self._records.items()))
            if oldest.at + self.ttl_s > now:
                return
            self._remove(number)

    def forget(self, worker: str) -> None:
        """Forget all ranks of ``worker``."""
        for target_id in [target_id for target_id in self._targets if target_id[0] == worker]:
            del self._targets[target_id]
            self._holders.retire(target_id)

    def sweep(self, limit: int) -> bool:
        """As ``PrefixIndex.sweep``."""
        return self._holders.sweep(limit)

    def __len__(self) -> int:
        return len(self._holders)

    def _remove(self, number: int) -> None:
        """Forget a record, unless that has happened, and the blocks that no later one has."""
        record = self._records.pop(number, None)
        if record is None:
            return
        self._recorded_keys -= len(record.keys)
        target = self._targets.get(record.target_id)
        if target is None:
            return
        if target.numbers and target.numbers[0] == number:
            target.numbers.popleft()
        removed = [key for key in record.keys if target.used.get(key) == number]
        for key in removed:
            del target.used[key]
        self._holders.remove(target.holding, removed)


MAX_BLOCKS = 1 << 22  # different blocks of all active prompts; further ones match nothing


class ActivePrefixes:
    """A multiset of prompts by target. A target that has a block has all blocks in front of it.

    A block's targets are the bits of one number, so that adding and removing a prompt costs one dictionary access per
    block, and matching it a few for each depth at which targets differ.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}  # by block; bits of forgotten targets may be left until they are swept
        self._counts: dict[TargetId, dict[int, int]] = {}
        self._bits: dict[TargetId, int] = {}
        self._targets = TargetBits()
        self._present = 0  # bits of all targets
        self._forgotten: list[tuple[int, dict[int, int]]] = []  # a bit, which is free once its blocks are swept

    def add(self, target: TargetId, keys: Sequence[int]) -> int:
        """Add a prompt and return how many of its blocks are new at ``target``."""
        counts = self._counts.get(target)
        if counts is None:
            counts = self._open(target)
        bit, masks, before = self._bits[target], self._masks, len(counts)
        for key in keys:
            count = counts.get(key)
            if count is not None:
                counts[key] = count + 1
                continue
            counts[key] = 1
            mask = masks.get(key)
            if mask is not None:
                masks[key] = mask | bit
            elif len(masks) < MAX_BLOCKS:
                masks[key] = bit
        return len(counts) - before

    def remove(self, target: TargetId, keys: Sequence[int]) -> int:
        """Remove a prompt that was added and return how many blocks no other active request has."""
        counts, bit = self._counts[target], self._bits[target]
        before = len(counts)
        for key in keys:
            count = counts[key]
            if count == 1:
                del counts[key]
                self._clear(key, bit)
            else:
                counts[key] = count - 1
        return before - len(counts)

    def forget(self, target: TargetId) -> None:
        """Forget all prompts of a target at once; ``sweep`` removes their blocks."""
        counts = self._counts.pop(target, None)
        if counts is not None:
            bit = self._bits.pop(target)
            self._targets.remove(bit)
            self._present &= ~bit
            self._forgotten.append((bit, counts))

    def sweep(self, limit: int) -> bool:
        """Remove blocks of forgotten targets, visiting at most ``limit``; True: nothing is left to do."""
        while self._forgotten and limit > 0:
            bit, counts = self._forgotten[-1]
            while counts and limit > 0:
                key, _ = counts.popitem()
                self._clear(key, bit)
                limit -= 1
            if not counts:
                self._forgotten.pop()
        return not self._forgotten

    def at_most(self, keys: Sequence[int], blocks: int) -> bool:
        """Whether no target has more than ``blocks`` leading blocks of a prompt; False: unknown. A tenth of a match."""
        return blocks >= len(keys) or keys[blocks] not in self._masks

    def match(self, keys: Sequence[int]) -> Depths:
        """Leading blocks of a prompt that active requests have, by target; to be read at once."""
        return Depths(self._levels(keys), self._targets)

    def _levels(self, keys: Sequence[int]) -> Levels:
        gone: list[int] = []
        depths: list[int] = []
        if not len(keys):
            return gone, depths
        masks, end = self._masks, len(keys)
        held, depth = masks.get(keys[0], 0) & self._present, 0
        while held:
            depth += 1
            further = held & masks.get(keys[depth], 0) if depth < end else 0
            if further == held:
                depth = self._common(keys, held, depth)
                further = held & masks.get(keys[depth], 0) if depth < end else 0
            if further != held:
                gone.append(held ^ further)
                depths.append(depth)
            held = further
        return gone, depths

    def _common(self, keys: Sequence[int], held: int, depth: int) -> int:
        """How many leading blocks all targets in ``held`` have, at least ``depth`` + 1: galloping, then bisecting."""
        masks, low, step = self._masks, depth + 1, 1
        high = len(keys)
        while low < high:
            at = min(low + step, high) - 1
            if masks.get(keys[at], 0) & held != held:
                high = at
                break
            low, step = at + 1, step * 2
        while low < high:
            middle = (low + high) // 2
            if masks.get(keys[middle], 0) & held == held:
                low = middle + 1
            else:
                high = middle
        return low

    def _open(self, target: TargetId) -> dict[int, int]:
        used = self._present
        for bit, _ in self._forgotten:
            used |= bit
        bit = ~used & (used + 1)  # the lowest free one
        self._bits[target] = bit
        self._targets.put(bit, target)
        self._present |= bit
        counts = self._counts[target] = {}
        return counts

    def _clear(self, key: int, bit: int) -> None:
        mask = self._masks.get(key, 0) & ~bit
        if mask:
            self._masks[key] = mask
        else:
            self._masks.pop(key, None)
