"""The block pool: which sequence holds which block, and the names under which idle blocks are found again. Pure.

Blocks are named by digests; tokens and scheduling are unknown here. Every operation costs O(1) per block.

Whenever a name is in the cache, so are all names before it in its chain; routers, which match prefixes by bisection,
rely on that. Three rules ensure it. A sequence frees its last block first, so that leaves are evicted before their
parents. While it runs, it names only blocks whose ancestors it holds itself. A copy without a holder gives its name to
a copy that has one.

Blocks evicted from the device's prefix cache may keep their names in host memory (``HostCache``, which plans copies). A
block that is evicted from the device is saved to a slot of the host's pool, and loaded into another block when a prompt
needs it again. Copies are made before the next step computes, saves first, so that a block may be saved, loaded and
written in one step. Behind host memory there may be files, to which slots are copied and from which they are filled
again before a sequence starts.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from penstock.schemas.kv import KvEvent, Removed, Stored

HOST, DISK = 1, 2  # tiers in KV events
RUN = 1024  # names in an event, at most: a batch has to fit a message
AHEAD, MOST_AHEAD = 4, 4096  # blocks that are saved ahead in a step, and that wait for it
MOST_WRITES = 32  # to files at once
FORGIVEN = 0.98  # of the measured time of files, at each look that leaves them alone: then they are tried again
MOST_READ = 1 / 2  # of the slots, for sequences that wait for blocks from files


class BlockCopies(NamedTuple):
    saves: list[tuple[int, int]]  # (block, slot)
    loads: list[tuple[int, int]]  # (slot, block), in order


class BlockCopier(Protocol):
    """Moves whole blocks between the device's pool and the host's.

    Attributes:
        load_s: seconds that copying a block to the device takes; 0: unknown.
    """

    load_s: float

    def copy(self, copies: BlockCopies) -> None:
        """Saves, then loads; steps that start later see them.

        Raises:
            EngineError: the device is lost.
        """

    def settle(self, blocks: Collection[int]) -> None:
        """Wait for copies of these blocks: other processes write to them."""

    def close(self) -> None: ...


class FileResult(NamedTuple):
    """What became of a block that was to be written to a file or read from one. ``late``: that has not ended yet."""

    name: bytes
    read: bool
    ok: bool
    late: bool = False


class BlockFiles(Protocol):
    """Slots of the host's pool in files, written and read by threads.

    Attributes:
        read_s: seconds that reading a block takes; 0: unknown.
    """

    read_s: float

    def write(self, name: bytes, parent: bytes | None, slot: int) -> bool:
        """Begin to write a slot; False: not now. The slot stays as it is until there is a result."""

    def read(self, name: bytes, parent: bytes | None, slot: int) -> None:
        """Begin to read into a slot, which nothing else uses until there is a result that is not ``late``."""

    def remove(self, name: bytes, parent: bytes | None) -> None: ...

    def results(self) -> list[FileResult]:
        """What was done since the last call."""

    def close(self) -> None: ...


class _Changes:
    """Names that come to a tier and leave it, as events; those of a chain share one."""

    def __init__(self, tier: int, *, wanted: bool) -> None:
        self._tier, self._wanted = tier, wanted
        self._events: list[KvEvent] = []
        self._run: list[bytes] = []  # each the parent of the one before: blocks leave the device from the last on
        self._parent: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._events or self._run)

    def add(self, events: list[KvEvent]) -> None:
        if self._wanted:
            self._end_run()
            self._events += events

    def stored(self, name: bytes, parent: bytes | None) -> None:
        if self._run and (name != self._parent or len(self._run) >= RUN):
            self._end_run()
        if self._wanted:
            self._run.append(name)
            self._parent = parent

    def removed(self, names: Seq[bytes]) -> None:
        parts = (names[at : at + RUN] for at in range(0, len(names), RUN))
        self.add([Removed(b"".join(part), tier=self._tier) for part in parts])

    def take(self) -> list[KvEvent]:
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if self._run:
            self._events.append(Stored(b"".join(reversed(self._run)), self._parent, tier=self._tier))
            self._run = []


def stored_runs(parents: Mapping[bytes, bytes | None], tier: int) -> list[KvEvent]:
    """All names of a tier as events, parents before children as far as they are there."""
    children: dict[bytes | None, list[bytes]] = {}
    for name, parent in parents.items():
        children.setdefault(parent if parent in parents else None, []).append(name)
    runs: list[list[bytes]] = []
    following = children.get(None, [])[::-1]
    while following:
        name = following.pop()
        following += children.get(name, ())
        if runs and runs[-1][-1] == parents[name] and len(runs[-1]) < RUN:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [Stored(b"".join(run), parents[run[0]], tier=tier) for run in runs]


class BlockFetch:
    """Blocks that a waiting sequence needs from files: they stay in host memory until it has started.

    Attributes:
        cache: the cache that reads them.
        waiting: those that are still being read.
    """

    def __init__(self, cache: "HostCache") -> None:
        self.cache = cache
        self.names: list[bytes] = []
        self.waiting: set[bytes] = set()


class DiskCache:
    """Which names are in files.

    Args:
        most_blocks: beyond, the least recently used are removed.
        present: those found at the start with their parents, the least recently used first.
    """

    def __init__(
        self,
        files: BlockFiles,
        most_blocks: int,
        present: Mapping[bytes, bytes | None] | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        self.files = files
        self.most_blocks = most_blocks
        self.names: OrderedDict[bytes, bytes | None] = OrderedDict(present or {})  # with their parents
        self.writing: dict[bytes, int] = {}  # with their slots
        self.parents: dict[bytes, bytes | None] = {}  # of ``writing``, which their files have in their names
        self.reading: dict[bytes, int] = {}
        self.late: set[bytes] = set()  # of ``reading``: until they have ended, nothing else is read
        self.stuck: set[bytes] = set()  # of ``writing``: late; no idle engine waits for them
        self.void: set[bytes] = set()  # of ``writing``: what was forgotten meanwhile
        self.read_blocks = self.written_blocks = self.lost_blocks = 0  # since start
        self.changes = _Changes(DISK, wanted=kv_events)
        self._shrink()
        self.changes.add(stored_runs(self.names, DISK))

    def put(self, name: bytes, parent: bytes | None) -> None:
        self.written_blocks += 1
        self.names[name] = parent
        self.changes.stored(name, parent)
        self._shrink()

    def drop(self, name: bytes) -> None:
        parent = self.names.pop(name)
        self.changes.removed([name])
        self.files.remove(name, parent)

    def forget(self) -> None:
        for name in list(self.names):
            self.drop(name)
        self.void.update(self.writing)

    def _shrink(self) -> None:
        while len(self.names) > self.most_blocks:
            oldest = next((name for name in self.names if name not in self.reading), None)
            if oldest is None:
                return
            self.drop(oldest)


class HostCache:
    """Which names are in which slot of host memory, and which of them are written to files and read from there.

    There is one cache for blocks and, if sliding-window layers have a pool of their own, another for their rows, with
    the same names.

    A slot is written to its file as soon as files are idle. If the slot is needed before, the block is lost, so files
    never delay a step.

    Args:
        slots: blocks that the host's pool holds.
        kv_events: report names that enter or leave.
        disk: None: nothing is written to files.
    Attributes:
        memory_only: names that are never written to a file.
        unwritten: names to be written, the first one next.
        compute_s: seconds that computing a block of a prompt takes; 0: unknown. Files that are slower are not read.
    """

    def __init__(self, slots: int, *, kv_events: bool = True, disk: DiskCache | None = None) -> None:
        if slots < 1:
            raise ValueError(f"an offload pool needs at least one block, not {slots}")
        self.slots = slots
        self.disk = disk
        self.loaded_blocks = 0  # since start
        self.compute_s = 0.0
        self.names: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self.parents: dict[bytes, bytes | None] = {}
        self.free = list(range(slots - 1, -1, -1))
        self.memory_only: set[bytes] = set()
        self.unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._fetches: list[BlockFetch] = []
        self._kept: Counter[bytes] = Counter()  # by fetches
        self._pinned: set[bytes] = set()  # to be loaded before the next step
        self._loading: set[bytes] = set()  # pinned until the copies are taken
        self._saves: dict[int, int] = {}  # slot -> block
        self._loads: list[tuple[int, int]] = []
        self._changes = _Changes(HOST, wanted=kv_events)

    @property
    def used_slots(self) -> int:
        return len(self.names)

    @property
    def busy(self) -> bool:
        """Whether files are being written or read, and not late: ``poll`` is to be called soon."""
        disk = self.disk
        return disk is not None and len(disk.writing) + len(disk.reading) > len(disk.late) + len(disk.stuck)

    def has(self, name: bytes, *, files: bool = False) -> bool:
        return name in self.names or (files and self.disk is not None and name in self.disk.names)

    def save(
        self, name: bytes, parent: bytes | None, block: int, *, memory_only: bool = False, last: bool = True
    ) -> bool:
        """Save a named block that leaves the device. False: no slot can be reassigned, so the block is lost.

        Args:
            memory_only: do not write it to a file.
            last: False: it is evicted before all others.
        """
        fresh = name not in self.names
        if fresh:
            slot = self._take_slot()
            if slot is None:
                return False
            self._saves[slot] = block
            self._enter(name, parent, slot)
            if memory_only:
                self.memory_only.add(name)
        if fresh or last:
            self.names.move_to_end(name, last=last)
        if not memory_only:
            self._may_write((name,))
        return fresh

    def _enter(self, name: bytes, parent: bytes | None, slot: int) -> None:
        self.names[name] = slot
        self.parents[name] = parent
        self._changes.stored(name, parent)

    def _may_write(self, names: Seq[bytes]) -> None:
        self.memory_only.difference_update(names)
        disk = self.disk
        if disk is not None:
            lacking = (each for each in names if each not in disk.names and disk.writing.get(each) != self.names[each])
            self.unwritten.update(dict.fromkeys(lacking))

    def _take_slot(self) -> int | None:
        if self.free:
            return self.free.pop()
        writing = self.disk.writing if self.disk is not None else ()
        for name in self.names:
            if name not in self._pinned and name not in self._kept and name not in writing:
                self._changes.removed([name])
                del self.parents[name]
                self.memory_only.discard(name)
                if name in self.unwritten:
                    del self.unwritten[name]
                    assert self.disk is not None
                    self.disk.lost_blocks += 1
                slot = self.names.pop(name)
                self._saves.pop(slot, None)  # else it would overwrite what comes into the slot meanwhile
                return slot
        return None

    def forget(self, *, files: bool) -> None:
        """Remove all names, and the copies that are planned: what the slots hold is no longer valid.

        Args:
            files: neither is what the files hold.
        """
        self._changes.removed(list(self.names))
        writing = self.disk.writing if self.disk is not None else {}
        self.free += [slot for name, slot in self.names.items() if slot != writing.get(name)]
        for unused in (self.names, self.parents, self.memory_only, self.unwritten, self._pinned, self._loading):
            unused.clear()
        self._saves, self._loads = {}, []
        if self.disk is not None and files:
            self.disk.forget()

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

    def load(self, names: Seq[bytes], blocks: Seq[int], *, memory_only: bool = False) -> None:
        """Plan to copy pinned names into blocks.

        Args:
            memory_only: as in ``save``, for whom they are loaded.
        """
        for name, block in zip(names, blocks, strict=True):
            self._loads.append((self.names[name], block))
            self.names.move_to_end(name)
        self._loading.update(names)
        self.loaded_blocks += len(names)
        if not memory_only and self.memory_only:
            self._may_write([name for name in names if name in self.memory_only])

    def take_copies(self) -> BlockCopies | None:
        """Copies that were planned since the last call; None: none."""
        if not (self._saves or self._loads):
            return None
        copies = BlockCopies([(block, slot) for slot, block in self._saves.items()], self._loads)
        self._saves, self._loads = {}, []
        self._pinned.clear()
        self._loading.clear()
        return copies

    # -- files -----------------------------------------------------------------------------------------------

    def fetch(self, digests: Seq[bytes], start: int, limit: int) -> BlockFetch | None:
        """Begin to read those of ``digests[start:limit]`` that are in files only; None: none is, or there is no room.

        The others that are here stay as long as what is fetched.
        """
        disk = self.disk
        if disk is None or start >= limit or disk.late:
            return None
        if self.compute_s and disk.files.read_s > self.compute_s:
            disk.files.read_s *= FORGIVEN
            return None
        fetch, room = BlockFetch(self), int(self.slots * MOST_READ) - len(self._kept)
        for name in digests[start:limit]:
            if len(fetch.names) >= room or not self.has(name, files=True):
                break
            if name in self.names:
                self.names.move_to_end(name)
            elif name not in disk.reading:
                slot = self._take_slot()
                if slot is None:
                    break
                disk.reading[name] = slot
                disk.files.read(name, disk.names[name], slot)
            if name in disk.reading:
                fetch.waiting.add(name)
            self._kept[name] += 1
            fetch.names.append(name)
        self._fetches.append(fetch)
        if fetch.waiting:
            return fetch
        self.release(fetch)
        return None

    def release(self, fetch: BlockFetch) -> None:
        """Its sequence has started, or was cancelled."""
        self._fetches.remove(fetch)
        for name in fetch.names:
            self._kept[name] -= 1
            if not self._kept[name]:
                del self._kept[name]

    def poll(self) -> None:
        """Take in what was written and read, and begin to write more."""
        disk = self.disk
        if disk is None:
            return
        for name, read, ok, late in disk.files.results():
            if not read:
                if late:
                    disk.stuck.add(name)
                else:
                    self._written(disk, name, ok=ok)
                continue
            for fetch in self._fetches:
                fetch.waiting.discard(name)
            if late:
                disk.late.add(name)
            else:
                self._read(disk, name, ok=ok)
        while self.unwritten and not disk.stuck and len(disk.writing) < MOST_WRITES:
            name = next(iter(self.unwritten))
            slot = self.names[name]
            if slot in self._saves or name in disk.writing or not disk.files.write(name, self.parents[name], slot):
                return
            disk.writing[name], disk.parents[name] = slot, self.parents[name]
            del self.unwritten[name]

    def _written(self, disk: DiskCache, name: bytes, *, ok: bool) -> None:
        slot, parent = disk.writing.pop(name), disk.parents.pop(name)
        void = name in disk.void
        disk.void.discard(name)
        disk.stuck.discard(name)
        if self.names.get(name) != slot:  # forgotten meanwhile
            self.free.append(slot)
        elif ok and not void:
            disk.put(name, parent)
            return
        if ok:
            disk.files.remove(name, parent)

    def _read(self, disk: DiskCache, name: bytes, *, ok: bool) -> None:
        slot = disk.reading.pop(name)
        disk.late.discard(name)
        if ok and name in disk.names and name not in self.names:
            disk.read_blocks += 1
            disk.names.move_to_end(name)
            self._enter(name, disk.names[name], slot)
            return
        self.free.append(slot)
        if not ok and name in disk.names:
            disk.drop(name)

    @property
    def has_events(self) -> bool:
        return bool(self._changes or (self.disk is not None and self.disk.changes))

    def take_events(self) -> list[KvEvent]:
        events = self._changes.take()
        return events if self.disk is None else self.disk.changes.take() + events

    def dump(self) -> list[KvEvent]:
        events = stored_runs(self.parents, HOST)
        return events if self.disk is None else events + stored_runs(self.disk.names, DISK)


class BlockObserver(Protocol):
    """Keeps additional data per block."""

    def discard(self, block: int) -> None:
        """The content of a block without holders is no longer valid."""

    def move(self, block: int, copy: int) -> None:
        """The name of ``block``, which has no holder, moves to a held copy."""

    def save(self, block: int, name: bytes) -> bool:
        """Plan to save the data of a block that has or had this name, and leaves the device; False: there is none."""

    def forget(self, *, files: bool) -> None:
        """See ``HostCache.forget``."""


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
        idle, unused: cached blocks without a holder, in order of eviction, and blocks without a name.
        memory_only: blocks whose content is not to be written to a file.
        saves_ahead: blocks that become idle are saved to the host soon, since other processes' writes do not wait for
            a copy.
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
        self.memory_only: set[int] = set()
        self.saves_ahead = False
        self._newly_idle: deque[int] = deque(maxlen=MOST_AHEAD)

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

    def take(self, hits: list[int], fresh: int, *, foreign: bool = False) -> list[int] | None:
        """Allocate a new table: hold ``hits`` (from ``match``) and ``fresh`` empty blocks; None: there are too few.

        Args:
            foreign: other processes write to the empty ones, without waiting for copies of what they held: that is
                lost, unless it was saved ahead.
        """
        holders, idle = self.holders, self.idle
        if self.left(hits, fresh) < 0:
            return None
        for block in hits:
            if not holders[block]:
                del idle[block]
            holders[block] += 1
        table = list(hits)
        for _ in range(fresh):
            table.append(self._take_one(foreign=foreign))
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

    def _take_one(self, *, foreign: bool = False) -> int:
        block = self.unused.pop() if self.unused else self._evict_one(saved=not foreign)
        if self.memory_only:
            self.memory_only.discard(block)
        self.holders[block] = 1
        self.generations[block] = (self.generations[block] + 1) & 0xFFFFFFFF
        return block

    def _evict_one(self, *, saved: bool = True) -> int:
        block, _ = self.idle.popitem(last=False)
        name = self.names[block]
        assert name is not None
        del self.cache[name]
        self.names[block] = None
        if self.kv_events:
            self._removed.append(name)
        if saved:
            self.save(block, name)
        if self.observer is not None:
            self.observer.discard(block)
        return block

    def save(self, block: int, name: bytes) -> bool:
        """Plan to copy a block, which has or had this name, to the host; False: nothing is to be copied."""
        if self.host is None:
            return False
        parent, memory_only = self.parents[block], block in self.memory_only
        saved = self.host.save(name, parent, block, memory_only=memory_only)
        if self.observer is not None and self.observer.save(block, name):
            return True
        return saved

    def save_ahead(self) -> None:
        """Plan to save some of the blocks that became idle lately."""
        saved = 0
        while self.host is not None and self._newly_idle and saved < AHEAD:
            block = self._newly_idle.popleft()
            name = self.names[block]
            if block in self.idle and name is not None:
                saved += self.save(block, name)

    def evict(self, *, saved: bool = True) -> bool:
        """Remove the next block from the cache; False: none is idle.

        Args:
            saved: in the host, if there is one.
        """
        if not self.idle:
            return False
        self.unused.append(self._evict_one(saved=saved))
        return True

    def forget(self, *, files: bool = True) -> None:
        """Remove all names: what the blocks hold is no longer valid. Those that are held stay held.

        Args:
            files: neither is what the files hold.
        """
        while self.evict(saved=False):
            pass
        for name, block in self.cache.items():
            self.names[block] = None
            if self.kv_events:
                self._removed.append(name)
        self.cache.clear()
        if self.host is not None:
            self.host.forget(files=files)
        if self.observer is not None:
            self.observer.forget(files=files)

    def shared(self, block: int) -> bool:
        """Whether more than one table holds a block."""
        return self.holders[block] > 1

    def name(self, table: list[int], digests: list[bytes], start: int, stop: int, *, leaving: bool = False) -> int:
        """Make blocks ``start`` .. ``stop`` of a held table findable; returns the first position still unnamed.

        The first copy of a block keeps the name. A table that is still in use stops there, since its later names would
        depend on a parent that it does not hold; it may try again later, and continues when ``leaving``: its release
        follows at once, so the holder of the first copy releases that later. Not with blocks that another table holds.
        """
        cache, holders, names, parents = self.cache, self.holders, self.names, self.parents
        elsewhere = False  # whether the block in front has another holder
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
            elsewhere = cache[digests[start]] != table[start]
            start += 1
        if start == stop or (elsewhere and holders[table[start]] > 1):
            return start
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
                    if self.saves_ahead:
                        self._newly_idle.append(block)

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._removed or (self.host is not None and self.host.has_events))

    def take_events(self) -> list[KvEvent]:
        """Names that entered and left the cache since the last call, in the order in which they did on each tier.

        Slower tiers come first, so that readers never miss a block that has moved.
        """
        if self._removed:
            self._flush_removed()
        events = self._events
        if events:
            self._events = []
        if self.host is not None and self.host.has_events:
            return self.host.take_events() + events
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
