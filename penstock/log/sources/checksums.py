"""HighwayHash-64 of many messages at once, each under its own key: the checksum nats-server stores with a message.

As ``penstock.log.sources.checksums``, in lockstep over columns: 100 MB/s instead of 1.

HighwayHash-64, the checksum that nats-server keeps beside each stream's metadata. Pure Python, for small inputs.

Source: J. Alakuijala, B. Cox, J. Wassenberg, "Fast keyed hash/pseudo-random function using SIMD multiply and permute",
arXiv:1612.06257; byte for byte the result of github.com/minio/highwayhash.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_PACKET_WORDS = struct.Struct("<4Q")
_INIT0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_INIT1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)


def highway_hash_64(key: bytes, data: bytes) -> bytes:
    """The hash of ``data`` under a key of 32 bytes: 8 bytes, little-endian."""
    state = _State(key)
    full = len(data) // _PACKET_WORDS.size * _PACKET_WORDS.size
    for lanes in _PACKET_WORDS.iter_unpack(data[:full]):
        state.update(lanes)
    if len(data) > full:
        state.update_rest(data[full:])
    return state.finish().to_bytes(8, "little")


class _State:
    def __init__(self, key: bytes) -> None:
        lanes = _PACKET_WORDS.unpack(key)
        self._mul0, self._mul1 = list(_INIT0), list(_INIT1)
        self._v0 = [init ^ lane for init, lane in zip(_INIT0, lanes, strict=True)]
        self._v1 = [init ^ _swap_halves(lane) for init, lane in zip(_INIT1, lanes, strict=True)]

    def update(self, lanes: tuple[int, ...]) -> None:
        """Mix in 32 bytes, as four little-endian integers."""
        v0, v1, mul0, mul1 = self._v0, self._v1, self._mul0, self._mul1
        for i in range(4):
            v1[i] = (v1[i] + mul0[i] + lanes[i]) & _MASK64
            mul0[i] ^= (v1[i] & _MASK32) * (v0[i] >> 32)
            v0[i] = (v0[i] + mul1[i]) & _MASK64
            mul1[i] ^= (v0[i] & _MASK32) * (v1[i] >> 32)
        for into, source in ((v0, v1), (v1, v0)):
            for i in (0, 2):
                low, high = _zipper_merge(source[i + 1], source[i])
                into[i] = (into[i] + low) & _MASK64
                into[i + 1] = (into[i + 1] + high) & _MASK64

    def update_rest(self, rest: bytes) -> None:
        """Mix in the last 1 to 31 bytes."""
        size, tail = len(rest), len(rest) & 3
        for i in range(4):
            self._v0[i] = (self._v0[i] + (size << 32) + size) & _MASK64
            low, high = self._v1[i] & _MASK32, self._v1[i] >> 32
            self._v1[i] = _rotate32(low, size) | _rotate32(high, size) << 32
        packet = bytearray(_PACKET_WORDS.size)
        packet[: size - tail] = rest[: size - tail]
        if size & 16:
            packet[28:] = rest[-4:]
        elif tail:
            last = rest[size - tail :]
            packet[16:19] = last[0], last[tail >> 1], last[tail - 1]
        self.update(_PACKET_WORDS.unpack(packet))

    def finish(self) -> int:
        for _ in range(4):
            v0 = self._v0
            self.update((_swap_halves(v0[2]), _swap_halves(v0[3]), _swap_halves(v0[0]), _swap_halves(v0[1])))
        total: int = self._v0[0] + self._v1[0] + self._mul0[0] + self._mul1[0]
        return total & _MASK64


def _swap_halves(value: int) -> int:
    return (value >> 32) | (value << 32) & _MASK64


def _rotate32(value: int, count: int) -> int:
    return ((value << count) | (value >> (32 - count))) & _MASK32


# Bytes of the 16 that a pair of lanes holds, v0's first, in the order in which they are added.
_MERGED = (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)


def _zipper_merge(v1: int, v0: int) -> tuple[int, int]:
    pair = struct.pack("<2Q", v0, v1)
    merged = bytes(pair[i] for i in _MERGED)
    return int.from_bytes(merged[:8], "little"), int.from_bytes(merged[8:], "little")


Words = npt.NDArray[np.uint64]

_PACKET = 32
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SHUFFLE = np.array(_MERGED)
_SWAPPED_LANES = [2, 3, 0, 1]


def checksums(keys: Sequence[bytes], messages: Sequence[bytes]) -> list[bytes]:
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
        self.mul0 = np.tile(np.array(_INIT0, np.uint64), (count, 1))
        self.mul1 = np.tile(np.array(_INIT1, np.uint64), (count, 1))
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
