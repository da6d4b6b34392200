"""The block pool: which sequence holds which block, and the names under which idle blocks are found again. Pure.

Blocks are named by digests; tokens and scheduling are unknown here. Every operation costs O(1) per block.

Whenever a name is in the cache, so are all names before it in its chain; routers, which match prefixes by bisection,
rely on that. Three rules ensure it. A sequence frees its last block first, so that leaves are evicted before their
parents. While it runs, it names only blocks whose ancestors it holds itself. A copy without a holder gives its name to
a copy that has one.

KV blocks in host memory: blocks evicted from the device's prefix cache keep their names there. Pure: plans copies.

A block that is evicted from the device is saved to a slot of the host's pool, and loaded into another block when a
prompt needs it again. Copies are made before the next step computes, saves first, so that a block may be saved, loaded
and written in one step.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from penstock.schemas.kv import KvEvent, Removed, Stored

HOST = 1  # tier in KV events


class BlockCopies(NamedTuple):
    saves: list[tuple[int, int]]  # (block, slot)
    loads: list[tuple[int, int]]  # (slot, block), in order


class BlockCopier(Protocol):
    """Moves whole blocks between the device's pool and the host's."""

    def copy(self, copies: BlockCopies) -> None:
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
        self.names: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self.parents: dict[bytes, bytes | None] = {}
        self.free = list(range(slots - 1, -1, -1))
        self._pinned: set[bytes] = set()  # to be loaded before the next step
        self._loading: set[bytes] = set()  # pinned until the copies are taken
        self._saves: dict[int, int] = {}  # slot -> block
        self._loads: list[tuple[int, int]] = []
        self._events: list[KvEvent] = []

    @property
    def used_slots(self) -> int:
        return len(self.names)

    def save(self, name: bytes, parent: bytes | None, block: int) -> None:
        """A named block leaves the device; without a slot that can be reassigned it is lost."""
        if name in self.names:
            self.names.move_to_end(name)
            return
        slot = self.free.pop() if self.free else self._evict()
        if slot is None:
            return
        self.names[name] = slot
        self.parents[name] = parent
        self._saves[slot] = block
        if self.kv_events:
            self._events.append(Stored(name, parent, tier=HOST))

    def _evict(self) -> int | None:
        for name in self.names:
            if name not in self._pinned:
                if self.kv_events:
                    self._events.append(Removed(name, tier=HOST))
                del self.parents[name]
                return self.names.pop(name)
        return None

    def forget(self) -> None:
        """Remove all names, and the copies that are planned: what the slots hold is no longer valid."""
        if self.kv_events and self.names:
            self._events.append(Removed(b"".join(self.names), tier=HOST))
        self.free += self.names.values()
        self.names.clear()
        self.parents.clear()
        self._pinned.clear()
        self._loading.clear()
        self._saves, self._loads = {}, []

    def match(self, digests: Seq[bytes], start: int, limit: int) -> list[bytes]:
        """Names of ``digests[start:limit]`` that are here, up to the first that is not."""
        matched = []
        for name in digests[start:limit]:
            if name not in self.names:
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
            self._loads.append((self.names[name], block))
            self.names.move_to_end(name)
        self._loading.update(names)
        self.loaded_blocks += len(names)

    def take_copies(self) -> BlockCopies | None:
        """Copies that were planned since the last call; None: none."""
        if not (self._saves or self._loads):
            return None
        copies = BlockCopies([(block, slot) for slot, block in self._saves.items()], self._loads)
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
        return [Stored(name, self.parents[name], tier=HOST) for name in self.names]


class BlockObserver(Protocol):
    """Keeps additional data per block."""

    def discard(self, block: int) -> None:
        """The content of a block without holders is no longer valid."""

    def move(self, block: int, copy: int) -> None:
        """The name of ``block``, which has no holder, moves to a held copy."""


class BlockManager:
    """The pool: ``total_blocks`` ids, each held by some sequences, cached (held by none, named) or unused.

    Args:
        prefix_cache: False: nothing gets a name, nothing is ever found.
        kv_events: False: ``take_events`` stays empty.
        host: keeps what is evicted.

    Attributes:
        generations: one u32 per block, increased whenever it is allocated. A reader that copies a block from another
            process compares it afterwards: equal means that the block was not overwritten meanwhile.
        observer: notified of blocks that change their content.
        holders, names, parents: of each block: sequences that hold it, its name, and the name of the block before it.
        cache: the block of each name.
        idle, unused: cached blocks that nobody holds, the first to be evicted first, and blocks without a name.
    """

    def __init__(
        self, total_blocks: int, *, prefix_cache: bool = True, kv_events: bool = True, host: HostCache | None = None
    ) -> None:
        if total_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {total_blocks}")
        self.total_blocks = total_blocks
        self.prefix_cache = prefix_cache
        self.kv_events = kv_events and prefix_cache
        self.generations = array("I", bytes(4 * total_blocks))  # other processes read it: it never moves
        self.holders = [0] * total_blocks
        self.names: list[bytes | None] = [None] * total_blocks
        self.parents: list[bytes | None] = [None] * total_blocks  # of the name; None: a prompt starts here
        self.cache: dict[bytes, int] = {}
        self.unused = list(range(total_blocks - 1, -1, -1))  # taken from the end
        self.idle: OrderedDict[int, None] = OrderedDict()  # cached blocks, first to be evicted first
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []  # not yet in _events
        self.observer: BlockObserver | None = None
        self.host = host

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give."""
        return len(self.unused) + len(self.idle)

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - len(self.unused) - len(self.idle)

    @property
    def cached_blocks(self) -> int:
        return len(self.idle)

    @property
    def free_blocks(self) -> int:
        return len(self.unused)

    def match(self, digests: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the longest cached prefix of ``digests[:limit]``; not yet held."""
        blocks: list[int] = []
        cache = self.cache
        for position in range(min(limit, len(digests))):
            block = cache.get(digests[position])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def left(self, hits: list[int], fresh: int) -> int:
        """``available`` after such a ``take``; below 0: there are too few blocks for it."""
        holders = self.holders
        revived = 0
        for block in hits:
            if not holders[block]:
                revived += 1
        return self.available - fresh - revived

    def take(self, hits: list[int], fresh: int) -> list[int] | None:
        """Allocate a new table: hold ``hits`` (from ``match``) and ``fresh`` empty blocks; None: there are too few."""
        holders, idle = self.holders, self.idle
        if self.left(hits, fresh) < 0:
            return None
        for block in hits:
            if not holders[block]:
                del idle[block]
            holders[block] += 1
        table = list(hits)
        for _ in range(fresh):
            table.append(self._take_one())
        return table

    def share(self, table: list[int]) -> list[int]:
        """A second table of the same held blocks, to be released by itself."""
        for block in table:
            assert self.holders[block], f"block {block} is not held"
            self.holders[block] += 1
        return list(table)

    def grow(self, table: list[int]) -> bool:
        """Append one empty block; False: all blocks are held."""
        if not self.unused and not self.idle:
            return False
        table.append(self._take_one())
        return True

    def _take_one(self) -> int:
        block = self.unused.pop() if self.unused else self._evict_one()
        self.holders[block] = 1
        self.generations[block] = (self.generations[block] + 1) & 0xFFFFFFFF
        return block

    def _evict_one(self) -> int:
        block, _ = self.idle.popitem(last=False)
        name = self.names[block]
        assert name is not None
        del self.cache[name]
        self.names[block] = None
        if self.kv_events:
            self._removed.append(name)
        if self.host is not None:
            self.host.save(name, self.parents[block], block)
        if self.observer is not None:
            self.observer.discard(block)
        return block

    def evict(self) -> bool:
        """Remove the next block from the cache; False: none is idle."""
        if not self.idle:
            return False
        self.unused.append(self._evict_one())
        return True

    def forget(self) -> None:
        """Remove all names: what the blocks hold is no longer valid. Those that are held stay held."""
        while self.evict():
            pass
        for name, block in self.cache.items():
            self.names[block] = None
            if self.kv_events:
                self._removed.append(name)
        self.cache.clear()
        if self.host is not None:
            self.host.forget()

    def shared(self, block: int) -> bool:
        """Whether more than one table holds a block."""
        return self.holders[block] > 1

    def name(self, table: list[int], digests: list[bytes], start: int, stop: int, *, leaving: bool = False) -> int:
        """Make blocks ``start`` .. ``stop`` of a held table findable; returns the first position still unnamed.

        The first copy of a block keeps the name. A table that is still in use stops there, since its later names would
        depend on a parent that it does not hold; it may try again later, and continues when ``leaving``: its release
        follows at once, so the holder of the first copy releases that later.
        """
        cache, holders, names, parents = self.cache, self.holders, self.names, self.parents
        # Names that are already in the cache come before those that are not.
        while start < stop and (first := cache.get(digests[start])) is not None:
            if not holders[first]:  # idle: its name moves to our copy, and it is emptied
                del self.idle[first]
                names[first] = None
                self.unused.append(first)
                if self.observer is not None:
                    self.observer.move(first, table[start])
                block = cache[digests[start]] = table[start]
                names[block] = digests[start]
                parents[block] = digests[start - 1] if start else None
            elif not leaving:
                return start
            start += 1
        if start == stop:
            return stop
        above = parent = digests[start - 1] if start else None
        fresh = digests[start:stop]
        for digest, block in zip(fresh, table[start:stop], strict=True):
            cache[digest] = block
            names[block] = digest
            parents[block] = parent
            parent = digest
        if self.kv_events:
            self._flush_removed()
            self._events.append(Stored(b"".join(fresh), above))
        return stop

    def release(self, table: list[int]) -> None:
        """Release a table, last block first. Named blocks stay findable until they are taken again."""
        holders, names, idle, unused = self.holders, self.names, self.idle, self.unused
        for block in reversed(table):
            count = holders[block] - 1
            assert count >= 0, f"block {block} was released twice"
            holders[block] = count
            if not count:
                if names[block] is None:
                    unused.append(block)
                    if self.observer is not None:
                        self.observer.discard(block)
                else:
                    idle[block] = None

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._removed or (self.host is not None and self.host.has_events))

    def take_events(self) -> list[KvEvent]:
        """Names that entered and left the cache since the last call, in the order in which they did."""
        if self._removed:
            self._flush_removed()
        events = self._events
        if events:
            self._events = []
        if self.host is not None and self.host.has_events:
            return events + self.host.take_events()
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(Removed(b"".join(self._removed)))
            self._removed.clear()

    def dump(self) -> list[KvEvent]:
        """The whole cache as ``Stored`` events, parents before children; then what the host has."""
        # A name enters the cache after its parent and leaves it before, so the dict is in parents-first order.
        runs: list[tuple[bytes | None, list[bytes]]] = []
        tails: dict[bytes | None, list[bytes]] = {}
        for digest, block in self.cache.items():
            parent = self.parents[block]
            run = tails.pop(parent, None) if parent is not None else None
            if run is None:
                run = []
                runs.append((parent, run))
            run.append(digest)
            tails[digest] = run
        device: list[KvEvent] = [Stored(b"".join(run), parent) for parent, run in runs]
        return device if self.host is None else device + self.host.dump()
