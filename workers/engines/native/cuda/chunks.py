"""Which chunks of prompts are attended to outside of the pages, how they are padded, and which together. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

STEP = 512  # rows and keys are padded to a multiple of this
LONG = 2048  # tokens from which on a whole prompt, or several of about the same length, are attended to outside of them
FILLED = 0.8  # share of the padded rows that a prompt must fill to be one of several
TOGETHER = 16  # prompts in one call, at most
LARGE = 64 << 20  # weights of a layer from which on its products take longer than launching calls for short prompts
LONG_BEHIND = 1024  # likewise for a chunk behind other tokens,
BEHIND_WORK = 16 << 20  # if it has so many pairs of a query and a key: two calls and a merge cost more than one


class Chunk(NamedTuple):
    """Neighbouring prompt tokens of one sequence in a batch.

    Attributes:
        row: of the first token in the batch.
        start: its position.
        table_row: row of the sequence's block table.
    """

    row: int
    start: int
    tokens: int
    table_row: int

    @property
    def is_long(self) -> bool:
        """Whether attention outside of the pages is faster."""
        if self.start < STEP:
            return self.tokens >= LONG
        return self.tokens >= LONG_BEHIND and self.tokens * (self.start + self.tokens // 2) >= BEHIND_WORK

    @property
    def unmasked(self) -> int:
        """Leading keys that are attended to without a mask."""
        return self.start // STEP * STEP

    @property
    def front(self) -> int:
        """Rows of padding before the chunk's own, which move the mask to its place."""
        return self.start - self.unmasked

    @property
    def rows(self) -> int:
        """Rows with padding; the keys that are attended to with a mask are as many."""
        return -(-(self.front + self.tokens) // STEP) * STEP


Group = tuple[Chunk, ...]  # attended to in one call


def groups(chunks: Iterable[Chunk], least: int = LONG) -> list[Group]:
    """The chunks of a batch that are attended to outside of the pages.

    Several are attended to in one call if they are whole prompts of the same padded length. Their number is a power of
    two, so that there are few shapes.

    Args:
        least: padded tokens of the shortest prompts that are attended to together.
    """
    found: list[Group] = []
    whole: defaultdict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        if chunk.start == 0 and chunk.rows >= least and chunk.tokens >= FILLED * chunk.rows:
            whole[chunk.rows].append(chunk)
        elif chunk.is_long:
            found.append((chunk,))
    for rows, equal in whole.items():
        while equal and (size := _power_below(min(len(equal), TOGETHER))) * rows >= LONG:
            found.append(tuple(equal[:size]))
            del equal[:size]
    return found


def shapes(longest: int, batched: int, least: int = LONG) -> Iterator[tuple[int, int]]:
    """Number of prompts and padded rows of each, of all groups of whole prompts.

    Args:
        longest: tokens of the longest prompt.
        batched: tokens of a step.
        least: see ``groups``.
    """
    for rows in range(least, -(-longest // STEP) * STEP + 1, STEP):
        size = 1
        while size <= TOGETHER and (size == 1 or size * FILLED * rows <= batched):
            if size * rows >= LONG:
                yield size, rows
            size *= 2


def adjoin(group: Seq[Chunk]) -> bool:
    """Whether the chunks lie behind each other in the batch and need no padding."""
    first = group[0]
    return all(
        chunk.tokens == first.rows and chunk.row == first.row + number * first.rows
        for number, chunk in enumerate(group)
    )


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)
