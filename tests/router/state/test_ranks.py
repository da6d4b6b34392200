"""Ranks from a worker's engine to a router's decision: each has a cache, a sequence of batches, a dump and a score."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.placement.decide import decide
from penstock.router.placement.routing import RoutingContext, RoutingRequest, Weights
from penstock.router.state.caches import by_rank
from penstock.router.state.holders import keys_view
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import block_hashes, kv
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import Stop
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.mock.executor import GREEDY
from penstock.workers.runners.flush_publisher import in_pages
from tests.properties import examples
from tests.router.dumps import load_dump

RANKS = 3
BLOCK = 2
ROOT = block_hashes.root("rev")


class Worker:
    """A mock engine with ranks, and what its worker makes of its steps."""

    def __init__(self) -> None:
        self.engine = mock.build_data_parallel(
            RANKS, mock.MockOptions(vocab_size=50, block_size=BLOCK, total_blocks=12, speedup=0)
        )
        self.seqs = [0] * RANKS
        self._keys = iter(range(1_000_000))

    def run(self, prompt: list[int], rank: int) -> list[kv.KvBatch]:
        stop = Stop(1, ignore_eos=True)
        self.engine.submit(SequenceRequest(next(self._keys), prompt, GREEDY, stop, root=ROOT, rank=rank))
        batches = []
        while self.engine.has_work():
            result = self.engine.step()
            for each, events in {0: result.events, **result.others}.items():
                if events:
                    batches.append(kv.KvBatch("w", 1, self.seqs[each], tuple(events), each))
                    self.seqs[each] += 1
        return batches

    def dump(self) -> list[kv.KvDump]:
        return [
            kv.KvDump("w", 1, self.seqs[rank] - 1, tuple(page), rank)
            for rank in range(RANKS)
            for page in in_pages(self.engine.dump(rank), 200)
        ]

    def held(self, rank: int) -> set[bytes]:
        return {name for event in self.engine.dump(rank) for name in block_hashes.split(event.digests)}  # type: ignore[union-attr]


def digests_of(prompt: list[int]) -> bytes:
    return block_hashes.chain(array("I", prompt).tobytes(), BLOCK, ROOT)


STEPS = st.lists(
    st.tuples(
        st.integers(0, RANKS - 1), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.sampled_from([True, False])
    ),
    max_size=25,
)


@examples(80)
@given(STEPS)
def test_every_rank_is_known_as_it_is_though_batches_of_some_are_lost(steps: list[tuple[int, list[int], bool]]) -> None:
    worker, index = Worker(), PrefixIndex(10_000)
    assert all(load_dump(index, pages) for pages in by_rank(worker.dump()))
    lost: set[int] = set()
    for rank, prompt, delivered in steps:
        for batch in worker.run(prompt, rank):
            if not delivered:
                lost.add(batch.rank)
            elif index.apply(batch):
                assert batch.rank not in lost
            else:
                assert batch.rank in lost, "the loss of one rank's batch makes another unknown"
                assert all(load_dump(index, pages) for pages in by_rank(worker.dump()))
                lost.clear()
        for each in set(range(RANKS)) - lost:
            assert index.held(("w", each)) == len(worker.held(each))
            names = block_hashes.split(digests_of(prompt))
            depth = next((i for i, name in enumerate(names) if name not in worker.held(each)), len(names))
            assert index.match(keys_view(b"".join(names))).get(("w", each), 0) == depth
    assert not index.holders.ragged


@given(st.integers(0, RANKS - 1), st.integers(0, 1000))
def test_a_prompt_goes_to_the_rank_that_holds_it(rank: int, seed: int) -> None:
    worker, index, fleet = Worker(), PrefixIndex(10_000), LoadTracker()
    fleet.put_worker(Registration("w", "m", "aggregated", "mock", 1, BLOCK, 12, 8, 1000, dp_size=RANKS))
    prompt = [1, 2, 3, 4, 5, 6, 7]
    for batch in worker.run(prompt, rank):
        assert index.apply(batch)
    overlaps = index.match(keys_view(digests_of(prompt)))
    assert overlaps == {("w", rank): 3}
    ask = RoutingRequest("m", len(prompt), 1, prompt_blocks=3)
    choice = decide(RoutingContext(ask, fleet.targets(0, "m"), overlaps, "kv", Weights(), seed))
    assert choice.chosen == ("w", rank)
    assert choice.overlap_blocks == 3
    assert {candidate.rank for candidate in choice.candidates} == set(range(RANKS))
