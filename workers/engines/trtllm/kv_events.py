"""Translates TensorRT-LLM's KV-cache events: its opaque hashes become our block names, from tokens and parents.

Pure: no engine, no clock, no thread. There is one translator per attention-DP rank (see ``by_rank``). A block that
cannot be named for certain (its parent was lost, two tenants have a copy of its tokens, or its media are unknown) is
left out with all its descendants: a router then sees fewer blocks than there are, never more. Blocks in host
memory have ``tier`` 1.

The KV cache manager V2 of later releases names blocks by 64 hexadecimal digits, and tells of each group of layers on
its own: a block counts while all groups with the largest window hold it on the device.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import structlog

from penstock.schemas import block_hashes
from penstock.workers.engines.events.translator import Block, EventTranslator, key_of

log = structlog.get_logger("engine")

MAX_REMEMBERED = 16_384  # first blocks of prompts, and media; about 8 MB


class Roots:
    """The root of the block names of recent prompts, by their first block: events do not contain it.

    Least recently used prompts are forgotten first.
    """

    def __init__(self, block_size: int, default: bytes, remembered: int = MAX_REMEMBERED) -> None:
        self._block_size = block_size
        self._default = default
        self._remembered = remembered
        self._first: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._others = False  # a prompt with another root than the default was seen
        self._media: OrderedDict[bytes, None] = OrderedDict()

    def learn(self, prompt: Seq[int], root: bytes, media: Iterable[bytes] = ()) -> None:
        """Note a prompt whose blocks may enter the cache."""
        self._others = self._others or root != self._default
        for digest in media:
            self._media[digest] = None
            self._media.move_to_end(digest)
        while len(self._media) > self._remembered:
            self._media.popitem(last=False)
        if len(prompt) < self._block_size:
            return
        tokens = pack(prompt[: self._block_size])
        roots = self._first.setdefault(tokens, set())
        if len(roots) < 2:  # of which there may be any number, and two are as ambiguous
            roots.add(root)
        self._first.move_to_end(tokens)
        while len(self._first) > self._remembered:
            self._first.popitem(last=False)

    def of(self, tokens: bytes) -> bytes | None:
        """The root of a first block; None: unknown or ambiguous."""
        if not self._others:
            return self._default
        roots = self._first.get(tokens, ())
        return next(iter(roots)) if len(roots) == 1 else None

    def knows(self, media: bytes) -> bool:
        return media in self._media


class TrtllmFormat:
    """Implements ``events.translator.EventFormat`` for one rank's events.

    Args:
        block_size: tokens per block, ours and the engine's.
        roots: updated with each submitted sequence.

    Attributes:
        window: the largest attention window known, in tokens; only its events are followed.
    """

    def __init__(self, block_size: int, roots: Roots) -> None:
        self.window: int | None = None
        self._block_size = block_size
        self._roots = roots
        self._created: set[tuple[int, int]] = set()  # windows and groups of layers
        self._groups: set[int] = set()  # with the window that is followed
        self._held: dict[bytes | int, set[int]] = {}  # by which of several groups
        self._expected: int | None = None  # the next event_id

    def lost(self) -> None:
        self._expected = None  # the number of lost events is unknown
        self._held.clear()

    def apply(self, event: Mapping[str, Any], blocks: EventTranslator) -> None:
        self._check_sequence(int(event["event_id"]), blocks)
        data, window, group = event["data"], event.get("window_size"), event.get("layer_group_id") or 0
        kind = data["type"]
        if kind == "created":
            self._create(int(window) if window is not None else 0, group, blocks)
        elif window is not None and self.window is not None and window != self.window:
            blocks.counts.filtered += 1
        elif kind == "stored":
            self._stored(data, group, blocks)
        elif kind == "removed":
            for key in map(_key_of, data["block_hashes"]):
                self._removed(key, group, blocks)
        elif kind == "updated":
            self._updated(data, group, blocks)
        else:
            raise ValueError(f"event type {kind!r}")

    def _check_sequence(self, event_id: int, blocks: EventTranslator) -> None:
        """Detect lost events. Ids count all events of a rank, of all windows, so check before any filter."""
        if self._expected is not None and event_id != self._expected:
            blocks.counts.lost += 1
            log.warning(
                "kv_events_lost",
                expected=self._expected,
                got=event_id,
                action="forgetting this worker's blocks; raise kv_cache_config.event_buffer_max_size",
            )
            self._clear(blocks)
        self._expected = event_id + 1

    def _clear(self, blocks: EventTranslator) -> None:
        blocks.clear()
        self._held.clear()

    def _create(self, window: int, group: int, blocks: EventTranslator) -> None:
        """A cache was created: at the start, one event per window or group. The largest window is followed."""
        if (window, group) in self._created:  # it was created again
            self._clear(blocks)
            self._created.clear()
        self._created.add((window, group))
        if window > (self.window or 0):
            if self.window is not None:
                self._clear(blocks)
            self.window = window
        self._groups = {group for window, group in self._created if window == (self.window or 0)}

    def _stored(self, data: Mapping[str, Any], group: int, blocks: EventTranslator) -> None:
        keys = [_key_of(block["block_hash"]) for block in data["blocks"]]
        if len(self._groups) > 1:
            for key in keys:
                self._held.setdefault(key, set()).add(group)
        above = data.get("parent_hash")
        parent = None if above is None else blocks.tree.find(_key_of(above))
        if above is not None and parent is None:
            blocks.counts.unnamed += len(keys)
            return
        for key, block in zip(keys, data["blocks"], strict=True):
            tokens = block["tokens"]
            if key in self._held and not self._held[key] >= self._groups:
                return  # the last group's event has what follows, too
            if len(tokens) < self._block_size:
                blocks.counts.partial += 1
                return  # blocks after it could not be named either
            if len(tokens) > self._block_size:
                raise ValueError(f"a block has {len(tokens)} tokens, expected {self._block_size}")
            node = blocks.tree.find(key)
            if node is None:
                digest = self._name(parent, tokens, block.get("mm_keys") or ())
                if digest is None:
                    blocks.counts.unnamed += 1
                    return
                node = blocks.tree.store(key, parent, digest, int(block.get("cache_level") or 0))
            parent = node

    def _name(self, parent: Block | None, tokens: Seq[Any], media: Seq[Any]) -> bytes | None:
        """None: no prompt, or prompts of several roots, begin with these tokens, or their media are unknown."""
        ids = [token["token_id"] if isinstance(token, Mapping) else token for token in tokens]
        has_extra_ids = any(isinstance(token, Mapping) and token.get("token_extra_id") for token in tokens)
        packed = pack(ids)
        above = self._roots.of(packed) if parent is None else parent.digest
        if above is None or (has_extra_ids and not media):
            return None
        digests: list[bytes] = []
        for key in media:
            digest = bytes.fromhex(key["hash"])
            if key.get("start_offset") and digests[-1:] == [digest]:
                continue  # the rest of a medium that text interrupts
            digests.append(digest)
        if not all(map(self._roots.knows, digests)):
            return None
        return block_hashes.extend(above, packed, b"".join(digests))

    def _removed(self, key: bytes | int, group: int, blocks: EventTranslator) -> None:
        held = self._held.get(key, set())
        held.discard(group)
        if not held:
            self._held.pop(key, None)
        blocks.tree.remove_subtree(key)

    def _updated(self, data: Mapping[str, Any], group: int, blocks: EventTranslator) -> None:
        """A block moved to another memory, or its priority changed (ignored)."""
        change, key = data.get("cache_level"), _key_of(data["block_hash"])
        block = blocks.tree.find(key)
        if block is None or not isinstance(change, Mapping) or change.get("new_value") is None:
            return
        if len(self._groups) > 1:  # one of them has it elsewhere now
            self._removed(key, group, blocks)
        else:
            blocks.tree.move(block, int(change["new_value"]))


def _key_of(value: Any) -> bytes | int:
    return value.encode() if isinstance(value, str) else key_of(value)


def by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Events by rank, in order; those without a valid rank are rank 0's. Empty ones are not events."""
    events_of: dict[int, list[Mapping[str, Any]]] = {}
    for event in filter(None, events):
        rank = event.get("attention_dp_rank") if isinstance(event, Mapping) else None
        events_of.setdefault(rank if isinstance(rank, int) and rank > 0 else 0, []).append(event)
    return events_of


def pack(tokens: Seq[int]) -> bytes:
    """
    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return array("I", tokens).tobytes()
