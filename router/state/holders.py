"""Which targets hold which prefix: holdings in a radix tree, with a hard cap. No events, epochs or time.

The state depends on the calls of ``store`` and ``remove`` only: after the same calls in the same order two of these are
equal, whatever was matched in between. A match is exact for any holding, also for one with gaps.

A match finds bit masks by depth (``Depths``). For a decision among hundreds of targets, making a dict of them and an
array of the dict costs several times the match.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from blake3 import blake3

from penstock.router.state.radix_tree import KEY_MASK, NODE_BLOCKS, NOTHING, SLOT, RadixTree
from penstock.schemas.block_hashes import DIGEST_BYTES, key_of, keys_of

TargetId = tuple[str, int]  # worker id, attention data-parallel rank
Levels = tuple[list[int], list[int]]  # masks of targets, and how many blocks each has


class TargetBits:
    """Which target has which bit.

    Attributes:
        targets: by bit.
        version: changes with ``targets``.
    """

    def __init__(self) -> None:
        self.targets: dict[int, TargetId] = {}
        self.version = 0

    def put(self, bit: int, target: TargetId) -> None:
        self.targets[bit] = target
        self.version += 1

    def remove(self, bit: int) -> None:
        del self.targets[bit]
        self.version += 1


class Depths(Mapping[TargetId, int]):
    """Leading blocks by target; targets without any are absent. To be read before ``bits`` changes.

    Attributes:
        masks: no bit is in two.
        numbers: of blocks, by mask.
    """

    __slots__ = ("_blocks", "bits", "masks", "numbers")

    def __init__(self, levels: Levels, bits: TargetBits) -> None:
        self.masks, self.numbers = levels
        self.bits = bits
        self._blocks: dict[TargetId, int] | None = None

    @property
    def blocks(self) -> dict[TargetId, int]:
        """The same as a dict, made when it is asked for."""
        if self._blocks is None:
            targets, self._blocks = self.bits.targets, {}
            for mask, depth in zip(self.masks, self.numbers, strict=True):
                for bit in (mask,) if mask in targets else bits_of(mask):
                    self._blocks[targets[bit]] = depth
        return self._blocks

    def __bool__(self) -> bool:
        return bool(self.masks)

    def get(self, target: TargetId, default: int = 0) -> int:  # type: ignore[override]
        return self.blocks.get(target, default)

    def __getitem__(self, target: TargetId) -> int:
        return self.blocks[target]

    def __iter__(self) -> Iterator[TargetId]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


class TierDepths(Mapping[TargetId, int]):
    """Leading blocks by target, on any tier of its cache. To be read as ``Depths``.

    Attributes:
        device: leading blocks on the device.
        lower: leading blocks in host memory or on the device; on disk or in either; targets without any are absent.
    """

    __slots__ = ("_blocks", "device", "lower")

    def __init__(self, device: Mapping[TargetId, int], lower: Sequence[Mapping[TargetId, int]]) -> None:
        self.device = as_dict(device) if isinstance(device, TierDepths) else device
        self.lower = lower
        self._blocks: dict[TargetId, int] | None = None

    @property
    def blocks(self) -> dict[TargetId, int]:
        """Leading blocks on any tier, made when it is asked for."""
        if self._blocks is None:
            self._blocks = found = dict(as_dict(self.device))
            for depths in self.lower:
                for target, depth in as_dict(depths).items():
                    found[target] = max(depth, found.get(target, 0))
        return self._blocks

    def tiers(self, target: TargetId) -> list[int]:
        """Leading blocks of one target on the device, and by ``lower``."""
        return [self.device.get(target, 0), *(each.get(target, 0) for each in self.lower)]

    def __bool__(self) -> bool:
        return bool(self.device) or any(self.lower)

    def get(self, target: TargetId, default: int = 0) -> int:  # type: ignore[override]
        return self.blocks.get(target, default)

    def __getitem__(self, target: TargetId) -> int:
        return self.blocks[target]

    def __iter__(self) -> Iterator[TargetId]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


def as_dict(blocks: Mapping[TargetId, int]) -> Mapping[TargetId, int]:
    """What many look-ups are cheaper in."""
    return blocks.blocks if isinstance(blocks, Depths) else blocks


def bits_of(mask: int) -> list[int]:
    """The bits of a mask, each alone, lowest first."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits


CHECKSUM = (1 << 48) - 1  # whole numbers that a metric, which is a float, can have
_LOW_BITS = bytes(byte & 15 for byte in range(256))
_MOST_REMEMBERED = 1 << 18  # targets, in all masks of the cache


def keys_view(digests: bytes) -> Sequence[int]:
    """``block_hashes.keys_of`` without decoding all keys: a match reads about two for each run of blocks."""
    if sys.byteorder == "big":
        return keys_of(digests)
    if surplus := len(digests) % DIGEST_BYTES:
        digests = digests[:-surplus]
    return memoryview(digests).cast("q")[::2]


def tree_keys_of(digests: bytes) -> list[int]:
    """The keys that a ``RadixTree`` has: the low 60 bits of ``keys_of``.

    Clearing the other bits in the bytes is four times as fast as in the numbers.
    """
    if sys.byteorder == "big" or len(digests) % DIGEST_BYTES:
        return [key & KEY_MASK for key in keys_of(digests)]
    if len(digests) == DIGEST_BYTES:
        return [key_of(digests) & KEY_MASK]
    packed = bytearray(digests)
    packed[7::DIGEST_BYTES] = packed[7::DIGEST_BYTES].translate(_LOW_BITS)
    return memoryview(packed).cast("q")[::2].tolist()


class Holding:
    """The blocks of one target.

    Attributes:
        bit: in the masks of the tree.
        blocks: their number.
        key_sum: the sum of their keys.
        cut: some were evicted at the cap, so events may continue blocks that are unknown here.
        salt: distinguishes its share of the checksum from that of another target with the same blocks.
    """

    __slots__ = ("bit", "blocks", "cut", "key_sum", "salt", "target_id")

    def __init__(self, target_id: TargetId, bit: int) -> None:
        self.target_id = target_id
        self.bit = bit
        self.blocks = 0
        self.key_sum = 0
        self.cut = False
        self.salt = int.from_bytes(blake3(repr(target_id).encode()).digest(8), "little")


class Holders:
    """The prefixes that targets hold, at most ``max_blocks`` distinct blocks.

    At the cap the blocks that were stored or continued longest ago are evicted, last blocks of prompts first. What a
    target stores after evicted blocks is refused. So a match reports less than a target holds, never more.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.tree = RadixTree(max_blocks)
        self._by_bit: dict[int, Holding] = {}  # order has no meaning
        self._bits = TargetBits()  # the same, for readers of masks
        self._by_target: dict[TargetId, Holding] = {}
        self._live = 0
        self._ragged = 0
        self._retired = 0
        self._sweeping = 0  # retired bits that the present sweep clears
        self._slots = 0  # number of bits ever assigned
        self._free_bits: list[int] = []
        self._targets_of: dict[int, dict[TargetId, int]] = {}  # cache: by mask, its targets as keys
        self._remembered = 0  # targets in it

    def __len__(self) -> int:
        """Distinct blocks stored, including blocks of retired holdings that are not swept yet."""
        return self.tree.blocks

    @property
    def ragged(self) -> tuple[TargetId, ...]:
        """Targets that stored blocks, or kept them, without the blocks before them. Only the latter can be missed."""
        return tuple(sorted(self._targets(self._ragged)))

    def checksum(self, holdings: Iterable[Holding] | None = None) -> int:
        """Of which target, or which of these, holds which blocks: 48 bits."""
        summed = self._by_target.values() if holdings is None else holdings
        return (sum(holding.salt * holding.key_sum for holding in summed) >> 16) & CHECKSUM

    def open(self, target_id: TargetId) -> Holding:
        """Start an empty holding of ``target_id``; its previous one is retired."""
        self.retire(target_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << self._slots
        return self._add(Holding(target_id, bit))

    def copy(self, holding: Holding, source: "Holders", of: Holding) -> None:
        """Give ``holding`` the blocks that ``of`` has in ``source``; it visits all nodes there."""
        tree, done = source.tree, set[int]()
        held = {node: count for node in range(len(tree.chunks)) if (count := tree.held(node, of.bit))}
        for node in held:
            chain = []
            while node in held and node not in done:
                chain.append(node)
                done.add(node)
                node = tree.parents[node]
            for each in reversed(chain):  # parents first
                parent = tree.parents[each]
                before = tree.chunks[parent][-1] if parent >= 0 else None
                self._store(holding, list(tree.chunks[each][: held[each]]), before)

    def restore(self, holding: Holding) -> None:
        """Add a holding whose blocks are loaded into the tree."""
        self._add(holding)

    def mark_ragged(self, holding: Holding) -> None:
        self._ragged |= holding.bit

    def link(self) -> None:
        """Bits below the highest one that no restored holding has are free."""
        bits = (1 << bit for bit in range(self._slots))
        self._free_bits = [bit for bit in bits if not bit & self._live]

    def retire(self, target_id: TargetId) -> None:
        """Forget the holding of ``target_id`` at once; ``sweep`` removes its blocks."""
        holding = self._by_target.pop(target_id, None)
        if holding is None:
            return
        del self._by_bit[holding.bit]
        self._bits.remove(holding.bit)
        self._live &= ~holding.bit
        self._ragged &= ~holding.bit
        self._retired |= holding.bit
        self._clear_cache()

    def holds(self, holding: Holding, key: int) -> bool:
        """Whether ``holding`` has a block."""
        tree_key = key & KEY_MASK
        return self._holds(holding.bit, self.tree.find(tree_key), tree_key)

    def store(self, holding: Holding, keys: Sequence[int], parent: int | None) -> None:
        """Add ``keys``, each the child of the one before, the first a child of ``parent``."""
        if keys:
            before = None if parent is None else parent & KEY_MASK
            self._store(holding, [key & KEY_MASK for key in keys], before)

    def store_digests(self, holding: Holding, digests: bytes, parent: bytes | None) -> None:
        """``store`` of packed digests."""
        if digests:
            self._store(holding, tree_keys_of(digests), None if parent is None else key_of(parent) & KEY_MASK)

    def _store(self, holding: Holding, tree_keys: list[int], parent: int | None) -> None:
        tree, bit = self.tree, holding.bit
        node, before = NOTHING, 0
        if parent is not None:
            before, node = parent, tree.shards[parent & SLOT].get(parent, NOTHING)
            if node >= 0 and len(tree_keys) == 1 and tree.grow(node, before, tree_keys[0], bit):
                holding.blocks += 1
                holding.key_sum += tree_keys[0]
                if tree.blocks > self.max_blocks:
                    self._evict(tree.blocks - self.max_blocks)
                return
            if (node < 0 or not tree.masks[node] & bit) and not self._holds(bit, node, before):
                if holding.cut:
                    return
                self._ragged |= bit
        tree.clock += len(tree_keys)
        at, end = 0, len(tree_keys)
        while at < end:
            owner = tree.find(tree_keys[at])
            if owner < 0:
                part = tree_keys[at : at + NODE_BLOCKS]
                node, count = tree.insert(part, node, before, bit)
                holding.blocks += count
                holding.key_sum += sum(part[:count])
            else:
                node, count = owner, self._join(holding, owner, tree_keys, at)
                tree.touch(node)
            at += count
            before = tree_keys[at - 1]
        if tree.blocks > self.max_blocks:
            self._evict(tree.blocks - self.max_blocks)

    def remove(self, holding: Holding, keys: Sequence[int]) -> None:
        """Remove ``keys``, in any order; those that are not held are ignored."""
        self._remove(holding, [key & KEY_MASK for key in keys])

    def remove_digests(self, holding: Holding, digests: bytes) -> None:
        """``remove`` of packed digests."""
        self._remove(holding, tree_keys_of(digests))

    def _remove(self, holding: Holding, tree_keys: list[int]) -> None:
        tree, bit = self.tree, holding.bit
        at = 0
        while at < len(tree_keys):
            count, node = 1, tree.find(tree_keys[at])
            if node >= 0 and (held := tree.held(node, bit)):
                count = self._leave(holding, node, held, tree_keys, at)
            at += count

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Number of leading ``keys`` held, by target; targets without any are absent."""
        (masks, numbers), by_bit = self.levels(keys), self._by_bit
        if len(masks) == 1:
            return dict.fromkeys(self._targets(masks[0]), numbers[0])
        depths: dict[TargetId, int] = {}
        for mask, depth in zip(masks, numbers, strict=True):
            holding = by_bit.get(mask)
            if holding is not None:
                depths[holding.target_id] = depth
            else:
                depths.update(dict.fromkeys(self._targets(mask), depth))
        return depths

    def depths(self, keys: Sequence[int]) -> Depths:
        """``match`` as masks."""
        return Depths(self.levels(keys), self._bits)

    def levels(self, keys: Sequence[int]) -> Levels:
        """``match`` as masks of holders, and the number of leading ``keys`` that each holds; no holder is in two."""
        ended: list[int] = []
        depths: list[int] = []
        tree, left, depth, end = self.tree, self._live, 0, len(keys)
        shards, chunks, masks, partials, parents = tree.shards, tree.chunks, tree.masks, tree.partial, tree.parents
        key = keys[0] & KEY_MASK if end else 0
        node = tree.find(key) if end else NOTHING
        while node >= 0:
            chunk, mask = chunks[node], masks[node]
            # A prompt begins in the middle of a node only if an engine named a wrong parent.
            start = 0 if chunk[0] == key else chunk.index(key)
            size = len(chunk) - start
            after, following = depth + size, NOTHING
            if after < end:
                key = keys[after] & KEY_MASK
                following = shards[key & SLOT].get(key, NOTHING)
            # A key names all blocks before it: if the next one follows this node, the prompt has all of it.
            if following < 0 or parents[following] != node:
                size = _common(chunk, start, keys, depth)
                if depth + size < after:
                    after = depth + size
                    key = keys[after] & KEY_MASK if after < end else NOTHING
                    following = tree.find(key)  # blocks stored before this node, without the blocks before them
                    mask |= sum(bits for count, bits in partials.get(node, {}).items() if count >= start + size)
            here = left & mask
            if here != left:
                gone = left ^ here
                if node in partials:
                    partial = partials[node]
                    within = sum(partial.values())
                    if start or within & gone != within:
                        within = _within(partial, gone, start, depth, ended, depths)
                    else:
                        ended += partial.values()
                        depths += [depth + count for count in partial] if depth else partial
                    gone ^= within
                if gone and depth:
                    ended.append(gone)
                    depths.append(depth)
                left = here
                if not left:
                    return ended, depths
            depth, node = after, following
        if left and depth:
            ended.append(left)
            depths.append(depth)
        return ended, depths

    def sweep(self, limit: int) -> bool:
        """Remove blocks of retired holdings, visiting about ``limit`` of them; True: nothing is left to do."""
        if not self._sweeping:
            if not self._retired and self.tree.settled:
                return True
            self._sweeping = self._retired
            self.tree.begin_sweep(self._sweeping)
        if not self.tree.sweep(limit):
            return False
        self._free_bits += bits_of(self._sweeping)
        self._retired &= ~self._sweeping
        self._sweeping = 0
        return not self._retired

    def _add(self, holding: Holding) -> Holding:
        self._by_target[holding.target_id] = self._by_bit[holding.bit] = holding
        self._bits.put(holding.bit, holding.target_id)
        self._slots = max(self._slots, holding.bit.bit_length())
        self._live |= holding.bit
        self._clear_cache()
        return holding

    def _clear_cache(self) -> None:
        self._targets_of.clear()
        self._remembered = 0

    def _holds(self, bit: int, node: int, tree_key: int) -> bool:
        if node < 0:
            return False
        held = self.tree.held(node, bit)
        chunk = self.tree.chunks[node]
        return held == len(chunk) or (held > 0 and chunk.index(tree_key) < held)

    def _join(self, holding: Holding, node: int, tree_keys: Sequence[int], at: int) -> int:
        """``holding`` gets those first ``tree_keys`` from ``at`` on that are in ``node``. Returns: their number."""
        tree, bit = self.tree, holding.bit
        chunk, held = tree.chunks[node], tree.held(node, bit)
        start = 0 if chunk[0] == tree_keys[at] else chunk.index(tree_keys[at])
        size = _common(chunk, start, tree_keys, at)
        if start > held:
            tree.split(node, start)
            chunk, start, held = tree.chunks[node], 0, 0
            self._ragged |= bit
        if start + size > held:
            holding.blocks += start + size - held
            holding.key_sum += sum(chunk[held : start + size])
            tree.set_held(node, bit, start + size)
        return size

    def _leave(self, holding: Holding, node: int, held: int, tree_keys: list[int], at: int) -> int:
        """``holding`` loses ``tree_keys`` from ``at`` on, the first one in ``node``. Returns: how many, at least 1."""
        chunk, first = self.tree.chunks[node], tree_keys[at]
        if first == chunk[held - 1]:  # last blocks first: the usual order of engines
            size = min(held, len(tree_keys) - at)
            if size == 1 or list(chunk[held - size : held]) == tree_keys[at : at + size][::-1]:
                self._shrink(holding, node, held, held - size)
                return size
        elif first == chunk[0] and list(chunk[:held]) == tree_keys[at : at + held]:
            self._shrink(holding, node, held, 0)
            return held
        by_node: dict[int, list[int]] = {}  # in any order: each split copies a node, so a node is split for all at once
        for tree_key in tree_keys[at:]:
            by_node.setdefault(self.tree.find(tree_key), []).append(tree_key)
        for node, lost in by_node.items():
            if node >= 0 and (held := self.tree.held(node, holding.bit)):
                self._lose(holding, node, held, lost)
        return len(tree_keys) - at

    def _lose(self, holding: Holding, node: int, held: int, tree_keys: list[int]) -> None:
        """``holding`` loses any blocks of ``node``."""
        position = {tree_key: at for at, tree_key in enumerate(self.tree.chunks[node][:held])}
        lost = sorted({position[tree_key] for tree_key in tree_keys if tree_key in position}, reverse=True)
        gone = 0  # blocks at the front that splits moved: they begin there, since each moves all that is before it
        while lost:
            begin = lost.pop()
            end = begin + 1
            while lost and lost[-1] == end:
                end = lost.pop() + 1
            front = node
            if end < held:
                self._ragged |= holding.bit
                front = self.tree.split(node, end - gone)
            self._shrink(holding, front, end - gone, begin - gone)
            gone = end

    def _shrink(self, holding: Holding, node: int, held: int, keep: int) -> None:
        lost = self.tree.chunks[node][keep:held]
        holding.blocks -= len(lost)
        holding.key_sum -= sum(lost)
        self.tree.release(node, holding.bit, keep)

    def _evict(self, count: int) -> None:
        tree = self.tree
        while count > 0:
            node = tree.oldest()
            size = len(tree.chunks[node])
            keep = max(0, size - count)
            count -= size - keep
            for held, mask in [(size, tree.masks[node]), *tree.partial.get(node, {}).items()]:
                if held <= keep:
                    continue
                lost = sum(tree.chunks[node][keep:held])
                for bit in bits_of(mask & self._live):
                    holding = self._by_bit[bit]
                    holding.blocks -= held - keep
                    holding.key_sum -= lost
                    holding.cut = True
            tree.evict(node, keep)

    def _targets(self, mask: int) -> dict[TargetId, int]:
        """As the keys of a dict: of those, ``dict.fromkeys`` takes the hashes too."""
        targets = self._targets_of.get(mask)
        if targets is None:
            bits = bits_of(mask)
            if self._remembered > _MOST_REMEMBERED:
                self._clear_cache()
            self._remembered += len(bits)
            targets = self._targets_of[mask] = {self._by_bit[bit].target_id: 0 for bit in bits}
        return targets


def _within(partial: dict[int, int], gone: int, start: int, depth: int, ended: list[int], depths: list[int]) -> int:
    """Add those of the bits ``gone`` that hold blocks of a node from ``start`` on to the levels, and return them."""
    within = 0
    for count, bits in partial.items():
        if bits & gone and count > start:
            within |= bits & gone
            ended.append(bits & gone)
            depths.append(depth + count - start)
    return within


def _common(chunk: Sequence[int], start: int, keys: Sequence[int], at: int) -> int:
    """How many ``keys`` from ``at`` on are those of ``chunk`` from ``start`` on, where the first ones are equal.

    A key names all blocks before it, so equal keys have equal keys before them.
    """
    size = min(len(chunk) - start, len(keys) - at)
    if size == 1 or chunk[start + size - 1] == keys[at + size - 1] & KEY_MASK:
        return size
    low, high = 1, size - 1  # at least and at most
    while low < high:
        middle = (low + high + 1) >> 1
        if chunk[start + middle - 1] == keys[at + middle - 1] & KEY_MASK:
            low = middle
        else:
            high = middle - 1
    return low
