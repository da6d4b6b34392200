"""Reads and writes the private files of nats-server's streams, while no broker runs. No other module does.

A stream is a folder of metadata (``meta.inf``, ``meta.sum``) and of blocks (``msgs/N.blk``). A block is a row of
records (nats-server ``filestore.go``):

    4 bytes  length of the record; the top bit: it has headers
    8        sequence; bit 63: the message was erased; bit 62: a tombstone, "the message of this sequence is deleted"
    8        Unix time in ns
    2        length of the subject
             subject, [4 bytes: length of the headers, headers,] body
    8        checksum: HighwayHash-64 of sequence, time, subject, headers and body, under a key per block

All numbers are little-endian. What a block begins with is read from its first record, the stream's limits from
``index.db``, which the server writes when it stops. If it was killed instead, or single messages were deleted, all
blocks are walked once for tombstones.

``known_form`` says whether a server's version is one whose files were tested. Files of others are read by a broker,
from a copy (``data_folder``), and none are written for them.
"""

import hashlib
import mmap
import os
import re
import struct
import subprocess
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from penstock.infra.bus.direct_get import parse_time
from penstock.infra.nats_server.binary import MINIMUM, TESTED, dotted, find_server, parse_version
from penstock.log_tools.sources.highway_hash import highway_hash_64
from penstock.schemas.subjects import HEADER_RECORDED_TIME

if TYPE_CHECKING:  # the forms of all messages take longer to load than one request takes to find
    from penstock.log_tools.sources.log_line import LogLine

log = structlog.get_logger("store")

# --- records ---

HEADER = struct.Struct("<IQqH")  # length, sequence, time, length of the subject
HAS_HEADERS = 1 << 31
CHECKSUM_BYTES = 8
ERASED, TOMBSTONE = 1 << 63, 1 << 62
LARGEST = 32 << 20  # bytes of a record; the server takes a longer one for damage
_SIZE = struct.Struct("<I")
_SEQUENCE = TOMBSTONE - 1
_FLAGS = ERASED | TOMBSTONE
_SMALLEST = HEADER.size + CHECKSUM_BYTES
LARGEST_GAP = 1 << 24  # sequences before the last message of a block; after a larger gap it is damaged

Place = tuple[int, int, int]  # sequence, Unix time in ns, offset in the block


class BlockRecords(NamedTuple):
    """Where the records of a block begin.

    Attributes:
        places: of the messages, in the order of their sequences. Erased ones are left out.
        deleted: the sequences that its tombstones name. Those messages may be in any block.
        first: sequence of the first record that is not a tombstone, erased or not; 0: there is none.
        damaged: bytes that are left out: an end that is not a whole record, as when the machine lost power while the
            server wrote it, overwritten records, and messages whose sequences do not ascend.
        tail: those of them that are at the end.
    """

    places: list[Place]
    deleted: list[int]
    first: int
    damaged: int
    tail: int = 0


class BlockMessage(NamedTuple):
    """A stored message."""

    subject: str
    headers: bytes  # as on the wire, with "NATS/1.0"; empty: none
    data: bytes


class Resume(NamedTuple):
    """What finds the next record after a damaged one.

    Attributes:
        key: of the block's checksums.
        starts: what a record may begin with: the beginnings of the stream's subjects, and tombstones.
    """

    key: bytes
    starts: re.Pattern[bytes]


_TOMBSTONE_START = rb"\x1e\0\0\0.{7}\x40.{8}\0\0"


def resume_pattern(subjects: Sequence[str]) -> re.Pattern[bytes] | None:
    """For ``Resume``; None: a stream that takes every subject."""
    begins = [subject.partition("*")[0].partition(">")[0].encode() for subject in subjects]
    if not begins or not all(begins):
        return None
    return re.compile(rb"(?P<subject>%b)|%b" % (b"|".join(map(re.escape, begins)), _TOMBSTONE_START), re.DOTALL)


def _resumed(block: bytes, after: int, seq: int, resume: Resume) -> int:
    """Offset of the first record after an offset whose checksum is right; -1: there is none.

    Args:
        seq: of the last message before it. Later ones are larger, of tombstones any.
    """
    size, start = len(block), after
    while (found := resume.starts.search(block, start)) is not None:
        start = found.start() + 1
        is_message = found["subject"] is not None
        at = found.start() - HEADER.size if is_message else found.start()
        if at < after or at + _SMALLEST > size:
            continue
        length, number, _, subject = HEADER.unpack_from(block, at)
        length &= ~HAS_HEADERS
        if not _SMALLEST + subject <= length <= LARGEST or at + length > size:
            continue
        if is_message and (number & _FLAGS or not seq < number <= seq + LARGEST_GAP):
            continue
        if not damaged(resume.key, block, [at]):
            return at
    return -1


def records(block: bytes, resume: Resume | None = None) -> BlockRecords:
    """Find the records of a block.

    Args:
        resume: finds those after a record whose length is damaged; None: they are left out.
    """
    places: list[Place] = []
    deleted: list[int] = []
    first = at = before = lost = 0  # ``before``: where the last record begins
    size, unpack, add = len(block), HEADER.unpack_from, places.append
    while at + _SMALLEST <= size:
        length, seq, time_ns, subject = unpack(block, at)
        length &= ~HAS_HEADERS
        if not _SMALLEST + subject <= length <= LARGEST or at + length > size:
            if resume is None:
                break
            if before < at and damaged(resume.key, block, [before]):  # its length led here
                at = before
                if places and places[-1][2] == at:
                    places.pop()
            following = _resumed(block, at + 1, places[-1][0] if places else 0, resume)
            if following < 0:
                break
            lost += following - at
            before = at = following
            continue
        before = at
        if not seq & _FLAGS:
            add((seq, time_ns, at))
            first = first or seq
        elif seq & TOMBSTONE and not seq & ERASED:
            deleted.append(seq & _SEQUENCE)
        else:
            first = first or seq & _SEQUENCE
        at += length
    tail = size - at
    left_out = tail + lost
    if (len(places) > 1 and places[-1][0] - places[-2][0] > LARGEST_GAP) or any(map(le, places[1:], places)):
        kept = _ascending(places)
        left_out += sum(_length(block, place) for place in set(places).difference(kept))
        places = kept
        first = kept[0][0]
    return BlockRecords(places, deleted, first, left_out, tail)


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


_RECORDED_TIME = b"\r\n%b:" % HEADER_RECORDED_TIME.encode()
_MESSAGE_ID = b"\r\nNats-Msg-Id:"
find_message_ids = re.compile(_MESSAGE_ID + rb" *([^\r\n]+)").findall  # of a whole block: 20 times as fast as each


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


def body_of(block: bytes, at: int) -> bytes:
    """The body of the message at an offset; of a record whose lengths contradict each other, what they enclose."""
    length, _, _, subject_bytes = HEADER.unpack_from(block, at)
    start = at + HEADER.size + subject_bytes
    if length & HAS_HEADERS:
        start += _SIZE.size + int.from_bytes(block[start : start + _SIZE.size], "little")
    return block[start : at + (length & ~HAS_HEADERS) - CHECKSUM_BYTES]


def parse_headers(headers: bytes) -> dict[str, str]:
    """The names and values of a message's headers."""
    values = {}
    for line in headers.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            values[name] = value.strip()
    return values


# --- checksums ---

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
    sums = checksums(key, [_covered(block, at) for at in offsets])
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


def checksums(key: bytes, messages: Sequence[bytes]) -> list[bytes]:
    """The hash of each message under one key. Pure Python does 1 MB/s, numpy 100 MB/s of many messages."""
    if sum(map(len, messages)) > _FEW_BYTES and can_verify_much():
        from penstock.log_tools.sources.many_checksums import many_checksums

        return many_checksums([key] * len(messages), messages)
    return [highway_hash_64(key, each) for each in messages]


# --- reading ---

KEPT_BLOCKS = 2  # of up to 8 MiB, for the next look at the same place
_INDEX_MAGIC = 11
_INDEX_VERSIONS = range(1, 5)
_INDEX_HEAD = 64  # bytes: the two of its form, and five numbers of up to ten


class UnreadableFiles(Exception):
    """The files are encrypted or compressed: only a broker can read them."""


class Raw(NamedTuple):
    """A message where it lies. ``block``: the bytes that hold it."""

    seq: int
    time_ns: int
    block: bytes
    at: int


class _Config(msgspec.Struct):
    Created: str = ""  # as the server writes it
    created: str = ""  # as ``restore`` does
    compression: str = "none"
    max_age: int = 0  # ns
    max_bytes: int = -1
    subjects: tuple[str, ...] = ()


class _Block(NamedTuple):
    number: int
    first_seq: int
    first_ns: int
    path: Path


def _numbers(folder: Path) -> list[int]:
    """The numbers of the blocks in a folder, in their order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".blk") and name[:-4].isdecimal())


class _LazyBlocks:
    """The blocks of a stream, each looked at when it is asked for: there may be a thousand, and one is wanted.

    Args:
        begin: what a block begins with, by its number; None: it has no message. It then stands for what follows it.
    """

    def __init__(
        self, numbers: Sequence[int], begin: Callable[[int], _Block | None], path: Callable[[int], Path]
    ) -> None:
        self._numbers = numbers
        self._begin = begin
        self._path = path
        self._known: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> _Block:
        at = range(len(self._numbers))[index]  # raises IndexError, which ends a loop
        block = self._known.get(at)
        if block is None:
            number = self._numbers[at]
            block = self._begin(number)
            if block is None:
                first_seq, first_ns = self[at + 1][1:3] if at + 1 < len(self) else (_SEQUENCE, _SEQUENCE)
                block = _Block(number, first_seq, first_ns, self._path(number))
            self._known[at] = block
        return block

    def __iter__(self) -> Iterator[_Block]:
        return map(self.__getitem__, range(len(self)))


class StoredStream:
    """A stream's messages, in both directions.

    Args:
        folder: of the stream, with ``meta.inf`` and ``msgs``. It is only read.
        check: called after each look at the files; raises if a broker has started on them.
        verify: leave out messages whose checksums are wrong, and say so.
    Raises:
        UnreadableFiles: see there.
        OSError, msgspec.MsgspecError: it is not a stream's folder, or cannot be read.
    Attributes:
        incomplete: the numbers of the blocks, of those that were read, that lack messages because of damage, with the
            time of the last message after it (Unix, ns). What the server was writing when it was killed is no damage.
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None, *, verify: bool = False) -> None:
        config = msgspec.json.decode((folder / "meta.inf").read_bytes(), type=_Config)
        if (folder / "meta.key").exists() or config.compression not in ("", "none"):
            raise UnreadableFiles(f"stream {folder.name} is encrypted or compressed")
        self.name = folder.name
        self.folder = folder
        self._check = check
        self._verify = verify
        self.created = config.Created or config.created
        self.max_age_s = config.max_age / 1e9
        self.max_bytes = config.max_bytes
        self._kept: OrderedDict[int, tuple[bytes, BlockRecords]] = OrderedDict()
        self._without: tuple[int, bytes] = -1, b""  # the last block that ``naming`` passed over: it soon asks again
        self.incomplete: dict[int, int] = {}
        self._starts = resume_pattern(config.subjects)
        numbers = self._numbers = _numbers(folder / "msgs")
        limits = _limits(folder / "msgs" / "index.db", self._path(numbers[-1])) if numbers else None
        self._deleted: frozenset[int] = frozenset()
        self._noted = limits is not None
        self._whole = limits is not None and limits.messages == limits.last_seq - limits.first_seq + 1
        deleted: list[int] = []
        self._blocks: list[_Block] | _LazyBlocks
        if self._whole:
            self._blocks = _LazyBlocks(numbers, lambda number: self._begin(number, deleted), self._path)
        else:
            begins = (self._begin(number, deleted) for number in numbers)
            self._blocks = [block for block in begins if block is not None]
            for block in self._blocks:
                deleted += self._records(block)[1].deleted
            self._deleted = frozenset(deleted)
            if limits is not None and not self._agree(limits):
                log.warning("index_damaged", stream=self.name)
                limits = None
                self._noted = False
        self.first_seq = limits.first_seq if limits is not None else self._blocks[0].first_seq if self._blocks else 0
        self.last_seq = limits.last_seq if limits is not None else self._last()

    @property
    def empty(self) -> bool:
        """Whether it has no message."""
        return not self._blocks or self.first_seq > self.last_seq

    def deleted(self) -> list[int]:
        """Sequences from the first to the last one that have no message."""
        if self._whole:
            return []
        gone: list[int] = []
        after = self.first_seq
        for place in self._places(0):
            gone += range(after, place[0])
            after = place[0] + 1
        return [*gone, *range(after, self.last_seq + 1)]

    def forward(self, pattern: re.Pattern[bytes] | None = None, *, after: int = 0, since_ns: int = 0) -> Iterator[Raw]:
        """Messages in the order of their sequences.

        Args:
            pattern: of their subjects (``subject_pattern``); None: all.
            after: after this sequence; with 0, from the first message on that was stored at ``since_ns`` or later.
        """
        for data, places in self.by_block(after=after, since_ns=since_ns):
            for seq, time_ns, at in places:
                if pattern is None or pattern.fullmatch(subject_of(data, at)):
                    yield Raw(seq, time_ns, data, at)

    def naming(self, text: bytes, *, since_ns: int = 0, until_ns: int = 0) -> Iterator[Raw]:
        """Messages in which a text stands, in subject, headers or body, in the order of their sequences.

        Blocks without it are passed over at the speed of memory.

        Args:
            since_ns: stored at this time or later.
            until_ns: no block is read that begins later, unless the one before has imported messages, whose times are
                in their headers; 0: all are.
        """
        imported = True
        for index in range(self._number_since(since_ns), len(self._blocks)):
            block = self._blocks[index]
            if until_ns and block.first_ns > until_ns and not imported:
                return
            data = self._bytes(block)
            imported = bool(until_ns) and _RECORDED_TIME in data
            at = data.find(text)
            if at < 0:
                self._without = block.number, data
                continue
            places = self._block(index, data)[1]
            begins = [place[2] for place in places]
            while at >= 0 and (number := bisect_right(begins, at)):
                seq, time_ns, begin = places[number - 1]
                if time_ns >= since_ns:
                    yield Raw(seq, time_ns, data, begin)
                at = data.find(text, begins[number]) if number < len(begins) else -1

    def by_block(self, *, after: int = 0, since_ns: int = 0, until_ns: int = 0) -> Iterator[tuple[bytes, list[Place]]]:
        """As ``forward``, a block at a time: its bytes, and where its messages are."""
        number = self._number_at(after + 1) if after else self._number_since(since_ns)
        for index in range(number, len(self._blocks)):
            if until_ns and self._blocks[index].first_ns > until_ns:
                return
            data, places = self._block(index)
            if places and (places[0][0] <= after or places[0][1] < since_ns):
                places = [place for place in places if place[0] > after and place[1] >= since_ns]
            if places:
                since_ns = 0
                yield data, places

    def places(self, index: int) -> tuple[bytes, list[Place]]:
        """The messages of one of ``contents``, as ``by_block`` gives them."""
        return self._block(index)

    def contents(self, since_ns: int = 0) -> Iterator[tuple[int, bytes]]:
        """The blocks that may have messages of a time or later, each with its number here, as bytes in no form.

        A message that was deleted may still be in them. The blocks may be larger than memory: keep none.
        """
        for index in range(self._number_since(since_ns), len(self._blocks)):
            yield index, self._bytes(self._blocks[index])

    def lost_subjects(self, number: int) -> list[bytes]:
        """The subjects with one message, which was in this block and is not found there, if the server noted them."""
        noted = self.noted_subjects()
        block = next((each for each in self._blocks if each.number == number), None)
        if noted is None or block is None:
            return []
        varint = bytearray()
        while number > 127:
            varint.append(number & 127 | 128)
            number >>= 7
        varint.append(number)
        data, rows = self._records(block)
        found = {subject_of(data, at) for _, _, at in rows.places}
        in_block = re.compile(rb"(?P<subject>[\x21-\x7e]+)\x01" + re.escape(bytes(varint)))
        namespace = self.name.rpartition("_")[0].encode() + b"."
        # The length of a subject, in front of it, may be a letter.
        subjects = (text[text.index(namespace) :] for text in in_block.findall(noted) if namespace in text)
        return [each for each in subjects if each not in found]

    def noted_subjects(self) -> bytes | None:
        """What the server has noted about each subject, as it wrote it: its length, its text, and numbers.

        None: it has noted nothing, or has written since.
        """
        if not self._noted:
            return None
        try:
            return (self.folder / "msgs" / "index.db").read_bytes()
        except FileNotFoundError:
            self._check()
            return None

    def backward(self, pattern: re.Pattern[bytes] | None = None, *, before: int = 0) -> Iterator[Raw]:
        """Messages, newest first: those before a sequence, or all."""
        start = min(self._number_at(before - 1) if before else len(self._blocks), len(self._blocks) - 1)
        for index in range(start, -1, -1):
            data, places = self._block(index)
            for seq, time_ns, at in reversed(places):
                if (not before or seq < before) and (pattern is None or pattern.fullmatch(subject_of(data, at))):
                    yield Raw(seq, time_ns, data, at)

    def is_intact(self, seq: int) -> bool:
        """Whether the message of a sequence, which is stored, is as the broker wrote it."""
        block = self._blocks[self._number_at(seq)]
        data, rows = self._records(block)
        at = rows.places[bisect_left(rows.places, (seq,))][2]
        return not damaged(key_of(self.name, block.number), data, [at])

    # --- blocks ---

    def _block(self, index: int, data: bytes | None = None) -> tuple[bytes, list[Place]]:
        data, rows = self._records(self._blocks[index], data)
        return data, self._living(rows.places)

    def _living(self, places: list[Place]) -> list[Place]:
        if not self._deleted and places and places[0][0] >= self.first_seq:
            return places
        return [place for place in places if place[0] >= self.first_seq and place[0] not in self._deleted]

    def _places(self, number: int) -> Iterator[Place]:
        for index in range(number, len(self._blocks)):
            yield from self._block(index)[1]

    def _agree(self, limits: "_Limits") -> bool:
        """Whether the blocks have the first message that the server noted, and nothing far from the last one."""
        if not limits.messages or not self._blocks:
            return True
        first = self._records(self._blocks[self._number_at(limits.first_seq)])[1].places
        begins = any(place[0] == limits.first_seq and place[1] == limits.first_ns for place in first)
        return begins and 0 <= limits.last_seq - self._last() <= LARGEST_GAP

    def _number_at(self, seq: int) -> int:
        return max(0, bisect_right(self._blocks, seq, key=lambda block: block.first_seq) - 1)

    def _number_since(self, since_ns: int) -> int:
        return max(0, bisect_left(self._blocks, since_ns, key=lambda block: block.first_ns) - 1) if since_ns else 0

    def _last(self) -> int:
        places = self._records(self._blocks[-1])[1].places if self._blocks else []
        return max((place[0] for place in places), default=0)

    def _bytes(self, block: _Block) -> bytes:
        kept = self._kept.get(block.number)
        if kept is not None:
            return kept[0]
        if self._without[0] == block.number:
            return self._without[1]
        try:
            data = block.path.read_bytes()
        except FileNotFoundError:
            self._check()
            raise
        self._check()
        return data

    def _records(self, block: _Block, data: bytes | None = None) -> tuple[bytes, BlockRecords]:
        kept = self._kept.get(block.number)
        if kept is None:
            data = data if data is not None else self._bytes(block)
            rows = records(data, self._resume(block.number))
            if rows.damaged:
                log.warning("block_damaged", stream=self.name, file=block.path.name, bytes_left_out=rows.damaged)
            whole = len(rows.places)
            if self._verify:
                rows = self._intact(block, data, rows)
            tail = rows.tail if block.number == self._numbers[-1] else 0
            if rows.damaged > tail or len(rows.places) < whole:
                self.incomplete[block.number] = rows.places[-1][1] if rows.places else block.first_ns
            kept = self._kept[block.number] = data, rows
            if len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return kept

    def _resume(self, number: int) -> Resume | None:
        return Resume(key_of(self.name, number), self._starts) if self._starts is not None else None

    def _path(self, number: int) -> Path:
        return self.folder / "msgs" / f"{number}.blk"

    def _begin(self, number: int, deleted: list[int]) -> _Block | None:
        """What a block begins with; None: it has no message, and ``deleted`` gets what its tombstones name."""
        path = self._path(number)
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                return None
            length, seq, time_ns, _ = HEADER.unpack(head)
            file.seek(length & ~HAS_HEADERS)
            following = file.read(HEADER.size)
        if seq and not seq >> 62 and (len(following) < HEADER.size or HEADER.unpack(following)[1] > seq):
            return _Block(number, seq, time_ns, path)
        rows = records(path.read_bytes(), self._resume(number))
        if rows.places:
            return _Block(number, rows.first, rows.places[0][1], path)
        deleted += rows.deleted
        return None

    def _intact(self, block: _Block, data: bytes, rows: BlockRecords) -> BlockRecords:
        bad = set(damaged(key_of(self.name, block.number), data, [at for _, _, at in rows.places]))
        if not bad:
            return rows
        seqs = [seq for seq, _, at in rows.places if at in bad]
        log.warning("messages_damaged", stream=self.name, file=block.path.name, left_out=len(seqs), first=seqs[0])
        return rows._replace(places=[place for place in rows.places if place[2] not in bad])


class Damage(NamedTuple):
    """What is damaged in a block.

    Attributes:
        messages: sequences and subjects of those whose checksums are wrong.
        lost_bytes: that are not whole records.
    """

    stream: str
    file: str
    messages: list[tuple[int, str]]
    lost_bytes: int


class FileCheck(NamedTuple):
    """What a look at files has found. ``unreadable``: streams that are encrypted or compressed."""

    damages: list[Damage]
    read_bytes: int
    all_bytes: int
    unreadable: list[str]


def check_files(folders: Sequence[Path], limit: int = 0) -> FileCheck:
    """Verify the checksums of stored messages, also while a broker runs on them.

    Args:
        folders: of streams.
        limit: bytes to read, about, the newest blocks first; 0: all.
    """
    blocks: list[tuple[float, int, Path, int, re.Pattern[bytes] | None, bool]] = []
    unreadable = []
    for folder in folders:
        try:
            config = msgspec.json.decode((folder / "meta.inf").read_bytes(), type=_Config)
        except (OSError, msgspec.MsgspecError):  # it is being made, or deleted
            continue
        if (folder / "meta.key").exists() or config.compression not in ("", "none"):
            unreadable.append(folder.name)
            continue
        numbers, starts = _numbers(folder / "msgs"), resume_pattern(config.subjects)
        for number in numbers:
            path = folder / "msgs" / f"{number}.blk"
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            blocks.append((stat.st_mtime, stat.st_size, path, number, starts, number == numbers[-1]))
    damages, read = [], 0
    for _, size, path, number, starts, is_last in sorted(blocks, key=lambda each: each[0], reverse=True):
        if limit and read >= limit:
            break
        read += size
        damage = _damage(path, number, starts, is_last)
        # Of a block that the broker was just writing, another look finds nothing.
        if damage is not None and (damage := _damage(path, number, starts, is_last)) is not None:
            damages.append(damage)
    return FileCheck(damages, read, sum(size for _, size, *_ in blocks), unreadable)


def _damage(path: Path, number: int, starts: re.Pattern[bytes] | None, is_last: bool) -> Damage | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # its last message was just deleted
        return None
    stream = path.parent.parent.name
    key = key_of(stream, number)
    rows = records(data, Resume(key, starts) if starts is not None else None)
    bad = set(damaged(key, data, [at for _, _, at in rows.places]))
    lost = rows.damaged - (rows.tail if is_last else 0)
    if not bad and not lost:
        return None
    messages = [(seq, subject_of(data, at).decode(errors="replace")) for seq, _, at in rows.places if at in bad]
    return Damage(stream, path.name, messages, lost)


class _Limits(NamedTuple):
    messages: int
    first_seq: int
    first_ns: int
    last_seq: int


def _limits(index: Path, last_block: Path) -> _Limits | None:
    """What the server noted about the stream when it stopped; None: nothing, or it has written since.

    The file begins with two bytes of its form and a row of variable-length numbers: messages, bytes, first sequence,
    its time, last sequence. It ends with the checksum of the last record then, and its own.
    """
    try:
        with index.open("rb") as file:  # it names every subject: 60 bytes for each record of DONE
            data = file.read(_INDEX_HEAD)
            file.seek(-2 * CHECKSUM_BYTES, 2)
            noted_checksum = file.read(CHECKSUM_BYTES)
        with last_block.open("rb") as file:
            file.seek(-CHECKSUM_BYTES, 2)
            last_checksum = file.read()
    except OSError:
        return None
    if len(data) < 32 or data[0] != _INDEX_MAGIC or data[1] not in _INDEX_VERSIONS:
        return None
    if noted_checksum != last_checksum:
        return None
    numbers = array("Q")
    at = 2
    while len(numbers) < 5:
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        numbers.append(value & (2**64 - 1))
    first_ns = (numbers[3] >> 1) ^ -(numbers[3] & 1)  # signed, the sign last
    return _Limits(numbers[0], numbers[2], first_ns, numbers[4])


def subject_pattern(subject: str) -> re.Pattern[bytes] | None:
    """A subject with wildcards as a pattern for encoded subjects; None: every subject."""
    if subject == ">":
        return None
    parts = [{"*": rb"[^.]+", ">": rb".+"}.get(part) or re.escape(part.encode()) for part in subject.split(".")]
    return re.compile(rb"\.".join(parts), re.DOTALL)


def without_limits(name: str, meta: bytes) -> tuple[bytes, str]:
    """A stream's metadata without an age limit and for a single server, and its checksum.

    The checksum is HighwayHash-64 under the SHA-256 of the stream's name, in hex (nats-server ``filestore.go``).

    Raises:
        ValueError: the metadata is not what nats-server writes.
    """
    try:
        config = msgspec.json.decode(meta, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the metadata of stream {name} is damaged: {error}") from error
    lifted = msgspec.json.encode(config | {"max_age": 0, "num_replicas": 1})
    return lifted, highway_hash_64(hashlib.sha256(name.encode()).digest(), lifted).hex()


# --- writing ---

BLOCK_BYTES = 4 << 20


def _bad(text: str) -> ValueError:
    from penstock.log_tools.sources.log_line import BadLine

    return BadLine(text)


class StreamFiles:
    """Writes one stream under recorded sequences and times. ``add`` its messages in order, then ``close``.

    A broker gives every message that is published a new sequence and the present time, and ``inspect``, traces and
    what-if need the recorded ones. The server reads a stream without an index from its blocks, and marks missing
    sequences as deleted.

    Args:
        folder: of the stream; it is made.
        recorded: how the recorded subjects begin, and ``stored``: how they are to begin.
    """

    def __init__(self, folder: Path, config: dict[str, Any], recorded: str, stored: str) -> None:
        self._folder = folder
        self._name = folder.name
        self._config = config
        self._from, self._to = recorded, stored
        self._parts: list[tuple[bytes, bytes, bytes, bytes]] = []  # header, subject, headers, body
        self._bytes = 0
        self._blocks = 0
        self._last = 0
        self.messages = 0
        (self._folder / "msgs").mkdir(mode=0o700, parents=True)

    def add(self, record: "LogLine") -> None:
        """
        Raises:
            BadLine: a sequence that does not follow the one before, or a subject of another namespace.
        """
        if record.seq <= self._last:
            raise _bad(f"sequence {record.seq} of {record.stream} comes after {self._last}")
        if not record.subject.startswith(self._from):
            raise _bad(f"subject {record.subject} does not begin with {self._from}")
        self._last = record.seq
        subject = (self._to + record.subject[len(self._from) :]).encode()
        headers = b""
        if record.headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in record.headers.items())
            headers = f"NATS/1.0\r\n{lines}\r\n".encode()
        size = HEADER.size + len(subject) + len(record.data) + CHECKSUM_BYTES
        if headers:
            size += 4 + len(headers)
        head = HEADER.pack(size | bool(headers) << 31, record.seq, parse_time(record.time), len(subject))
        self._parts.append((head, subject, headers, record.data))
        self._bytes += size
        self.messages += 1
        if self._bytes >= BLOCK_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the buffered messages and the stream's metadata."""
        self._flush()
        meta, checksum = without_limits(self._name, msgspec.json.encode(self._config))
        (self._folder / "meta.inf").write_bytes(meta)
        (self._folder / "meta.sum").write_text(checksum)

    def _flush(self) -> None:
        if not self._parts:
            return
        self._blocks += 1
        # The server's checksum leaves out both lengths.
        hashed = [head[4:20] + subject + headers + data for head, subject, headers, data in self._parts]
        sums = checksums(key_of(self._name, self._blocks), hashed)
        out = bytearray()
        for (head, subject, headers, data), checksum in zip(self._parts, sums, strict=True):
            length = len(headers).to_bytes(4, "little") if headers else b""
            out += b"".join((head, subject, length, headers, data, checksum))
        (self._folder / "msgs" / f"{self._blocks}.blk").write_bytes(out)
        self._parts.clear()
        self._bytes = 0


# --- versions ---


class OtherServer(ValueError):
    """The nats-server of this machine may store streams in another form."""


def known_form(version: tuple[int, int, int] | None) -> bool:
    """Whether the files of a server are as this module reads and writes them. None: unknown, so they are tried."""
    return version is None or (version >= MINIMUM and version[:2] <= TESTED[:2])


def written_by(data_dir: Path) -> tuple[int, int, int] | None:
    """The version of the server that ran last on a data folder, from its log; None: unknown."""
    try:
        with (data_dir / "nats.log").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            at = log.rfind(b"[INF]   Version:")
            line = log[at : log.find(b"\n", at)] if at >= 0 else b""
    except (OSError, ValueError):  # none, or empty
        return None
    return parse_version("v" + line.decode(errors="replace").rpartition(" ")[2])


def check_server() -> None:
    """
    Raises:
        OtherServer: the nats-server that would read files written here is of a later version than was tested.
        NoServerBinary: there is none.
    """
    found = subprocess.run([find_server(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    if not known_form(parse_version(found)):
        raise OtherServer(
            f"{found.strip()} may store streams in another form than {dotted(TESTED)}, which was tested: install that "
            "one (pip install penstock), or import into a running broker with --nats-url"
        )
