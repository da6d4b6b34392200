"""``highway_hash.highway_hash_64`` of many messages at once, each under its own key, in lockstep over columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.log_tools.sources.highway_hash import INIT0, INIT1, MERGED

Words = npt.NDArray[np.uint64]

_PACKET = 32
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SHUFFLE = np.array(MERGED)
_SWAPPED_LANES = [2, 3, 0, 1]


def many_checksums(keys: Sequence[bytes], messages: Sequence[bytes]) -> list[bytes]:
    """The hash of each message, 8 bytes.

    Args:
        keys: 32 bytes for each message.
    """
    if not messages:
        return []
    sizes = np.array([len(message) for message in messages])
    order = np.argsort(-sizes, kind="stable")  # those that still have packets are always the first ones
    packed = -(-sizes // _PACKET)
    starts = np.concatenate(([0], np.cumsum(packed)))[:-1]
    buffer = np.frombuffer(
        b"".join(message.ljust(count * _PACKET, b"\0") for message, count in _padded(messages)), "<u8"
    )
    lanes = buffer.reshape(-1, 4)
    state = _Columns(np.frombuffer(b"".join(keys[i] for i in order), "<u8").reshape(-1, 4))
    full = (sizes // _PACKET)[order]
    first = starts[order]
    active = len(full)
    for packet in range(int(full[0])):
        while full[active - 1] <= packet:
            active -= 1
        state.update(lanes[first[:active] + packet], active)
    rests = (sizes % _PACKET)[order]
    _update_rests(state, rests, lanes, first + full)
    sums = state.finish().astype("<u8").tobytes()
    out = [b""] * len(messages)
    for place, index in enumerate(order):
        out[index] = sums[place * 8 : place * 8 + 8]
    return out


def _padded(messages: Sequence[bytes]) -> list[tuple[bytes, int]]:
    return [(message, -(-len(message) // _PACKET)) for message in messages]


def _update_rests(state: "_Columns", rests: npt.NDArray[Any], lanes: Words, rows: npt.NDArray[Any]) -> None:
    """Mix in the last 1 to 31 bytes of each message."""
    which = np.flatnonzero(rests)
    if not len(which):
        return
    size = rests[which]
    old = np.ascontiguousarray(lanes[rows[which]]).view(np.uint8).reshape(-1, _PACKET)
    tail = size & 3
    column = np.arange(_PACKET)
    new = np.where(column[None, :] < (size - tail)[:, None], old, 0).astype(np.uint8)
    large, small = np.flatnonzero(size & 16), np.flatnonzero(((size & 16) == 0) & (tail > 0))
    for offset in range(4):
        new[large, 28 + offset] = old[large, size[large] - 4 + offset]
    begin, rest = (size - tail)[small], tail[small]
    new[small, 16] = old[small, begin]
    new[small, 17] = old[small, begin + (rest >> 1)]
    new[small, 18] = old[small, begin + rest - 1]
    part = state.rows(which)
    wide = size.astype(np.uint64)[:, None]
    part.v0 += (wide << _HALF) + wide
    low, high = part.v1 & _LOW, part.v1 >> _HALF
    part.v1 = _rotated(low, wide) | (_rotated(high, wide) << _HALF)
    part.update(new.view(np.uint64).reshape(-1, 4), len(which))
    state.put(which, part)


def _rotated(value: Words, count: Words) -> Words:
    return ((value << count) | (value >> (_HALF - count))) & _LOW


class _Columns:
    """The states of all messages, one row of four lanes each."""

    def __init__(self, keys: Words) -> None:
        count = len(keys)
        self.mul0 = np.tile(np.array(INIT0, np.uint64), (count, 1))
        self.mul1 = np.tile(np.array(INIT1, np.uint64), (count, 1))
        self.v0 = self.mul0 ^ keys
        self.v1 = self.mul1 ^ _swapped(keys)

    def rows(self, which: npt.NDArray[Any]) -> "_Columns":
        part = object.__new__(_Columns)
        part.mul0, part.mul1, part.v0, part.v1 = (each[which] for each in (self.mul0, self.mul1, self.v0, self.v1))
        return part

    def put(self, which: npt.NDArray[Any], part: "_Columns") -> None:
        self.mul0[which], self.mul1[which], self.v0[which], self.v1[which] = part.mul0, part.mul1, part.v0, part.v1

    def update(self, lanes: Words, count: int) -> None:
        """Mix one packet into each of the first ``count`` states."""
        v0, v1, mul0, mul1 = self.v0[:count], self.v1[:count], self.mul0[:count], self.mul1[:count]
        v1 += mul0
        v1 += lanes
        mul0 ^= (v1 & _LOW) * (v0 >> _HALF)
        v0 += mul1
        mul1 ^= (v0 & _LOW) * (v1 >> _HALF)
        v0 += _merged(v1)
        v1 += _merged(v0)

    def finish(self) -> Words:
        for _ in range(4):
            self.update(_swapped(self.v0[:, _SWAPPED_LANES]), len(self.v0))
        total: Words = self.v0[:, 0] + self.v1[:, 0] + self.mul0[:, 0] + self.mul1[:, 0]
        return total


def _swapped(values: Words) -> Words:
    return (values >> _HALF) | (values << _HALF)


def _merged(values: Words) -> Words:
    pairs = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 2, 16)
    return np.ascontiguousarray(pairs[:, :, _SHUFFLE]).view(np.uint64).reshape(-1, 4)
