"""The mock's memory: real bytes in pools that other workers read and write, so that a handoff moves something.

The contents depend on the same inputs as a model's. A block holds a checksum of its tokens, of all blocks before it and
of the media so far; a slot of embeddings holds a stream derived from the medium's raw bytes. So a worker that continues
with blocks of another worker can verify that they are the right ones, and an answer shows whether its images were.
"""

import ctypes
import mmap
import struct
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3

from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockCopies
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.engine_protocol import EngineError, RequestError

BLOCK_BYTES = 64
SLOT_BYTES = 64
KINDS = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "embedding"})

_KEY = blake3(b"mock embeddings").digest()
_pack = struct.Struct("<I").pack
_unpack_from = struct.Struct("<I").unpack_from


def embedding(raw: bytes, slots: int = 1) -> bytes:
    """The mock's embedding of a medium."""
    return blake3(raw, key=_KEY).digest(slots * SLOT_BYTES)


def seen(media: Seq[bytes], before: int = 0) -> int:
    """Checksum of embeddings, in order: the mock's state of a sequence's media."""
    for each in media:
        before = crc32(each, before)
    return before


class Pages:
    """``count`` equal pages in private anonymous memory, which takes no space until it is used."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._map = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = memoryview(self._map)

    def memory(self, layout: str) -> Memory:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return Memory(base=base, block_bytes=self.size, blocks=self.count, layout=layout)

    def get(self, page: int) -> bytes:
        return bytes(self.data[page * self.size : (page + 1) * self.size])

    def put(self, page: int, content: bytes) -> None:
        self.data[page * self.size : (page + 1) * self.size] = content

    def close(self) -> None:
        self.data.release()
        try:
            self._map.close()
        except BufferError:  # still being read; it is freed with the last reader
            pass


class MockCopies:
    """Implements ``penstock.workers.engines.core.blocks.BlockCopier``.

    Args:
        pages: of the KV pool; None: it has no memory.
        load_s: that bringing a block back takes.
        sleep: waits for that.
    """

    def __init__(self, pages: Pages | None, slots: int, load_s: float, sleep: Callable[[float], None]) -> None:
        self._pages, self._slots = pages, Pages(slots, pages.size) if pages is not None else None
        self.load_s, self._sleep = load_s, sleep

    def copy(self, copies: BlockCopies) -> None:
        if self._pages is not None and self._slots is not None:
            for block, slot in copies.saves:
                self._slots.put(slot, self._pages.get(block))
            for slot, block in copies.loads:
                self._pages.put(block, self._slots.get(slot))
        if copies.loads and self.load_s:
            self._sleep(self.load_s * len(copies.loads))

    def settle(self, blocks: Collection[int]) -> None: ...

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()


class Medium(NamedTuple):
    raw: bytes
    tokens: int


def _rows(raw: bytes) -> int:
    import safetensors  # late: only a vision model needs it

    try:
        ((_, tensor),) = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
        tokens, _ = tensor["shape"]
    except Exception as error:  # of the format's own type, or of another number of tensors or axes
        raise RequestError(Code.invalid_request, "an embedding is one tensor of (tokens, hidden)") from error
    return int(tokens)


class MockVisionEncoder:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``: every image takes one slot."""

    needs_grid = False

    def __init__(self, slots: int, slot_tokens: int) -> None:
        self.slots, self.slot_tokens = slots, slot_tokens
        self.pages = Pages(slots, SLOT_BYTES)

    def prepare(self, raw: bytes, kind: str) -> object:
        """Images are not decoded; of embeddings only the number of tokens is read.

        Raises:
            RequestError: an unknown kind, no bytes, or embeddings that cannot be read.
        """
        if kind not in KINDS or not raw:
            raise RequestError(Code.invalid_request, f"{len(raw)} bytes of kind {kind!r} are not a medium")
        return Medium(raw, self.slot_tokens if kind != "embedding" else _rows(raw))

    def tokens(self, prepared: object) -> int:
        assert isinstance(prepared, Medium)
        return prepared.tokens

    def fill(self, media: Seq[tuple[list[int], object]]) -> None:
        for slots, medium in media:
            assert isinstance(medium, Medium)
            embeddings = embedding(medium.raw, len(slots))
            for number, slot in enumerate(slots):
                part = embeddings[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
                self.pages.data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = part

    def read(self, slots: Seq[int]) -> bytes:
        return b"".join(self.pages.data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for slot in slots)

    def memory(self) -> Memory:
        return self.pages.memory(f"mock({self.slot_tokens},{SLOT_BYTES})")

    def close(self) -> None:
        self.pages.close()


class MockBlocks:
    """The KV pool. A block: media seen so far (4 bytes) | checksum of the prompt's end, if it lies in this block |
    checksum of the whole block, once it is full (half each of what is left).
    """

    def __init__(self, blocks: int, block_size: int, block_bytes: int, encoder: MockVisionEncoder | None) -> None:
        if block_bytes < 12:
            raise ValueError(f"a block of the mock's memory needs 12 bytes, not {block_bytes}")
        self._size = block_size
        self._width = (block_bytes - 4) // 2
        self._encoder = encoder
        self.pages = Pages(blocks, block_bytes)

    @property
    def layers(self) -> int:
        """Number of layers in a block, of equal size."""
        return self.memory().layers

    @contextmanager
    def without_last_layer(self, plan: Seq[ScheduledSequence]) -> Iterator[None]:
        """A context in which the last layer of the blocks that a step writes is not computed yet."""
        size, data = self.pages.size, self.pages.data
        parts = []
        for scheduled in plan:
            start, end = scheduled.start, scheduled.start + scheduled.count
            for position in range(start // self._size, -(-end // self._size)):
                at = self._at(scheduled.sequence, position)
                parts.append(slice(at + size - size // self.layers, at + size))
        computed = [bytes(data[part]) for part in parts]
        for part, content in zip(parts, computed, strict=True):
            data[part] = bytes(len(content))
        try:
            yield
        finally:
            for part, content in zip(parts, computed, strict=True):
                data[part] = content

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """The tokens from ``start`` to ``end`` have been computed."""
        size, width = self._size, self._width
        for position in range(start // size, end // size):
            self._put(sequence, position, 4 + width, self._sum(sequence, position, (position + 1) * size))
        prompt = sequence.prompt_len
        if start < prompt <= end and prompt % size:
            self._put(sequence, prompt // size, 4, self._sum(sequence, prompt // size, prompt))

    def check(self, sequence: Sequence, end: int) -> None:
        """Check that the blocks hold the tokens before ``end``, which were not computed for this sequence.

        Raises:
            EngineError: they do not.
        """
        size, width = self._size, self._width
        parts = [(position, 4 + width, (position + 1) * size) for position in range(end // size)]
        if end % size:
            parts.append((end // size, 4, end))
        for position, offset, upto in parts:
            at = self._at(sequence, position)
            head = bytes(self.pages.data[at : at + 4])
            content = bytes(self.pages.data[at + offset : at + offset + width])
            if content != self._digest(sequence, position, upto, head):
                raise EngineError(
                    f"block {sequence.blocks[position]} does not hold the tokens {position * size} to {upto} of the "
                    f"sequence that was to continue with it"
                )

    def seen(self, sequence: Sequence) -> int:
        """Checksum of the media of a sequence whose prompt was computed."""
        return self._stored(sequence, (sequence.prompt_len - 1) // self._size)

    def _sum(self, sequence: Sequence, position: int, upto: int) -> bytes:
        head = _pack(self._head(sequence, position)) if sequence.media else b"\0\0\0\0"
        at = self._at(sequence, position)
        self.pages.data[at : at + 4] = head
        return self._digest(sequence, position, upto, head)

    def _digest(self, sequence: Sequence, position: int, upto: int, head: bytes) -> bytes:
        before = b""
        if position:
            at = self._at(sequence, position - 1) + 4 + self._width
            before = bytes(self.pages.data[at : at + self._width])
        tokens = pack_tokens(sequence.tokens[position * self._size : upto])
        return blake3(head + before + tokens).digest(self._width)

    def _head(self, sequence: Sequence, position: int) -> int:
        """Checksum of the media that begin before the end of a block."""
        last = (sequence.prompt_len - 1) // self._size
        if position > last:
            return self._stored(sequence, last)
        state = self._stored(sequence, position - 1) if position else 0
        for span in sequence.media:
            if span.position // self._size == position:
                if not span.slots:  # handed off with the block
                    return self._stored(sequence, position)
                assert self._encoder is not None
                state = seen([self._encoder.read(span.slots)], state)
        return state

    def _stored(self, sequence: Sequence, position: int) -> int:
        state: int = _unpack_from(self.pages.data, self._at(sequence, position))[0]
        return state

    def _at(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position] * self.pages.size

    def _put(self, sequence: Sequence, position: int, offset: int, value: bytes) -> None:
        at = self._at(sequence, position) + offset
        self.pages.data[at : at + len(value)] = value

    def memory(self) -> Memory:
        return self.pages.memory(f"mock({self._size},{self.pages.size})")

    def close(self) -> None:
        self.pages.close()
