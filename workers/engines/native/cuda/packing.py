"""Packs a planned step into the rows of one batch: decode rows first, then chunks of prompts.

Decides which chunks of prompts are attended to outside of the pages, how they are padded, and which together; assigns
sequences rows of the block tables on the device, and tracks which blocks the device has.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence, scored_to
from penstock.workers.engines.native.model.executor import media_rows

STEP = 512  # rows and keys are padded to a multiple of this
LONG = 2048  # tokens from which on a whole prompt, or several of about the same length, are attended to outside of them
FILLED = 0.8  # share of the padded rows that a prompt must fill to be one of several
TOGETHER = 16  # prompts in one call, at most
LARGE = 64 << 20  # weights of a layer from which on its products take longer than launching calls for short prompts
LONG_AFTER = 1024  # likewise for a chunk after other tokens,
BEHIND_WORK = 16 << 20  # if it has this many pairs of a query and a key: two calls and a merge cost more than one


class PromptChunk(NamedTuple):
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
        return self.tokens >= LONG_AFTER and self.tokens * (self.start + self.tokens // 2) >= BEHIND_WORK

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


Group = tuple[PromptChunk, ...]  # attended to in one call


def groups(chunks: Iterable[PromptChunk], least: int = LONG) -> list[Group]:
    """The chunks of a batch that are attended to outside of the pages.

    Several are attended to in one call if they are whole prompts of the same padded length. Their number is a power of
    two, so that there are few shapes.

    Args:
        least: padded tokens of the shortest prompts that are attended to together.
    """
    found: list[Group] = []
    whole: defaultdict[int, list[PromptChunk]] = defaultdict(list)
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


def adjoin(group: Seq[PromptChunk]) -> bool:
    """Whether the chunks follow each other in the batch and need no padding."""
    first = group[0]
    return all(
        chunk.tokens == first.rows and chunk.row == first.row + number * first.rows
        for number, chunk in enumerate(group)
    )


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


class TableRow:
    """A sequence's row of the block tables.

    Attributes:
        index: of the row.
        adjusted: logits are changed by penalties, biases or processors, or log-probabilities are wanted.
        cut: tokens are sampled from what min_p, top_k or top_p leave.
        plain: neither of these. A constraint is none.
        random: tokens are sampled, not greedy.
    """

    __slots__ = ("adjusted", "blocks", "cut", "index", "plain", "random", "rows", "sent_blocks", "sent_rows")

    def __init__(self, index: int, sequence: Sequence) -> None:
        self.index = index
        # The lists that the device has. A preempted sequence gets new ones when it is admitted again.
        self.blocks: list[int] | None = None
        self.rows: list[int] | None = None
        self.sent_blocks = 0  # leading entries that are on the device
        self.sent_rows = 0
        sampling = sequence.sampling
        self.random = sampling.temperature > 0
        penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self.cut = self.random and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        changed = bool(sampling.logit_bias) or sequence.processors is not None
        self.adjusted = penalty or changed or sampling.logprobs is not None
        self.plain = not (self.cut or self.adjusted)


class TableRows:
    """Block table rows for up to ``count`` sequences, and the table changes that are not on the device yet.

    Args:
        width: entries per row.
        sliding: add a second table after the first, for the pool rows of sliding-window layers.
        shift: of a sequence, what is added to the numbers of its tokens to get their positions, if they differ. The
            shifts of all rows are after the tables, in the order of the rows.

    Attributes:
        places: changed entries, as indices into the flattened tables.
        values: their new values.
    """

    def __init__(
        self, count: int, width: int, *, sliding: bool = False, shift: Callable[[Sequence], int] | None = None
    ) -> None:
        self._width = width
        self._shift, self._shifts_offset = shift, (1 + sliding) * count * width
        self._rows_offset = count * width if sliding else 0
        self._free = list(range(count - 1, -1, -1))
        self._table_rows: dict[Sequence, TableRow] = {}
        self.places: list[int] = []
        self.values: list[int] = []

    @property
    def shifted(self) -> bool:
        """Whether positions follow from media."""
        return self._shift is not None

    def of(self, sequence: Sequence) -> TableRow:
        """The row of a sequence. Records the entries of its tables that are new since the last call."""
        table_row = self._table_rows.get(sequence)
        if table_row is None:
            table_row = self._assign(sequence)
        blocks = sequence.blocks
        if table_row.blocks is not blocks:
            table_row.blocks, table_row.sent_blocks = blocks, 0
        if table_row.sent_blocks < len(blocks):
            self._record(table_row.index * self._width, table_row.sent_blocks, blocks)
            table_row.sent_blocks = len(blocks)
        if self._rows_offset:
            self._send_rows(table_row, sequence.rows)
        return table_row

    def _send_rows(self, table_row: TableRow, rows: list[int]) -> None:
        if table_row.rows is not rows:
            table_row.rows, table_row.sent_rows = rows, 0
        if table_row.sent_rows < len(rows):
            self._record(self._rows_offset + table_row.index * self._width, table_row.sent_rows, rows)
            table_row.sent_rows = len(rows)

    def _record(self, first: int, start: int, entries: list[int]) -> None:
        self.places += range(first + start, first + len(entries))
        # Kernels load entries before the window and ignore the result, so these must be valid, too.
        self.values += [max(entry, 0) for entry in entries[start:]]

    def _assign(self, sequence: Sequence) -> TableRow:
        if not self._free:
            for idle in [held for held in self._table_rows if not held.blocks]:  # ended, or preempted
                self._free.append(self._table_rows.pop(idle).index)
        table_row = self._table_rows[sequence] = TableRow(self._free.pop(), sequence)
        if self._shift is not None:
            self.places.append(self._shifts_offset + table_row.index)
            self.values.append(self._shift(sequence))
        return table_row

    def take_changes(self) -> tuple[list[int], list[int]]:
        """``places`` and ``values`` since the last call."""
        places, values = self.places, self.values
        self.places, self.values = [], []
        return places, values


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
        slots: the slot of each row's LoRA adapter; -1: it has none.
        first_rows: the first row of each sequence.
        media: rows that take image embeddings, each with its index in the embedding pool.
        placed: rows before the end of a sequence's last medium, for models whose positions follow from media: the first
            row, the sequence, the first token and the one after the last.
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
    placed: list[tuple[int, Sequence, int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first_rows: dict[Sequence, int] = field(default_factory=dict)

    @property
    def rest(self) -> list[tuple[int, int, int, int]]:
        """The tiles that are in no long chunk."""
        ranges = [range(chunk.row, chunk.row + chunk.tokens) for group in self.long for chunk in group]
        return [tile for tile in self.tiles if not any(tile[0] in rows for rows in ranges)]

    @property
    def single(self) -> bool:
        """Whether the step only decodes, so that a graph can compute it."""
        return self.decodes == len(self.tokens) and not (self.media or self.scored or self.placed)


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
            chunks.append(PromptChunk(row, scheduled.start, count, table_row.index))
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
        packed.first_rows.setdefault(sequence, row)
        packed.tokens += sequence.tokens[start : min(stop, draft_start)]
        packed.tokens += sequence.draft[max(start - draft_start, 0) : max(stop - draft_start, 0)]
        packed.tokens += [UNKNOWN] * (row + stop - start - len(packed.tokens))
        packed.table_rows += [table_row.index] * (stop - start)
        packed.slots += [sequence.adapter_slot] * (stop - start)
        packed.positions += range(start, stop)
        if sequence.media and self._table_rows.shifted:
            last = sequence.media[-1].position + sequence.media[-1].tokens
            if start < last:
                packed.placed.append((row, sequence, start, min(stop, last)))
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


class PackedStep(msgspec.Struct, frozen=True, array_like=True, tag="packed"):
    """A step as another rank computes it, which has no sequences and draws nothing; lists as packed 32-bit integers.

    Attributes:
        eager: no graph computes it.
        tokens, table_rows, positions, decodes, tiles, drawn, scored: of ``Packed``.
        long: of ``Packed``: number of chunks of each group, and each one's four numbers.
        places, values: of ``TableRows.take_changes``.
    """

    decodes: int
    eager: bool
    tokens: bytes
    table_rows: bytes
    positions: bytes
    tiles: bytes
    long: bytes
    drawn: bytes
    scored: bytes
    places: bytes
    values: bytes


def packed_step(packed: Packed, changes: tuple[list[int], list[int]], *, eager: bool) -> PackedStep:
    """A step for the other ranks."""
    tiles, long = chain.from_iterable(packed.tiles), list[int]()
    for group in packed.long:
        long += (len(group), *chain.from_iterable(group))
    lists = (packed.tokens, packed.table_rows, packed.positions, tiles, long, packed.drawn, packed.scored, *changes)
    return PackedStep(packed.decodes, eager, *(array("i", each).tobytes() for each in lists))


def unpacked_step(step: PackedStep) -> tuple[Packed, tuple[list[int], list[int]], bool]:
    """What ``packed_step`` was called with; ``draws`` and ``order`` are empty."""
    lists = (step.tokens, step.table_rows, step.positions, step.tiles, step.long, step.drawn, step.scored)
    tokens, table_rows, positions, tiles, long, drawn, scored = (array("i", each).tolist() for each in lists)
    packed = Packed(tokens, table_rows, positions, step.decodes, drawn=drawn, scored=scored)
    packed.tiles = list(zip(*(tiles[at::4] for at in range(4)), strict=True))
    packed.slots = [-1] * len(tokens)
    numbers = iter(long)
    for count in numbers:
        packed.long.append(tuple(PromptChunk(*(next(numbers) for _ in range(4))) for _ in range(count)))
    return packed, (array("i", step.places).tolist(), array("i", step.values).tolist()), step.eager
