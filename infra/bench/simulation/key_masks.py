"""Which targets have which keys: a map from a key to a bitmask of positions."""

from collections.abc import Iterable, Sequence


class KeyMasks:
    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._masks: dict[int, int] = {}

    def add(self, position: int, keys: Iterable[int]) -> None:
        bit, masks = 1 << position, self._masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def remove(self, position: int, keys: Iterable[int]) -> None:
        keep, masks = ~(1 << position), self._masks
        for key in keys:
            left = masks.get(key, 0) & keep
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)

    def leading(self, keys: Sequence[int]) -> list[int]:
        """Number of leading keys that each position has."""
        depths = [0] * self._positions
        get = self._masks.get
        mask, depth = (1 << self._positions) - 1, 0
        for key in keys:
            left = mask & get(key, 0)
            if left != mask:
                _set(depths, mask ^ left, depth)
                mask = left
                if not mask:
                    return depths
            depth += 1
        _set(depths, mask, depth)
        return depths


def _set(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        bit = mask & -mask
        depths[bit.bit_length() - 1] = depth
        mask ^= bit
