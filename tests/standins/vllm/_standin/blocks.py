"""The block pool of one engine: blocks by number, found again by hash, with vLLM's events. Knows tokens and KV."""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import sha256
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored

Kv = Any


class Block:
    __slots__ = ("hash", "kv", "number", "refs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.hash: bytes | None = None
        self.refs = 0
        self.kv: Kv = None


Media = list[tuple[int, int, str]]  # position, tokens, identifier of each


def keys(salt: str | None, lora: str | None, start: int, size: int, media: Media) -> tuple[Any, ...] | None:
    """What a block's hash has besides its tokens: the adapter's name, the media in it, and in the first the salt."""
    within = [(name, at - start) for at, count, name in media if at < start + size and at + count > start]
    return tuple(each for each in (lora, *within, salt if start == 0 else None) if each) or None


def chain(
    tokens: list[int], size: int, salt: str | None, lora: str | None = None, media: Media | None = None
) -> list[bytes]:
    """Hashes of the full blocks."""
    found: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        extra = keys(salt, lora, start, size, media or [])
        text = repr((found[-1] if found else b"", tokens[start : start + size], extra))
        found.append(sha256(text.encode()).digest())
    return found


def external(value: bytes | None) -> bytes | int | None:
    if value is None or os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
        return value
    return int.from_bytes(value, "big") & ((1 << 64) - 1)


class Pool:
    """``total`` blocks, one of which is the null block. Freed blocks keep their content until they are taken."""

    def __init__(self, total: int, size: int, *, caching: bool) -> None:
        self.size, self.caching = size, caching
        self.usable = total - 1
        blocks = [Block(number) for number in range(1, total)]
        self.free: OrderedDict[int, Block] = OrderedDict((block.number, block) for block in blocks)
        self._by_hash: dict[bytes, dict[int, Block]] = {}
        self.events: list[Any] = []

    @property
    def usage(self) -> float:
        return 1 - len(self.free) / self.usable

    def find(self, hashes: list[bytes], most: int) -> list[Block]:
        """The longest chain of cached blocks; not held yet."""
        found: list[Block] = []
        for value in hashes[:most] if self.caching else ():
            copies = self._by_hash.get(value)
            if not copies:
                break
            found.append(next(iter(copies.values())))
        return found

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.refs:
                del self.free[block.number]
            block.refs += 1

    def take(self, count: int) -> list[Block] | None:
        """New blocks; None: there are not so many."""
        if count > len(self.free):
            return None
        found = []
        for _ in range(count):
            _, block = self.free.popitem(last=False)
            self._evict(block)
            block.refs = 1
            found.append(block)
        return found

    def release(self, blocks: list[Block]) -> None:
        """In the order of a sequence; its last block goes first when room is needed."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0
            if not block.refs:
                self.free[block.number] = block
                if block.hash is None:
                    self.free.move_to_end(block.number, last=False)

    def cache(
        self,
        blocks: list[Block],
        hashes: list[bytes],
        tokens: list[int],
        start: int,
        salt: str | None,
        lora: tuple[str, int] | None = None,
        media: Media | None = None,
    ) -> None:
        """Full blocks ``start`` .. of a sequence can be found from now on; also where others have the same content."""
        if not self.caching or start >= len(blocks):
            return
        for block, value in zip(blocks[start:], hashes[start : len(blocks)], strict=True):
            assert block.hash is None
            block.hash = value
            self._by_hash.setdefault(value, {})[block.number] = block
        name = lora[0] if lora else None
        extras: list[Any] = [
            keys(salt, name, at * self.size, self.size, media or []) for at in range(start, len(blocks))
        ]
        self.events.append(
            BlockStored(
                block_hashes=[external(value) for value in hashes[start : len(blocks)]],  # type: ignore[misc]
                parent_block_hash=external(hashes[start - 1]) if start else None,
                token_ids=tokens[start * self.size : len(blocks) * self.size],
                block_size=self.size,
                lora_id=lora[1] if lora else None,
                medium=MEDIUM_GPU,
                lora_name=name,
                extra_keys=extras,
                group_idx=0,
            )
        )

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        copies = self._by_hash[block.hash]
        del copies[block.number]
        if not copies:
            del self._by_hash[block.hash]
        self.events.append(BlockRemoved(block_hashes=[external(block.hash)], medium=MEDIUM_GPU, group_idx=0))  # type: ignore[list-item]
        block.hash = block.kv = None

    def reset(self) -> bool:
        if len(self.free) != self.usable:
            return False
        self._by_hash.clear()
        for block in self.free.values():
            block.hash = block.kv = None
        self.events.append(AllBlocksCleared())
        return True
