"""Which row of the block tables on the device a sequence has, and what of its blocks is there already. No torch."""

from workers.engines.core.sequence import Sequence


class Lane:
    __slots__ = ("blocks", "draws", "index", "plain", "told")

    def __init__(self, index: int) -> None:
        self.index = index
        self.blocks: list[int] | None = None  # the list that was told of; a sequence that was preempted has a new one
        self.told = 0  # leading blocks that are on the device
        self.plain = False  # its tokens are drawn from the logits as they are, but for temperature
        self.draws = False  # at random


class Lanes:
    """Lanes for up to ``count`` sequences, and the changes to their tables that the device has not seen.

    Attributes:
        pairs: (place in the flattened tables, block) of each change.
    """

    def __init__(self, count: int, width: int) -> None:
        self._width = width
        self._free = list(range(count - 1, -1, -1))
        self._lanes: dict[Sequence, Lane] = {}
        self.places: list[int] = []
        self.values: list[int] = []

    def of(self, sequence: Sequence) -> Lane:
        """The lane of a sequence, whose blocks will be on the device once all changes are."""
        lane = self._lanes.get(sequence)
        if lane is None:
            lane = self._take(sequence)
        blocks = sequence.blocks
        if lane.blocks is not blocks:
            lane.blocks, lane.told = blocks, 0
        if lane.told < len(blocks):
            start = lane.index * self._width
            self.places += range(start + lane.told, start + len(blocks))
            self.values += blocks[lane.told :]
            lane.told = len(blocks)
        return lane

    def _take(self, sequence: Sequence) -> Lane:
        if not self._free:
            for old in [each for each in self._lanes if not each.blocks]:  # ended, or preempted
                self._free.append(self._lanes.pop(old).index)
        lane = self._lanes[sequence] = Lane(self._free.pop())
        s = sequence.sampling
        lane.draws = s.temperature > 0
        penalty = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        narrowed = lane.draws and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        asked = s.logprobs is not None or bool(s.logit_bias) or sequence.processors is not None
        lane.plain = not (penalty or narrowed or asked)
        return lane

    def taken(self) -> tuple[list[int], list[int]]:
        """Changes since the last call."""
        places, values = self.places, self.values
        self.places, self.values = [], []
        return places, values
