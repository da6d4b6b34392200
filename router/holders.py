"""Which targets hold which prefix: a map from block key to a bitmask of holders, searched by bisection.

It has no events, epochs or time. A key names a whole prefix, since block digests are chained, so a flat dict serves as
the radix tree. A holding is closed if every block comes with all blocks before it, as with engines that evict leaves
first. Then a match bisects over positions instead of walking them. Samples check this: a holding that is found not to
be closed is *ragged*, and is walked from then on.
"""

import sys
from collections.abc import Callable, Sequence

from schemas.blocks import DIGEST_BYTES, keys_of

TargetId = tuple[str, int]  # worker id, attention data-parallel rank

AUDIT_EVERY = 1024  # one match in so many is walked, to find ragged holdings
_SHARED_MASKS = 1 << 16
# Keys are spread over this many dicts: growing a single dict of 4 million keys takes 180 ms, listing it 70 ms.
_SHARDS = 256
_SHARD = _SHARDS - 1


def keys_view(digests: bytes) -> Sequence[int]:
    """``schemas.blocks.keys_of`` without decoding all keys: a match of 4,096 blocks reads about a dozen."""
    if sys.byteorder == "big":
        return keys_of(digests)
    if surplus := len(digests) % DIGEST_BYTES:
        digests = digests[:-surplus]
    return memoryview(digests).cast("q")[::2]


class Holding:
    """The blocks of one target: its bit in the masks, the number of blocks, and the sum of their keys for checksums."""

    __slots__ = ("bit", "blocks", "cut", "key_sum", "target_id")

    def __init__(self, target_id: TargetId, bit: int) -> None:
        self.target_id = target_id
        self.bit = bit
        self.blocks = 0
        self.key_sum = 0
        self.cut = False  # some of its blocks were refused at the cap


class Holders:
    """The prefixes that targets hold, at most ``max_blocks`` distinct blocks.

    At the cap, new blocks are refused together with all blocks after them, and counted in ``refused``. Holdings stay
    closed, and a match reports less than a target holds, never more.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.refused = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # key -> mask, in the shard of the key
        self._blocks = 0  # keys in all shards
        self._by_bit: dict[int, Holding] = {}  # order has no meaning
        self._by_target: dict[TargetId, Holding] = {}
        self._live = 0
        self._ragged = 0
        self._retired = 0
        self._sweeping = 0  # retired bits that the present sweep clears
        self._shards_left = 0  # shards that the present sweep has not started
        self._unswept: list[int] = []  # keys left of the shard being swept
        self._slots = 0  # number of bits ever assigned
        self._free_bits: list[int] = []
        self._shared: dict[int, int] = {}  # one int object per mask, not per block
        self._names: dict[int, tuple[TargetId, ...]] = {}
        self._matches = 0

    def __len__(self) -> int:
        """Distinct blocks stored, including blocks of retired holdings that are not swept yet."""
        return self._blocks

    @property
    def retired(self) -> int:
        """Number of retired holdings whose blocks wait for ``sweep``."""
        return self._retired.bit_count()

    @property
    def ragged(self) -> tuple[TargetId, ...]:
        """Targets whose holdings were found not to be closed."""
        return tuple(sorted(self._targets(self._ragged)))

    def holdings(self) -> list[Holding]:
        """All holdings, sorted by target."""
        return [self._by_target[target_id] for target_id in sorted(self._by_target)]

    def open(self, target_id: TargetId) -> Holding:
        """Start an empty holding of ``target_id``; its previous one is retired."""
        self.retire(target_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << self._slots
        if bit == 1 << self._slots:
            self._slots += 1
        holding = self._by_target[target_id] = self._by_bit[bit] = Holding(target_id, bit)
        self._live |= bit
        self._names.clear()
        return holding

    def retire(self, target_id: TargetId) -> None:
        """Forget the holding of ``target_id`` at once; ``sweep`` removes its blocks."""
        holding = self._by_target.pop(target_id, None)
        if holding is None:
            return
        del self._by_bit[holding.bit]
        self._live &= ~holding.bit
        self._ragged &= ~holding.bit
        self._retired |= holding.bit
        self._names.clear()

    def holds(self, holding: Holding, key: int) -> bool:
        return bool(self._shards[key & _SHARD].get(key, 0) & holding.bit)

    def store(self, holding: Holding, keys: Sequence[int], parent: int | None) -> None:
        """Add ``keys``, each the child of the one before, the first a child of ``parent``."""
        if not keys:
            return
        if parent is not None and not self.holds(holding, parent):
            if holding.cut:
                self.refused += len(keys)
                return
            self._ragged |= holding.bit
        if self._blocks + len(keys) > self.max_blocks:
            keys = self._fitting(holding, keys)
        shards, bit, share = self._shards, holding.bit, self._sharing()
        new = added = total = 0
        for key in keys:
            shard = shards[key & _SHARD]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit
                new += 1
            elif mask & bit:
                continue
            else:
                shard[key] = share(mask | bit, mask | bit)
            total += key
            added += 1
        self._blocks += new
        holding.blocks += added
        holding.key_sum += total

    def remove(self, holding: Holding, keys: Sequence[int]) -> None:
        """Remove ``keys``; those that are not held are ignored."""
        shards, bit, share = self._shards, holding.bit, self._sharing()
        gone = total = 0
        for key in keys:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & bit:
                if mask == bit:
                    del shard[key]
                    self._blocks -= 1
                else:
                    shard[key] = share(mask ^ bit, mask ^ bit)
                total += key
                gone += 1
        holding.blocks -= gone
        holding.key_sum -= total

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Number of leading ``keys`` held, by target; targets without any are absent. Only probed keys are read."""
        if not keys:
            return {}
        key = keys[0]
        first = self._shards[key & _SHARD].get(key, 0) & self._live
        if not first:
            return {}
        self._matches += 1
        closed = first & ~self._ragged
        if self._matches % AUDIT_EVERY == 0:
            return self._audited(keys, first)
        found: dict[TargetId, int] = {}
        if closed and not self._bisect(keys, closed, found):
            return self._audited(keys, first)
        if closed != first:
            self._walk(keys, first ^ closed, found)
        return found

    def sweep(self, limit: int) -> bool:
        """Remove blocks of retired holdings, visiting at most ``limit``; True: nothing is left to do."""
        if not self._sweeping:
            if not self._retired:
                return True
            self._sweeping, self._shards_left = self._retired, _SHARDS
        shards, keep, share, unswept = self._shards, ~self._sweeping, self._sharing(), self._unswept
        while limit > 0 and (unswept or self._shards_left):
            if not unswept:
                self._shards_left -= 1
                unswept.extend(shards[self._shards_left])
            part = unswept[-limit:]
            del unswept[-limit:]
            limit -= len(part) + 1
            for key in part:
                shard = shards[key & _SHARD]
                mask = shard.get(key, 0)
                left = mask & keep
                if left != mask:
                    if left:
                        shard[key] = share(left, left)
                    else:
                        del shard[key]
                        self._blocks -= 1
        if unswept or self._shards_left:
            return False
        self._free_bits += _bits(self._sweeping)
        self._retired &= keep
        self._sweeping = 0
        return not self._retired

    def _fitting(self, holding: Holding, keys: Sequence[int]) -> Sequence[int]:
        room = self.max_blocks - self._blocks
        for position, key in enumerate(keys):
            if key not in self._shards[key & _SHARD]:
                if room <= 0:
                    holding.cut = True
                    self.refused += len(keys) - position
                    return keys[:position]
                room -= 1
        return keys

    def _bisect(self, keys: Sequence[int], first: int, found: dict[TargetId, int]) -> bool:
        """Fill ``found`` for the closed holdings ``first``, which hold keys[0]; False: some are not closed."""
        shards, names = self._shards, self._names.get
        end = len(keys) - 1
        key = keys[end]
        last = shards[key & _SHARD].get(key, 0) & first
        if last:
            found.update(dict.fromkeys(names(last) or self._targets(last), end + 1))
        if last == first:
            return True
        todo = [(0, first, end, last)]  # the holders shrink from ``low`` at ``a`` to ``high`` at ``b``
        while todo:
            a, low, b, high = todo.pop()
            while b - a > 1:
                middle = (a + b) >> 1
                key = keys[middle]
                mask = shards[key & _SHARD].get(key, 0) & first
                if mask == low:
                    a = middle
                elif mask == high:
                    b = middle
                elif mask & ~low or high & ~mask:
                    return False
                else:
                    todo.append((middle, mask, b, high))
                    b, high = middle, mask
            if high & ~low:
                return False
            left = low ^ high
            found.update(dict.fromkeys(names(left) or self._targets(left), b))
        return True

    def _walk(self, keys: Sequence[int], mask: int, found: dict[TargetId, int]) -> None:
        shards, depth = self._shards, 0
        for key in keys:
            left = mask & shards[key & _SHARD].get(key, 0)
            if left != mask:
                found.update(dict.fromkeys(self._targets(mask ^ left), depth))
                mask = left
                if not mask:
                    return
            depth += 1
        found.update(dict.fromkeys(self._targets(mask), depth))

    def _audited(self, keys: Sequence[int], first: int) -> dict[TargetId, int]:
        """The exact answer by walking; holdings with a key after a gap become ragged."""
        found: dict[TargetId, int] = {}
        shards, depth, mask, gone = self._shards, 0, first, 0
        for key in keys:
            here = shards[key & _SHARD].get(key, 0) & first
            self._ragged |= here & gone
            left = mask & here
            if left != mask:
                found.update(dict.fromkeys(self._targets(mask ^ left), depth))
                gone |= mask ^ left
                mask = left
            depth += 1
        if mask:
            found.update(dict.fromkeys(self._targets(mask), depth))
        return found

    def _targets(self, mask: int) -> tuple[TargetId, ...]:
        known = self._names.get(mask)
        if known is None:
            if len(self._names) >= _SHARED_MASKS:
                self._names.clear()
            known = self._names[mask] = tuple(self._by_bit[bit].target_id for bit in _bits(mask))
        return known

    def _sharing(self) -> Callable[[int, int], int]:
        if len(self._shared) > _SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
