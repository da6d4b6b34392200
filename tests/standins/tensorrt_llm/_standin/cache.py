"""Block reuse: a tree of blocks as TensorRT-LLM keeps it, with its events. Knows tokens and KV, no requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from tensorrt_llm._standin.model import Kv
from tensorrt_llm._standin.variant import LATER, LATEST, QUIRKS

PRIORITY = 35
Key = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]  # tokens, (hash, start offset) of media in the block


class Block:
    __slots__ = ("children", "hash", "key", "kv", "parent", "priority", "refs", "used")

    def __init__(self, parent: Block | None, key: Key, kv: Kv | None, seed: str = "", priority: int = PRIORITY) -> None:
        self.parent, self.key, self.kv, self.priority = parent, key, kv, priority
        text = f"{seed}|{parent.hash if parent else 0}|{key}"
        digest = blake2b(text.encode(), digest_size=32).digest()
        self.hash: int | str = digest.hex() if LATEST else int.from_bytes(digest[:8], "little")  # V2's or V1's
        self.children: dict[Key, Block] = {}
        self.refs = 0
        self.used = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[0]


class Events:
    """What happens to the blocks of one rank, in the words of 1.2.1's serialiser, once for each window.

    A window smaller than the largest sees the last blocks of a prompt only, so that its parents do not chain.
    """

    def __init__(self, windows: list[int], size: int, rank: int | None) -> None:
        self._windows, self._size, self._rank = sorted(set(windows)), size, rank
        self._ids = itertools.count()
        self._pending: list[dict[str, Any]] = []
        self._known: dict[int, set[int | str]] = {window: set() for window in self._windows}

    def take(self) -> list[dict[str, Any]]:
        """Since the last call."""
        found, self._pending = self._pending, []
        return found

    def put(self, window: int, data: dict[str, Any]) -> None:
        event: dict[str, Any] = {"event_id": next(self._ids), "data": data, "window_size": window}
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        if LATER:
            event["layer_group_id"] = self._windows.index(window) if window in self._windows else 0
            event["hash_algo"] = "v2_sha256" if LATEST else "v1_block_key"
        self._pending.append(event)

    def created(self, primary: int, secondary: int) -> None:
        for window in self._windows:
            self.put(window, {"type": "created", "num_blocks_per_cache_level": [primary, secondary]})

    def stored(self, blocks: list[Block]) -> None:
        for window in self._windows:
            seen = blocks if window == self._windows[-1] else blocks[-max(1, window // self._size) :]
            self._known[window].update(block.hash for block in seen)
            above = seen[0].parent
            parent = above.hash if above is not None and above.parent is not None else None
            self.put(window, {"type": "stored", "parent_hash": parent, "blocks": [_stored(block) for block in seen]})

    def removed(self, blocks: list[Block]) -> None:
        for window in self._windows:
            gone = [block.hash for block in blocks if block.hash in self._known[window]]
            self._known[window].difference_update(gone)
            if not gone:
                continue
            last = next((e for e in reversed(self._pending) if e["window_size"] == window), None)
            if last is not None and last["data"]["type"] == "removed":
                last["data"]["block_hashes"] += gone
            else:
                self.put(window, {"type": "removed", "block_hashes": gone})


def _stored(block: Block) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": block.hash,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in block.tokens],
        "cache_level": 0,
        "priority": block.priority,
    }
    media = [{"type": "mm_key", "hash": each, "start_offset": start} for each, start in block.key[1]]
    if QUIRKS.mm_keys != "absent":
        found["mm_keys"] = media if QUIRKS.mm_keys == "full" else []
    return found


class Cache:
    """Blocks that can be found again, and how many of the pool are taken.

    ``taken``: blocks of running sequences that are not in the tree (yet).
    """

    def __init__(self, total: int, size: int, events: Events, *, reuse: bool, partial: bool, host: int) -> None:
        self.total, self.size, self.events = total, size, events
        self._reuse, self._partial = reuse, partial
        self._roots: dict[str, Block] = {}
        self._all: dict[int, Block] = {}  # by id()
        self._clock = itertools.count()
        self.taken = 0
        events.created(total, host)

    # -- counting

    @property
    def used(self) -> int:
        return self.taken + sum(block.refs > 0 for block in self._all.values())

    @property
    def free(self) -> int:
        """As the statistics say it: what can be reused is free as well."""
        return self.total - self.used

    # -- use

    def root(self, seed: str) -> Block:
        if seed not in self._roots:
            self._roots[seed] = Block(None, ((), ()), None, seed)
        return self._roots[seed]

    def find(self, seed: str, keys: Callable[[int, int], Key], tokens: int) -> tuple[list[Block], Kv | None]:
        """The cached beginning of a prompt: whole blocks (now held) and the KV of a part of the next.

        Args:
            keys: key of the tokens from a position to another.
            tokens: how many may come from the cache.
        """
        found: list[Block] = []
        if not self._reuse:
            return found, None
        node = self.root(seed)
        while (len(found) + 1) * self.size <= tokens:
            at = len(found) * self.size
            child = node.children.get(keys(at, at + self.size))
            if child is None:
                break
            found.append(child)
            node = child
        for block in found:
            self._hold(block)
        at = len(found) * self.size
        best, part = 0, None
        if self._partial:
            for child in node.children.values():
                same = 0
                limit = min(len(child.tokens), tokens - at)
                wanted = keys(at, at + limit)[0]
                while same < limit and child.tokens[same] == wanted[same]:
                    same += 1
                if child.key[1] or keys(at, at + limit)[1]:
                    same = 0  # never a part of a block with media
                if same > best:
                    assert child.kv is not None
                    best, part = same, child.kv[:, :, :, :same]
        return found, part

    def _hold(self, block: Block) -> None:
        block.refs += 1
        block.used = next(self._clock)

    def release(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.refs -= 1
            block.used = next(self._clock)
            assert block.refs >= 0

    def take(self, count: int) -> None:
        self._make_room(count)
        self.taken += count

    def put_back(self, count: int) -> None:
        self.taken -= count
        assert self.taken >= 0

    def store(self, held: list[Block], seed: str, pieces: Iterator[tuple[Key, Kv, int]]) -> list[Block]:
        """Put blocks that are taken behind those that are held; returns their places in the tree, held.

        Where another sequence stored the same block meanwhile, that one is held and the own one given back.
        """
        if not self._reuse:
            return []
        node = held[-1] if held else self.root(seed)
        found: list[Block] = []
        run: list[Block] = []
        for key, kv, priority in pieces:
            child = node.children.get(key)
            self.taken -= 1
            if child is None:
                child = node.children[key] = Block(node, key, kv, priority=priority)
                self._all[id(child)] = child
                child.refs = 1
                child.used = next(self._clock)
                run.append(child)
            else:
                self._hold(child)
                if run:
                    self.events.stored(run)
                    run = []
            found.append(child)
            node = child
        if run:
            self.events.stored(run)
        return found

    # -- room

    def _make_room(self, count: int) -> None:
        while self.total - self.taken - len(self._all) < count:
            idle = [block for block in self._all.values() if not block.refs and not block.children]
            assert idle, "the scheduler promised more blocks than there are"
            self._remove(min(idle, key=lambda block: (block.priority, block.used)))

    def _remove(self, block: Block) -> None:
        assert block.parent is not None
        del block.parent.children[block.key]
        del self._all[id(block)]
        self.events.removed([block])
