"""Which workers hold which prefix: a map from block key to a bitmask of holders, searched by bisection.

Knows nothing of events, epochs or time. A key names a whole prefix (block digests are chained), so a flat dict
is the radix tree. Holdings that are closed towards the front (who holds a block holds all before it) make a
match a bisection over positions instead of a walk. That is what engines that evict leaves first give us; it is
checked, not trusted: whoever is caught breaking it is *ragged* and walked from then on.
"""

import sys
from collections.abc import Callable, Sequence

from schemas.blocks import DIGEST_BYTES, keys_of

TargetId = tuple[str, int]  # worker id, attention data-parallel rank

AUDIT_EVERY = 1024  # matches between two that are also walked, to catch ragged holders
_SHARED_MASKS = 1 << 16
# Keys are spread over so many dicts: one of 4 million keys grows in a step of 180 ms and is listed in 70 ms.
_SHARDS = 256
_SHARD = _SHARDS - 1


def keys_view(digests: bytes) -> Sequence[int]:
    """``schemas.blocks.keys_of`` without decoding them all: a match of 4,096 blocks reads about a dozen."""
    if sys.byteorder == "big":
        return keys_of(digests)
    if surplus := len(digests) % DIGEST_BYTES:
        digests = digests[:-surplus]
    return memoryview(digests).cast("q")[::2]


class Holding:
    """What one place holds: its bit, how many blocks, and the sum of their keys (for checksums)."""

    __slots__ = ("bit", "blocks", "cut", "key_sum", "target_id")

    def __init__(self, target_id: TargetId, bit: int) -> None:
        self.target_id = target_id
        self.bit = bit
        self.blocks = 0
        self.key_sum = 0
        self.cut = False  # something of it was refused at the cap


class Holders:
    """Places and the prefixes they hold, at most ``max_blocks`` distinct blocks.

    At the cap new blocks are refused together with everything behind them and counted in ``refused``; holdings
    stay closed, and the index only says less than is true.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.refused = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]  # key -> mask, in the shard of the key
        self._blocks = 0  # keys in all shards
        self._by_bit: dict[int, Holding] = {}  # insertion order is of no meaning
        self._by_target: dict[TargetId, Holding] = {}
        self._live = 0
        self._ragged = 0
        self._retired = 0
        self._sweeping = 0  # the retired bits that the running sweep clears
        self._shards_left = 0  # that the running sweep has not begun with
        self._unswept: list[int] = []  # keys of the shard that it is at
        self._slots = 0  # bits ever given out
        self._free_bits: list[int] = []
        self._shared: dict[int, int] = {}  # one int object per mask, not per block
        self._names: dict[int, tuple[TargetId, ...]] = {}
        self._matches = 0

    def __len__(self) -> int:
        """Distinct blocks stored, those only a retired place held included until they are swept."""
        return self._blocks

    @property
    def retired(self) -> int:
        """Forgotten holdings whose blocks wait for ``sweep``."""
        return self._retired.bit_count()

    @property
    def ragged(self) -> tuple[TargetId, ...]:
        """Places whose holdings were seen not to be closed towards the front."""
        return tuple(sorted(self._targets(self._ragged)))

    def holdings(self) -> list[Holding]:
        """All holdings, sorted by target."""
        return [self._by_target[target_id] for target_id in sorted(self._by_target)]

    def open(self, target_id: TargetId) -> Holding:
        """Start ``place`` anew with nothing; what it held before is retired."""
        self.retire(target_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << self._slots
        if bit == 1 << self._slots:
            self._slots += 1
        holding = self._by_target[target_id] = self._by_bit[bit] = Holding(target_id, bit)
        self._live |= bit
        self._names.clear()
        return holding

    def retire(self, target_id: TargetId) -> None:
        """Forget ``place`` at once; its blocks are cleaned up by ``sweep``."""
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
        """``keys`` are held from now on, each the child of the one before, the first that of ``parent``."""
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
        """``keys`` are no longer held; those that never were are ignored."""
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
        """How many leading ``keys`` each place holds; places that hold none are absent. Only probed keys are read."""
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
        """Clean up after retired places, at most ``limit`` blocks; True: nothing is left to do."""
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
        """Fill ``found`` for the closed places ``first``, holders of keys[0]; False: some are not closed."""
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
        """The exact answer by walking; places that hold a key behind a gap become ragged."""
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
