"""Limits how many answers of one key are sent at once: a client's repeats must not delay other clients."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.schemas.errors import Code, ServingError


@dataclass(slots=True)
class _Key:
    free: asyncio.Semaphore
    held: int = 0  # or waited for


class KeyedSlots:
    """
    Args:
        slots: of each key.
        waiting: for a slot of each key; further ones are refused.
    """

    def __init__(self, slots: int, waiting: int) -> None:
        self._slots = slots
        self._waiting = waiting
        self._keys: dict[Hashable, _Key] = {}

    def __len__(self) -> int:
        """Keys in use."""
        return len(self._keys)

    @asynccontextmanager
    async def hold(self, key: Hashable, what: str) -> AsyncIterator[None]:
        """One slot of a key, first come, first served.

        Args:
            what: is limited, for the error.
        Raises:
            ServingError: queue_full.
        """
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key(asyncio.Semaphore(self._slots))
        if entry.held >= self._slots + self._waiting:
            raise ServingError(
                Code.queue_full,
                f"{entry.held} {what} are open, {self._slots} are answered at once; read the answer at ps.read, or try "
                "again later",
                retry_after=1.0,
            )
        entry.held += 1
        try:
            async with entry.free:
                yield
        finally:
            entry.held -= 1
            if not entry.held:
                del self._keys[key]
