"""The KV pool of one scheduler: each block is in it once, and SGLang's events say so."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm._standin.blocks import Block, Media
from vllm._standin.blocks import Pool as _Pool


def signed(value: bytes) -> int:
    return int.from_bytes(value[:8], "big", signed=True)


def _same(last: BlockStored, salt: str | None, name: str | None, parent: int | None) -> bool:
    return (last.cache_salt, last.lora_name, last.block_hashes[-1]) == (salt, name, parent)


class Pool(_Pool):
    def __init__(self, total: int, size: int, *, caching: bool) -> None:
        super().__init__(total, size, caching=caching)
        self.lora_names: dict[str, str] = {}  # by id

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
        if not self.caching or start >= len(blocks):
            return
        name = self.lora_names[lora[0]] if lora else None
        for at in range(start, len(blocks)):
            value, block = hashes[at], blocks[at]
            assert block.hash is None
            copies = self._by_hash.setdefault(value, {})
            block.hash = value
            copies[block.number] = block
            if len(copies) > 1:
                continue
            parent = signed(hashes[at - 1]) if at else None
            content = tokens[at * self.size : (at + 1) * self.size]
            last = self.events[-1] if self.events else None
            if isinstance(last, BlockStored) and _same(last, salt, name, parent):
                last.block_hashes.append(signed(value))
                last.token_ids.extend(content)
            else:
                stored = BlockStored([signed(value)], parent, content, self.size, None, "GPU", salt, None, name)
                self.events.append(stored)

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        copies = self._by_hash[block.hash]
        del copies[block.number]
        if not copies:
            del self._by_hash[block.hash]
            self.events.append(BlockRemoved([signed(block.hash)], medium="GPU"))
        block.hash = block.kv = None

    def reset(self) -> bool:
        before: list[Any] = list(self.events)
        done = super().reset()
        if done:
            self.events = [*before, AllBlocksCleared()]
        return done
