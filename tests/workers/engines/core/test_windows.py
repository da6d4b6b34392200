"""Rows of sliding-window layers: bounded, never somebody else's, and found again only where a whole window is there."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from penstock.workers.engines.core.blocks import BlockCopies, BlockManager, DiskCache, HostCache
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import OverlapExecutor, Sampled, ScheduledSequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import (
    BlockReservation,
    EngineInfo,
    PinnedPrompt,
    RequestError,
    StepResult,
)
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, names, request
from tests.workers.engines.core.test_offload import Copier, Files

WORDS = MockVocabulary(6, excluded=(2,))
SIZE = 4


class WindowMemory(PoolMemory):
    """Besides, which prefix's KV lies in the rows of the sliding layers."""

    def __init__(self, window: int) -> None:
        super().__init__(MockExecutor(WORDS, 1, speedup=0), SIZE, ROOT)
        self.window = window
        self.queue = deque[Callable[[], None]]()  # what a device still has to do
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}

    def execute(self, plan: list[ScheduledSequence], scoring: Sequence[ScheduledSequence] = ()) -> list[Sampled]:
        written = [
            (sequence.rows[position // SIZE], position % SIZE)
            for sequence, start, count, _ in map(astuple, plan)
            for position in range(start, start + count)
        ]
        assert len(set(written)) == len(written), "two tokens in one place"
        for sequence, start, _, _ in map(astuple, plan):
            for position in range(max(0, start - self.window + 1), start):
                place = (sequence.rows[position // SIZE], position % SIZE)
                assert self.rows.get(place) == tuple(sequence.tokens[: position + 1]), "attends to someone else's row"
                assert place not in written, "a row is written that is still read"
        for sequence, start, count, _ in map(astuple, plan):
            for position in range(start, start + count):
                place = (sequence.rows[position // SIZE], position % SIZE)
                self.rows[place] = tuple(sequence.tokens[: position + 1])
        return super().execute(plan, scoring)

    def receive(
        self, source: "WindowMemory", blocks: Iterable[tuple[int, int]], reservation: BlockReservation, rows: list[int]
    ) -> None:
        """What a transfer does with what is to be filled."""
        there = set(reservation.blocks[: reservation.have])
        pairs = [(one, other, source.content, self.content) for one, other in blocks if other not in there]
        first = len(reservation.blocks) + (len(reservation.tails) > 0) - len(rows)
        pairs += [(rows[position - first], row, source.rows, self.rows) for position, _, row in reservation.fills]
        for one, other, theirs, mine in pairs:
            for offset in range(SIZE):
                mine.pop((other, offset), None)
                if (one, offset) in theirs:
                    mine[other, offset] = theirs[one, offset]


class Pending:
    """A step that reads and writes only when its result is asked for, as late as a device may."""

    def __init__(self, memory: WindowMemory, plan: list[ScheduledSequence]) -> None:
        self._memory, self._plan = memory, plan
        self._sampled: list[Sampled] | None = None
        memory.queue.append(self._run)

    def _run(self) -> None:
        self._sampled = self._memory.execute(self._plan)

    def result(self) -> list[Sampled]:
        while self._sampled is None:
            self._memory.queue.popleft()()
        return self._sampled


class LateCopier(Copier):
    """Copies in the order of the device's work, as late as that may be."""

    def __init__(self, memory: WindowMemory, content: dict[tuple[int, int], tuple[int, ...]]) -> None:
        super().__init__(content)
        self.queue, self.waiting = memory.queue, list[frozenset[int]]()

    def copy(self, copies: BlockCopies) -> None:
        touched = frozenset([block for block, _ in copies.saves] + [block for _, block in copies.loads])
        self.waiting.append(touched)

        def run() -> None:
            super(LateCopier, self).copy(copies)
            self.waiting.remove(touched)

        self.queue.append(run)

    def settle(self, blocks: Collection[int]) -> None:
        while any(not touched.isdisjoint(blocks) for touched in self.waiting):
            self.queue.popleft()()


class Rig:
    """An engine with ``rows`` rows for windows of ``window`` tokens."""

    def __init__(
        self,
        window: int,
        rows: int,
        *,
        blocks: int = 400,
        max_running: int = 8,
        budget: int = 64,
        only: bool = False,
        prefix_cache: bool = True,
        no_evict: bool = False,
        overlapped: bool = False,
        slots: tuple[int, int] | None = None,
        files: tuple[Files, Files] | None = None,
    ) -> None:
        disks = [None] * 2 if files is None else [DiskCache(each, 99, dict(each.present)) for each in files]
        self.hosts = [HostCache(count, disk=disk) for count, disk in zip(slots or (), disks, strict=False)]
        host, row_host = self.hosts or (None, None)
        self.manager = BlockManager(blocks, prefix_cache=prefix_cache, host=host)
        self.windows = WindowRows(self.manager, rows, block_size=SIZE, window=window, only=only, host=row_host)
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(
                block_size=SIZE,
                max_running=max_running,
                max_batched_tokens=budget,
                max_model_len=1000,
                eos_token_ids=(2,),
                no_evict=no_evict,
            ),
            self.windows,
        )
        info = EngineInfo("mock", SIZE, rows, max_running, 1000, 6, (2,), True)
        self.memory = WindowMemory(window)
        ahead = cast(OverlapExecutor, SimpleNamespace(launch=lambda plan, scoring: Pending(self.memory, plan)))
        computing = None if overlapped else self.memory
        pools = (self.memory.content, self.memory.rows) if slots is not None else ()
        self.copiers = [LateCopier(self.memory, pool) if overlapped else Copier(pool) for pool in pools]
        for each, slot_copier in zip(files or (), self.copiers, strict=False):
            each.slots = slot_copier.slots
        copier, row_copier = self.copiers or (None, None)
        self.engine = ScheduledEngine(
            info, self.scheduler, computing, ahead=ahead if overlapped else None, copier=copier, row_copier=row_copier
        )
        self.pinned: list[PinnedPrompt] = []
        self.mirror = Mirror()
        self.most = 0

    def step(self) -> StepResult:
        result = self.engine.step()
        self.mirror.apply([event for event in result.events if not getattr(event, "tier", 0)])
        self.pinned += result.pinned
        self.most = max(self.most, self.windows.used_blocks)
        self.check()
        return result

    def check(self, reservations: Sequence[BlockReservation] = ()) -> None:
        """Each row is in one place, held by whom it says, or can be reclaimed."""
        windows, manager, scheduler = self.windows, self.manager, self.scheduler
        waiting = {id(one.reservation): one.reservation for one in scheduler.queue.waiting.values() if one.reservation}
        waiting |= {id(one): one for one in reservations}
        held: Counter[int] = Counter()
        for sequence in scheduler.running:
            held.update(sequence.blocks[sequence.first_row : len(sequence.rows)])
        kept = Counter(block for one in waiting.values() for block in one.window)
        kept.update(chain.from_iterable(scheduler.pinned._in_windows.values()))
        reserved = [fill.row for one in waiting.values() for fill in one.fills]
        assert windows.holders == held + kept
        assert windows.kept == kept.total() + len(reserved)
        assert sorted([*windows.free, *windows.rows.values(), *reserved]) == list(range(windows.total_blocks))
        final = windows.rows.keys() - windows.holders.keys() - windows.passed.keys()
        assert final <= manager.idle.keys(), "a row that nothing can reclaim"
        assert not windows.passed.keys() & windows.holders.keys()
        tables = [sequence.blocks for sequence in scheduler.running]
        if not self.memory.queue:  # else some copies are still to be made
            for host, copier in zip(self.hosts, self.copiers, strict=True):
                for name, slot in host.names.items():
                    assert slot in host._saves or names(list(copier.slots[slot, SIZE - 1]))[-1] == name
        check_pool(manager, [*tables, *(one.blocks + one.tails for one in waiting.values()), *scheduler.pinned.tables])

    def run(self, *requests: object) -> dict[object, list[int]]:
        outputs: dict[object, list[int]] = {}
        for item in requests:
            self.engine.submit(item)  # type: ignore[arg-type]
        for _ in range(5000):
            if not self.engine.has_work():
                return outputs
            result = self.step()
            assert not result.failures
            for output in result.outputs:
                outputs.setdefault(output.key, []).append(output.token)
        raise AssertionError("it does not end")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (i * i + salt * (i + 1)) % 3 for i in range(length)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_answer_holds_its_window_only(prefix_cache: bool) -> None:
    rig = Rig(10, 4, prefix_cache=prefix_cache, only=True, budget=8)
    (answer,) = rig.run(request("a", prompt(90), 400, ignore_eos=True)).values()
    assert len(answer) == 400
    assert rig.most == rig.windows.most_rows == 4
    stats = rig.engine.stats()
    assert stats.used_blocks == 0
    assert stats.cached_blocks + stats.free_blocks == 4


def test_a_prompt_is_computed_in_as_many_chunks_as_rows_allow() -> None:
    rig = Rig(10, 6)
    rig.run(request("a", prompt(90), 3, ignore_eos=True))
    assert rig.most <= 6


def test_a_prefix_is_reused_where_its_window_is_still_there() -> None:
    rig = Rig(8, 40)
    first = rig.run(request("a", prompt(20), 21, ignore_eos=True))["a"]
    rig.engine.submit(request("b", prompt(20) + first + [3], 2, ignore_eos=True))
    assert rig.step().started[0].cached_tokens == 40
    rig.engine.submit(request("c", prompt(18), 2, ignore_eos=True))
    assert rig.step().started[0].cached_tokens == 16  # passed, but there was room to keep it
    rig.run()


def test_passed_rows_leave_first_and_only_the_borders_that_need_them() -> None:
    rig = Rig(8, 13)
    answer = rig.run(request("a", prompt(20), 21, ignore_eos=True))["a"]
    names = set(rig.mirror.parents)
    rig.run(request("b", prompt(21, salt=1), 2, ignore_eos=True))
    assert names < set(rig.mirror.parents)  # nothing was reported as removed
    rig.engine.submit(request("c", prompt(18), 2, ignore_eos=True))
    assert rig.step().started[0].cached_tokens < 16
    rig.run()
    rig.engine.submit(request("d", prompt(20) + answer, 2, ignore_eos=True))
    assert rig.step().started[0].cached_tokens == 40
    rig.run()


def test_the_last_windows_leave_with_their_blocks_and_are_reported() -> None:
    rig = Rig(8, 9)
    rig.run(request("a", prompt(20), 21, ignore_eos=True))
    names = set(rig.mirror.parents)
    for salt in range(1, 4):
        rig.run(request(salt, prompt(33, salt=salt), 2, ignore_eos=True))
    assert names - set(rig.mirror.parents)
    rig.engine.submit(request("c", prompt(20), 2, ignore_eos=True))
    rig.run()


def test_no_evict_admits_only_what_has_room_for_its_window() -> None:
    rig = Rig(8, 7, no_evict=True)
    rig.run(*(request(n, prompt(9, salt=n), 30, ignore_eos=True) for n in range(6)))
    assert rig.engine.stats().preemptions == 0


def handed_off(source: Rig, target: Rig, tokens: list[int], key: object) -> list[int] | None:
    """The first token of an answer by one engine, the others by another, with the KV of the first; None: no room."""
    first = source.run(request(key, tokens, 1, ignore_eos=True, root=ROOT, pin=True))[key]
    pinned = source.pinned.pop()
    rest = len(tokens) % SIZE
    held = pinned.windows
    assert [source.windows.generations[row] for row in held.rows] == held.generations
    assert len(held.rows) <= source.windows.most_rows
    digests = names(tokens)
    reservation = target.scheduler.reservations.reserve(digests, int(rest > 0), 1, len(tokens))
    if reservation is None:
        assert source.engine.release_pinned(key)
        return None
    target.check([reservation])
    into = reservation.blocks + reservation.tails
    target.memory.receive(source.memory, zip(pinned.blocks, into, strict=True), reservation, held.rows)
    target.scheduler.reservations.adopt(reservation)
    assert source.engine.release_pinned(key)
    source.check()
    target.check([reservation])
    target.engine.submit(request(key, tokens, 9, ignore_eos=True, root=ROOT, generated=first, reservation=reservation))
    return first


@pytest.mark.parametrize("length", [3, 20, 37, 90])
@pytest.mark.parametrize("only", [False, True])
def test_a_handoff_moves_the_window_and_nothing_of_the_prompt_is_computed_again(length: int, only: bool) -> None:
    source, target = (Rig(10, 8, only=only) for _ in range(2))
    first = handed_off(source, target, prompt(length), "a")
    assert first is not None
    started = target.step()
    assert started.started[0].cached_tokens == length
    assert started.computed_tokens == 1
    assert first + [o.token for o in started.outputs] + target.run()["a"] == expected_tokens(prompt(length), 9, WORDS)
    for rig in (source, target):
        assert rig.windows.used_blocks == rig.windows.kept == 0


def test_a_prompt_whose_window_is_gone_is_handed_off_without_blocks() -> None:
    """The answer so far is longer than the pool: what its window has passed is not kept for another worker."""
    rig = Rig(8, 5, budget=8)
    tokens = expected_tokens(prompt(20), 41, WORDS)
    rig.run(request("a", prompt(20), 41, ignore_eos=True, pin=True, generated=tokens[:40]))
    assert rig.pinned.pop().blocks == []
    assert rig.engine.release_pinned("a")
    assert rig.windows.kept == 0


def test_a_reservation_without_rows_is_computed_here() -> None:
    """As of a peer that has no such pool, when all blocks of the prompt are cached here and their rows are gone."""
    rig = Rig(8, 9)
    rig.run(request("a", prompt(20), 2, ignore_eos=True))
    for salt in (1, 2):
        rig.run(request(salt, prompt(30, salt), 2, ignore_eos=True))
    reservation = rig.scheduler.reservations.reserve(names(prompt(20)), 0, 1)
    assert reservation is not None
    rig.scheduler.reservations.adopt(reservation)
    (answer,) = rig.run(request("b", prompt(20), 5, ignore_eos=True, root=ROOT, reservation=reservation)).values()
    assert answer == expected_tokens(prompt(20), 5, WORDS)
    assert rig.windows.kept == 0


def test_more_rows_than_there_are_are_never_reserved() -> None:
    with pytest.raises(RequestError, match="11 rows"):
        Rig(8, 8).scheduler.reservations.reserve(names(prompt(8)), 9, 9, 9)


def test_a_prefix_moves_with_the_window_before_its_end() -> None:
    source, target = Rig(8, 20), Rig(8, 20)
    source.run(request("a", prompt(41), 2, ignore_eos=True, root=ROOT))
    asked = names(prompt(41))
    found = source.scheduler.reservations.find(asked)
    assert (len(found.blocks), len(found.windows.rows)) == (10, 2)
    assert source.scheduler.reservations.pin("reader", found) == 10
    source.check()
    reservation = target.scheduler.reservations.reserve(asked, 0, 0)
    assert reservation is not None
    target.memory.receive(
        source.memory, zip(found.blocks, reservation.blocks, strict=True), reservation, found.windows.rows
    )
    target.scheduler.reservations.adopt(reservation)
    target.scheduler.reservations.release(reservation)
    assert source.engine.release_pinned("reader")
    target.engine.submit(request("b", prompt(41), 9, ignore_eos=True, root=ROOT))
    started = target.step()
    assert started.started[0].cached_tokens == 40
    source.windows.discard(found.blocks[9])
    assert source.scheduler.reservations.pin("late", found) == 0
    assert len(source.scheduler.reservations.find(asked).blocks) < 10


def test_a_pool_smaller_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 blocks"):
        WindowRows(BlockManager(10), 3, block_size=4, window=10, only=False)


def test_a_window_that_left_the_device_comes_back_from_host_memory() -> None:
    """Of a prompt whose blocks are still there, and of one that has left as a whole."""
    rig = Rig(8, 6, slots=(40, 40))
    rig.run(request("a", prompt(41), 2, ignore_eos=True, root=ROOT))
    rig.run(request("b", prompt(41, salt=1), 2, ignore_eos=True, root=ROOT))
    assert len(rig.manager.match(names(prompt(29)), 7)) == 7
    rig.engine.submit(request("c", prompt(29), 9, ignore_eos=True, root=ROOT))
    assert rig.step().started[0].cached_tokens == 28
    assert rig.run()["c"] == expected_tokens(prompt(29), 9, WORDS)[1:]
    while rig.manager.evict():
        pass
    rig.engine.submit(request("d", prompt(41), 9, ignore_eos=True, root=ROOT))
    assert rig.step().started[0].cached_tokens == 40
    assert rig.engine.stats().loaded_blocks == 10
    assert rig.hosts[1].loaded_blocks < 8, "rows before the window stay where they are"


def test_a_prefix_whose_rows_are_being_loaded_is_read_by_another_worker_afterwards() -> None:
    rig = Rig(8, 6, slots=(40, 40), overlapped=True)
    rig.run(request("a", prompt(41), 2, ignore_eos=True, root=ROOT))
    rig.run(request("b", prompt(41, salt=1), 2, ignore_eos=True, root=ROOT))
    rig.engine.submit(request("c", prompt(29), 9, ignore_eos=True, root=ROOT))
    rig.step()
    assert rig.memory.queue, "the copy is under way"
    found = rig.scheduler.reservations.find(names(prompt(29)))
    assert rig.scheduler.reservations.pin("reader", found) == 7
    for block, row in zip(found.blocks[5:], found.windows.rows, strict=True):
        assert rig.memory.rows[row, 3] == rig.memory.content[block, 3]
    assert rig.engine.release_pinned("reader")
    rig.run()


def test_rows_that_are_being_saved_are_not_written_by_another_worker() -> None:
    rig = Rig(8, 8, blocks=18, budget=4, slots=(40, 40), overlapped=True)
    rig.run(request("a", prompt(41), 2, ignore_eos=True, root=ROOT))
    rig.engine.submit(request("b", prompt(41, salt=1), 9, ignore_eos=True, root=ROOT))
    rig.step()
    assert rig.memory.queue, "rows of blocks that are evicted are being saved"
    reservation = rig.scheduler.reservations.reserve(names(prompt(12)), 0, 1)
    assert reservation is not None
    assert (reservation.have, len(reservation.fills)) == (3, 2), "its blocks are here, and the rows of its window not"
    (_, copier) = rig.copiers
    assert isinstance(copier, LateCopier)
    assert not any({fill.row for fill in reservation.fills} & touched for touched in copier.waiting)
    rig.scheduler.reservations.release(reservation)
    rig.run()


@examples(150)
@given(
    st.integers(1, 14),
    st.integers(0, 6),
    st.sampled_from((30, 60, 400)),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from((None, (6, 3), (30, 9), (30, 30))),
    st.sampled_from((None, ((9, True),), ((0, True), (2, True), (1, False)))),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1), st.integers(1, 30), st.integers(0, 6)), max_size=12),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_answers_are_those_without_windows(
    window: int,
    spare: int,
    blocks: int,
    budget: int,
    prefix_cache: bool,
    slots: tuple[int, int] | None,
    plan: tuple[tuple[int, bool], ...] | None,
    requests: list[tuple[int, int, int, int]],
    cancelled: list[int],
) -> None:
    """Also with host memory and slow or damaged files, which a second engine finds."""
    rows, files = (window - 2) // SIZE + 2 + spare, None if plan is None else (Files(), Files())
    more = {"blocks": blocks, "budget": budget, "prefix_cache": prefix_cache, "max_running": 4, "slots": slots}
    if files is not None and plan is not None and slots is not None:
        first = Rig(window, rows, files=files, **more)  # type: ignore[arg-type]
        for length, salt, _, _ in requests[:3]:
            first.run(request(length, prompt(length, salt), 3, ignore_eos=True, root=ROOT))
        first.engine.close()
        for each, host in zip(files, first.hosts, strict=True):
            assert host.disk is not None
            each.present, each.plan = dict(host.disk.names), plan
    rig = Rig(window, rows, files=files, **more)  # type: ignore[arg-type]
    wanted, outputs = {}, dict[object, list[int]]()
    for key, (length, salt, count, steps) in enumerate(requests):
        rig.engine.submit(request(key, prompt(length, salt), count, ignore_eos=True, root=ROOT))
        wanted[key] = expected_tokens(prompt(length, salt), count, WORDS)
        for _ in range(steps):
            for output in rig.step().outputs:
                outputs.setdefault(output.key, []).append(output.token)
        if key in cancelled and rig.engine.cancel(key):
            del wanted[key]
    for _ in range(5000):
        if not rig.engine.has_work():
            break
        for output in rig.step().outputs:
            outputs.setdefault(output.key, []).append(output.token)
    assert {key: outputs.get(key) for key in wanted} == wanted
    assert rig.windows.used_blocks == 0


@examples(100)
@given(
    st.integers(2, 14),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.sampled_from((30, 60, 400)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((None, (6, 3), (30, 9))),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1), st.integers(0, 6), st.booleans()), max_size=8),
)
def test_answers_that_are_handed_off_are_those_of_one_engine(
    window: int,
    spare: tuple[int, int],
    blocks: int,
    only: bool,
    overlapped: bool,
    slots: tuple[int, int] | None,
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """Beside others that are computed in either engine."""
    least, more = (window - 2) // SIZE + 2, {"blocks": blocks, "only": only, "max_running": 4, "slots": slots}
    source, target = (Rig(window, least + rows, overlapped=overlapped, **more) for rows in spare)
    wanted, outputs = {}, dict[object, list[int]]()

    def step() -> StepResult:
        result = target.step()
        for output in result.outputs:
            outputs.setdefault(output.key, []).append(output.token)
        return result

    for key, (length, salt, steps, beside) in enumerate(requests):
        tokens = prompt(length, salt)
        if beside:
            target.engine.submit(request(("own", key), tokens, 6, ignore_eos=True, root=ROOT))
            wanted["own", key] = expected_tokens(tokens, 6, WORDS)
        first = handed_off(source, target, tokens, key)
        if first is not None:
            outputs[key], wanted[key] = first, expected_tokens(tokens, 9, WORDS)
        for _ in range(steps):
            step()
    for _ in range(5000):
        if not target.engine.has_work():
            break
        step()
    assert {key: outputs.get(key) for key in wanted} == wanted
    for rig in (source, target):
        assert rig.windows.used_blocks == rig.windows.kept == 0
