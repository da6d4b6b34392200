"""The prefix index without KV events: assumes that a worker caches the prompts it was sent recently. No clock.

Entries expire ``ttl_s`` after the last request that used them; at ``max_blocks`` the oldest are removed first. A block
is never removed before the blocks that follow it in its prompt, so holdings stay closed.
"""

from collections import deque
from collections.abc import Sequence

from router.depths import TargetId
from router.holders import Holders, Holding


class ApproximateIndex:
    """``PrefixIndex.match`` fed by past decisions.

    Args:
        max_blocks: hard cap of (target, block) pairs.
    """

    def __init__(self, max_blocks: int, ttl_s: float = 120.0) -> None:
        self.max_blocks = max_blocks
        self.ttl_s = ttl_s
        self._holders = Holders(max_blocks)
        self._used: dict[TargetId, tuple[Holding, dict[int, int]]] = {}  # key -> number of the last record with it
        self._records: deque[tuple[float, int, TargetId, tuple[int, ...]]] = deque()
        self._recorded = 0
        self._recorded_keys = 0  # in all records, repeats included

    def record(self, target_id: TargetId, keys: Sequence[int], now: float) -> None:
        """A prompt was sent to ``target_id`` at ``now`` (seconds, any epoch, never going back)."""
        self.expire(now)
        part = tuple(keys[: self.max_blocks])
        while self._records and self._recorded_keys + len(part) > self.max_blocks:
            self._remove_oldest()
        if target_id not in self._used:
            self._used[target_id] = (self._holders.open(target_id), {})
        holding, used = self._used[target_id]
        self._recorded += 1
        self._recorded_keys += len(part)
        self._holders.store(holding, part, None)
        used.update(dict.fromkeys(part, self._recorded))
        self._records.append((now, self._recorded, target_id, part))

    def match(self, keys: Sequence[int]) -> dict[TargetId, int]:
        """Number of leading blocks of a prompt probably held, by target; targets without any are absent."""
        return self._holders.match(keys)

    def expire(self, now: float) -> None:
        """Remove what was last used ``ttl_s`` ago or earlier."""
        while self._records and self._records[0][0] + self.ttl_s <= now:
            self._remove_oldest()

    def forget(self, worker: str) -> None:
        """Forget all ranks of ``worker``."""
        for target_id in [target_id for target_id in self._used if target_id[0] == worker]:
            del self._used[target_id]
            self._holders.retire(target_id)

    def sweep(self, limit: int) -> bool:
        """As ``PrefixIndex.sweep``."""
        return self._holders.sweep(limit)

    def __len__(self) -> int:
        return len(self._holders)

    def _remove_oldest(self) -> None:
        _, number, target_id, keys = self._records.popleft()
        self._recorded_keys -= len(keys)
        if target_id in self._used:
            holding, used = self._used[target_id]
            gone = [key for key in keys if used.get(key) == number]
            for key in gone:
                del used[key]
            self._holders.remove(holding, gone)
