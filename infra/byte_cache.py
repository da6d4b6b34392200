"""A cache whose entries take bounded memory, whatever clients send. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 256  # of the cache's own, beside key and value


class ByteCache(Generic[K, V]):
    """The entries used last, as many as fit.

    Args:
        most_bytes: of all entries. A larger one is not kept.
        size_of: bytes of an entry, from its key and value.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[K, V], int]) -> None:
        self._most = most_bytes
        self._size_of = size_of
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # used longest ago first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V) -> None:
        self.pop(key)
        size = self._size_of(key, value) + ENTRY_BYTES
        if size > self._most:
            return
        self._entries[key] = value, size
        self.size_bytes += size
        while self.size_bytes > self._most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.size_bytes -= freed

    def pop(self, key: K) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self.size_bytes -= found[1]
