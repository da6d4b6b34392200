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


class KeyCounts:
    """As ``KeyMasks``, where each position has every key as often as it was added."""

    def __init__(self, positions: int) -> None:
        self._masks = KeyMasks(positions)
        self._counts: list[dict[int, int]] = [{} for _ in range(positions)]

    def distinct(self, position: int) -> int:
        return len(self._counts[position])

    def leading(self, keys: Sequence[int]) -> list[int]:
        return self._masks.leading(keys)

    def add(self, position: int, keys: Iterable[int]) -> None:
        counts, new = self._counts[position], []
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                new.append(key)
        self._masks.add(position, new)

    def remove(self, position: int, keys: Iterable[int]) -> None:
        counts, gone = self._counts[position], []
        for key in keys:
            count = counts[key] - 1
            if count:
                counts[key] = count
            else:
                del counts[key]
                gone.append(key)
        self._masks.remove(position, gone)


def _set(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        bit = mask & -mask
        depths[bit.bit_length() - 1] = depth
        mask ^= bit
