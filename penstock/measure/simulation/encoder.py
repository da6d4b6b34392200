"""A simulated encode worker: one medium at a time, first come, first served, behind an LRU cache of embeddings."""

from collections import OrderedDict


class Encoder:
    """
    Args:
        encode_ms: time per medium that is not cached.
        cache: media whose embeddings are kept.
    """

    def __init__(self, encode_ms: float, cache: int) -> None:
        self._encode_ns = round(encode_ms * 1e6)
        self._capacity = cache
        self._ready: OrderedDict[int, int] = OrderedDict()  # medium -> when its embeddings are there, in ns
        self._free_ns = 0

    def encode(self, medium: int, now_ns: int) -> int:
        """Encode a medium after those before it, and return when its embeddings are ready, in ns."""
        if medium in self._ready:
            self._ready.move_to_end(medium)
            return max(now_ns, self._ready[medium])
        self._free_ns = max(self._free_ns, now_ns) + self._encode_ns
        self._ready[medium] = self._free_ns
        if len(self._ready) > self._capacity:
            self._ready.popitem(last=False)
        return self._free_ns
