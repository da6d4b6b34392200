"""How a long chunk of a prompt is padded for attention outside of the pages. No torch."""

from typing import NamedTuple

STEP = 512  # rows and keys are padded to a multiple of this
LONG = 2048  # tokens from which on a whole prompt is attended to outside of the pages
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
