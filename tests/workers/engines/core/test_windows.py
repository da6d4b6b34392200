"""Rows of sliding-window layers: bounded, never somebody else's, and found again only where a whole window is there."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, request

WORDS = MockVocabulary(6, excluded=(2,))
SIZE = 4


class WindowMemory(PoolMemory):
    """Besides, which prefix's KV lies in the rows of the sliding layers."""

    def __init__(self, window: int) -> None:
        super().__init__(MockExecutor(WORDS, 1, speedup=0), SIZE, ROOT)
        self.window = window
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
    ) -> None:
        self.manager = BlockManager(blocks, prefix_cache=prefix_cache)
        self.windows = WindowRows(self.manager, rows, block_size=SIZE, window=window, only=only)
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
        self.engine = ScheduledEngine(info, self.scheduler, WindowMemory(window))
        self.mirror = Mirror()
        self.most = 0

    def step(self) -> StepResult:
        result = self.engine.step()
        self.mirror.apply(result.events)
        self.most = max(self.most, self.windows.used_blocks)
        self.check()
        return result

    def check(self) -> None:
        """Each row is in one place, held by whom it says, or can be reclaimed."""
        windows, manager = self.windows, self.manager
        held: dict[int, int] = {}
        for sequence in self.scheduler.running:
            for block in sequence.blocks[sequence.first_row : len(sequence.rows)]:
                held[block] = held.get(block, 0) + 1
        assert windows.holders == held
        assert sorted([*windows.free, *windows.rows.values()]) == list(range(windows.total_blocks))
        final = windows.rows.keys() - held.keys() - windows.passed.keys()
        assert final <= manager.idle.keys(), "a row that nothing can reclaim"
        assert not windows.passed.keys() & held.keys()
        check_pool(manager, [sequence.blocks for sequence in self.scheduler.running])

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


def test_handoffs_are_refused() -> None:
    rig = Rig(8, 9)
    assert rig.engine.kv_transfer is None
    with pytest.raises(RequestError, match="--no-hybrid-kv-cache"):
        rig.engine.submit(request("a", prompt(9), pin=True))


def test_a_pool_smaller_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 blocks"):
        WindowRows(BlockManager(10), 3, block_size=4, window=10, only=False)


@examples(150)
@given(
    st.integers(1, 14),
    st.integers(0, 6),
    st.sampled_from((30, 60, 400)),
    st.integers(1, 30),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1), st.integers(1, 30), st.integers(0, 6)), max_size=12),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_answers_are_those_without_windows(
    window: int,
    spare: int,
    blocks: int,
    budget: int,
    prefix_cache: bool,
    requests: list[tuple[int, int, int, int]],
    cancelled: list[int],
) -> None:
    rows = (window - 2) // SIZE + 2 + spare
    rig = Rig(window, rows, blocks=blocks, budget=budget, prefix_cache=prefix_cache, max_running=4)
    wanted, outputs = {}, dict[object, list[int]]()
    for key, (length, salt, count, steps) in enumerate(requests):
        rig.engine.submit(request(key, prompt(length, salt), count, ignore_eos=True))
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
