"""The prefix index against a dict of sets."""

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state.holders import TierDepths, keys_view
from penstock.router.state.prefix_index import PENDING_BATCHES, ApproximateIndex, PrefixIndex
from penstock.schemas.block_hashes import chain, keys_of, root, split
from penstock.schemas.kv import Cleared, KvBatch, KvDump, KvEvent, Removed, Stored
from tests.properties import examples
from tests.router.dumps import load_dump

WORKERS = ("a", "b", "c")


def prompt(*tokens: int) -> bytes:
    """Digests of a prompt of one-token blocks."""
    return chain(b"".join(t.to_bytes(4, "little") for t in tokens), 1, root("m"))


class Engine:
    """A worker's cache that evicts leaves first, and the batches it publishes."""

    def __init__(self, worker: str, epoch: int = 1, rank: int = 0) -> None:
        self.worker, self.epoch, self.rank = worker, epoch, rank
        self.seq = -1
        self.parents: dict[bytes, bytes | None] = {}

    def batch(self, *events: KvEvent) -> KvBatch:
        self.seq += 1
        return KvBatch(self.worker, self.epoch, self.seq, events, self.rank)

    def store(self, digests: bytes) -> Stored | None:
        names = split(digests)
        fresh = next((i for i, name in enumerate(names) if name not in self.parents), len(names))
        if fresh == len(names):
            return None
        for i in range(fresh, len(names)):
            self.parents[names[i]] = names[i - 1] if i else None
        return Stored(b"".join(names[fresh:]), names[fresh - 1] if fresh else None)

    def evict(self, rng: random.Random, count: int) -> Removed:
        gone = []
        for _ in range(count):
            parents = set(self.parents.values())
            leaves = sorted(name for name in self.parents if name not in parents)
            if leaves:
                gone.append(rng.choice(leaves))
                del self.parents[gone[-1]]
        return Removed(b"".join(gone))

    def clear(self) -> Cleared:
        self.parents.clear()
        return Cleared()

    def dump(self, pages: int = 1) -> list[KvDump]:
        events = tuple(Stored(name, parent) for name, parent in self.parents.items())
        size = len(events) // pages + 1
        return [
            KvDump(self.worker, self.epoch, self.seq, events[p * size : (p + 1) * size], self.rank, (p + 1) % pages)
            for p in range(pages)
        ]

    def held(self, digests: bytes) -> int:
        depth = 0
        for name in split(digests):
            if name not in self.parents:
                break
            depth += 1
        return depth


def expected(engines: list[Engine], digests: bytes) -> dict[tuple[str, int], int]:
    return {(e.worker, e.rank): e.held(digests) for e in engines if e.held(digests)}


PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda tokens: prompt(*tokens))
STEP = st.tuples(
    st.sampled_from(["store", "store", "store", "evict", "clear", "gap", "epoch", "forget", "sweep", "again", "dump"]),
    st.integers(0, len(WORKERS) - 1),
    PROMPT,
    st.integers(1, 6),
)


@examples(150)
@given(st.lists(STEP, max_size=40), st.integers(0, 1000))
def test_the_index_equals_the_caches_whose_events_it_folded(
    steps: list[tuple[str, int, bytes, int]], seed: int
) -> None:
    rng, index = random.Random(seed), PrefixIndex(10_000)
    engines = [Engine(w, rank=i % 2) for i, w in enumerate(WORKERS)]
    last: KvBatch | None = None
    for kind, who, digests, count in steps:
        engine = engines[who]
        events: tuple[KvEvent | None, ...] = ()
        if kind == "store":
            events = (engine.store(digests),)
        elif kind == "evict":
            events = (engine.evict(rng, count),)
        elif kind == "clear":
            events = (engine.clear(), engine.store(digests))
        elif kind == "gap":
            engine.batch()
            events = (engine.store(digests),)
        elif kind == "epoch":
            engines[who] = engine = Engine(engine.worker, engine.epoch + 1, engine.rank)
        elif kind == "forget":
            index.forget(engine.worker)
            events = (engine.store(digests),)
        elif kind == "sweep":
            index.sweep(count)
        elif kind == "again" and last is not None:
            index.apply(last)
        elif kind == "dump" and engine.seq >= 0:
            assert load_dump(index, engine.dump(pages=count))
        if kind in ("store", "evict", "clear", "gap", "epoch", "forget"):
            last = engine.batch(*(e for e in events if e is not None))
            late = engine.dump(pages=count)
            if not index.apply(last):
                extra = engine.batch(*filter(None, (engine.store(digests[: 16 * count]),)))
                assert not index.apply(extra), "it waits for a dump"
                assert (engine.worker, engine.rank) not in index.match(keys_of(digests))
                assert load_dump(index, late)
        for probe in (digests, digests[: 16 * count], prompt(*(rng.randrange(3) for _ in range(8)))):
            spoken = [e for e in engines if e.seq >= 0 and (e.worker, e.rank) not in index.awaiting_dump()]
            assert index.match(keys_view(probe)) == {
                place: depth for place, depth in expected(spoken, probe).items() if depth
            }
        for e in engines:
            if e.seq >= 0:
                assert index.held((e.worker, e.rank)) in (len(e.parents), 0)
    while not index.sweep(5):
        pass
    known = [e for e in engines if index.held((e.worker, e.rank))]
    assert index.blocks == len(set().union(*(e.parents for e in known))) if known else index.blocks == 0
    assert not index.holders.ragged


@pytest.mark.parametrize("cut", range(1, 9))
def test_events_mean_the_same_however_they_are_batched(cut: int) -> None:
    digests = prompt(*range(8))
    names = split(digests)
    whole, parts = PrefixIndex(100), PrefixIndex(100)
    whole.apply(KvBatch("w", 1, 0, (Stored(digests),)))
    whole.apply(KvBatch("w", 1, 1, (Removed(names[7]),)))
    events: list[KvEvent] = [
        Stored(b"".join(names[at : at + cut]), names[at - 1] if at else None) for at in range(0, 8, cut)
    ]
    for seq, event in enumerate([*events, Removed(names[7])]):
        assert parts.apply(KvBatch("w", 1, seq, (event,)))
    assert parts.match(keys_of(digests)) == whole.match(keys_of(digests)) == {("w", 0): 7}


def test_replicas_that_folded_the_same_have_the_same_checksum_and_others_do_not() -> None:
    one, two = Engine("a"), Engine("b")
    batches = [one.batch(one.store(prompt(1, 2, 3))), two.batch(two.store(prompt(1, 2, 4)))]  # type: ignore[arg-type]
    x, y = PrefixIndex(100), PrefixIndex(100)
    for index, order in ((x, batches), (y, batches[::-1])):
        for batch in order:
            index.apply(batch)
            index.apply(batch)
    assert x.checksum() == y.checksum()
    from_dump = PrefixIndex(100)
    assert load_dump(from_dump, two.dump(2))
    assert load_dump(from_dump, one.dump())
    assert from_dump.checksum() == x.checksum()
    before = x.checksum()
    x.apply(one.batch(one.evict(random.Random(0), 1)))
    assert x.checksum() != before
    y.forget("b")
    assert y.checksum() != before


def test_batches_after_a_gap_are_replayed_on_the_dump() -> None:
    index, digests = PrefixIndex(100), prompt(*range(6))
    names = split(digests)
    assert index.apply(KvBatch("w", 1, 0, (Stored(names[0]),)))
    assert not index.apply(KvBatch("w", 1, 2, (Stored(names[2], names[1]),)))
    assert not index.apply(KvBatch("w", 1, 3, (Stored(names[3], names[2]),)))
    assert index.match(keys_of(digests)) == {}
    assert index.awaiting_dump() == [("w", 0)]
    assert load_dump(index, [KvDump("w", 1, 2, (Stored(b"".join(names[:3])),))])
    assert index.match(keys_of(digests)) == {("w", 0): 4}
    assert index.apply(KvBatch("w", 1, 3, (Removed(names[0]),))), "a redelivery"
    assert index.match(keys_of(digests)) == {("w", 0): 4}


def test_a_dump_that_leaves_a_gap_or_is_of_an_old_epoch_is_not_enough() -> None:
    index, digests = PrefixIndex(100), prompt(*range(6))
    assert not index.apply(KvBatch("w", 5, 7, (Stored(digests),)))
    assert not load_dump(index, [KvDump("w", 4, 9, (Stored(digests),))])
    assert not load_dump(index, [KvDump("w", 5, 3, (Stored(digests),))])
    assert not load_dump(index, [KvDump("w", 5, 7, ()), KvDump("w", 5, 8, ())])
    assert index.match(keys_of(digests)) == {}
    assert load_dump(index, [KvDump("w", 5, 6, ())])
    assert index.match(keys_of(digests)) == {("w", 0): 6}
    assert load_dump(index, [KvDump("w", 5, 2, ())]), "older than what is known: nothing to do"
    assert index.match(keys_of(digests)) == {("w", 0): 6}


def test_no_more_batches_are_kept_for_a_dump_than_the_bound() -> None:
    index = PrefixIndex(100)
    for seq in range(1, PENDING_BATCHES + 3):
        index.apply(KvBatch("w", 1, seq))
    assert not load_dump(index, [KvDump("w", 1, 0)]), "the first pending ones were let go"
    assert load_dump(index, [KvDump("w", 1, 5)])


def test_other_groups_are_not_indexed_and_other_tiers_apart() -> None:
    index, digests = PrefixIndex(100), prompt(1, 2, 3)
    names = split(digests)
    index.apply(KvBatch("w", 1, 0, (Stored(names[0]), Stored(digests, group=1), Removed(digests, group=1))))
    assert index.match(keys_of(digests)) == {("w", 0): 1}
    assert not isinstance(index.match(keys_of(digests)), TierDepths), "fleets without tiers look at one"
    index.apply(KvBatch("w", 1, 1, (Stored(names[2], names[1], tier=2), Stored(names[1], names[0], tier=1))))
    found = index.match(keys_view(digests))
    assert isinstance(found, TierDepths)
    assert found == {("w", 0): 3}
    assert found.tiers(("w", 0)) == [1, 2, 3]
    assert index.held(("w", 0)) == 1


@examples(150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "move", "lose", "clear", "dump"]),
            st.sampled_from([0, 0, 1, 1, 2, 3]),
            PROMPT,
            st.integers(0, 11),
            st.integers(1, 4),
        ),
        max_size=40,
    )
)
def test_each_tier_is_known_with_the_faster_ones(steps: list[tuple[str, int, bytes, int, int]]) -> None:
    """Whatever leaves and comes, in any order: tiers 0 to 2 of one target, 3 is none that counts; another has one."""
    index, other = PrefixIndex(10_000), Engine("other")
    index.apply(other.batch(Stored(prompt(0, 0, 1)))), other.store(prompt(0, 0, 1))
    tiers: list[dict[bytes, bytes | None]] = [{}, {}, {}, {}]
    seq = -1
    for kind, tier, digests, start, count in steps:
        names = split(digests)
        part = names[start : start + count]
        parents = dict(zip(names, [None, *names], strict=False))
        events: list[KvEvent] = []
        if kind == "clear":
            events = [Cleared()]
            tiers = [{}, {}, {}, {}]
        elif part:
            if kind != "lose":
                events = [Stored(b"".join(part), parents[part[0]], tier=tier)]
                tiers[tier].update({name: parents[name] for name in part})
            if kind != "store":
                gone = (tier + 3) % 4 if kind == "move" else tier
                events.append(Removed(b"".join(part[::-1]), tier=gone))
                tiers[gone] = {name: parent for name, parent in tiers[gone].items() if name not in part}
        seq += 1
        if kind == "dump":
            page = [Stored(name, above, tier=at) for at, own in enumerate(tiers) for name, above in own.items()]
            assert load_dump(index, [KvDump("w", 1, seq, tuple(page))])
        else:
            assert index.apply(KvBatch("w", 1, seq, tuple(events)))
        for probe in (digests, prompt(0, 0, 1, 2), prompt(2)):
            chain_of = split(probe)
            wanted, upper = [], set[bytes]()
            for own in tiers[:3]:
                upper |= own.keys()
                wanted.append(next((at for at, name in enumerate(chain_of) if name not in upper), len(chain_of)))
            for found in (index.match(keys_view(probe)), index.depths(keys_view(probe))):
                depths = found.tiers(("w", 0)) if isinstance(found, TierDepths) else [found.get(("w", 0), 0)] * 3
                assert list(accumulate(depths, max)) == wanted
                assert found.get(("w", 0), 0) == wanted[-1]
                assert found.get(("other", 0), 0) == other.held(probe)
    index.forget("w")
    while not index.sweep(7):
        pass
    assert index.match(keys_view(prompt(0, 0, 1))) == {("other", 0): 3}
    assert index.blocks == 3


@examples(60)
@given(st.lists(PROMPT, max_size=30), st.integers(1, 20), st.integers(0, 99))
def test_at_the_cap_the_index_reports_less_but_never_more(prompts: list[bytes], cap: int, seed: int) -> None:
    index, rng = PrefixIndex(cap), random.Random(seed)
    engines = [Engine(w) for w in WORKERS]
    for digests in prompts:
        engine = rng.choice(engines)
        if stored := engine.store(digests):
            index.apply(engine.batch(stored))
        if rng.random() < 0.3:
            index.apply(engine.batch(engine.evict(rng, 2)))
        assert index.blocks <= cap
        assert not index.holders.ragged
        full = expected(engines, digests)
        assert all(depth <= full[place] for place, depth in index.match(keys_of(digests)).items())


def test_more_workers_than_bits_in_a_word_are_distinguished() -> None:
    digests, index = prompt(*range(100)), PrefixIndex(1000)
    for w in range(100):
        index.apply(KvBatch(f"w{w}", 1, 0, (Stored(digests[: 16 * (w + 1)]),)))
    assert index.match(keys_of(digests)) == {(f"w{w}", 0): w + 1 for w in range(100)}
    index.forget("w99")
    while not index.sweep(7):
        pass
    assert index.blocks == 99
    index.apply(KvBatch("new", 1, 0, (Stored(digests[:32]),)))
    assert index.match(keys_of(digests)) == {("new", 0): 2} | {(f"w{w}", 0): w + 1 for w in range(99)}


def test_a_forgotten_worker_is_gone_before_the_sweep_and_after() -> None:
    digests, index = prompt(*range(50)), PrefixIndex(1000)
    for worker in ("a", "b"):
        index.apply(KvBatch(worker, 1, 0, (Stored(digests if worker == "a" else digests[:160]),)))
    index.forget("a")
    assert index.match(keys_of(digests)) == {("b", 0): 10}
    assert not index.sweep(20)
    index.apply(KvBatch("c", 1, 0, (Stored(digests[:320]),)))
    while not index.sweep(20):
        assert index.match(keys_of(digests)) == {("b", 0): 10, ("c", 0): 20}
    assert index.blocks == 20


def test_a_child_without_its_parent_is_detected_at_once_and_never_overcounted() -> None:
    names = split(prompt(*range(6)))
    index = PrefixIndex(100)
    index.apply(KvBatch("w", 1, 0, (Stored(b"".join(names[:2])), Stored(b"".join(names[3:]), names[2]))))
    assert index.holders.ragged == (("w", 0),)
    assert index.match(keys_of(b"".join(names))) == {("w", 0): 2}


def test_a_worker_that_evicts_from_the_middle_is_detected_at_once() -> None:
    digests = prompt(*range(64))
    index = PrefixIndex(100)
    index.apply(KvBatch("w", 1, 0, (Stored(digests), Removed(split(digests)[40]))))
    index.apply(KvBatch("good", 1, 0, (Stored(digests),)))
    assert index.match(keys_of(digests)) == {("w", 0): 40, ("good", 0): 64}
    assert index.holders.ragged == (("w", 0),)
    index.apply(KvBatch("w", 1, 1, (Stored(split(digests)[40], split(digests)[39]),)))
    assert index.match(keys_of(digests)) == {("w", 0): 64, ("good", 0): 64}, "what came after the gap is still there"


@given(st.lists(st.tuples(st.sampled_from(WORKERS), PROMPT, st.integers(0, 4)), max_size=40))
def test_past_decisions_count_until_they_expire(records: list[tuple[str, bytes, int]]) -> None:
    index = ApproximateIndex(10_000, ttl_s=10)
    now, used = 0, {}
    for worker, digests, step in records:
        now += step
        index.record((worker, 0), keys_of(digests), now)
        used.update({(worker, key): now for key in keys_of(digests)})
        for _, probe, _ in records[:5]:
            keys, found = keys_of(probe), {}
            for w in WORKERS:
                fresh = [used.get((w, key), -99) + 10 > now for key in keys]
                depth = fresh.index(False) if False in fresh else len(fresh)
                if depth:
                    found[w, 0] = depth
            assert index.match(keys) == found
    index.forget("a")
    assert all(worker != "a" for _, digests, _ in records for worker, _ in index.match(keys_of(digests)))
    index.expire(now + 10)
    while not index.sweep(10):
        pass
    assert len(index) == 0


def test_past_decisions_never_outgrow_their_cap() -> None:
    index = ApproximateIndex(50, ttl_s=1e9)
    for i in range(200):
        index.record(("w", 0), keys_of(prompt(i, *range(i % 30))), i)
        assert len(index) <= 50
    assert index.match(keys_of(prompt(199, *range(19)))) == {("w", 0): 20}, "the youngest are kept"
    assert index.match(keys_of(prompt(100, *range(10)))) == {}
