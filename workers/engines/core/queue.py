"""Chooses the waiting sequence that starts next, and its blocks. Pure.

In each class sequences are served first come, first served, as far as tenants' shares allow (``StartQueue``).
Whoever is next is the head, which nothing overtakes. That must not end in a deadlock: a reservation holds
blocks for a sequence that has not started, so a queue served strictly in order could stop for good, when its head needs
blocks that a sequence after it holds until its own turn. Three rules prevent that:

1. If there is no room for the head, the first after it whose blocks are reserved goes before it: it needs little or
   nothing more, and its end makes room.
2. The blocks that the first sequence without a reservation needs are not reserved for others, so few go before it.
3. Reservations are reclaimed, the last one first: to whatever runs and has to grow, and, if nothing runs, to the head.
   Their sequences keep their places, and compute what is no longer in the cache.

A sequence whose LoRA adapter has no slot on the device lets those after it go first, ``MOST_PASSED`` times. After that
nothing starts before it, so that those who run end and a slot becomes free.

So if nothing runs, the head waits for nothing but reservations that are still to be filled (bounded by the transfer's
time, and by that of an announcement before it) and blocks pinned for other workers (bounded by their leases).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

from penstock.infra.process.class_queue import StartQueue, StartShare
from penstock.schemas.errors import Code
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.sequence import LoadedAdapter, Sequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import (
    NO_ROWS,
    BlockReservation,
    FoundBlocks,
    PinnedPrompt,
    RequestError,
    RowToFill,
)


class Reservations:
    """Implements ``engine_protocol.KvTransfer``: blocks for prompts whose KV comes from another worker.

    Blocks in host memory are copied back. Blocks that are only in files are not: the other worker is faster.

    Attributes:
        prompts_end, prompts_written: see ``KvTransfer``.
        copy: makes the copies that are planned, without waiting.
        settle, settle_rows: wait for copies of these blocks, or rows of sliding-window layers.

    Args:
        pinned: holds what other workers read of the cache.
        headroom: blocks that must stay available: one for each running sequence to grow into, and those that the first
            waiting sequence without a reservation needs.
        windows, row_headroom: rows of sliding-window layers, and the same for them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        pinned: "PinnedBlocks",
        headroom: Callable[[], int],
        windows: WindowRows | None = None,
        row_headroom: Callable[[], int] = lambda: 0,
    ) -> None:
        self._blocks = blocks
        self._pinned = pinned
        self._headroom = headroom
        self.prompts_end: Callable[[list[object]], None] | None = None
        self.prompts_written: Callable[[list[PinnedPrompt], int], None] | None = None
        self._windows = windows
        self._row_headroom = row_headroom
        self.copy: Callable[[], None] = lambda: None
        self.settle: Callable[[Seq[int]], None] = lambda blocks: None
        self.settle_rows: Callable[[Seq[int]], None] = lambda rows: None
        self.expected = 0  # sequences that reservations were made for, and that have not started
        self.reserved_blocks = 0

    def reserve(self, digests: Seq[bytes], tails: int, users: int, tokens: int = 0) -> BlockReservation | None:
        """Hold the blocks of a prompt, cached or to be filled; None: too few are available now.

        Raises:
            RequestError: there are never so many rows of sliding-window layers.
        """
        blocks, host, full = self._blocks, self._blocks.host, len(digests)
        hits = blocks.match(digests, full)
        fresh = full - len(hits) + tails
        if blocks.left(hits, fresh) < self.expected + self._headroom():
            return None
        window, first = [], full
        if self._windows is not None:  # blocks in the window that have rows keep them, the others get some
            first = self._windows.first_block(tokens or full * self._windows.block_size)
            window = [block for block in hits[first:] if block in self._windows.rows]
            lacking = max(0, full - first) + tails - len(window)
            if len(window) + lacking > self._windows.total_blocks:
                raise RequestError(Code.out_of_blocks, f"{len(window) + lacking} rows of sliding-window layers")
            if self._windows.left(window, lacking) < self.expected + self._row_headroom():
                return None
        if host is not None:
            blocks.saves_ahead = True
            self.copy()
        table = blocks.take(hits, fresh, foreign=True)
        assert table is not None
        have = len(hits)
        if host is not None:
            self.settle(table[have:])
            names = host.match(digests, have, full)
            host.pin(names)
            host.load(names, table[have : have + len(names)], memory_only=True)
            self.copy()
            have += len(names)
        self.reserved_blocks += len(table)
        self.expected += users
        reservation = BlockReservation(list(digests), table[:full], have, table[full:], users, loaded=have - len(hits))
        if self._windows is not None:
            self._windows.keep(hits, window)
            reservation.window = window
            lack = [(n, table[n]) for n in range(first, full) if table[n] not in self._windows.rows]
            lack += [(full, tail) for tail in reservation.tails]
            rows = self._windows.reserve(len(lack))
            self.settle_rows(rows)
            reservation.fills = [RowToFill(n, block, row) for (n, block), row in zip(lack, rows, strict=True)]
        return reservation

    def adopt(self, reservation: BlockReservation) -> None:
        """The blocks are filled: enter them into the prefix cache."""
        reservation.filled = True
        if self._windows is not None:
            for _, block, row in reservation.fills:
                self._windows.enter(block, row)
                reservation.window.append(block)
            reservation.fills = []
        if self._blocks.prefix_cache:
            first, last = reservation.have - reservation.loaded, len(reservation.blocks)
            if reservation.loaded:  # other workers read what has a name, whenever they like
                self.settle(reservation.blocks[first : reservation.have])
            reservation.named = self._blocks.name(reservation.blocks, reservation.digests, first, last)
            if self._blocks.host is not None:  # until a sequence starts with them that may be stored
                self._blocks.memory_only.update(reservation.blocks[first:])

    def release(self, reservation: BlockReservation) -> None:
        """Free the blocks that no sequence has taken; a second call does nothing."""
        table = reservation.blocks + reservation.tails
        self.reserved_blocks -= len(table)
        self.expected -= reservation.users
        if self._windows is not None:
            self._windows.unreserve([fill.row for fill in reservation.fills])
            self._windows.drop(reservation.window)
            reservation.fills, reservation.window = [], []
        self._blocks.release(table)
        reservation.blocks, reservation.tails, reservation.users = [], [], 0

    def find(self, digests: Seq[bytes]) -> FoundBlocks:
        """As of ``KvTransfer``. While the engine thread changes the cache, the generation says whose a block is: it is
        increased before a block gets another content."""
        cache, generations = self._blocks.cache, self._blocks.generations
        found = FoundBlocks([], [])
        for name in digests:
            block = cache.get(name)
            if block is None:
                break
            generation = generations[block]
            if cache.get(name) != block:  # it was evicted in between, so the generation may be of its next content
                break
            found.blocks.append(block)
            found.generations.append(generation)
        if (windows := self._windows) is None:
            return found
        border = windows.usable(found.blocks)
        held = windows.found(found.blocks[windows.first_block(border * windows.block_size) : border])
        if held is None:  # the engine thread took one of them just now
            return FoundBlocks([], [])
        return FoundBlocks(found.blocks[:border], found.generations[:border], held)

    def pin(self, key: object, found: FoundBlocks) -> int:
        blocks, windows = self._blocks, self._windows
        there = []
        for block, generation in zip(found.blocks, found.generations, strict=True):
            if blocks.generations[block] != generation or blocks.names[block] is None:
                break
            there.append(block)
        if windows is not None:
            window = found.blocks[len(found.blocks) - len(found.windows.rows) :]
            if len(there) < len(found.blocks) or windows.found(window) != found.windows:
                return 0
            if windows.left(window, 0) < self.expected + self._row_headroom():
                return 0
        # A prefix from its first block on: nothing may stay in the cache without what is in front of it.
        if (
            not there
            or blocks.parents[there[0]] is not None
            or blocks.left(there, 0) < self.expected + self._headroom()
        ):
            return 0
        if windows is not None and windows.host is not None:  # blocks have names already when their rows are loaded
            self.copy()
            self.settle_rows(found.windows.rows)
        table = blocks.take(there, 0)
        assert table is not None
        self._pinned.hold(key, table, window if windows is not None else [])
        return len(table)

    def take_tail(self, reservation: BlockReservation) -> None:
        """A sequence starts and continues in one of the copies of the prompt's last block."""
        tail = reservation.tails.pop()
        self.reserved_blocks -= 1
        if tail in reservation.window:
            assert self._windows is not None
            reservation.window.remove(tail)
            self._windows.drop([tail])  # the sequence holds it next

    def release_user(self, reservation: BlockReservation) -> None:
        """One of its users has started or was cancelled; the last one releases it."""
        if not reservation.users:  # it was released before
            return
        reservation.users -= 1
        self.expected -= 1
        if not reservation.users:
            self.release(reservation)


class PinnedBlocks:
    """Blocks of prompts whose sequences have ended, kept until another worker has fetched them."""

    def __init__(self, blocks: BlockManager, block_size: int, windows: WindowRows | None = None) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._windows = windows
        self._tables: dict[object, list[int]] = {}
        self._in_windows: dict[object, list[int]] = {}  # those of them whose rows are held
        self._new: list[PinnedPrompt] = []  # not yet reported

    def __contains__(self, key: object) -> bool:
        return key in self._tables

    @property
    def block_count(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    @property
    def tables(self) -> list[list[int]]:
        return list(self._tables.values())

    @property
    def keys(self) -> list[object]:
        return list(self._tables)

    def pin(self, sequence: Sequence) -> None:
        """Keep the blocks of its prompt beyond its end; none if rows of its window are gone."""
        blocks, windows = sequence.blocks[: -(-sequence.prompt_len // self._block_size)], NO_ROWS
        window = []
        if self._windows is not None:
            window = blocks[self._windows.first_block(sequence.prompt_len) :]
            held = self._windows.found(window)
            blocks, window, windows = (blocks, window, held) if held is not None else ([], [], windows)
        table = self._blocks.share(blocks)
        self.hold(sequence.key, table, window)
        generations = self._blocks.generations
        pinned = PinnedPrompt(sequence.key, table, [generations[block] for block in table], windows=windows)
        self._new.append(pinned)

    def hold(self, key: object, table: list[int], window: list[int]) -> None:
        """Keep a table of held blocks until ``release``, and the rows of some of them."""
        self._tables[key] = table
        if self._windows is not None:
            self._windows.keep(table, window)
            self._in_windows[key] = window

    def release(self, key: object) -> bool:
        """Free the blocks of an ended sequence; False: it has pinned none."""
        table = self._tables.pop(key, None)
        if table is None:
            return False
        if self._windows is not None:
            self._windows.drop(self._in_windows.pop(key))
        self._blocks.release(table)
        return True

    def take_new(self) -> list[PinnedPrompt]:
        """Blocks pinned since the last call."""
        new, self._new = self._new, []
        return new


MOST_PASSED = 64  # sequences that go before one whose adapter has no slot; then it waits for running ones only


class AdapterSlots:
    """Which adapters are in the slots of the device. An adapter that no running sequence uses makes room for others,
    the one that was used least recently first.

    Args:
        slots: adapters of which sequences run at once; 0: none may have one.
        copy: of an adapter's matrices into a slot, seen by later steps.
    Attributes:
        loaded: ids of the adapters in slots, replaced at each change, so that any thread may read it.
    """

    def __init__(self, slots: int = 0, copy: Callable[[int, object], None] = lambda slot, matrices: None) -> None:
        self.slots = slots
        self._copy = copy
        self._slot: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first
        self._users: Counter[str] = Counter()
        self.loaded: tuple[str, ...] = ()

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence's adapter is in a slot, or can come into one."""
        adapter = sequence.adapter
        return adapter is None or adapter.id in self._slot or len(self._users) < self.slots

    def take(self, sequence: Sequence) -> None:
        """A sequence starts: bring its adapter into a slot. There has to be room."""
        adapter = sequence.adapter
        if adapter is None:
            return
        if adapter.id not in self._slot:
            self.load(adapter)
        self._slot.move_to_end(adapter.id)
        self._users[adapter.id] += 1
        sequence.adapter_slot = self._slot[adapter.id]

    def load(self, adapter: LoadedAdapter) -> None:
        """Bring an adapter that is in no slot into one; there has to be room."""
        slot = len(self._slot)
        if slot == self.slots:
            idle = next(each for each in self._slot if each not in self._users)
            slot = self._slot.pop(idle)
        self._copy(slot, adapter.matrices)
        self._slot[adapter.id] = slot
        self.loaded = tuple(self._slot)

    def fill(self, adapter: LoadedAdapter) -> None:
        """Bring an adapter into a slot that is free, before it is asked for."""
        if adapter.id not in self._slot and len(self._slot) < self.slots:
            self.load(adapter)

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended or is preempted."""
        adapter = sequence.adapter
        if adapter is None or sequence.adapter_slot < 0:
            return
        sequence.adapter_slot = -1
        self._users[adapter.id] -= 1
        if not self._users[adapter.id]:
            del self._users[adapter.id]


class AdmittedSequence(NamedTuple):
    """A sequence that may start; ``sequence.blocks`` are allocated."""

    sequence: Sequence
    computed: int  # leading tokens whose KV is in its blocks
    named: int  # leading blocks that are in the prefix cache


class _BlockNeed(NamedTuple):
    hits: list[int]  # blocks that are there
    tail: list[int]  # the prompt's last one, not full, as it was handed off
    fresh: int  # further blocks
    named: int
    offloaded: list[bytes]  # names of the first fresh ones that the host has
    rows: list[bytes]  # names of blocks whose rows come from the host


class Queue:
    """
    Args:
        no_evict: admit a sequence only with room for all blocks it may need, except with a reservation.
        windows: limit which cached prefixes can be reused.
        adapters: the slots of LoRA adapters; None: there are none.
    """

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        reservations: Reservations,
        *,
        no_evict: bool = False,
        windows: WindowRows | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._blocks = blocks
        self.adapters = adapters if adapters is not None else AdapterSlots()
        self._windows = windows
        self._reservations = reservations
        self._block_size = block_size
        self._no_evict = no_evict
        self.waiting: OrderedDict[object, Sequence] = OrderedDict()  # as they came, but preempted ones first
        self._only = StartShare()  # of all that wait, unless there is ``_fair``
        self._fair: StartQueue[Sequence] | None = None  # all that were not preempted
        self.reserved = 0  # of those that wait: how many have a reservation

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, key: object) -> bool:
        return key in self.waiting

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """
        Args:
            first: it was preempted.
        """
        self.waiting[sequence.key] = sequence
        self.reserved += sequence.reservation is not None
        if first:
            self.waiting.move_to_end(sequence.key, last=False)
            return
        if self._fair is None:
            if len(self.waiting) == 1 or sequence.share == self._only:
                self._only = sequence.share
                return
            self._fair = StartQueue()
            for each in self.waiting.values():
                self._share(self._fair, each)
        else:
            self._share(self._fair, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It was cancelled."""
        del self.waiting[sequence.key]
        self.unreserve(sequence)
        self._release_fetches(sequence)
        if self._fair is not None and not sequence.started:
            self._fair.remove(sequence.key)
        self._unshare()

    def _share(self, fair: StartQueue[Sequence], sequence: Sequence) -> None:
        if sequence.started:  # it was preempted
            return
        cached = len(self._blocks.match(sequence.digests, len(sequence.digests)))
        size = max(1, len(sequence.tokens) - cached * self._block_size)
        fair.push(sequence.key, sequence, sequence.share, size)

    def _unshare(self) -> None:
        if not self.waiting:
            self._fair = None

    def _head(self) -> Sequence:
        head = next(iter(self.waiting.values()))
        if self._fair is None or head.started:
            return head
        return self._fair.first() or head

    # -- reservations ----------------------------------------------------------------------------------------

    def head_claim(self) -> int:
        """Blocks that must be left for the first in line without a reservation."""
        for sequence in (self._head(), *self.waiting.values()) if self.waiting else ():
            if sequence.reservation is None:
                need = self._need(sequence)
                return self._blocks.available - self._blocks.left(need.hits, need.fresh)
        return 0

    def head_rows(self) -> int:
        """The same of rows of sliding-window layers."""
        waits = self._windows is not None and len(self.waiting) > self.reserved
        return self._windows.most_rows if self._windows is not None and waits else 0

    def unreserve(self, sequence: Sequence) -> None:
        """A sequence starts, is cancelled, or is to be computed here: it no longer needs its reservation."""
        reservation, sequence.reservation = sequence.reservation, None
        if reservation is not None:
            self.reserved -= 1
            self._reservations.release_user(reservation)

    def reclaim(self) -> bool:
        """Free the last waiting sequence's reservation for a running one; False: none can be given up."""
        for sequence in reversed(self.waiting.values()) if self.reserved else ():
            if sequence.reservation is not None and all(span.slots for span in sequence.media):
                self.unreserve(sequence)
                return True
        return False

    # -- who is next -----------------------------------------------------------------------------------------

    def next(self, running: Seq[Sequence], *, reserved: bool = False) -> AdmittedSequence | None:
        """Take the next sequence out of the queue; None: none can start.

        Args:
            reserved: only one that has a reservation.
        """
        if reserved:
            return self._admit_reserved(None, running) if self.reserved else None
        head = self._head()
        if _reads(head):
            return self._pass_reading(running)
        if not self.adapters.has_room(head):
            return self._pass(head, running)
        admission = self._try_admit(head, running)
        if admission is None and self.reserved:
            admission = self._admit_reserved(head, running)
            if admission is None and not running:
                admission = self._reclaim_for(head)
        return admission

    # -- blocks in files -------------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence) -> None:
        """Begin to read what a sequence that came now needs from files; it waits for that."""
        host, digests = self._blocks.host, sequence.digests
        if host is None or host.disk is None or sequence.reservation is not None:
            return
        most, rows, windows = self._reusable(sequence), list[bytes](), self._windows
        hits = self._blocks.match(digests, most)
        if windows is not None:
            behind = takewhile(lambda name: host.has(name, files=True), digests[len(hits) : most])
            most = windows.usable(hits, names=[*digests[: len(hits)], *behind], files=True)
            rows = windows.offloaded(hits, digests, most)
        found = [host.fetch(digests, len(hits), most)]
        if windows is not None and windows.host is not None:
            found.append(windows.host.fetch(rows, 0, len(rows)))
        sequence.fetches = tuple(fetch for fetch in found if fetch is not None)

    def _release_fetches(self, sequence: Sequence) -> None:
        fetches, sequence.fetches = sequence.fetches, ()
        for fetch in fetches:
            fetch.cache.release(fetch)

    def _pass_reading(self, running: Seq[Sequence]) -> AdmittedSequence | None:
        """Let the first sequence that waits for no file go before the head, which does so for a bounded time."""
        for sequence in self.waiting.values():
            if not _reads(sequence):
                return self._try_admit(sequence, running)
        return None

    def _pass(self, head: Sequence, running: Seq[Sequence]) -> AdmittedSequence | None:
        """Let the first sequence whose adapter has a slot go before the head, whose adapter has none."""
        if head.passed >= MOST_PASSED:
            return None
        for sequence in self.waiting.values():
            if self.adapters.has_room(sequence):
                admission = self._try_admit(sequence, running)
                head.passed += admission is not None
                return admission
        return None

    def _admit_reserved(self, head: Sequence | None, running: Seq[Sequence]) -> AdmittedSequence | None:
        for sequence in self.waiting.values():
            if sequence.reservation is not None and sequence is not head:
                admission = self._try_admit(sequence, running)
                if admission is not None:
                    return admission
        return None

    def _reclaim_for(self, head: Sequence) -> AdmittedSequence | None:
        """Nothing runs, so nothing else frees blocks: reclaim reservations, last first, until the head fits."""
        for sequence in [*(each for each in reversed(self.waiting.values()) if each is not head), head]:
            if sequence.reservation is not None:
                self.unreserve(sequence)
                admission = self._try_admit(head, ())
                if admission is not None:
                    return admission
        return None

    def _try_admit(self, sequence: Sequence, running: Seq[Sequence]) -> AdmittedSequence | None:
        windows = self._windows
        if not self.adapters.has_room(sequence) or _reads(sequence):
            return None
        if windows is not None and sequence.reservation is None and not windows.room:
            return None
        need = self._need(sequence)
        if self._no_evict and sequence.reservation is None and not self._fits_to_end(sequence, need, running):
            return None
        host = self._blocks.host
        if host is not None:
            host.pin(need.offloaded)  # taking blocks evicts others, which are saved in its slots
        if windows is not None and windows.host is not None:
            windows.host.pin(need.rows)
        table = self._blocks.take(need.hits, need.fresh)
        if table is None:
            if host is not None:
                host.unpin(need.offloaded)
            if windows is not None and windows.host is not None:
                windows.host.unpin(need.rows)
            return None
        hits = len(need.hits)
        computed = (hits + len(need.offloaded)) * self._block_size
        if host is not None:
            blocks = table[hits : hits + len(need.offloaded)]
            host.load(need.offloaded, blocks, memory_only=sequence.no_store)
            if not sequence.no_store:
                self._blocks.memory_only.difference_update(need.hits)
        self._release_fetches(sequence)
        if need.tail:
            assert sequence.reservation is not None
            table[len(need.hits) : len(need.hits)] = need.tail
            self._reservations.take_tail(sequence.reservation)
            computed = sequence.prompt_len
        del self.waiting[sequence.key]
        if self._fair is not None and not sequence.started:
            self._fair.take(sequence.key)
        self._unshare()
        sequence.blocks = table
        self.adapters.take(sequence)
        self.unreserve(sequence)
        return AdmittedSequence(sequence, computed, need.named)

    def _need(self, sequence: Sequence) -> _BlockNeed:
        size, scored = self._block_size, sequence.score >= sequence.prompt_len
        tokens, max_blocks = len(sequence.tokens), self._reusable(sequence)
        reservation, tail = sequence.reservation, []
        offloaded, rows = list[bytes](), list[bytes]()
        if reservation is not None and reservation.filled:
            # Not looked up by name: another copy may have had the name, and may have been evicted.
            hits = reservation.blocks[:max_blocks]
            named = min(reservation.named, len(hits))
            if scored and len(hits) == len(reservation.blocks) and tokens > sequence.prompt_len:
                tail = reservation.tails[-1:]
            if self._windows is not None:
                usable = self._windows.usable([*hits, *tail], sequence.prompt_len if tail else 0)
                if usable < len(hits) + len(tail):
                    hits, tail = hits[:usable], []
                    named = min(named, len(hits))
        else:
            hits = self._blocks.match(sequence.digests, max_blocks)
            if self._blocks.host is not None:
                offloaded = self._blocks.host.match(sequence.digests, len(hits), max_blocks)
            if self._windows is not None:
                usable, rows = self._in_windows(self._windows, sequence.digests, hits, offloaded)
                del offloaded[max(0, usable - len(hits)) :], hits[usable:]
            named = len(hits)
        return _BlockNeed(hits, tail, -(-tokens // size) - len(hits) - len(tail), named, offloaded, rows)

    def _in_windows(
        self, windows: WindowRows, digests: list[bytes], hits: list[int], offloaded: list[bytes]
    ) -> tuple[int, list[bytes]]:
        """How many blocks of a prefix can be reused, and the names of the rows that host memory must supply."""
        if windows.host is not None:
            border = windows.usable(hits, names=digests[: len(hits) + len(offloaded)])
            rows = windows.offloaded(hits, digests, border)
            window = hits[windows.first_block(border * self._block_size) : border]
            there = [block for block in window if block in windows.rows]
            if not rows or windows.left(there, len(rows)) > 0:
                return border, rows
        return windows.usable(hits), []

    def _reusable(self, sequence: Sequence) -> int:
        """Leading blocks that can be taken from a cache."""
        # Never all known tokens: the last one must be computed for its logits, and so must scored ones.
        scored = sequence.score >= sequence.prompt_len
        return ((len(sequence.tokens) if scored else sequence.score) - 1) // self._block_size

    def _fits_to_end(self, sequence: Sequence, need: _BlockNeed, running: Seq[Sequence]) -> bool:
        """Whether the longest output of a sequence fits beside those of all running ones."""
        size = self._block_size
        windows = self._windows
        if windows is not None and (len(running) + 1) * windows.most_rows > windows.total_blocks - windows.kept:
            return False
        growth = -(-(sequence.limit - 1) // size) - len(need.hits) - need.fresh  # the last token is never computed
        for other in running:
            growth += max(0, -(-(other.limit - 1) // size) - len(other.blocks))
        return self._blocks.left(need.hits, need.fresh) >= growth


def _reads(sequence: Sequence) -> bool:
    """Whether a sequence waits for files."""
    return any(fetch.waiting for fetch in sequence.fetches)
