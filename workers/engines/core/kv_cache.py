"""The KV cache of each sequence: its blocks, their names, and the rows of its sliding windows. Pure.

Names (digests) of KV blocks, under which the prefix cache finds them again. Pure.
"""

from array import array

from penstock.schemas.blocks import chain, extend, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.base import SequenceRequest
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.core.windows import WindowRows


def block_digests(request: SequenceRequest, prompt: "array[int]", tokens: list[int], size: int) -> list[bytes]:
    """Names of all full blocks of ``tokens``; the prompt's own are taken from the request if it has them."""
    digests = list(request.digests)
    if len(digests) != len(prompt) // size:  # none given, or of another block size
        digests = split(chain(pack_tokens(prompt), size, request.root, request.extra))
    if len(tokens) // size > len(digests):
        parent = digests[-1] if digests else request.root
        done = len(digests)  # the prompt's last block, not full, may end with a medium
        extra = {block - done: media for block, media in request.extra.items() if block >= done}
        digests += split(chain(pack_tokens(tokens[done * size :]), size, parent, extra))
    return digests


def name_blocks(blocks: BlockManager, sequence: Sequence, computed: int, size: int, *, leaving: bool = False) -> None:
    """Enter a sequence's complete blocks, those of ``computed`` leading tokens, into the prefix cache.

    Args:
        leaving: see ``BlockManager.name``.
    """
    full = computed // size
    if full <= sequence.named:
        return
    digests = sequence.digests
    while len(digests) < full:
        done = len(digests)
        parent = digests[-1] if digests else sequence.root
        tokens = pack_tokens(sequence.tokens[done * size : (done + 1) * size])
        digests.append(extend(parent, tokens, sequence.extra.get(done, b"")))
    sequence.named = blocks.name(sequence.blocks, digests, sequence.named, full, leaving=leaving)


class KvCacheManager:
    """Allocates blocks and rows for sequences as they grow, names full blocks, frees all at the end. Never preempts.

    Args:
        windows: rows of the sliding-window layers; None: they have no pool of their own.
        fair: no sequence gets more rows than it needs to decode.
    """

    def __init__(self, blocks: BlockManager, block_size: int, windows: WindowRows | None, *, fair: bool) -> None:
        self.blocks = blocks
        self.windows = windows
        self._block_size = block_size
        self._fair = fair

    @property
    def pool(self) -> BlockManager | WindowRows:
        """The pool that limits how many tokens are held."""
        return self.windows if self.windows is not None and self.windows.only else self.blocks

    @property
    def in_one_pool(self) -> bool:
        """Whether all KV of a block is in one pool, and only there, so that other workers can read and write it."""
        return self.windows is None and self.blocks.host is None

    def admit(self, sequence: Sequence, computed: int) -> None:
        """A sequence starts behind ``computed`` cached tokens; its blocks are allocated."""
        if self.windows is not None:
            self.windows.admit(sequence, computed)

    def grow(self, sequence: Sequence) -> bool:
        """Allocate one more block; False: all are held."""
        return self.blocks.grow(sequence.blocks)

    def cover(self, sequence: Sequence, start: int, count: int) -> int:
        """Allocate rows for as many of ``count`` tokens from ``start`` on as possible; returns how many.

        Without ``windows`` that is all of them.
        """
        if self.windows is None:
            return count
        covered = self.windows.fit(sequence, start, count, fair=self._fair)
        if covered:
            self.windows.cover(sequence, start + covered)
        return covered

    def draft_room(self, scheduled: ScheduledSequence, wanted: int) -> int:
        """Allocate for up to ``wanted`` proposed tokens behind a planned one; returns for how many."""
        sequence, start = scheduled.sequence, scheduled.start
        if scheduled.count != 1 or not scheduled.samples or sequence.lockstep:
            return 0
        wanted = min(wanted, sequence.limit - start - 2)  # one more token is drawn than proposed
        size, blocks = self._block_size, sequence.blocks
        while wanted > 0 and start + 1 + wanted > len(blocks) * size and self.blocks.grow(blocks):
            pass
        room = min(wanted, len(blocks) * size - start - 1)
        return max(self.cover(sequence, start, 1 + room) - 1, 0) if room > 0 else 0

    def cache_blocks(self, sequence: Sequence, computed: int) -> None:
        """Enter the full blocks of ``computed`` leading tokens into the prefix cache."""
        if self.blocks.prefix_cache:
            name_blocks(self.blocks, sequence, computed, self._block_size)

    def free(self, sequence: Sequence, *, held: bool) -> None:
        """Free the blocks of a sequence. Computed blocks stay in the prefix cache while there is room.

        Args:
            held: another table of the same blocks stays in use.
        """
        if self.blocks.prefix_cache:
            name_blocks(self.blocks, sequence, sequence.computed, self._block_size, leaving=not held)
        if self.windows is not None:
            self.windows.release(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
