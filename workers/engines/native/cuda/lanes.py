"""Assigns sequences rows of the block tables on the device, and tracks which blocks the device has. No torch."""

from workers.engines.core.sequence import Sequence


class Lane:
    """A sequence's row of the block tables.

    Attributes:
        index: its row.
        plain: temperature is the only sampling parameter that changes the logits.
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


class Lanes:
    """Lanes for up to ``count`` sequences, and the table changes that are not on the device yet.

    Args:
        width: entries per lane and table.
        sliding: add a second table behind the first, for the pool rows of sliding-window layers.

    Attributes:
        places: changed entries, as indices into the flattened tables.
        values: their new values.
    """

    def __init__(self, count: int, width: int, *, sliding: bool = False) -> None:
        self._width = width
        self._rows_offset = count * width if sliding else 0
        self._free = list(range(count - 1, -1, -1))
        self._lanes: dict[Sequence, Lane] = {}
        self.places: list[int] = []
        self.values: list[int] = []

    def of(self, sequence: Sequence) -> Lane:
        """The lane of a sequence. Records the entries of its tables that are new since the last call."""
        lane = self._lanes.get(sequence)
        if lane is None:
            lane = self._assign(sequence)
        blocks = sequence.blocks
        if lane.blocks is not blocks:
            lane.blocks, lane.sent_blocks = blocks, 0
        if lane.sent_blocks < len(blocks):
            self._record(lane.index * self._width, lane.sent_blocks, blocks)
            lane.sent_blocks = len(blocks)
        if self._rows_offset:
            self._send_rows(lane, sequence.rows)
        return lane

    def _send_rows(self, lane: Lane, rows: list[int]) -> None:
        if lane.rows is not rows:
            lane.rows, lane.sent_rows = rows, 0
        if lane.sent_rows < len(rows):
            self._record(self._rows_offset + lane.index * self._width, lane.sent_rows, rows)
            lane.sent_rows = len(rows)

    def _record(self, first: int, start: int, entries: list[int]) -> None:
        self.places += range(first + start, first + len(entries))
        # Kernels load entries before the window and ignore the result, so these must be valid, too.
        self.values += [max(entry, 0) for entry in entries[start:]]

    def _assign(self, sequence: Sequence) -> Lane:
        if not self._free:
            for idle in [held for held in self._lanes if not held.blocks]:  # ended, or preempted
                self._free.append(self._lanes.pop(idle).index)
        lane = self._lanes[sequence] = Lane(self._free.pop(), sequence)
        return lane

    def take_changes(self) -> tuple[list[int], list[int]]:
        """``places`` and ``values`` since the last call."""
        places, values = self.places, self.values
        self.places, self.values = [], []
        return places, values
