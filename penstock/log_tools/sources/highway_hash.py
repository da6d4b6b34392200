"""HighwayHash-64, the checksum that nats-server keeps with messages and metadata. Pure Python, for small inputs.

Source: J. Alakuijala, B. Cox, J. Wassenberg, "Fast keyed hash/pseudo-random function using SIMD multiply and permute",
arXiv:1612.06257; byte for byte the result of github.com/minio/highwayhash.
"""

import struct

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_PACKET_WORDS = struct.Struct("<4Q")
INIT0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
INIT1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)


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
        self._mul0, self._mul1 = list(INIT0), list(INIT1)
        self._v0 = [init ^ lane for init, lane in zip(INIT0, lanes, strict=True)]
        self._v1 = [init ^ _swap_halves(lane) for init, lane in zip(INIT1, lanes, strict=True)]

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
MERGED = (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)


def _zipper_merge(v1: int, v0: int) -> tuple[int, int]:
    pair = struct.pack("<2Q", v0, v1)
    merged = bytes(pair[i] for i in MERGED)
    return int.from_bytes(merged[:8], "little"), int.from_bytes(merged[8:], "little")
