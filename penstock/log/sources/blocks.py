"""The records in a block of nats-server's file store. Pure.

A block is a row of records (nats-server ``filestore.go``, the same since 2.10):

    4 bytes  length of the record; the top bit: it has headers
    8        sequence; bit 63: the message was erased; bit 62: a tombstone, "the message of this sequence is deleted"
    8        Unix time in ns
    2        length of the subject
             subject, [4 bytes: length of the headers, headers,] body
    8        checksum

All numbers are little-endian. ``penstock.log.sources.blocks`` verifies checksums, which takes longer than everything
else.

Whether messages are as the broker stored them: their checksums, HighwayHash-64 under a key per block. Pure.

A checksum covers sequence, time, subject, headers and body. Pure Python checks 1 MB/s, numpy 100 MB/s of many messages.
"""

import hashlib
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from operator import le
from typing import NamedTuple

from penstock.log.sources.checksums import highway_hash_64

HEADER = struct.Struct("<IQqH")  # length, sequence, time, length of the subject
HAS_HEADERS = 1 << 31
CHECKSUM_BYTES = 8
ERASED, TOMBSTONE = 1 << 63, 1 << 62
LARGEST = 32 << 20  # bytes of a record; the server takes a longer one for damage
_SIZE = struct.Struct("<I")
_SEQUENCE = TOMBSTONE - 1
_FLAGS = ERASED | TOMBSTONE
_SMALLEST = HEADER.size + CHECKSUM_BYTES
LARGEST_GAP = 1 << 24  # sequences before the last message of a block; behind a larger gap it is damaged

Place = tuple[int, int, int]  # sequence, Unix time in ns, offset in the block


class BlockRecords(NamedTuple):
    """Where the records of a block begin.

    Attributes:
        places: of the messages, in the order of their sequences. Erased ones are left out.
        deleted: the sequences that its tombstones name. Those messages may be in any block.
        first: sequence of the first record that is no tombstone, erased or not; 0: there is none.
        damaged: bytes that are left out: an end that is no whole record, as when the machine lost power while the
            server wrote it, and messages whose sequences do not ascend.
    """

    places: list[Place]
    deleted: list[int]
    first: int
    damaged: int


class BlockMessage(NamedTuple):
    """A stored message."""

    subject: str
    headers: bytes  # as on the wire, with "NATS/1.0"; empty: none
    data: bytes


def records(block: bytes) -> BlockRecords:
    """Find the records of a block."""
    places: list[Place] = []
    deleted: list[int] = []
    first = at = 0
    size, unpack, add = len(block), HEADER.unpack_from, places.append
    while at + _SMALLEST <= size:
        length, seq, time_ns, subject = unpack(block, at)
        length &= ~HAS_HEADERS
        if not _SMALLEST + subject <= length <= LARGEST or at + length > size:
            break
        if not seq & _FLAGS:
            add((seq, time_ns, at))
            first = first or seq
        elif seq & TOMBSTONE and not seq & ERASED:
            deleted.append(seq & _SEQUENCE)
        else:
            first = first or seq & _SEQUENCE
        at += length
    damaged = size - at
    if (len(places) > 1 and places[-1][0] - places[-2][0] > LARGEST_GAP) or any(map(le, places[1:], places)):
        kept = _ascending(places)
        damaged += sum(_length(block, place) for place in set(places).difference(kept))
        places = kept
        first = kept[0][0]
    return BlockRecords(places, deleted, first, damaged)


def _ascending(places: list[Place]) -> list[Place]:
    """Without messages whose sequences contradict those around them: each would hide others, or millions."""
    kept: list[Place] = []
    for place in places:
        if kept and place[0] <= kept[-1][0]:
            if len(kept) > 1 and place[0] <= kept[-2][0]:
                continue
            kept.pop()  # it is larger than the two around it
        kept.append(place)
    if len(kept) > 1 and kept[-1][0] - kept[-2][0] > LARGEST_GAP:
        kept.pop()
    return kept


def _length(block: bytes, place: Place) -> int:
    (length,) = _SIZE.unpack_from(block, place[2])
    return int(length) & ~HAS_HEADERS


def subject_of(block: bytes, at: int) -> bytes:
    """The subject of the message at an offset, encoded."""
    start = at + HEADER.size
    return block[start : start + int.from_bytes(block[start - 2 : start], "little")]


_MESSAGE_ID = b"\r\nNats-Msg-Id:"


def message_id(block: bytes, at: int) -> bytes:
    """The message id of the message at an offset, encoded; empty: it has none."""
    length, _, _, subject_bytes = HEADER.unpack_from(block, at)
    if not length & HAS_HEADERS:
        return b""
    start = at + HEADER.size + subject_bytes
    end = start + _SIZE.size + int.from_bytes(block[start : start + _SIZE.size], "little")
    name = block.find(_MESSAGE_ID, start, end)
    return block[name + len(_MESSAGE_ID) : block.find(b"\r\n", name + 2, end)].strip() if name >= 0 else b""


def message(block: bytes, at: int) -> BlockMessage:
    """The message at an offset.

    Raises:
        ValueError: the lengths in the record contradict each other.
    """
    length, _, _, subject_bytes = HEADER.unpack_from(block, at)
    start = at + HEADER.size
    body = start + subject_bytes
    end = at + (length & ~HAS_HEADERS) - CHECKSUM_BYTES
    headers = b""
    if length & HAS_HEADERS:
        (header_bytes,) = _SIZE.unpack_from(block, body)
        body += _SIZE.size + header_bytes
        if body > end:
            raise ValueError(f"a record at offset {at} has headers of {header_bytes} bytes")
        headers = block[body - header_bytes : body]
    return BlockMessage(block[start : start + subject_bytes].decode(), headers, block[body:end])


def parse_headers(headers: bytes) -> dict[str, str]:
    """The names and values of a message's headers."""
    values = {}
    for line in headers.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            values[name] = value.strip()
    return values


_FEW_BYTES = 256 << 10
_LENGTH_BYTES = 4


def key_of(stream: str, block: int) -> bytes:
    """The key of a block's checksums.

    Args:
        stream: with the namespace.
        block: its number, which its file is named by.
    """
    return hashlib.sha256(f"{stream}-{block}".encode()).digest()


def damaged(key: bytes, block: bytes, offsets: Sequence[int]) -> list[int]:
    """The messages at these offsets whose checksums are wrong."""
    covered = [_covered(block, at) for at in offsets]
    if sum(map(len, covered)) > _FEW_BYTES and can_verify_much():
        from penstock.log.sources.checksums import checksums

        sums = checksums([key] * len(covered), covered)
    else:
        sums = [highway_hash_64(key, each) for each in covered]
    return [at for at, checksum in zip(offsets, sums, strict=True) if checksum != _stored(block, at)]


def can_verify_much() -> bool:
    """Whether whole streams can be checked in reasonable time."""
    return find_spec("numpy") is not None


def _covered(block: bytes, at: int) -> bytes:
    length, _, _, subject_bytes = HEADER.unpack_from(block, at)
    end = at + (length & ~HAS_HEADERS) - CHECKSUM_BYTES
    body = at + HEADER.size + subject_bytes
    head, subject = block[at + _LENGTH_BYTES : at + HEADER.size - 2], block[at + HEADER.size : body]
    if length & HAS_HEADERS:
        body += _LENGTH_BYTES
    return head + subject + block[body:end]


def _stored(block: bytes, at: int) -> bytes:
    length: int = HEADER.unpack_from(block, at)[0]
    end = at + (length & ~HAS_HEADERS)
    return block[end - CHECKSUM_BYTES : end]
