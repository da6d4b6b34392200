"""How many leading blocks of a prompt each target has, as bit masks by depth. Data only.

A match finds masks. For a decision among hundreds of targets, making a dict of them and an array of the dict costs
several times the match.
"""

from collections.abc import Iterator, Mapping

TargetId = tuple[str, int]  # worker id, attention data-parallel rank
Levels = tuple[list[int], list[int]]  # masks of targets, and how many blocks each has


class TargetBits:
    """Which target has which bit.

    Attributes:
        targets: by bit.
        version: changes with ``targets``.
    """

    def __init__(self) -> None:
        self.targets: dict[int, TargetId] = {}
        self.version = 0

    def put(self, bit: int, target: TargetId) -> None:
        self.targets[bit] = target
        self.version += 1

    def remove(self, bit: int) -> None:
        del self.targets[bit]
        self.version += 1


class Depths(Mapping[TargetId, int]):
    """Leading blocks by target; targets without any are absent. To be read before ``bits`` changes.

    Attributes:
        masks: no bit is in two.
        numbers: of blocks, by mask.
    """

    __slots__ = ("_blocks", "bits", "masks", "numbers")

    def __init__(self, levels: Levels, bits: TargetBits) -> None:
        self.masks, self.numbers = levels
        self.bits = bits
        self._blocks: dict[TargetId, int] | None = None

    @property
    def blocks(self) -> dict[TargetId, int]:
        """The same as a dict, made when it is asked for."""
        if self._blocks is None:
            targets, self._blocks = self.bits.targets, {}
            for mask, depth in zip(self.masks, self.numbers, strict=True):
                for bit in (mask,) if mask in targets else bits_of(mask):
                    self._blocks[targets[bit]] = depth
        return self._blocks

    def __bool__(self) -> bool:
        return bool(self.masks)

    def get(self, target: TargetId, default: int = 0) -> int:  # type: ignore[override]
        return self.blocks.get(target, default)

    def __getitem__(self, target: TargetId) -> int:
        return self.blocks[target]

    def __iter__(self) -> Iterator[TargetId]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


def as_dict(blocks: Mapping[TargetId, int]) -> Mapping[TargetId, int]:
    """What many look-ups are cheaper in."""
    return blocks.blocks if isinstance(blocks, Depths) else blocks


def bits_of(mask: int) -> list[int]:
    """The bits of a mask, each alone, lowest first."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
