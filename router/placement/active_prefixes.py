"""Which prompt blocks the active requests of each target have, counted by request. No clock, no NATS.

A block that was sent to a target with one request can be reused there by the next, before the target's KV events say
so: the events of a prompt lag behind by the whole queue in front of it.
"""

from collections.abc import Sequence

from router.holders import Holders, Holding, TargetId

MAX_BLOCKS = 1 << 22  # of all active prompts; further blocks match nothing


class ActivePrefixes:
    """A multiset of prompts by target. Holdings are closed: who has a block has all blocks in front of it."""

    def __init__(self) -> None:
        self._holders = Holders(MAX_BLOCKS)
        self._counts: dict[TargetId, tuple[Holding, dict[int, int]]] = {}

    def add(self, target: TargetId, keys: Sequence[int]) -> int:
        """Add a prompt and return how many of its blocks are new at ``target``."""
        if target not in self._counts:
            self._counts[target] = (self._holders.open(target), {})
        holding, counts = self._counts[target]
        before = len(counts)
        lead = 0
        for key in keys:
            count = counts.get(key)
            if count is None:
                counts[key] = 1
            else:
                counts[key] = count + 1
                lead += 1
        self._holders.store(holding, keys[lead:], keys[lead - 1] if lead else None)
        return len(counts) - before

    def remove(self, target: TargetId, keys: Sequence[int]) -> int:
        """Remove a prompt that was added and return how many blocks no other active request has."""
        holding, counts = self._counts[target]
        gone = []
        for key in keys:
            count = counts[key]
            if count == 1:
                del counts[key]
                gone.append(key)
            else:
                counts[key] = count - 1
        self._holders.remove(holding, gone)
        return len(gone)

    def forget(self, target: TargetId) -> None:
        """Forget all prompts of a target at once; ``sweep`` removes their blocks."""
        if self._counts.pop(target, None) is not None:
            self._holders.retire(target)

    def sweep(self, limit: int) -> bool:
        """Remove blocks of forgotten targets, visiting at most ``limit``; True: nothing is left to do."""
        return self._holders.sweep(limit)

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Leading blocks of a prompt that active requests have, by target; targets without any are absent."""
        return self._holders.match(keys)
