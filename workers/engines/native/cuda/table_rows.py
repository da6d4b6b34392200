"""Assigns sequences rows of the block tables on the device, and tracks which blocks the device has. No torch."""

from penstock.workers.engines.core.sequence import Sequence


class TableRow:
    """A sequence's row of the block tables.

    Attributes:
        index: of the row.
        plain: temperature is the only sampling parameter that changes the logits. A constraint is none.
        random: tokens are sampled, not greedy.
    """

    __slots__ = ("blocks", "index", "plain", "random", "rows", "sent_blocks", "sent_rows")

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
        truncated = self.random and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        adjusted = sampling.logprobs is not None or bool(sampling.logit_bias) or sequence.processors is not None
        self.plain = not (penalty or truncated or adjusted)


class TableRows:
    """Block table rows for up to ``count`` sequences, and the table changes that are not on the device yet.

    Args:
        width: entries per row.
        sliding: add a second table behind the first, for the pool rows of sliding-window layers.

    Attributes:
        places: changed entries, as indices into the flattened tables.
        values: their new values.
    """

    def __init__(self, count: int, width: int, *, sliding: bool = False) -> None:
        self._width = width
        self._rows_offset = count * width if sliding else 0
        self._free = list(range(count - 1, -1, -1))
        self._table_rows: dict[Sequence, TableRow] = {}
        self.places: list[int] = []
        self.values: list[int] = []

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
        return table_row

    def take_changes(self) -> tuple[list[int], list[int]]:
        """``places`` and ``values`` since the last call."""
        places, values = self.places, self.values
        self.places, self.values = [], []
        return places, values
