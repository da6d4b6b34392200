"""From TensorRT-LLM's KV-cache events to ours: its opaque hashes become our block names, from tokens and parents.

Pure: no engine, no clock, no thread. One ``Translator`` per attention-DP rank (see ``by_rank``), whose names are the
rank's own; fed with several, a name is ours while any of them holds it. What cannot be named for certain (a parent that
was lost, tokens of which two tenants have a copy, media of unknown content) is left out together with what hangs below
it: a router then knows less than there is, never more.

Names that we publish are closed towards the front, as routers expect: a block is shown while it and all before it are
in device memory. Blocks in host memory are shown with ``tier`` 1.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog

from schemas import blocks
from schemas.kv import Cleared, KvEvent, Removed, Stored

log = structlog.get_logger("engine")

REMEMBERED = 16_384  # first blocks of prompts, and media; about 8 MB


class Counts(msgspec.Struct):
    """Since the start. Blocks, except ``gaps`` (times that events were lost) and ``malformed`` (events)."""

    stored: int = 0
    removed: int = 0
    partial: int = 0
    filtered: int = 0  # events of other attention windows
    orphans: int = 0  # unknown parent
    ambiguous: int = 0  # no or several prompts begin so
    gaps: int = 0
    malformed: int = 0


class _Block(msgspec.Struct, eq=False):
    """One block of one rank. ``shown``: it and all before it are on the device."""

    digest: bytes
    parent: "_Block | None"
    level: int
    children: "dict[int, _Block]"
    hash: int
    shown: bool = False


class _Rank(msgspec.Struct, eq=False):
    blocks: dict[int, _Block] = {}
    roots: dict[int, _Block] = {}
    partial: set[int] = set()
    expected: int | None = None  # the next event_id
    created: set[int] = set()  # windows


def signed(value: int) -> int:
    """An unsigned 64-bit hash as a signed one, as consumers of int64 want it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def unsigned(value: int) -> int:
    return value & ((1 << 64) - 1)


class Roots:
    """Which root of names a prompt's first block belongs to; events do not say. Least recently used go first."""

    def __init__(self, block_size: int, default: bytes, remembered: int = REMEMBERED) -> None:
        self._block_size = block_size
        self._default = default
        self._remembered = remembered
        self._first: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._others = False  # some root that is not the default was seen
        self._media: OrderedDict[bytes, None] = OrderedDict()

    def learn(self, prompt: Seq[int], root: bytes, media: Iterable[bytes] = ()) -> None:
        """A sequence with this prompt may leave blocks in the cache."""
        self._others = self._others or root != self._default
        for digest in media:
            self._media[digest] = None
            self._media.move_to_end(digest)
        while len(self._media) > self._remembered:
            self._media.popitem(last=False)
        if len(prompt) < self._block_size:
            return
        tokens = pack(prompt[: self._block_size])
        self._first.setdefault(tokens, set()).add(root)
        self._first.move_to_end(tokens)
        while len(self._first) > self._remembered:
            self._first.popitem(last=False)

    def of(self, tokens: bytes) -> bytes | None:
        """The root of a first block; None: there is none for certain."""
        if not self._others:
            return self._default
        found = self._first.get(tokens, ())
        return next(iter(found)) if len(found) == 1 else None

    def knows(self, media: bytes) -> bool:
        return media in self._media


class Translator:
    """Feed it events in their order; it answers with ours.

    Args:
        block_size: tokens per block, ours and the engine's.
        roots: shared with whoever submits sequences.
    """

    def __init__(self, block_size: int, roots: Roots) -> None:
        self.counts = Counts()
        self.window: int | None = None  # the largest known
        self._block_size = block_size
        self._roots = roots
        self._ranks: dict[int, _Rank] = {}
        self._shown: dict[bytes, int] = {}  # name -> ranks that show it
        self._host: dict[tuple[bytes, int], int] = {}  # name, level -> ranks that have it there
        self._out: list[KvEvent] = []
        self._warned: set[str] = set()

    # --- in ---

    def feed(self, events: Iterable[Mapping[str, Any]]) -> list[KvEvent]:
        """Translate a batch. Nothing in an event can raise: what is malformed is counted and skipped."""
        for event in events:
            try:
                self._event(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.counts.malformed += 1
                self._once("kv_event_malformed", error=repr(error))
        out, self._out = self._out, []
        return _joined(out)

    def _event(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(int(event.get("attention_dp_rank") or 0))
        self._check_sequence(rank, int(event["event_id"]))
        data, window = event["data"], event.get("window_size")
        kind = data["type"]
        if kind == "created":
            self._created(rank, window)
            return
        if window is not None and self.window is not None and window != self.window:
            self.counts.filtered += 1
            return
        if kind == "stored":
            self._stored(rank, data)
        elif kind == "removed":
            for value in data["block_hashes"]:
                self._removed(rank, unsigned(int(value)))
        elif kind == "updated":
            self._updated(rank, data)
        else:
            raise ValueError(f"event type {kind!r}")

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank({}, {}, set(), None, set())
        return rank

    def _check_sequence(self, rank: _Rank, event_id: int) -> None:
        """Ids count every event of a rank, also of windows that are not ours: so this comes before any filter."""
        if rank.expected is not None and event_id != rank.expected:
            self.counts.gaps += 1
            log.warning(
                "kv_events_lost",
                expected=rank.expected,
                got=event_id,
                action="forgetting this worker's blocks; raise kv_cache_config.event_buffer_max_size",
            )
            self._forget(rank)
        rank.expected = event_id + 1

    def _created(self, rank: _Rank, window: Any) -> None:
        """A cache was made: at the start, one event per attention window. The largest window is the one to follow."""
        size = int(window) if window is not None else 0
        if size in rank.created:  # made anew
            self._forget(rank)
            rank.created.clear()
        rank.created.add(size)
        if size and (self.window is None or size > self.window):
            if self.window is not None:
                for other in self._ranks.values():
                    self._forget(other)
            self.window = size

    # --- blocks ---

    def _stored(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        above = data.get("parent_hash")
        parent: _Block | None = None
        if above is not None:
            parent = rank.blocks.get(unsigned(int(above)))
            if parent is None:
                self.counts.orphans += len(data["blocks"])
                return
        for block in data["blocks"]:
            value = unsigned(int(block["block_hash"]))
            tokens = block["tokens"]
            if len(tokens) < self._block_size:
                rank.partial.add(value)
                self.counts.partial += 1
                return  # whatever followed it would have no name either
            if len(tokens) > self._block_size:
                raise ValueError(f"a block of {len(tokens)} tokens where blocks have {self._block_size}")
            known = rank.blocks.get(value)
            if known is None:
                digest = self._name(parent, tokens, block.get("mm_keys") or ())
                if digest is None:
                    self.counts.ambiguous += 1
                    return
                known = _Block(digest, parent, int(block.get("cache_level") or 0), {}, value)
                rank.blocks[value] = known
                (rank.roots if parent is None else parent.children)[value] = known
                self._put_by(known)
                self._refresh(known)
            parent = known

    def _name(self, parent: _Block | None, tokens: Seq[Any], media: Seq[Any]) -> bytes | None:
        ids = [token["token_id"] if isinstance(token, Mapping) else token for token in tokens]
        strange = any(isinstance(token, Mapping) and token.get("token_extra_id") for token in tokens)
        packed = pack(ids)
        above = self._roots.of(packed) if parent is None else parent.digest
        if above is None or (strange and not media):
            return None
        extra = b""
        for key in media:
            digest = bytes.fromhex(key["hash"])
            if not self._roots.knows(digest):
                return None
            extra += digest
        return blocks.extend(above, packed, extra)

    def _removed(self, rank: _Rank, value: int) -> None:
        if value in rank.partial:
            rank.partial.discard(value)
            return
        block = rank.blocks.pop(value, None)
        if block is None:
            return
        del (rank.roots if block.parent is None else block.parent.children)[value]
        self._take_off(block)
        below = list(block.children.values())
        self._hide(block)
        while below:  # their names can be found no more, wherever their blocks are
            orphan = below.pop()
            below += orphan.children.values()
            rank.blocks.pop(orphan.hash, None)
            self._take_off(orphan)

    def _updated(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        """A block went to another memory, or its priority changed (which is nobody's business)."""
        change = data.get("cache_level")
        block = rank.blocks.get(unsigned(int(data["block_hash"])))
        if block is None or not isinstance(change, Mapping) or change.get("new_value") is None:
            return
        level = int(change["new_value"])
        if level == block.level:
            return
        self._take_off(block)
        if level:
            self._hide(block)
        block.level = level
        self._put_by(block)
        self._refresh(block)

    def _put_by(self, block: _Block) -> None:
        """It is in host memory, if it is."""
        if not block.level:
            return
        place = (block.digest, block.level)
        self._host[place] = self._host.get(place, 0) + 1
        if self._host[place] == 1:
            self._out.append(Stored(block.digest, _name_of(block.parent), tier=block.level))

    def _take_off(self, block: _Block) -> None:
        """It is not there any more."""
        if not block.level:
            return
        place = (block.digest, block.level)
        self._host[place] -= 1
        if not self._host[place]:
            del self._host[place]
            self._out.append(Removed(block.digest, tier=block.level))

    def _refresh(self, block: _Block) -> None:
        """Show it and what hangs below it, as far as it is on the device."""
        todo = [block]
        while todo:
            each = todo.pop()
            if each.shown or each.level or not (each.parent is None or each.parent.shown):
                continue
            each.shown = True
            count = self._shown.get(each.digest, 0)
            self._shown[each.digest] = count + 1
            if not count:
                self.counts.stored += 1
                self._out.append(Stored(each.digest, _name_of(each.parent)))
            todo += each.children.values()

    def _hide(self, block: _Block) -> None:
        """It left the device: neither it nor what hangs below it is of use to a prompt now."""
        gone: list[_Block] = []
        todo = [block]
        while todo:
            each = todo.pop()
            if each.shown:
                each.shown = False
                gone.append(each)
                todo += each.children.values()
        for each in reversed(gone):
            self._drop(each.digest)

    def _drop(self, digest: bytes) -> None:
        count = self._shown[digest] - 1
        if count:
            self._shown[digest] = count
            return
        del self._shown[digest]
        self.counts.removed += 1
        self._out.append(Removed(digest))

    def _forget(self, rank: _Rank) -> None:
        """All that is known of a rank is void."""
        lonely = all(other is rank or not other.blocks for other in self._ranks.values())
        if lonely and rank.blocks:
            self._shown.clear()
            self._host.clear()
            self._out.append(Cleared())
        else:
            for block in rank.blocks.values():
                self._take_off(block)
            for block in list(rank.roots.values()):
                self._hide(block)
        rank.blocks.clear()
        rank.roots.clear()
        rank.partial.clear()

    # --- out ---

    @property
    def names(self) -> int:
        """Blocks on the device that have a name, each counted once."""
        return len(self._shown)

    def dump(self) -> list[KvEvent]:
        """All names, parents before children."""
        out: list[KvEvent] = []
        seen: set[tuple[bytes, int]] = set()
        for rank in self._ranks.values():
            todo = list(rank.roots.values())
            while todo:
                block = todo.pop()
                todo += block.children.values()
                if (block.shown or block.level) and (block.digest, block.level) not in seen:
                    seen.add((block.digest, block.level))
                    out.append(Stored(block.digest, _name_of(block.parent), tier=block.level))
        return _joined(out)

    def _once(self, event: str, **fields: object) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, **fields)


def by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Events apart, in their order; those that name no rank, or none that is a number, are rank 0's."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        rank = event.get("attention_dp_rank") if isinstance(event, Mapping) else None
        found.setdefault(rank if isinstance(rank, int) and rank > 0 else 0, []).append(event)
    return found


def pack(tokens: Seq[int]) -> bytes:
    """
    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return array("I", tokens).tobytes()


def _name_of(block: _Block | None) -> bytes | None:
    return None if block is None else block.digest


def _joined(events: list[KvEvent]) -> list[KvEvent]:
    """Neighbours that tell of one chain, or that remove, as one event."""
    out: list[KvEvent] = []
    run: list[KvEvent] = []
    for event in events:
        if run and not _continues(run[-1], event):
            out.append(_as_one(run))
            run = []
        run.append(event)
    if run:
        out.append(_as_one(run))
    return out


def _continues(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(last, Stored) and isinstance(event, Stored):
        return event.tier == last.tier and event.parent == last.digests
    return isinstance(last, Removed) and isinstance(event, Removed) and event.tier == last.tier


def _as_one(run: list[KvEvent]) -> KvEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, Cleared):
        return first
    digests = b"".join(event.digests for event in run if not isinstance(event, Cleared))
    return msgspec.structs.replace(first, digests=digests)
