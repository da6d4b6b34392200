"""Watchers for tests of the engine core: what every step must leave true, whatever the sequences are."""

from collections.abc import Callable, Sequence

from msgspec.structs import astuple

from penstock.schemas.block_hashes import DIGEST_BYTES, chain, extend, root, split
from penstock.schemas.kv import KvEvent, Removed, Stored
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Executor, Sampled, ScheduledSequence
from penstock.workers.engines.engine_protocol import Failure, Output, SequenceRequest, StepResult

GREEDY = Sampling(temperature=0.0)
ROOT = root("weights")


def request(key: object, prompt: list[int], max_tokens: int = 8, **more: object) -> SequenceRequest:
    stop = Stop(max_tokens, **{k: more.pop(k) for k in ("min_tokens", "token_ids", "ignore_eos") if k in more})  # type: ignore[arg-type]
    return SequenceRequest(key, prompt, more.pop("sampling", GREEDY), stop, **more)  # type: ignore[arg-type]


def names(prompt: list[int]) -> list[bytes]:
    """Of its full blocks of four tokens."""
    return split(chain(pack_tokens(prompt), 4, ROOT))


class Bench:
    """A scheduler whose next tokens are dictated by the test."""

    def __init__(
        self,
        *,
        total_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 8,
        max_batched_tokens: int = 64,
        mixed_chunk_tokens: int = 0,
        max_model_len: int = 1000,
        prefix_cache: bool = True,
        no_evict: bool = False,
        token: Callable[[ScheduledSequence], int] = lambda scheduled: 100 + len(scheduled.sequence.tokens),
    ) -> None:
        self.blocks = BlockManager(total_blocks, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            self.blocks,
            SchedulerConfig(
                block_size=block_size,
                max_running=max_running,
                max_batched_tokens=max_batched_tokens,
                mixed_chunk_tokens=mixed_chunk_tokens,
                max_model_len=max_model_len,
                eos_token_ids=(2,),
                no_evict=no_evict,
            ),
        )
        self.token = token
        self.plan: list[ScheduledSequence] = []

    def step(self) -> StepResult:
        self.plan = self.scheduler.schedule()
        # Seen by the test as it was when planned.
        self.shape = [
            (scheduled.sequence.key, scheduled.start, scheduled.count, scheduled.samples) for scheduled in self.plan
        ]
        return self.scheduler.commit(self.plan, [(self.token(each), None) for each in self.plan if each.samples])

    def finish(self, steps: int = 200) -> dict[object, list[Output | Failure]]:
        """Step until nothing is left; what each sequence got."""
        got: dict[object, list[Output | Failure]] = {}
        for _ in range(steps):
            if not self.scheduler.has_work():
                return got
            result = self.step()
            for item in (*result.outputs, *result.failures):
                got.setdefault(item.key, []).append(item)
        raise AssertionError(f"work is left after {steps} steps")


class Mirror:
    """A router's view of one cache: names folded from events, refusing what a router could not understand."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            assert isinstance(event, Stored | Removed)
            assert event.digests
            if isinstance(event, Stored):
                parent = event.parent
                for digest in split(event.digests):
                    assert len(digest) == DIGEST_BYTES
                    assert digest not in self.parents, "stored twice"
                    assert parent is None or parent in self.parents, "stored before its parent"
                    self.parents[digest] = parent
                    parent = digest
            else:
                for digest in split(event.digests):
                    del self.parents[digest]
                    assert digest not in self.parents.values(), "removed before its children"


def check_pool(manager: BlockManager, tables: list[list[int]]) -> None:
    """Every block is in exactly one place, and counted as often as it is held."""
    held: dict[int, int] = {}
    for table in tables:
        assert len(set(table)) == len(table)
        for block in table:
            held[block] = held.get(block, 0) + 1
    unused, idle = manager.unused, list(manager.idle)
    assert sorted([*held, *unused, *idle]) == list(range(manager.total_blocks))
    assert manager.holders == [held.get(block, 0) for block in range(manager.total_blocks)]
    assert {block: name for name, block in manager.cache.items()} == {
        block: name for block, name in enumerate(manager.names) if name is not None
    }
    assert all(manager.names[block] is None for block in unused)
    assert all(manager.names[block] is not None for block in idle)
    assert (manager.used_blocks, manager.cached_blocks, manager.free_blocks) == (len(held), len(idle), len(unused))
    # Closed towards the front, now and after any number of evictions.
    rank = {block: position for position, block in enumerate(idle)}
    for block in manager.cache.values():
        parent = manager.parents[block]
        if parent is not None:
            above = manager.cache[parent]
            if above in rank:
                assert rank.get(block, len(idle)) < rank[above], "a parent would be evicted before its child"


class PoolMemory:
    """An executor around another that keeps, for each place in the pool, which prefix's KV lies there."""

    def __init__(self, inner: Executor, block_size: int, root: bytes) -> None:
        self.inner, self.size, self.root = inner, block_size, root
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.plans: list[list[ScheduledSequence]] = []

    def execute(self, plan: list[ScheduledSequence], scoring: Sequence[ScheduledSequence] = ()) -> list[Sampled]:
        self.plans.append(plan)
        for sequence, start, count, samples in map(astuple, plan):
            tokens = sequence.tokens
            assert count > 0
            assert start + count <= len(sequence.blocks) * self.size, "a position without a block"
            assert samples == (start + count == len(tokens))
            for position in range(start):
                place = (sequence.blocks[position // self.size], position % self.size)
                assert self.content.get(place) == tuple(tokens[: position + 1]), "attends to someone else's KV"
        # Writes come after all reads: two sequences of one step do not see each other's blocks.
        for sequence, start, count, _ in map(astuple, plan):
            for position in range(start, start + count):
                place = (sequence.blocks[position // self.size], position % self.size)
                self.content[place] = tuple(sequence.tokens[: position + 1])
        return self.inner.execute(plan, scoring)

    def check_names(self, manager: BlockManager) -> None:
        """Each name is that of the tokens whose KV lies in the block."""
        for name, block in manager.cache.items():
            prefix, digest = self.content[block, self.size - 1], self.root
            assert len(prefix) % self.size == 0
            for start in range(0, len(prefix), self.size):
                digest = extend(digest, pack_tokens(prefix[start : start + self.size]))
            assert digest == name

    def close(self) -> None:
        self.inner.close()
