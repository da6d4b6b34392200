"""Which blocks hold the KV of sliding-window layers, and where. Pure.

A model with sliding windows keeps two pools. Blocks of the first hold the full-attention layers, and a sequence holds
all of its own. The sliding layers of a block are a row of the second pool, and a sequence holds the rows that its
window still covers, so their number is bounded however long the sequence is.

A row is in one of four states:

- held: a running sequence's window covers its block.
- passed: the window of a running sequence has left it, or a prefix hit did not need it. Kept while there is room, and
  reassigned first, oldest first.
- final: its block ended an answer and is idle in the prefix cache. It leaves with its block, which the block manager
  evicts in its own order and reports as removed.
- free.

A prefix of the cache can be reused up to a block border if the rows that a window behind it covers are all there.
Passed rows are dropped without an event: a router's view of a prefix is exact for the longest chains, and a request
that branches off inside one may find less.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.sequence import Sequence


class WindowRows:
    """The second pool: ``total_blocks`` rows. Implements ``BlockObserver``.

    Args:
        window: tokens that a query attends to in these layers, itself included.
        only: the model has no other layers, so this pool is its whole KV cache.

    Attributes:
        rows: the row of each block that has one; ``free`` has the others.
        holders: how many sequences hold a block's row.
        passed: blocks whose rows a window has passed.
    """

    def __init__(self, blocks: BlockManager, total_blocks: int, *, block_size: int, window: int, only: bool) -> None:
        self.total_blocks = total_blocks
        self.only = only
        self.window = window
        self._size = block_size
        if total_blocks < self.most_rows:
            raise ValueError(
                f"a window of {window} tokens needs {self.most_rows} blocks of {block_size}, not {total_blocks}"
            )
        self._blocks = blocks
        self.rows: dict[int, int] = {}  # block -> row
        self.holders: dict[int, int] = {}  # block -> sequences that hold its row
        self.passed: OrderedDict[int, None] = OrderedDict()  # blocks
        self.free = list(range(total_blocks - 1, -1, -1))
        blocks.observer = self

    @property
    def most_rows(self) -> int:
        """Rows that a sequence holds while it decodes, at most."""
        return (self.window - 2) // self._size + 2

    @property
    def used_blocks(self) -> int:
        return len(self.holders)

    @property
    def cached_blocks(self) -> int:
        return len(self.rows) - len(self.holders)

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    def first_block(self, position: int) -> int:
        """The first block that a query at ``position`` attends to."""
        return max(0, position - self.window + 1) // self._size

    def usable(self, hits: Seq[int]) -> int:
        """How many of the blocks of a cached prefix can be reused: those before the last border with a whole window."""
        border = len(hits)
        while border:
            first = self.first_block(border * self._size)
            missing = border - 1
            while missing >= first and hits[missing] in self.rows:
                missing -= 1
            if missing < first:
                break
            border = missing  # every border behind needs the missing row, too
        return border

    def admit(self, sequence: Sequence, computed: int) -> None:
        """A sequence starts behind ``computed`` cached tokens: hold the rows of its window.

        ``sequence.blocks`` are held, and ``usable`` has found these rows.
        """
        first, hits = self.first_block(computed), -(-computed // self._size)
        sequence.rows, sequence.first_row = [-1] * first, first
        for block in sequence.blocks[:first]:
            if block in self.rows and block not in self.holders:  # it is no longer idle, so not final
                self.passed[block] = None
                self.passed.move_to_end(block)
        for block in sequence.blocks[first:hits]:
            self.passed.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
            sequence.rows.append(self.rows[block])

    def fit(self, sequence: Sequence, start: int, count: int, *, fair: bool = False) -> int:
        """How many of ``count`` tokens from ``start`` on can get rows, once those that are passed are released.

        Args:
            fair: no more rows than any sequence needs to decode, so that each that was admitted has its own.
        """
        first = self.first_block(start)
        for number in range(sequence.first_row, min(first, len(sequence.rows))):
            self._drop(sequence.blocks[number], passed=True)
        sequence.first_row = max(sequence.first_row, first)
        room = self.total_blocks - len(self.holders)
        if fair:
            room = min(room, self.most_rows - (len(sequence.rows) - sequence.first_row))
        return max(0, min(count, (len(sequence.rows) + room) * self._size - start))

    def cover(self, sequence: Sequence, stop: int) -> None:
        """Give rows to the blocks of a sequence up to position ``stop``; ``fit`` has allowed it."""
        for block in sequence.blocks[len(sequence.rows) : -(-stop // self._size)]:
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
            self.passed[block] = None

    def _take(self) -> int:
        if not self.free and self.passed:
            block, _ = self.passed.popitem(last=False)
            return self.rows.pop(block)
        while not self.free:
            evicted = self._blocks.evict()
            assert evicted, "fit() promised more rows than there are"
        return self.free.pop()

    def move(self, block: int, copy: int) -> None:
        if block in self.rows and copy not in self.rows:
            self.rows[copy] = self.rows.pop(block)
            self.passed.pop(block, None)
            self.passed[copy] = None
        else:
            self.discard(block)

    def discard(self, block: int) -> None:
        row = self.rows.pop(block, None)
        if row is not None:
            assert block not in self.holders, f"the row of block {block} is held"
            self.passed.pop(block, None)
            self.free.append(row)
