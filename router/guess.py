"""Where prefixes probably are, from past decisions: for engines without KV events. Pure; ``now`` is an argument."""

from collections import OrderedDict
from collections.abc import Sequence

TTL_NS = 120_000_000_000
LIMIT = 1_000_000


class Guess:
    """The last worker that each block went to, for a while. The newest ``limit`` blocks are kept."""

    def __init__(self, ttl_ns: int = TTL_NS, limit: int = LIMIT) -> None:
        self._ttl_ns = ttl_ns
        self._limit = limit
        self._seen: OrderedDict[int, dict[str, int]] = OrderedDict()  # key -> worker -> until when

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, worker: str, keys: Sequence[int], now_ns: int) -> None:
        """A prompt with these blocks was sent to a worker."""
        seen, until = self._seen, now_ns + self._ttl_ns
        for key in reversed(keys):  # so that leaves are forgotten before their parents
            seen.setdefault(key, {})[worker] = until
            seen.move_to_end(key)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def match(self, keys: Sequence[int], now_ns: int) -> dict[tuple[str, int], int]:
        """Leading blocks that each (worker, rank 0) probably holds."""
        out: dict[tuple[str, int], int] = {}
        for depth, key in enumerate(keys):
            holders = self._seen.get(key, {})
            going_on = [worker for worker, until in holders.items() if until > now_ns]
            going_on = [worker for worker in going_on if out.get((worker, 0), 0) == depth]
            if not going_on:
                break
            for worker in going_on:
                out[worker, 0] = depth + 1
        return out

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        for key in [key for key, holders in self._seen.items() if holders.pop(worker, None) and not holders]:
            del self._seen[key]
