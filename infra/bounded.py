"""A cache and a queue that take bounded memory, whatever clients send. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

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


class QueueLimits(NamedTuple):
    """What may wait: entries and their bytes, of all tenants together and of each alone."""

    entries: int = 2_048
    size_bytes: int = 32 << 20
    tenant_entries: int = 512
    tenant_bytes: int = 8 << 20


class FairQueue(Generic[T]):
    """The tenants take turns, one entry each; of a tenant's entries the smallest is next, of equal ones the oldest."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._tenants: OrderedDict[str, OrderedDict[Hashable, tuple[T, int]]] = OrderedDict()  # next turn first
        self._bytes_of: dict[str, int] = {}
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tenant: str, key: Hashable, entry: T, size_bytes: int) -> bool:
        """
        Args:
            key: of the entry among its tenant's; not in the queue.
        Returns: False: it is not added, because a limit is reached.
        """
        own, own_bytes = self._tenants.get(tenant, OrderedDict()), self._bytes_of.get(tenant, 0) + size_bytes
        limits = self._limits
        if len(own) >= limits.tenant_entries or self._count >= limits.entries:
            return False
        if own_bytes > limits.tenant_bytes or self._bytes + size_bytes > limits.size_bytes:
            return False
        own[key] = entry, size_bytes
        self._tenants[tenant] = own
        self._bytes_of[tenant] = own_bytes
        self._count += 1
        self._bytes += size_bytes
        return True

    def take(self, held: Callable[[str], bool] = lambda tenant: False) -> T | None:
        """Remove the next entry of the tenant whose turn it is; None: there is none.

        Args:
            held: whether a tenant misses its turn.
        """
        tenant = next((each for each in self._tenants if not held(each)), None)
        if tenant is None:
            return None
        own = self._tenants[tenant]
        self._tenants.move_to_end(tenant)
        return self._remove(tenant, min(own, key=lambda key: own[key][1]))

    def drop(self, tenant: str, key: Hashable) -> None:
        """Remove an entry, if it is there."""
        if key in self._tenants.get(tenant, ()):
            self._remove(tenant, key)

    def _remove(self, tenant: str, key: Hashable) -> T:
        own = self._tenants[tenant]
        entry, size_bytes = own.pop(key)
        self._bytes_of[tenant] -= size_bytes
        if not own:
            del self._tenants[tenant], self._bytes_of[tenant]
        self._count -= 1
        self._bytes -= size_bytes
        return entry
