"""A bounded queue whose tenants take turns. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


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
