"""Which blocks hold the KV of sliding-window layers, and where. Pure.

A model with sliding windows keeps two pools. Blocks of the first hold the full-attention layers, and a sequence holds
all of its own. The sliding layers of a block are a row of the second pool, and a sequence holds the rows that its
window still covers, so their number is bounded however long the sequence is.

A row is in one of five states:

- held: a running sequence's window covers its block, or other workers read it.
- reserved: it is being filled by another worker, and belongs to no block yet.
- passed: the window of a running sequence has left it, or a prefix hit did not need it. Kept while there is room, and
  reassigned first, oldest first.
- final: its block ended an answer and is idle in the prefix cache. It leaves with its block, which the block manager
  evicts in its own order and reports as removed.
- free.

A prefix of the cache can be reused up to a block border if the rows that a window there covers are all there.
Passed rows are dropped without an event: a router's view of a prefix is exact for the longest chains, and a request
that branches off inside one may find less.

Rows may have a cache in host memory (``HostCache``), as blocks do. A row is saved when it is reassigned or its block
leaves the device, and copied back when a prefix needs it for its window.

Other workers fill rows while a step is computed. That is safe between two calls of ``Scheduler.schedule``: the one plan
that may be in flight then was made after the rows that are passed by now were passed, so it reads none of them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.engine_protocol import HeldRows


def most_rows(window: int, block_size: int) -> int:
    """Rows that a window of so many tokens touches, at most."""
    return (window - 2) // block_size + 2


class WindowRows:
    """The second pool: ``total_blocks`` rows. Implements ``BlockObserver``.

    Args:
        block_size: tokens of a row.
        window: tokens that a query attends to in these layers, itself included.
        only: this pool is the model's whole KV cache; it has no other layers.
        host: cache of rows in host memory; None: there is none.

    Attributes:
        rows: the row of each block that has one; ``free`` has the others, but for those that are reserved.
        holders: how many sequences and readers hold a block's row.
        passed: blocks whose rows a window has passed.
        generations: one u32 per row, as ``BlockManager`` has one per block.
        kept: rows that readers and reservations hold; those of shared blocks count several times.
    """

    def __init__(
        self,
        blocks: BlockManager,
        total_blocks: int,
        *,
        block_size: int,
        window: int,
        only: bool,
        host: HostCache | None = None,
    ) -> None:
        self.total_blocks = total_blocks
        self.host = host
        self.only = only
        self.window = window
        self.block_size = block_size
        if total_blocks < self.most_rows:
            raise ValueError(
                f"a window of {window} tokens needs {self.most_rows} blocks of {block_size}, not {total_blocks}"
            )
        self._blocks = blocks
        self.rows: dict[int, int] = {}  # block -> row
        self.holders: dict[int, int] = {}  # block -> sequences that hold its row
        self.passed: OrderedDict[int, None] = OrderedDict()  # blocks
        self.free = list(range(total_blocks - 1, -1, -1))
        self.generations = array("I", bytes(4 * total_blocks))  # other processes read it: it never moves
        self.kept = self._reserved = 0
        blocks.observer = self

    @property
    def most_rows(self) -> int:
        """Rows that a sequence holds while it decodes, at most."""
        return most_rows(self.window, self.block_size)

    @property
    def used_blocks(self) -> int:
        return len(self.holders) + self._reserved

    @property
    def cached_blocks(self) -> int:
        return len(self.rows) - len(self.holders)

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    @property
    def room(self) -> int:
        """Rows that sequences can get."""
        return self.total_blocks - self.used_blocks

    def first_block(self, position: int) -> int:
        """The first block that a query at ``position`` attends to."""
        return max(0, position - self.window + 1) // self.block_size

    def usable(self, hits: Seq[int], tokens: int = 0, names: Seq[bytes] = (), *, files: bool = False) -> int:
        """How many of the blocks of a prefix can be reused: those before the last border with a whole window.

        Args:
            tokens: in the blocks, if the last is not full; 0: all are.
            names: of these blocks and of the next ones, whose rows may be in host memory.
            files: rows may be in files, too.
        """
        border = max(len(hits), len(names))
        position, rows, host = tokens or border * self.block_size, self.rows, self.host if names else None
        while border:
            first = self.first_block(position)
            missing = border - 1
            while missing >= first and (
                (missing < len(hits) and hits[missing] in rows)
                or (host is not None and host.has(names[missing], files=files))
            ):
                missing -= 1
            if missing < first:
                break
            border, position = missing, missing * self.block_size  # every border after needs the missing row, too
        return border

    def offloaded(self, hits: Seq[int], names: Seq[bytes], border: int) -> list[bytes]:
        """Names of the blocks of the window before ``border`` whose rows are not on the device; see ``usable``."""
        first, rows = self.first_block(border * self.block_size), self.rows
        return [names[n] for n in range(first, border) if n >= len(hits) or hits[n] not in rows]

    def admit(self, sequence: Sequence, computed: int) -> None:
        """A sequence starts after ``computed`` cached tokens: hold the rows of its window.

        ``sequence.blocks`` are held, and ``usable`` has found these rows; those in host memory are pinned there.
        """
        first, hits = self.first_block(computed), -(-computed // self.block_size)
        sequence.rows, sequence.first_row = [-1] * first, first
        self._pass_unheld(sequence.blocks[:first])
        window, loaded = sequence.blocks[first:hits], list[tuple[int, bytes]]()
        for number, block in enumerate(window, first):
            self.passed.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
            if block not in self.rows:
                loaded.append((block, sequence.digests[number]))
        for block, name in loaded:
            assert self.host is not None
            self.rows[block] = self._take()
            self.host.load([name], [self.rows[block]], memory_only=sequence.no_store)
        sequence.rows += [self.rows[block] for block in window]

    def fit(self, sequence: Sequence, start: int, count: int, *, fair: bool = False) -> int:
        """How many of ``count`` tokens from ``start`` on can get rows, once those that are passed are released.

        Args:
            fair: no more rows than any sequence needs to decode, so that each that was admitted has its own.
        """
        # Another worker continues after the prompt: its window stays while there is room.
        kept = self.first_block(min(start, sequence.prompt_len) if sequence.pin else start)
        for first in (kept, self.first_block(start)):
            for number in range(sequence.first_row, min(first, len(sequence.rows))):
                self._drop(sequence.blocks[number], passed=True)
            sequence.first_row = max(sequence.first_row, first)
            room = self.room
            if fair:
                room = min(room, self.most_rows - (len(sequence.rows) - sequence.first_row))
            covered = min(count, (len(sequence.rows) + room) * self.block_size - start)
            if covered > 0:
                return covered
        return 0

    def cover(self, sequence: Sequence, stop: int) -> None:
        """Give rows to the blocks of a sequence up to position ``stop``; ``fit`` has allowed it."""
        for block in sequence.blocks[len(sequence.rows) : -(-stop // self.block_size)]:
            row = self._take()
            self.rows[block] = row
            self.holders[block] = 1
            sequence.rows.append(row)

    def release(self, sequence: Sequence) -> None:
        """Release all rows of a sequence that ends or is preempted; its blocks are named already and still held."""
        for number in range(len(sequence.rows) - 1, sequence.first_row - 1, -1):
            block = sequence.blocks[number]
            self._drop(block, passed=self._blocks.shared(block))
        sequence.rows, sequence.first_row = [], 0

    def _drop(self, block: int, *, passed: bool) -> None:
        count = self.holders[block] - 1
        if count:
            self.holders[block] = count
            return
        del self.holders[block]
        if passed:  # also without a name: it may still get one
            self._pass(block)

    def _pass(self, block: int) -> None:
        self.passed[block] = None
        self.passed.move_to_end(block)

    def _pass_unheld(self, blocks: Seq[int]) -> None:
        """Blocks are no longer idle, so their rows not final."""
        for block in blocks:
            if block in self.rows and block not in self.holders:
                self._pass(block)

    def _take(self, *, foreign: bool = False) -> int:
        if not self.free and self.passed:
            block, _ = self.passed.popitem(last=False)
            if not foreign and (name := self._blocks.names[block]) is not None:
                self._save(block, name)
            row = self.rows.pop(block)
        else:
            while not self.free:
                evicted = self._blocks.evict(saved=not foreign)
                assert evicted, "more rows were promised than there are"
            row = self.free.pop()
        self.generations[row] = (self.generations[row] + 1) & 0xFFFFFFFF
        return row

    # -- other workers ---------------------------------------------------------------------------------------

    def left(self, window: Seq[int], fresh: int) -> int:
        """How many more rows could be reserved after ``keep`` and ``reserve(fresh)``; below 0: too few."""
        return self.room - fresh - sum(block not in self.holders for block in window)

    def found(self, blocks: Seq[int]) -> HeldRows | None:
        """The rows of blocks, from any thread; None: one has none. A generation is increased before a row gets another
        block."""
        rows, generations = [], []
        for block in blocks:
            row = self.rows.get(block, -1)
            generation = self.generations[row]
            if row < 0 or self.rows.get(block) != row:
                return None
            rows.append(row)
            generations.append(generation)
        return HeldRows(rows, generations)

    def keep(self, table: Seq[int], window: Seq[int]) -> None:
        """Hold the rows of the blocks of a window, which have some, until ``drop``; the whole table is held."""
        self.kept += len(window)
        for block in window:
            self.passed.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
        self._pass_unheld(table)

    def drop(self, blocks: Seq[int]) -> None:
        """The blocks themselves are still held."""
        self.kept -= len(blocks)
        for block in reversed(blocks):
            self._drop(block, passed=self._blocks.shared(block))

    def reserve(self, count: int) -> list[int]:
        """Reserve rows for another worker to fill, as many as ``left`` allows, until ``enter`` or ``unreserve``.

        Their content is lost unless it was saved before, see ``BlockManager.take``.
        """
        rows = [self._take(foreign=True) for _ in range(count)]
        self._reserved += count
        self.kept += count
        return rows

    def enter(self, block: int, row: int) -> None:
        """A reserved row holds a block's KV now; it is kept on. Another that the block has got meanwhile stays."""
        self._reserved -= 1
        if block in self.rows:
            self.free.append(row)
        else:
            self.rows[block] = row
        self.kept -= 1
        self.keep((), (block,))

    def unreserve(self, rows: Seq[int]) -> None:
        """Nothing writes to them any more."""
        self._reserved -= len(rows)
        self.kept -= len(rows)
        self.free += rows

    # -- blocks ----------------------------------------------------------------------------------------------

    def move(self, block: int, copy: int) -> None:
        if block in self.rows and copy not in self.rows:
            self.rows[copy] = self.rows.pop(block)
            self.passed.pop(block, None)
            self._pass(copy)
        else:
            self.discard(block)

    def save(self, block: int, name: bytes) -> bool:
        return self._save(block, name, last=block not in self.passed)

    def _save(self, block: int, name: bytes, *, last: bool = True) -> bool:
        row, blocks = self.rows.get(block), self._blocks
        if self.host is None or row is None:
            return False
        return self.host.save(name, blocks.parents[block], row, memory_only=block in blocks.memory_only, last=last)

    def forget(self, *, files: bool) -> None:
        if self.host is not None:
            self.host.forget(files=files)

    def discard(self, block: int) -> None:
        row = self.rows.pop(block, None)
        if row is not None:
            assert block not in self.holders, f"the row of block {block} is held"
            self.passed.pop(block, None)
            self.free.append(row)
