"""Blocks that leave the device come back from host memory with their KV, under their names, and the events say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Removed, Stored
from penstock.workers.engines.core.blocks import HOST, BlockCopies, BlockManager, HostCache
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, request

WORDS, SIZE = MockVocabulary(6, excluded=(2,)), 4


class Copier:
    """Copies what ``PoolMemory`` says lies in the pool."""

    def __init__(self, memory: PoolMemory) -> None:
        self.memory = memory
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.closed = False

    def copy(self, copies: BlockCopies) -> None:
        content = self.memory.content
        assert len({slot for _, slot in copies.saves}) == len(copies.saves)
        for block, slot in copies.saves:
            self.slots.update({(slot, offset): content[block, offset] for offset in range(SIZE)})
        for slot, block in copies.loads:
            content.update({(block, offset): self.slots[slot, offset] for offset in range(SIZE)})

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self, blocks: int, slots: int, *, budget: int = 64) -> None:
        self.host = HostCache(slots)
        self.manager = BlockManager(blocks, host=self.host)
        config = SchedulerConfig(block_size=SIZE, max_running=3, max_batched_tokens=budget, max_model_len=200)
        self.scheduler = Scheduler(self.manager, config)
        self.memory = PoolMemory(MockExecutor(WORDS, 1, speedup=0), SIZE, ROOT)
        self.copier = Copier(self.memory)
        info = EngineInfo("mock", SIZE, blocks, 3, 200, 6, (), True)
        self.engine = ScheduledEngine(info, self.scheduler, self.memory, copier=self.copier)
        self.mirror, self.reported = Mirror(), set[bytes]()
        self.cached: dict[object, int] = {}

    def step(self) -> StepResult:
        result = self.engine.step()
        self.cached.update(dict(result.started))
        self.mirror.apply([event for event in result.events if not getattr(event, "tier", 0)])
        for event in result.events:
            if isinstance(event, Stored) and event.tier == HOST:
                assert event.digests not in self.reported
                self.reported.add(event.digests)
            elif isinstance(event, Removed) and event.tier == HOST:
                self.reported.remove(event.digests)
        assert self.reported == set(self.host.names)
        assert len(self.host.names) + len(self.host.free) == self.host.slots
        check_pool(self.manager, [sequence.blocks for sequence in self.scheduler.running])
        self.memory.check_names(self.manager)
        return result

    def run(self, key: object, prompt: list[int], count: int) -> list[int]:
        self.engine.submit(request(key, prompt, count, ignore_eos=True, root=ROOT))
        found = []
        for _ in range(500):
            if not self.engine.has_work():
                return found
            found += [output.token for output in self.step().outputs]
        raise AssertionError("it does not end")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (i * i + salt * (i + 1)) % 3 for i in range(length)]


def test_a_prompt_that_left_the_device_is_loaded_and_not_computed() -> None:
    rig = Rig(12, 30)
    rig.run("a", prompt(33), 4)
    rig.run("b", prompt(40, 1), 4)
    assert rig.reported
    assert rig.run("c", prompt(33), 4) == expected_tokens(prompt(33), 4, WORDS)
    assert rig.cached["c"] == 32
    stats = rig.engine.stats()
    assert stats.loaded_blocks > 0
    assert stats.host_blocks == len(rig.reported)
    dumped = {name for event in rig.engine.dump() if event.tier == HOST for name in split(event.digests)}  # type: ignore[union-attr]
    assert dumped == rig.reported


def test_a_full_host_drops_the_least_recently_used() -> None:
    rig = Rig(12, 4)
    for salt in range(4):
        rig.run(salt, prompt(40, salt), 2)
    assert len(rig.reported) == 4


def test_slots_of_blocks_that_are_being_loaded_are_not_reassigned() -> None:
    cache = HostCache(2, kv_events=False)
    cache.save(b"a", None, 1)
    cache.save(b"b", b"a", 2)
    assert cache.take_copies() == BlockCopies([(1, 1 - 1), (2, 1)], [])
    cache.pin([b"a", b"b"])
    cache.save(b"c", None, 3)  # there is no room
    assert cache.take_copies() is None
    cache.load([b"a"], [7])
    cache.unpin([b"a", b"b"])
    cache.save(b"c", None, 3)
    assert cache.match([b"a", b"b", b"c"], 0, 3) == [b"a"]
    assert cache.take_copies() == BlockCopies([(3, 1)], [(0, 7)])
    assert cache.take_events() == []


def test_handoffs_are_refused_and_the_copier_is_closed() -> None:
    rig = Rig(12, 4)
    assert rig.engine.kv_transfer is None
    with pytest.raises(RequestError, match="--kv-offloading-size 0"):
        rig.engine.submit(request("a", prompt(9), pin=True))
    rig.engine.close()
    assert rig.copier.closed


@examples(80)
@given(
    st.sampled_from((13, 16, 24)),
    st.integers(1, 20),
    st.sampled_from((3, 11, 64)),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 12), st.integers(0, 5), st.booleans()),
        max_size=14,
    ),
)
def test_answers_are_those_without_a_host(
    blocks: int, slots: int, budget: int, requests: list[tuple[int, int, int, int, bool]]
) -> None:
    rig, outputs, wanted = Rig(blocks, slots, budget=budget), dict[object, list[int]](), {}
    for key, (length, salt, count, steps, cancelled) in enumerate(requests):
        rig.engine.submit(request(key, prompt(length, salt), count, ignore_eos=True, root=ROOT))
        wanted[key] = expected_tokens(prompt(length, salt), count, WORDS)
        for _ in range(steps):
            for output in rig.step().outputs:
                outputs.setdefault(output.key, []).append(output.token)
        if cancelled and rig.engine.cancel(key):
            del wanted[key]
    for _ in range(2000):
        if not rig.engine.has_work():
            break
        for output in rig.step().outputs:
            outputs.setdefault(output.key, []).append(output.token)
    assert {key: outputs.get(key) for key in wanted} == wanted
