"""Submissions that wait for a place in the queue of their class, beside those that wait in their stream.

A submission that is sent back to its stream is delivered again after a second, when others may have taken the places
that were free meanwhile: with a short queue, most places would stay empty. So some of each tenant wait here. Pure.
"""

import asyncio
from collections import OrderedDict, deque

from penstock.schemas.requests import Priority

OF_TENANT = 32  # of each class


class WaitingLine:
    """In each class, tenants take turns; of a tenant, the first that came is the first."""

    def __init__(self) -> None:
        self._tenants: dict[Priority, OrderedDict[str, deque[asyncio.Future[None]]]] = {
            each: OrderedDict() for each in Priority
        }

    def __len__(self) -> int:
        return sum(len(line) for tenants in self._tenants.values() for line in tenants.values())

    def enter(self, priority: Priority, tenant: str, *, again: bool = False) -> "asyncio.Future[None] | None":
        """A future that is done when there may be a place; None: too many of the tenant's wait.

        Args:
            again: it waited before, and others took its place: it is the tenant's first.
        """
        line = self._tenants[priority].setdefault(tenant, deque())
        if len(line) >= OF_TENANT and not again:
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if again:
            line.appendleft(turn)
        else:
            line.append(turn)
        return turn

    def admit(self, priority: Priority, places: int) -> None:
        """Wake as many of a class as there are places."""
        tenants = self._tenants[priority]
        while places > 0 and tenants:
            tenant, line = tenants.popitem(last=False)
            turn = line.popleft()
            if line:
                tenants[tenant] = line
            if not turn.done():  # its submission may have been given up
                turn.set_result(None)
                places -= 1
