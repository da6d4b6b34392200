"""One stream of a data folder, read from its files while no broker runs on it.

What a block begins with is read from its first record, the stream's limits from ``index.db``, which the server writes
when it stops. If it was killed instead, or single messages were deleted, all blocks are walked once for tombstones.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from penstock.log.sources.blocks import (
    CHECKSUM_BYTES,
    HAS_HEADERS,
    HEADER,
    LARGEST_GAP,
    BlockRecords,
    Place,
    damaged,
    key_of,
    records,
    subject_of,
)

log = structlog.get_logger("store")

KEPT_BLOCKS = 2  # of up to 8 MiB, for the next look at the same place
_INDEX_MAGIC = 11
_INDEX_VERSIONS = range(1, 5)


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
    created: str = ""  # as ``penstock.log.sources.restore`` does
    compression: str = "none"
    max_age: int = 0  # ns
    max_bytes: int = -1


class _Block(NamedTuple):
    number: int
    first_seq: int
    first_ns: int
    path: Path


class StoredStream:
    """A stream's messages, in both directions.

    Args:
        folder: of the stream, with ``meta.inf`` and ``msgs``. It is only read.
        check: called after each look at the files; raises if a broker has started on them.
        verify: leave out messages whose checksums are wrong, and say so.
    Raises:
        UnreadableFiles: see there.
        OSError, msgspec.MsgspecError: it is no stream's folder, or cannot be read.
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
        paths = sorted((int(path.stem), path) for path in (folder / "msgs").glob("*.blk") if path.stem.isdecimal())
        deleted: list[int] = []
        self._blocks = [block for number, path in paths if (block := _begin(number, path, deleted)) is not None]
        self._firsts = [block.first_seq for block in self._blocks]
        limits = _limits(folder / "msgs" / "index.db", paths[-1][1]) if paths else None
        self._deleted: frozenset[int] = frozenset()
        self._whole = limits is not None and limits.messages == limits.last_seq - limits.first_seq + 1
        if not self._whole:
            for block in self._blocks:
                deleted += self._records(block)[1].deleted
            self._deleted = frozenset(deleted)
            if limits is not None and not self._agree(limits):
                log.warning("index_damaged", stream=self.name)
                limits = None
        self.first_seq = limits.first_seq if limits is not None else self._firsts[0] if self._blocks else 0
        self.last_seq = limits.last_seq if limits is not None else self._last()

    @property
    def blocks(self) -> list[Path]:
        """The files that hold messages, in order."""
        return [block.path for block in self._blocks]

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
            after: behind this sequence; with 0, from the first message on that was stored at ``since_ns`` or later.
        """
        for data, places in self.by_block(after=after, since_ns=since_ns):
            for seq, time_ns, at in places:
                if pattern is None or pattern.fullmatch(subject_of(data, at)):
                    yield Raw(seq, time_ns, data, at)

    def by_block(self, *, after: int = 0, since_ns: int = 0) -> Iterator[tuple[bytes, list[Place]]]:
        """As ``forward``, a block at a time: its bytes, and where its messages are."""
        number = self._number_at(after + 1) if after else self._number_since(since_ns)
        for index in range(number, len(self._blocks)):
            data, places = self._block(index)
            if places and (places[0][0] <= after or places[0][1] < since_ns):
                places = [place for place in places if place[0] > after and place[1] >= since_ns]
            if places:
                since_ns = 0
                yield data, places

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

    def _block(self, index: int) -> tuple[bytes, list[Place]]:
        data, rows = self._records(self._blocks[index])
        return data, self._living(rows.places)

    def _living(self, places: list[Place]) -> list[Place]:
        if not self._deleted and places and places[0][0] >= self.first_seq:
            return places
        return [place for place in places if place[0] >= self.first_seq and place[0] not in self._deleted]

    def _places(self, number: int) -> Iterator[Place]:
        for block in self._blocks[number:]:
            yield from self._living(self._records(block)[1].places)

    def _agree(self, limits: "_Limits") -> bool:
        """Whether the blocks have the first message that the server noted, and nothing far from the last one."""
        if not limits.messages or not self._blocks:
            return True
        first = self._records(self._blocks[self._number_at(limits.first_seq)])[1].places
        begins = any(place[0] == limits.first_seq and place[1] == limits.first_ns for place in first)
        return begins and 0 <= limits.last_seq - self._last() <= LARGEST_GAP

    def _number_at(self, seq: int) -> int:
        return max(0, bisect_right(self._firsts, seq) - 1)

    def _number_since(self, since_ns: int) -> int:
        return max(0, bisect_left(self._blocks, since_ns, key=lambda block: block.first_ns) - 1) if since_ns else 0

    def _last(self) -> int:
        return max((place[0] for block in self._blocks[-1:] for place in self._records(block)[1].places), default=0)

    def _records(self, block: _Block) -> tuple[bytes, BlockRecords]:
        kept = self._kept.get(block.number)
        if kept is None:
            try:
                data = block.path.read_bytes()
            except FileNotFoundError:
                self._check()
                raise
            self._check()
            rows = records(data)
            if rows.damaged:
                log.warning("block_damaged", stream=self.name, file=block.path.name, bytes_left_out=rows.damaged)
            if self._verify:
                rows = self._intact(block, data, rows)
            kept = self._kept[block.number] = data, rows
            if len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return kept

    def _intact(self, block: _Block, data: bytes, rows: BlockRecords) -> BlockRecords:
        bad = set(damaged(key_of(self.name, block.number), data, [at for _, _, at in rows.places]))
        if not bad:
            return rows
        seqs = [seq for seq, _, at in rows.places if at in bad]
        log.warning("messages_damaged", stream=self.name, file=block.path.name, left_out=len(seqs), first=seqs[0])
        return rows._replace(places=[place for place in rows.places if place[2] not in bad])


def _begin(number: int, path: Path, deleted: list[int]) -> _Block | None:
    """What a block begins with; None: it has no message, and ``deleted`` gets what its tombstones name."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        length, seq, time_ns, _ = HEADER.unpack(head)
        file.seek(length & ~HAS_HEADERS)
        following = file.read(HEADER.size)
    if seq and not seq >> 62 and (len(following) < HEADER.size or HEADER.unpack(following)[1] > seq):
        return _Block(number, seq, time_ns, path)
    rows = records(path.read_bytes())
    if rows.places:
        return _Block(number, rows.first, rows.places[0][1], path)
    deleted += rows.deleted
    return None


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
        data = index.read_bytes()
        with last_block.open("rb") as file:
            file.seek(-CHECKSUM_BYTES, 2)
            last_checksum = file.read()
    except OSError:
        return None
    if len(data) < 32 or data[0] != _INDEX_MAGIC or data[1] not in _INDEX_VERSIONS:
        return None
    if data[-2 * CHECKSUM_BYTES : -CHECKSUM_BYTES] != last_checksum:
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
