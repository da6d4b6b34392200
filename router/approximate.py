"""The prefix index without KV events: guess that a worker holds the prompts it was sent lately. No clock.

Entries live ``ttl_s`` after the last request that used them; at ``max_blocks`` the oldest go first. Of a prompt
the front is never younger than what follows it, so holdings stay closed towards the front.
"""

from collections import deque
from collections.abc import Sequence

from router.holders import Holders, Holding, Place


class ApproximateIndex:
    """``PrefixIndex.match`` fed by past decisions.

    Args:
        max_blocks: hard cap of (place, block) pairs.
    """

    def __init__(self, max_blocks: int, ttl_s: float = 120.0) -> None:
        self.max_blocks = max_blocks
        self.ttl_s = ttl_s
        self._holders = Holders(max_blocks)
        self._used: dict[Place, tuple[Holding, dict[int, int]]] = {}  # key -> number of the last record with it
        self._records: deque[tuple[float, int, Place, tuple[int, ...]]] = deque()
        self._recorded = 0
        self._recorded_keys = 0  # in all records, repeats included

    def record(self, place: Place, keys: Sequence[int], now: float) -> None:
        """A prompt was sent to ``place`` at ``now`` (seconds, any epoch, never going back)."""
        self.expire(now)
        part = tuple(keys[: self.max_blocks])
        while self._records and self._recorded_keys + len(part) > self.max_blocks:
            self._drop_oldest()
        if place not in self._used:
            self._used[place] = (self._holders.open(place), {})
        holding, used = self._used[place]
        self._recorded += 1
        self._recorded_keys += len(part)
        self._holders.store(holding, part, None)
        used.update(dict.fromkeys(part, self._recorded))
        self._records.append((now, self._recorded, place, part))

    def match(self, keys: Sequence[int]) -> dict[Place, int]:
        """How many leading blocks of a prompt each place probably holds; those without any are absent."""
        return self._holders.match(keys)

    def expire(self, now: float) -> None:
        """Drop what was last used ``ttl_s`` ago or earlier."""
        while self._records and self._records[0][0] + self.ttl_s <= now:
            self._drop_oldest()

    def forget(self, worker: str) -> None:
        """Drop everything recorded of ``worker``, all ranks."""
        for place in [place for place in self._used if place[0] == worker]:
            del self._used[place]
            self._holders.retire(place)

    def sweep(self, limit: int) -> bool:
        """As ``PrefixIndex.sweep``."""
        return self._holders.sweep(limit)

    def __len__(self) -> int:
        return len(self._holders)

    def _drop_oldest(self) -> None:
        _, number, place, keys = self._records.popleft()
        self._recorded_keys -= len(keys)
        if place in self._used:
            holding, used = self._used[place]
            gone = [key for key in keys if used.get(key) == number]
            for key in gone:
                del used[key]
            self._holders.remove(holding, gone)
