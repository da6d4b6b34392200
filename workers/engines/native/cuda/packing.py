"""Packs a planned step into the rows of one batch: decode rows first, then chunks of prompts."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence, scored_to
from penstock.workers.engines.native.cuda.chunks import LONG, Chunk, Group, groups
from penstock.workers.engines.native.cuda.table_rows import TableRow, TableRows
from penstock.workers.engines.native.model.executor import media_rows

UNKNOWN = -1  # the previous step samples this token, and only the device has it


class Draw(NamedTuple):
    """A token to sample from the logits of one row.

    Attributes:
        length: of the sequence, without this token.
        target: index under which the device keeps the token for the next step.
    """

    sequence: Sequence
    table_row: TableRow
    length: int
    target: int


@dataclass(slots=True)
class Packed:
    """The rows of a batch, and what to compute from them.

    Attributes:
        tokens: of each row, or ``UNKNOWN``.
        decodes: number of leading rows that are decoded one by one.
        tiles: the remaining rows, for ``attend.prefill``: first row, its position, number of rows, table row.
        long: the chunks of the remaining rows that are attended to outside of the pages.
        drawn: the row of each of ``draws``.
        order: indices into ``draws``, in the order in which the step returns tokens.
        scored: rows whose logits score prompt tokens.
        media: rows that take image embeddings, each with its index in the embedding pool.
    """

    tokens: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    decodes: int = 0
    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    long: list[Group] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    media: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rest(self) -> list[tuple[int, int, int, int]]:
        """The tiles that are in no long chunk."""
        ranges = [range(chunk.row, chunk.row + chunk.tokens) for group in self.long for chunk in group]
        return [tile for tile in self.tiles if not any(tile[0] in rows for rows in ranges)]

    @property
    def single(self) -> bool:
        """Whether the step only decodes, so that a graph can compute it."""
        return self.decodes == len(self.tokens) and not (self.media or self.scored)


class Packing:
    """Turns plans into ``Packed``.

    Args:
        tile_rows: maximum number of rows per tile.
        singles: sequences with up to this many scheduled tokens are decoded row by row.
        spare: a target that no step reads, for draws of sequences with proposed tokens.
        media_tokens: embeddings per slot of the embedding pool.
        by_position: decode all generated tokens row by row and put all prompt tokens into tiles, however many a step
            computes. The kernel used for a token then does not depend on the rest of the batch.
        least: see ``chunks.groups``.
    """

    def __init__(
        self,
        table_rows: TableRows,
        *,
        tile_rows: int,
        singles: int,
        spare: int,
        media_tokens: int = 0,
        by_position: bool = False,
        least: int = LONG,
    ) -> None:
        self._table_rows, self._tile_rows, self._singles, self._spare = table_rows, tile_rows, singles, spare
        self._media_tokens, self._by_position, self._least = media_tokens, by_position, least

    def pack(self, plan: Seq[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> Packed:
        """
        Args:
            scoring: sequences of the plan whose prompt tokens need scores.
        """
        packed = Packed()
        tiled = []
        for scheduled in plan:
            count = self._tiled_tokens(scheduled)
            if count:
                tiled.append((scheduled, count))
            if count < scheduled.count:
                if not count:
                    self._add_media_and_scores(packed, scheduled, len(packed.tokens), scoring)
                self._add_rows(packed, scheduled, scheduled.start + count, scheduled.start + scheduled.count)
        packed.decodes = len(packed.tokens)
        chunks = []
        for scheduled, count in tiled:
            row = len(packed.tokens)
            self._add_media_and_scores(packed, scheduled, row, scoring)
            table_row = self._add_rows(packed, scheduled, scheduled.start, scheduled.start + count)
            chunks.append(Chunk(row, scheduled.start, count, table_row.index))
            for offset in range(0, count, self._tile_rows):
                packed.tiles.append(
                    (row + offset, scheduled.start + offset, min(self._tile_rows, count - offset), table_row.index)
                )
        packed.tiles.sort(key=lambda tile: -tile[1])  # the longest first
        if not self._by_position:
            packed.long = groups(chunks, self._least)
        plan_index = {scheduled.sequence: number for number, scheduled in enumerate(plan)}
        draws = packed.draws
        packed.order = sorted(range(len(draws)), key=lambda n: (plan_index[draws[n].sequence], draws[n].length))
        return packed

    def _tiled_tokens(self, scheduled: ScheduledSequence) -> int:
        """How many of the leading scheduled tokens belong in tiles."""
        if self._by_position:
            return min(max(scheduled.sequence.prompt_len - scheduled.start, 0), scheduled.count)
        return 0 if scheduled.count <= self._singles or scheduled.sequence.draft else scheduled.count

    def _add_rows(self, packed: Packed, scheduled: ScheduledSequence, start: int, stop: int) -> TableRow:
        """Add rows for a sequence's tokens from position ``start`` to ``stop``, and the draws from their logits."""
        sequence, end, row = scheduled.sequence, scheduled.start + scheduled.count, len(packed.tokens)
        draft_start = end - len(sequence.draft)  # where the proposed tokens begin
        table_row = self._table_rows.of(sequence)
        packed.tokens += sequence.tokens[start : min(stop, draft_start)]
        packed.tokens += sequence.draft[max(start - draft_start, 0) : max(stop - draft_start, 0)]
        packed.tokens += [UNKNOWN] * (row + stop - start - len(packed.tokens))
        packed.table_rows += [table_row.index] * (stop - start)
        packed.positions += range(start, stop)
        if scheduled.samples:
            for position in range(max(start, draft_start - 1), stop):
                target = self._spare if sequence.draft else table_row.index
                packed.drawn.append(row + position - start)
                packed.draws.append(Draw(sequence, table_row, position + 1, target))
        return table_row

    def _add_media_and_scores(
        self, packed: Packed, scheduled: ScheduledSequence, row: int, scoring: Seq[ScheduledSequence]
    ) -> None:
        """Add the embeddings and scores of a sequence whose first token is in ``row``."""
        if scheduled.sequence.media and self._media_tokens:
            packed.media += media_rows(scheduled, row, self._media_tokens)
        if scoring and scheduled in scoring:
            first = row - scheduled.start - 1
            packed.scored += range(first + scheduled.sequence.score, first + scored_to(scheduled))
