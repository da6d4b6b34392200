"""The prompt blocks of the active requests of each target, counted by request. No clock, no NATS.

A block that was sent to a target with one request can be reused there by the next, before the target's KV events say
so: the events of a prompt lag behind by the whole queue in front of it.
"""

from collections.abc import Sequence

from penstock.router.state.depths import Depths, Levels, TargetBits, TargetId

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
