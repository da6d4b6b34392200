"""The engine's events under its own hashes come out as ours: always closed, never more than the engine holds."""

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import block_hashes
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored
from penstock.workers.engines.engine_protocol import EngineInfo
from penstock.workers.engines.events.translator import EventTranslator, key_of
from penstock.workers.engines.trtllm.adapter import TrtllmBlocks
from penstock.workers.engines.trtllm.engine_health import KvEvents
from penstock.workers.engines.trtllm.kv_events import Roots, TrtllmFormat
from penstock.workers.engines.trtllm.trtllm_metrics import NativeMetrics
from tests.properties import examples

SIZE = 4
ROOT = block_hashes.root("rev")
TENANT = block_hashes.root("rev", salt="tenant")
GLOBAL, SLIDING = 32768, 512


class Source:
    """KvEvents of one rank, numbered."""

    def __init__(self, rank: int | None = None, window: int | None = GLOBAL) -> None:
        self._ids = count()
        self._rank = rank
        self.window = window

    def event(
        self, data: dict[str, Any], window: int | None = None, skip: int = 0, group: int | None = None
    ) -> dict[str, Any]:
        for _ in range(skip):
            next(self._ids)
        event: dict[str, Any] = {"event_id": next(self._ids), "data": data}
        if group is not None:
            event["layer_group_id"] = group
        if self.window is not None:
            event["window_size"] = window or self.window
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        return event

    def created(self, window: int | None = None, **more: Any) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [10, 0]}, window, **more)

    def stored(
        self, hashes: Sequence[int | str], tokens: Sequence[int], parent: int | str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Blocks of ``SIZE`` tokens, the last one of what is left."""
        each = [
            {
                "type": "stored_block",
                "block_hash": value,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens[at * SIZE : (at + 1) * SIZE]
                ],
                "cache_level": 0,
                "priority": 35,
                "mm_keys": [],
            }
            for at, value in enumerate(hashes)
        ]
        return self.event({"type": "stored", "parent_hash": parent, "blocks": each}, **more)

    def removed(self, *hashes: int | str, **more: Any) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": list(hashes)}, **more)

    def moved(self, value: int | str, level: int, **more: Any) -> dict[str, Any]:
        diff = {"type": "event_diff", "new_value": level, "old_value": 1 - level}
        return self.event({"type": "updated", "block_hash": value, "cache_level": diff, "priority": None}, **more)


def names(tokens: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    return block_hashes.split(block_hashes.chain(array("I", tokens).tobytes(), SIZE, root))


def translator(roots: Roots | None = None) -> EventTranslator:
    return EventTranslator(TrtllmFormat(SIZE, roots or Roots(SIZE, ROOT)))


class Index:
    """A reader's fold, which checks that names come behind their parents and go before them."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.host: set[bytes] = set()

    def fold(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.parents.clear()
                self.host.clear()
                continue
            digests = block_hashes.split(event.digests)
            if event.tier:
                (self.host.update if isinstance(event, Stored) else self.host.difference_update)(digests)
            elif isinstance(event, Stored):
                parent = event.parent
                for digest in digests:
                    assert parent is None or parent in self.parents, "a name without its parent"
                    assert digest not in self.parents, "a name comes twice"
                    self.parents[digest] = parent
                    parent = digest
            else:
                for digest in digests:
                    assert digest not in self.parents.values(), "a name whose children are still there"
                    del self.parents[digest]


TOKENS = list(range(100, 100 + 3 * SIZE))


def signed(value: int) -> int:
    """The same 64 bits, as some producers write them."""
    return int.from_bytes(value.to_bytes(8, "big"), "big", signed=True)


def test_a_prompt_becomes_one_event_with_our_names() -> None:
    source, ours = Source(), translator()
    events = ours.feed(
        [source.created(), source.stored([11, 12], TOKENS[: 2 * SIZE]), source.stored([13], TOKENS[2 * SIZE :], 12)]
    )
    assert events == [Stored(b"".join(names(TOKENS)))]
    assert ours.feed([source.removed(13)]) == [Removed(names(TOKENS)[2])]
    assert ours.dump() == [Stored(b"".join(names(TOKENS)[:2]))]


@given(st.integers(0, 2**64 - 1))
def test_hashes_may_come_signed_or_unsigned(value: int) -> None:
    assert key_of(signed(value)) == value
    source, ours = Source(), translator()
    ours.feed([source.stored([value], TOKENS[:SIZE])])
    assert ours.feed([source.removed(signed(value))]) == [Removed(names(TOKENS)[0])]


@pytest.mark.parametrize("value", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_corners_of_64_bits(value: int) -> None:
    assert key_of(signed(value)) == value


def test_windows_other_than_the_largest_are_dropped_once_it_is_known() -> None:
    source, ours = Source(), translator()
    early = ours.feed([source.stored([1], TOKENS[:SIZE], window=SLIDING)])
    assert early == [Stored(names(TOKENS)[0])]
    assert ours.feed([source.created(SLIDING)]) == []
    assert ours.feed([source.created(GLOBAL)]) == [Cleared()]  # the events were of a window that forgets
    assert ours.feed([source.stored([1], TOKENS[:SIZE], window=SLIDING), source.removed(1, window=SLIDING)]) == []
    assert ours.feed([source.stored([1], TOKENS[:SIZE])]) == [Stored(names(TOKENS)[0])]
    assert ours.counts.filtered == 2


def test_dropped_windows_still_count_in_the_sequence() -> None:
    source, ours = Source(), translator()
    ours.feed([source.created(SLIDING), source.created(GLOBAL), source.stored([1], TOKENS[:SIZE])])
    ours.feed([source.stored([5], TOKENS[:SIZE], window=SLIDING), source.stored([2], TOKENS[SIZE : 2 * SIZE], 1)])
    assert ours.counts.lost == 0
    assert ours.names == 2


def test_partial_blocks_are_remembered_until_they_go_and_never_reported() -> None:
    source, ours = Source(), translator()
    events = ours.feed([source.stored([1, 2, 3], TOKENS[: SIZE + 2])])
    assert events == [Stored(names(TOKENS)[0])]
    assert ours.counts.partial == 1
    assert ours.feed([source.removed(2)]) == []
    assert ours.feed([source.stored([4], TOKENS[SIZE : 2 * SIZE], 1)]) == [Stored(names(TOKENS)[1], names(TOKENS)[0])]


def test_lost_events_void_what_is_known() -> None:
    source, ours = Source(), translator()
    ours.feed([source.created(), source.stored([1], TOKENS[:SIZE])])
    events = ours.feed([source.stored([9], TOKENS[SIZE : 2 * SIZE], 1, skip=1)])
    assert events == [Cleared()]  # and its parent is not known any more
    assert (ours.counts.lost, ours.counts.unnamed, ours.names) == (1, 1, 0)
    assert ours.feed([source.stored([1], TOKENS[:SIZE])]) == [Stored(names(TOKENS)[0])]


def test_ranks_are_numbered_apart_and_one_that_lost_events_voids_no_other() -> None:
    info = EngineInfo("trtllm", SIZE, 100, 8, 64, 1000, (), kv_events=True, load_seconds=0.0, dp_size=2)
    first, second = Source(0), Source(1)
    blocks = TrtllmBlocks(info, Roots(SIZE, ROOT), NativeMetrics(None, {}))
    name = Stored(names(TOKENS)[0])
    found = blocks.take(KvEvents([first.stored([1], TOKENS[:SIZE]), second.stored([71], TOKENS[:SIZE])]))
    assert found == {0: [name], 1: [name]}
    assert blocks.take(KvEvents([first.removed(skip=3)])) == {0: [Cleared()]}
    assert [blocks.dump(rank) for rank in (0, 1)] == [[], [name]]
    assert blocks.take(KvEvents([], lost=True)) == {0: [], 1: [Cleared()]}


def test_a_recreated_cache_is_empty() -> None:
    source, ours = Source(), translator()
    ours.feed([source.created(), source.stored([1], TOKENS[:SIZE])])
    assert ours.feed([source.created()]) == [Cleared()]
    assert ours.dump() == []


def test_blocks_in_host_memory_are_reported_as_such_and_do_not_make_a_prompt_cheap() -> None:
    source, ours = Source(), translator()
    first, second, _ = names(TOKENS)
    ours.feed([source.stored([1, 2], TOKENS[: 2 * SIZE])])
    assert ours.feed([source.moved(1, 1)]) == [Removed(second + first), Stored(first, None, tier=1)]
    assert ours.feed([source.moved(1, 1)]) == []
    assert ours.feed([source.moved(1, 0)]) == [Removed(first, tier=1), Stored(first + second)]


@pytest.mark.parametrize("level", [None, {"type": "event_diff", "new_value": None, "old_value": 0}])
def test_updates_without_a_difference_are_nothing(level: object) -> None:
    source, ours = Source(), translator()
    ours.feed([source.stored([1], TOKENS[:SIZE])])
    update = {"type": "updated", "block_hash": 1, "cache_level": level, "priority": {"new_value": 40, "old_value": 35}}
    assert ours.feed([source.event(update)]) == []
    assert ours.counts.malformed == 0


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": "strange"},
        {"type": "stored", "blocks": [{}]},
        {"type": "stored", "blocks": [{"block_hash": 5, "tokens": [{"token_id": -1}] * SIZE}]},
        {"type": "stored", "blocks": [{"block_hash": 5, "tokens": list(range(SIZE + 1))}]},
        {"type": "removed", "block_hashes": None},
        None,
    ],
)
def test_malformed_events_are_counted_and_nothing_else_is_lost(data: Any) -> None:
    source, ours = Source(), translator()
    events = ours.feed([source.event(data), source.stored([1], TOKENS[:SIZE]), {"event_id": "x"}])
    assert events == [Stored(names(TOKENS)[0])]
    assert ours.counts.malformed == 2
    assert ours.counts.lost == 0


def test_tenants_get_names_of_their_own_and_equal_beginnings_none() -> None:
    roots = Roots(SIZE, ROOT)
    ours, source = translator(roots), Source()
    other = list(range(500, 500 + SIZE))
    roots.learn(TOKENS, ROOT)
    roots.learn(other, TENANT)
    events = ours.feed([source.stored([1], TOKENS[:SIZE]), source.stored([2], other)])
    assert events == [Stored(names(TOKENS)[0]), Stored(names(other, TENANT)[0])]
    roots.learn(TOKENS, TENANT)
    assert ours.feed([source.stored([3], TOKENS[:SIZE])]) == []
    assert ours.counts.unnamed == 1
    assert ours.feed([source.stored([4], TOKENS[SIZE : 2 * SIZE], 3)]) == []  # nor has what hangs below it


def test_first_blocks_are_remembered_up_to_a_number() -> None:
    roots = Roots(SIZE, ROOT, remembered=2)
    for start in range(0, 12, SIZE):
        roots.learn(list(range(start, start + SIZE)), TENANT)
    found = [roots.of(array("I", range(start, start + SIZE)).tobytes()) for start in range(0, 12, SIZE)]
    assert found == [None, TENANT, TENANT]


def test_a_first_block_of_many_tenants_is_ambiguous_and_takes_no_more_room() -> None:
    roots = Roots(SIZE, ROOT)
    for number in range(1_000):
        roots.learn(TOKENS, number.to_bytes(32, "big"))
    assert roots.of(array("I", TOKENS[:SIZE]).tobytes()) is None
    assert sum(map(len, roots._first.values())) == 2


def test_media_are_part_of_a_name_if_they_are_ours() -> None:
    digest = bytes(range(32))
    roots = Roots(SIZE, ROOT)
    roots.learn(TOKENS, ROOT, [digest])
    source, ours = Source(), translator(roots)

    def seen(value: int, digest: bytes) -> list[KvEvent]:
        event = source.stored([value], TOKENS[:SIZE])
        event["data"]["blocks"][0]["mm_keys"] = [{"type": "mm_key", "hash": digest.hex(), "start_offset": 0}]
        return ours.feed([event])

    assert seen(1, digest) == [Stored(block_hashes.extend(ROOT, array("I", TOKENS[:SIZE]).tobytes(), digest))]
    assert seen(2, bytes(32)) == []

    # Text interrupts it: the rest is no second one. One that begins again is.
    event = source.stored([3], TOKENS[:SIZE])
    keys = [{"type": "mm_key", "hash": digest.hex(), "start_offset": start} for start in (3, 4, 0)]
    event["data"]["blocks"][0]["mm_keys"] = keys
    named = block_hashes.extend(ROOT, array("I", TOKENS[:SIZE]).tobytes(), digest + digest)
    assert ours.feed([event]) == [Stored(named)]


def hexadecimal(value: int) -> str:
    return f"{value:064x}"


def test_hashes_of_the_later_manager_are_hexadecimal() -> None:
    source, ours = Source(), translator()
    one, two = map(hexadecimal, (1, 2))
    first, second, _ = names(TOKENS)
    events = [source.created(group=0), source.stored([one], TOKENS[:SIZE], group=0)]
    assert ours.feed([*events, source.stored([two], TOKENS[SIZE : 2 * SIZE], one, group=0)]) == [Stored(first + second)]
    assert ours.feed([source.moved(two, 1, group=0)]) == [Removed(second), Stored(second, first, tier=1)]
    assert ours.feed([source.removed(two, one, group=0)]) == [Removed(second, tier=1), Removed(first)]
    assert ours.counts.malformed == 0


def test_a_block_counts_while_all_groups_of_layers_hold_it() -> None:
    source, ours = Source(), translator()
    first, second, _ = names(TOKENS)
    begin = [source.created(group=0), source.created(group=1), source.created(SLIDING, group=2)]
    assert ours.feed([*begin, source.stored([1, 2], TOKENS[: 2 * SIZE], group=0)]) == []
    sliding = source.stored([1, 2], TOKENS[: 2 * SIZE], window=SLIDING, group=2)
    assert ours.feed([sliding, source.stored([1], TOKENS[:SIZE], group=1)]) == [Stored(first)]
    assert ours.feed([source.stored([2], TOKENS[SIZE : 2 * SIZE], 1, group=1)]) == [Stored(second, first)]
    assert ours.feed([source.removed(2, window=SLIDING, group=2), source.removed(2, group=0)]) == [Removed(second)]
    assert ours.feed([source.removed(2, group=1)]) == []
    assert ours.feed([source.stored([2], TOKENS[SIZE : 2 * SIZE], 1, group=0)]) == []  # the other has it no longer
    assert ours.feed([source.moved(1, 1, group=1)]) == [Removed(first)]
    assert ours.feed([source.moved(1, 0, group=1)]) == []  # that it is back is not known for certain


# --- against a plain model of the engine's cache ---------------------------------------------------------------------


class Cache:
    """A reuse tree of one rank that evicts leaves, moves blocks to the host and back, and loses events."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.source = Source()
        self.blocks: dict[int, tuple[int | None, bytes, int]] = {}  # hash -> parent, name, level
        self.partial: list[int] = []
        self.hashes = count()

    def store(self) -> Iterator[dict[str, Any]]:
        """A prompt of few possible tokens, so that prompts share beginnings."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 6 * SIZE))]
        parent: int | None = None
        at = 0
        for digest in names(tokens):
            known = [value for value, (_, name, _) in self.blocks.items() if name == digest]
            if not known:
                break
            parent = known[0]
            at += 1
        if at == len(names(tokens)):
            return
        rest = tokens[at * SIZE :]
        values = [next(self.hashes) for _ in range(-(-len(rest) // SIZE))]
        yield self.source.stored(values, rest, parent)
        for value, digest in zip(values, names(tokens)[at:], strict=False):
            self.blocks[value] = (parent, digest, 0)
            parent = value
        self.partial += values[len(rest) // SIZE :]

    def evict(self) -> Iterator[dict[str, Any]]:
        parents = {parent for parent, _, _ in self.blocks.values()}
        leaves = sorted(value for value in self.blocks if value not in parents)
        if leaves:
            value = self.rng.choice(leaves)
            del self.blocks[value]
            yield self.source.removed(value)
        if self.partial and self.rng.random() < 0.5:
            yield self.source.removed(self.partial.pop())

    def move(self) -> Iterator[dict[str, Any]]:
        if self.blocks:
            value = self.rng.choice(sorted(self.blocks))
            parent, digest, level = self.blocks[value]
            self.blocks[value] = (parent, digest, 1 - level)
            yield self.source.moved(value, 1 - level)

    def device(self) -> set[bytes]:
        """Names on the device whose ancestors are, too."""
        found: set[int] = set()
        for value, (parent, _, level) in sorted(self.blocks.items()):
            if level == 0 and (parent is None or parent in found):
                found.add(value)
        return {self.blocks[value][1] for value in found}

    def host(self) -> set[bytes]:
        return {digest for _, digest, level in self.blocks.values() if level}


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_the_fold_of_the_events_is_what_the_engine_holds(seed: int, batch: int) -> None:
    rng = random.Random(seed)
    cache, ours, index = Cache(rng), translator(), Index()
    pending: list[dict[str, Any]] = [cache.source.created()]
    for _ in range(60):
        pending += rng.choice([cache.store, cache.store, cache.evict, cache.move])()
        if len(pending) >= batch:
            index.fold(ours.feed(pending))
            pending.clear()
            assert set(index.parents) == cache.device()
    index.fold(ours.feed(pending))
    again = Index()
    again.fold(ours.dump())
    assert again.parents == index.parents
    assert again.host == index.host == cache.host()
    assert ours.names == len(index.parents)
    assert ours.counts.unnamed == ours.counts.malformed == ours.counts.lost == 0


@examples(60)
@given(st.integers(0, 2**32), st.integers(2, 3), st.sampled_from([GLOBAL, None]))
def test_with_groups_of_layers_it_is_never_more(seed: int, groups: int, window: int | None) -> None:
    rng = random.Random(seed)
    source, ours, index = Source(window=window), translator(), Index()
    digests = names(TOKENS)
    held: list[set[int]] = [set() for _ in range(groups)]
    index.fold(ours.feed([source.created(group=group) for group in range(groups)]))
    for _ in range(60):
        group = rng.randrange(groups)
        depth = len(held[group])
        if rng.random() < 0.6 and depth < len(digests):
            end = rng.randrange(depth + 1, len(digests) + 1)
            parent = hexadecimal(depth - 1) if depth else None
            new = [hexadecimal(at) for at in range(depth, end)]
            event = source.stored(new, TOKENS[depth * SIZE : end * SIZE], parent, group=group)
            held[group] |= set(range(depth, end))
        elif depth:
            event = source.removed(hexadecimal(depth - 1), group=group)
            held[group].discard(depth - 1)
        else:
            continue
        index.fold(ours.feed([event]))
        assert set(index.parents) <= {digests[at] for at in set.intersection(*held)}
    for group in range(groups):
        index.fold(ours.feed([source.removed(*map(hexadecimal, sorted(held[group], reverse=True)), group=group)]))
    for group in range(groups):
        index.fold(ours.feed([source.stored(list(map(hexadecimal, range(3))), TOKENS, group=group)]))
    assert set(index.parents) == set(digests)
    assert ours.counts.malformed == 0


@examples(60)
@given(st.integers(0, 2**32), st.floats(0.02, 0.3))
def test_with_events_lost_it_is_never_more(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    cache, ours, index = Cache(rng), translator(), Index()
    for _ in range(80):
        for event in rng.choice([cache.store, cache.evict, cache.move])():
            if rng.random() >= loss:
                index.fold(ours.feed([event]))
    # One more, so that a loss at the very end is seen.
    index.fold(ours.feed([cache.source.event({"type": "removed", "block_hashes": []})]))
    assert set(index.parents) <= cache.device()
