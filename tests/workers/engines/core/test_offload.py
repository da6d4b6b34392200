"""Blocks that leave the device come back from host memory with their KV, under their names, and the events say so."""

from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Removed, Stored
from penstock.workers.engines.core.blocks import (
    DISK,
    HOST,
    BlockCopies,
    BlockManager,
    DiskCache,
    FileResult,
    HostCache,
)
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.engine_protocol import EngineInfo, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, names, request

WORDS, SIZE = MockVocabulary(6, excluded=(2,)), 4


class Copier:
    """Copies what lies in a pool by the places of its blocks."""

    load_s = 0.0

    def __init__(self, content: dict[tuple[int, int], tuple[int, ...]]) -> None:
        self.content = content
        self.settled: list[int] = []
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.closed = False

    def copy(self, copies: BlockCopies) -> None:
        content = self.content
        assert len({slot for _, slot in copies.saves}) == len(copies.saves)
        for block, slot in copies.saves:
            self.slots.update({(slot, offset): content[block, offset] for offset in range(SIZE)})
        for slot, block in copies.loads:
            content.update({(block, offset): self.slots[slot, offset] for offset in range(SIZE)})

    def settle(self, blocks: Collection[int]) -> None:
        self.settled += blocks

    def close(self) -> None:
        self.closed = True


class Files:
    """Files whose threads are as slow as a plan says: each look at the results ends some of what was begun.

    Args:
        plan: by turns, how many tasks end, and whether they succeed; False: the file is damaged.
    """

    read_s = 0.0

    def __init__(self, plan: Sequence[tuple[int, bool]] = ((9, True),)) -> None:
        self.plan, self.turn = plan, 0
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # the copier's
        self.content: dict[bytes, list[tuple[int, ...]]] = {}
        self.removed: list[bytes] = []
        self.tasks: list[tuple[bytes, int, bool]] = []
        self.full = self.closed = False
        self.present: dict[bytes, bytes | None] = {}  # at the start of the next engine

    def write(self, name: bytes, parent: bytes | None, slot: int) -> bool:
        if not self.full:
            self.tasks.append((name, slot, False))
        return not self.full

    def read(self, name: bytes, parent: bytes | None, slot: int) -> None:
        self.tasks.append((name, slot, True))

    def remove(self, name: bytes, parent: bytes | None) -> None:
        self.content.pop(name, None)
        self.removed.append(name)

    def results(self) -> list[FileResult]:
        count, ok = self.plan[self.turn % len(self.plan)]
        self.turn += 1
        done, self.tasks = self.tasks[:count], self.tasks[count:]
        for name, slot, read in done:
            if read and ok:
                content = self.content[name]
                self.slots.update({(slot, offset): content[offset] for offset in range(SIZE)})
            elif not read:
                self.content[name] = [self.slots[slot, offset] for offset in range(SIZE)]
        late = [FileResult(name, read, ok=False, late=True) for name, _, read in self.tasks if not ok]
        return [FileResult(name, read, ok) for name, _, read in done] + late

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(
        self, blocks: int, slots: int, *, budget: int = 64, files: Files | None = None, most_files: int = 99
    ) -> None:
        self.disk = DiskCache(files, most_files, dict(files.present)) if files is not None else None
        self.on_disk = set[bytes]()
        self.host = HostCache(slots, disk=self.disk)
        self.manager = BlockManager(blocks, host=self.host)
        config = SchedulerConfig(block_size=SIZE, max_running=3, max_batched_tokens=budget, max_model_len=200)
        self.scheduler = Scheduler(self.manager, config)
        self.memory = PoolMemory(MockExecutor(WORDS, 1, speedup=0), SIZE, ROOT)
        self.copier = Copier(self.memory.content)
        if files is not None:
            files.slots = self.copier.slots
        info = EngineInfo("mock", SIZE, blocks, 3, 200, 6, (), True)
        self.engine = ScheduledEngine(info, self.scheduler, self.memory, copier=self.copier)
        self.mirror, self.reported = Mirror(), set[bytes]()
        self.cached: dict[object, int] = {}

    def step(self) -> StepResult:
        result = self.engine.step()
        self.cached.update(dict(result.started))
        self.mirror.apply([event for event in result.events if not getattr(event, "tier", 0)])
        for event in result.events:
            reported = {HOST: self.reported, DISK: self.on_disk}.get(getattr(event, "tier", 0))
            for name in split(event.digests) if reported is not None and isinstance(event, Stored | Removed) else ():
                assert (name in reported) == isinstance(event, Removed)
                reported ^= {name}
        assert self.reported == set(self.host.names)
        used = set(self.host.names.values())
        if self.disk is not None:
            assert self.on_disk == set(self.disk.names)
            assert len(self.disk.names) <= self.disk.most_blocks
            assert isinstance(self.disk.files, Files)
            for name in self.disk.names:
                assert names(list(self.disk.files.content[name][SIZE - 1]))[-1] == name, "what is announced is there"
            used |= set(self.disk.writing.values()) | set(self.disk.reading.values())
        assert len(used) + len(self.host.free) == self.host.slots
        tables = [sequence.blocks for sequence in self.scheduler.running]
        check_pool(self.manager, tables + self.scheduler.pinned.tables)
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


def on_disk(files: Files, *names: bytes) -> DiskCache:
    return DiskCache(files, 99, dict.fromkeys(names), kv_events=False)


def test_a_slot_that_a_file_is_read_into_is_not_saved_to() -> None:
    cache = HostCache(2, disk=on_disk(Files(((0, True),)), b"c"))
    cache.save(b"a", None, 1)
    assert cache.take_copies() == BlockCopies([(1, 0)], [])
    cache.poll()  # begins to write it, so its slot stays
    cache.save(b"b", None, 2)
    assert cache.fetch([b"c"], 0, 1) is not None
    assert cache.take_copies() is None


def test_what_is_forgotten_while_it_is_written_leaves_no_slot_and_no_file_behind() -> None:
    removed: list[tuple[bytes, bytes | None]] = []

    class Slow(Files):
        def remove(self, name: bytes, parent: bytes | None) -> None:
            removed.append((name, parent))

    cache = HostCache(2, disk=on_disk(files := Slow(((0, True),))))
    for block in (1, 2):  # the second time, it is still being written
        cache.save(b"b", b"a", block)
        cache.take_copies()
        cache.poll()
        cache.forget(files=False)
    files.plan = ((9, True),)
    files.slots = {(slot, offset): () for slot in range(2) for offset in range(SIZE)}
    cache.poll()
    assert sorted(cache.free) == [0, 1]
    assert removed == [(b"b", b"a")]


def test_what_leaves_the_device_again_while_it_is_written_is_written_once() -> None:
    files = Files(((0, True),))
    cache = HostCache(2, disk=on_disk(files))
    for _ in range(2):
        cache.save(b"a", None, 1)
        cache.take_copies()
        cache.poll()
    assert not cache.unwritten
    assert len(files.tasks) == 1


def test_nothing_waits_for_files_while_a_read_is_late() -> None:
    files = Files(((0, False),))
    cache = HostCache(4, disk=on_disk(files, b"a", b"b"))
    first = cache.fetch([b"a"], 0, 1)
    assert first is not None
    cache.poll()
    assert not first.waiting
    cache.release(first)
    assert cache.fetch([b"a"], 0, 1) is None
    assert cache.fetch([b"b"], 0, 1) is None
    files.plan = ((1, False),)
    cache.poll()
    assert cache.fetch([b"b"], 0, 1) is not None


def test_names_of_a_tier_are_reported_in_chains() -> None:
    cache = HostCache(9)
    for at in (4, 3, 2):  # as they leave the device
        cache.save(bytes([at]), bytes([at - 1]), at)
    cache.save(b"x", None, 7)
    assert cache.take_events() == [Stored(b"\2\3\4", b"\1", tier=HOST), Stored(b"x", tier=HOST)]
    assert cache.dump() == [Stored(b"\2\3\4", b"\1", tier=HOST), Stored(b"x", tier=HOST)]


def test_a_prompt_comes_back_from_files_of_an_earlier_engine() -> None:
    files = Files()
    first = Rig(12, 8, files=files)
    answer = first.run("a", prompt(37), 4)
    for salt in range(1, 4):
        first.run(salt, prompt(40, salt), 2)
    first.engine.close()
    assert files.closed
    files.present = dict(first.disk.names) if first.disk is not None else {}
    second = Rig(12, 30, files=files)
    assert second.run("b", prompt(37), 4) == answer
    assert second.cached["b"] == 36
    stats = second.engine.stats()
    assert (stats.disk_read_blocks, stats.loaded_blocks) == (9, 9)
    dumped = second.engine.dump()
    assert {name for event in dumped if event.tier == DISK for name in split(event.digests)} == second.on_disk  # type: ignore[union-attr]


def test_damaged_files_are_dropped_and_their_blocks_computed() -> None:
    files = Files()
    first = Rig(12, 30, files=files)
    first.run("a", prompt(37), 4)
    first.run("b", prompt(40, 1), 4)
    first.engine.close()
    assert first.disk is not None
    files.present, files.plan = dict(first.disk.names), ((9, False),)
    second = Rig(12, 30, files=files)
    assert second.run("b", prompt(37), 4) == expected_tokens(prompt(37), 4, WORDS)
    assert second.cached["b"] == 0
    assert files.removed


def test_others_start_while_one_waits_for_files_and_late_ones_are_computed() -> None:
    files = Files()
    first = Rig(12, 30, files=files)
    first.run("a", prompt(37), 2)
    first.engine.close()
    assert first.disk is not None
    files.present, files.plan = dict(first.disk.names), ((0, True),)
    second = Rig(40, 30, files=files)
    second.engine.submit(request("a", prompt(37), 2, ignore_eos=True, root=ROOT))
    second.engine.submit(request("b", prompt(20, 1), 2, ignore_eos=True, root=ROOT))
    found = [output.token for _ in range(6) for output in second.step().outputs]
    assert found == expected_tokens(prompt(20, 1), 2, WORDS)
    assert "a" not in second.cached
    assert second.engine.blocked, "the loop pauses between two looks"
    files.plan = ((0, False),)
    for _ in range(4):
        second.step()
    assert second.cached["a"] == 0
    files.plan = ((9, True),)
    while second.engine.has_work():
        second.step()


def test_files_that_are_slower_than_computing_are_not_read_for_a_while() -> None:
    files = Files()
    first = Rig(12, 30, files=files)
    first.run("a", prompt(37), 2)
    first.engine.close()
    assert first.disk is not None
    files.present, files.read_s = dict(first.disk.names), 1.03
    second = Rig(12, 30, files=files)
    second.host.compute_s = 1.0
    cached = []
    for key in range(3):
        second.run(key, prompt(37), 2)
        cached.append(second.cached[key])
        while second.manager.evict():
            pass
        second.host.forget(files=False)
    assert cached == [0, 0, 36]


def test_kv_of_no_store_goes_to_no_file_until_another_request_has_it() -> None:
    files = Files()
    rig = Rig(12, 30, files=files)
    rig.engine.submit(request("a", prompt(37), 2, ignore_eos=True, root=ROOT, no_store=True))
    for salt in (1, 2):
        rig.run(salt, prompt(40, salt), 2)
    private = set(names(prompt(37)))
    assert private & rig.reported, "it is in host memory"
    assert not private & rig.on_disk
    rig.run("b", prompt(37), 2)
    for salt in (1, 2):
        rig.run(salt, prompt(40, salt), 2)
    assert private & rig.on_disk
    rig = Rig(12, 30, files=(closing := Files()))
    rig.engine.submit(request("a", prompt(37), 2, ignore_eos=True, root=ROOT, no_store=True))
    rig.run("c", prompt(9, 1), 2)
    rig.engine.close()
    assert not private & closing.content.keys()


def test_a_full_disk_keeps_nothing_waiting() -> None:
    files = Files()
    rig = Rig(12, 6, files=files)
    files.full = True
    for salt in range(4):
        rig.run(salt, prompt(40, salt), 2)
    assert not rig.on_disk
    assert rig.engine.stats().disk_lost_blocks > 0
    assert not rig.engine.has_work(), "an idle engine does not wait for a disk"


def test_an_idle_engine_does_not_look_at_a_disk_that_hangs_and_uses_it_when_it_is_back() -> None:
    files = Files(((0, True),))
    rig = Rig(12, 30, files=files)
    for salt in range(2):
        rig.engine.submit(request(salt, prompt(40, salt), 2, ignore_eos=True, root=ROOT))
        while rig.scheduler.by_key:
            rig.step()
    assert files.tasks
    assert rig.engine.has_work(), "writes of a disk that is only slow are awaited"
    files.plan = ((0, False),)
    rig.step()
    assert not rig.engine.has_work()
    files.plan = ((99, True),)
    rig.run("b", prompt(9, 3), 2)
    assert rig.on_disk
    assert rig.disk is not None
    assert not rig.disk.stuck


def test_the_copier_is_closed() -> None:
    rig = Rig(12, 4)
    rig.engine.close()
    assert rig.copier.closed


def handed(rig: Rig, key: object, length: int, count: int) -> tuple[int, list[int]]:
    """Receive a prompt's KV as from another worker. Returns: blocks that were there, and the answer."""
    tokens = prompt(length)
    digests = names(tokens)
    transfer = rig.engine.kv_transfer
    assert transfer is not None
    reservation = transfer.reserve(digests, 1 if length % SIZE else 0, 1)
    assert reservation is not None
    assert set(reservation.blocks[reservation.have :] + reservation.tails) <= set(rig.copier.settled)
    assert not rig.host.take_copies(), "nothing is copied while another process writes"
    for at, block in enumerate(reservation.blocks + reservation.tails):
        written = {(block, offset): tuple(tokens[: at * SIZE + offset + 1]) for offset in range(SIZE)}
        if reservation.have <= at:
            rig.memory.content.update(written)
        else:
            assert {place: rig.memory.content[place] for place in written} == written, "it is there already"
    rig.copier.settled.clear()
    transfer.adopt(reservation)
    loaded = reservation.blocks[reservation.have - reservation.loaded : reservation.have]
    assert set(loaded) <= set(rig.copier.settled), "a block with a name may be read by another process at any time"
    first = expected_tokens(tokens, count, WORDS)[0]
    asked = request(key, tokens, count, ignore_eos=True, root=ROOT, generated=[first], reservation=reservation)
    rig.engine.submit(asked)
    found = [first]
    while rig.engine.has_work():
        found += [output.token for output in rig.step().outputs]
    return reservation.have, found


def test_a_decode_worker_brings_back_what_it_has_and_receives_the_rest() -> None:
    rig = Rig(30, 60)
    wanted = expected_tokens(prompt(37), 5, WORDS)
    assert handed(rig, "a", 37, 5) == (0, wanted)
    for key in range(6):  # what becomes idle is saved, a few blocks in each step
        rig.run(key, prompt(20, 1), 6)
    while rig.manager.evict():
        pass
    have, answer = handed(rig, "b", 37, 5)
    assert answer == wanted
    assert have == 9
    assert rig.engine.stats().loaded_blocks >= 9


def test_blocks_that_others_write_to_are_not_saved_meanwhile() -> None:
    rig = Rig(12, 60)
    rig.run("a", prompt(40, 1), 2)
    kept = set(rig.host.names)
    have, answer = handed(rig, "b", 37, 4)
    assert (have, answer) == (0, expected_tokens(prompt(37), 4, WORDS))
    assert not set(names(prompt(40, 1))) & (set(rig.host.names) - kept), "what they held is lost"


def test_blocks_that_came_back_are_handed_on() -> None:
    rig = Rig(12, 30)
    rig.run("a", prompt(37), 2)
    rig.run("b", prompt(40, 1), 2)
    rig.engine.submit(request("c", prompt(37), 1, ignore_eos=True, root=ROOT, pin=True))
    pinned = [each for _ in range(3) for each in rig.step().pinned]
    assert rig.cached["c"] == 36
    (found,) = pinned
    for position, token in enumerate(prompt(37)):
        place = (found.blocks[position // SIZE], position % SIZE)
        assert rig.memory.content[place][-1] == token
    assert rig.engine.release_pinned("c")


@examples(80)
@given(
    st.sampled_from((13, 16, 24)),
    st.integers(1, 20),
    st.sampled_from((3, 11, 64)),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 12), st.integers(0, 5), st.booleans()),
        max_size=14,
    ),
    st.just([]) | st.lists(st.tuples(st.integers(0, 4), st.sampled_from((True, True, False))), min_size=1, max_size=5),
    st.integers(1, 30),
)
def test_answers_are_those_without_a_host(
    blocks: int,
    slots: int,
    budget: int,
    requests: list[tuple[int, int, int, int, bool]],
    plan: list[tuple[int, bool]],
    most_files: int,
) -> None:
    files = Files(plan) if plan else None
    rig = Rig(blocks, slots, budget=budget, files=files, most_files=most_files)
    outputs, wanted = dict[object, list[int]](), {}
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
