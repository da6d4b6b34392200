"""KV blocks in host memory: blocks evicted from the device's prefix cache keep their names there. Pure: plans copies.

A block that is evicted from the device is saved to a slot of the host's pool, and loaded into another block when a
prompt needs it again. Copies are made before the next step computes, saves first, so that a block may be saved, loaded
and written in one step.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from penstock.schemas.kv import KvEvent, Removed, Stored

HOST = 1  # tier in KV events


class Copies(NamedTuple):
    saves: list[tuple[int, int]]  # (block, slot)
    loads: list[tuple[int, int]]  # (slot, block), in order


class BlockCopier(Protocol):
    """Moves whole blocks between the device's pool and the host's."""

    def copy(self, copies: Copies) -> None:
        """Saves, then loads; steps that start later see them.

        Raises:
            EngineError: the device is lost.
        """

    def close(self) -> None: ...


class HostCache:
    """Which names are in which slot.

    Args:
        slots: blocks that the host's pool holds.
        kv_events: report names that enter or leave.
    """

    def __init__(self, slots: int, *, kv_events: bool = True) -> None:
        if slots < 1:
            raise ValueError(f"an offload pool needs at least one block, not {slots}")
        self.slots = slots
        self.kv_events = kv_events
        self.loaded_blocks = 0  # since start
        self._names: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._parents: dict[bytes, bytes | None] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._pinned: set[bytes] = set()  # to be loaded before the next step
        self._loading: set[bytes] = set()  # pinned until the copies are taken
        self._saves: dict[int, int] = {}  # slot -> block
        self._loads: list[tuple[int, int]] = []
        self._events: list[KvEvent] = []

    @property
    def used_slots(self) -> int:
        return len(self._names)

    def save(self, name: bytes, parent: bytes | None, block: int) -> None:
        """A named block leaves the device; without a slot that can be reassigned it is lost."""
        if name in self._names:
            self._names.move_to_end(name)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return
        self._names[name] = slot
        self._parents[name] = parent
        self._saves[slot] = block
        if self.kv_events:
            self._events.append(Stored(name, parent, tier=HOST))

    def _evict(self) -> int | None:
        for name in self._names:
            if name not in self._pinned:
                if self.kv_events:
                    self._events.append(Removed(name, tier=HOST))
                del self._parents[name]
                return self._names.pop(name)
        return None

    def match(self, digests: Seq[bytes], start: int, limit: int) -> list[bytes]:
        """Names of ``digests[start:limit]`` that are here, up to the first that is not."""
        matched = []
        for name in digests[start:limit]:
            if name not in self._names:
                break
            matched.append(name)
        return matched

    def pin(self, names: Seq[bytes]) -> None:
        """Keep names until they are loaded, or unpinned."""
        self._pinned.update(names)

    def unpin(self, names: Seq[bytes]) -> None:
        self._pinned.difference_update(set(names) - self._loading)

    def load(self, names: Seq[bytes], blocks: Seq[int]) -> None:
        """Plan to copy pinned names into blocks."""
        for name, block in zip(names, blocks, strict=True):
            self._loads.append((self._names[name], block))
            self._names.move_to_end(name)
        self._loading.update(names)
        self.loaded_blocks += len(names)

    def take_copies(self) -> Copies | None:
        """Copies that were planned since the last call; None: none."""
        if not (self._saves or self._loads):
            return None
        copies = Copies([(block, slot) for slot, block in self._saves.items()], self._loads)
        self._saves, self._loads = {}, []
        self._pinned.clear()
        self._loading.clear()
        return copies

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def dump(self) -> list[KvEvent]:
        return [Stored(name, self._parents[name], tier=HOST) for name in self._names]
