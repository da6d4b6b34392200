"""The prefix index without KV events: predicts the cache of a target from the requests sent to it. No clock.

A target is assumed to keep the prompts it was sent last, as many as its KV cache holds, each for at most ``ttl_s`` from
the last request that used it. A block is never removed before the blocks that follow it in its prompt, so holdings stay
closed. What a target generates is not predicted.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.router.state.depths import TargetId
from penstock.router.state.holders import Holders, Holding

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
