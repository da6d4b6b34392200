"""Steps ahead: the next plan is made before the tokens of the one before are known, and nothing comes out different."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from penstock.schemas.requests import Sampling
from penstock.schemas.transfer import Memory
from penstock.workers.engines.constraints.token_mask import Matcher
from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.engine import ScheduledEngine, scheduler_stats
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence
from penstock.workers.engines.core.sequence import Sequence as Running
from penstock.workers.engines.engine_protocol import EngineInfo, PinnedPrompt, RequestError, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, request
from tests.workers.engines.core.test_offload import Copier

WORDS = MockVocabulary(6, excluded=(2,))
STOP = 4  # a token that ends some answers: learned one step late


class Passed(NamedTuple):
    layers: int
    wait: Callable[[], None]


class Step:
    waypoints: Sequence[Passed] = ()

    def __init__(self, sampled: list[Sampled]) -> None:
        self._sampled = sampled

    def result(self) -> list[Sampled]:
        return self._sampled


class Late:
    """Computes a plan when it is launched, from what is known then and what the step before drew: as a device would.

    Attributes:
        most: steps that were launched before the results of earlier ones were asked for, at once.
    """

    def __init__(self, block_size: int) -> None:
        self.pool = PoolMemory(MockExecutor(WORDS, 1, speedup=0), block_size, ROOT)
        self._size = block_size
        self._drawn: dict[Running, int] = {}
        self.unknown = 0

    def launch(self, plan: list[ScheduledSequence], scoring: Sequence[ScheduledSequence] = ()) -> Step:
        drawn, content, size = {}, self.pool.content, self._size
        for sequence, start, count, samples in map(astuple, plan):
            tokens = list(sequence.tokens)
            if start + count > len(tokens):
                self.unknown += 1
                tokens.append(self._drawn[sequence])
            assert start + count <= len(tokens)
            assert samples == (start + count == len(tokens))
            places = [(sequence.blocks[p // size], p % size) for p in range(start + count)]
            for position, place in enumerate(places):
                if position < start:
                    assert content.get(place) == tuple(tokens[: position + 1]), "attends to someone else's KV"
                else:
                    content[place] = tuple(tokens[: position + 1])
            if samples:
                (drawn[sequence],) = expected_tokens(tokens, 1, WORDS)
        self._drawn = drawn
        return Step([(drawn[scheduled.sequence], None) for scheduled in plan if scheduled.samples])

    def memory(self) -> dict[str, Memory]:
        return {}

    def close(self) -> None:
        self.pool.close()


def ahead(
    total_blocks: int = 32,
    *,
    block_size: int = 4,
    max_running: int = 4,
    max_batched_tokens: int = 32,
    mixed_chunk_tokens: int = 0,
    prefix_cache: bool = True,
) -> tuple[ScheduledEngine, Late, Scheduler]:
    manager = BlockManager(total_blocks, prefix_cache=prefix_cache)
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            block_size=block_size,
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            mixed_chunk_tokens=mixed_chunk_tokens,
            max_model_len=24,
        ),
    )
    info = EngineInfo("late", block_size, total_blocks, max_running, 24, 6, (), True)
    executor = Late(block_size)
    return ScheduledEngine(info, scheduler, None, ahead=executor), executor, scheduler


def check(engine: ScheduledEngine, executor: Late, scheduler: Scheduler) -> None:
    flight = engine.inflight
    ended = [scheduled.sequence for scheduled in flight.plan if scheduled.sequence.ended] if flight else []
    check_pool(scheduler.blocks, [sequence.blocks for sequence in (*scheduler.running, *ended)])
    if scheduler.blocks.prefix_cache:
        executor.pool.check_names(scheduler.blocks)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known() -> None:
    engine, executor, _ = ahead()
    engine.submit(request("a", [0, 1, 0], 6, root=ROOT))
    assert engine.step().outputs == []
    assert [output.token for output in engine.step().outputs] == expected_tokens([0, 1, 0], 1, WORDS)
    assert executor.unknown == 1
    rest = [output for _ in range(5) for output in engine.step().outputs]
    assert [output.finish for output in rest] == ["", "", "", "", "length"]
    assert executor.unknown == 5
    assert not engine.has_work()


def test_what_computing_a_block_takes_has_its_launch_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers weigh by it what bringing a block back from host memory costs."""
    host, executor, now = HostCache(8), Late(4), [0.0]
    config = SchedulerConfig(block_size=4, max_running=4, max_batched_tokens=32, max_model_len=24)
    scheduler = Scheduler(BlockManager(32, host=host), config)
    info = EngineInfo("late", 4, 32, 4, 24, 6, (), True)
    engine = ScheduledEngine(info, scheduler, None, ahead=executor, copier=Copier(executor.pool.content))
    monkeypatch.setattr("penstock.workers.engines.core.engine.LEAST_PROMPT_TOKENS", 1)
    monkeypatch.setattr("penstock.workers.engines.core.engine.PROMPT_SHARE", 1.0)
    monkeypatch.setattr("penstock.workers.engines.core.engine.time.perf_counter", lambda: now[0])
    launch = executor.launch

    def launches(plan: list[ScheduledSequence], scoring: Sequence[ScheduledSequence] = ()) -> Step:
        now[0] += 0.060
        return launch(plan, scoring)

    def result(step: Step) -> list[Sampled]:
        now[0] += 0.040
        return step._sampled

    monkeypatch.setattr(executor, "launch", launches)
    monkeypatch.setattr(Step, "result", result)
    engine.submit(request("a", [0, 1, 0, 1, 0, 1, 0, 1, 0], 1, root=ROOT))
    engine.submit(request("b", [1, 1, 0, 1, 0, 1, 0, 1, 0], 1, root=ROOT))
    while engine.has_work():
        engine.step()
    assert host.compute_s == pytest.approx(0.100 / 16 * 4)


def test_a_step_that_had_ended_before_the_next_was_launched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = ahead()
    engine.submit(request("a", [0, 1, 0], 6, root=ROOT))
    now, takes = [0.0], [0.005]
    monkeypatch.setattr("penstock.workers.engines.core.engine.time.perf_counter", lambda: now[0])

    def result(step: Step) -> list[Sampled]:
        now[0] += takes[0]
        return step._sampled

    def launch(plan: list[ScheduledSequence], scoring: Sequence[ScheduledSequence] = ()) -> Step:
        now[0] += 0.002
        return Late.launch(cast("Late", engine.ahead), plan, scoring)

    monkeypatch.setattr(Step, "result", result)
    monkeypatch.setattr(engine.ahead, "launch", launch)
    assert engine.step().ahead_s is None
    assert [engine.step().ahead_s for _ in range(2)] == pytest.approx([0.005, 0.005])
    takes[0] = 0.0
    assert engine.step().ahead_s == 0.0


def test_prompts_are_reported_as_written_when_the_step_in_flight_has_passed_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the blocks that it writes, also if they are another's before its result is known."""
    engine, _, scheduler = ahead()
    seen: list[object] = []
    waypoints = [Passed(3, lambda: seen.append("three")), Passed(0, lambda: seen.append("all"))]
    monkeypatch.setattr(Step, "waypoints", waypoints)
    engine.submit(request("other", [1, 0], 1, root=ROOT))
    engine.submit(request("a", [0, 1, 0, 1, 0], 1, root=ROOT, pin=True))
    scheduler.reservations.prompts_written = lambda prompts, layers: seen.append((prompts, layers))
    assert engine.step().outputs == []
    assert not seen
    assert engine.inflight is not None
    table = list(engine.inflight.plan[1].sequence.blocks)
    prompt = PinnedPrompt("a", table, [scheduler.blocks.generations[block] for block in table])
    (pinned,) = engine.step().pinned
    assert seen == ["three", ([prompt], 3), "all", ([prompt], 0)]
    assert pinned == prompt
    scheduler.pinned.release("a")
    engine.submit(request("b", [1, 1, 1], 2, root=ROOT, pin=True))
    engine.step()
    assert engine.inflight is not None
    assert engine.cancel("b")
    engine.submit(request("other", [1, 0], 3, root=ROOT))
    while engine.has_work():
        engine.step()
    assert seen[4:] == ["three", (mock.ANY, 3), "all", (mock.ANY, 0)]


def test_an_answer_whose_end_is_known_by_its_length_is_not_computed_further() -> None:
    engine, executor, scheduler = ahead()
    engine.submit(request("a", [0, 1, 0], 2, root=ROOT))
    outputs = [output for _ in range(3) for output in engine.step().outputs]
    assert len(outputs) == 2
    assert executor.unknown == 1
    assert not engine.has_work()
    assert scheduler.blocks.used_blocks == 0


class Anything:
    """A constraint that every text matches."""

    error = ""

    def follow(self, tokens: Sequence[int]) -> None: ...


def test_a_constrained_answer_is_launched_ahead_like_any_other() -> None:
    engine, executor, scheduler = ahead()
    asked = request("a", [0, 1, 0], 6, root=ROOT)
    scheduler.submit(asked, None, cast("Matcher", Anything()))
    outputs = [output for _ in range(7) for output in engine.step().outputs]
    assert [output.token for output in outputs] == expected_tokens([0, 1, 0], 6, WORDS)
    assert executor.unknown == 5
    assert not engine.has_work()


def test_a_stop_token_is_learned_a_step_late_and_its_blocks_stay_until_that_step_is_done() -> None:
    prompts = ([n % 3 % 2, n % 2, n // 2 % 2, n // 4 % 2] for n in range(64))
    prompt = next(each for each in prompts if [*expected_tokens(each, 2, WORDS), STOP].index(STOP) == 1)
    engine, executor, scheduler = ahead()
    engine.submit(request("a", prompt, 9, token_ids=(STOP,), root=ROOT))
    engine.step()
    engine.step()
    last = engine.step()
    assert [(output.token, output.finish) for output in last.outputs] == [(STOP, "stop")]
    assert engine.has_work()
    assert scheduler.blocks.used_blocks > 0
    check(engine, executor, scheduler)
    assert engine.step().outputs == []
    assert not engine.has_work()
    assert scheduler.blocks.used_blocks == 0


def test_a_cancelled_sequence_gives_its_blocks_back_when_its_step_is_done() -> None:
    engine, _, scheduler = ahead()
    engine.submit(request("a", [0, 1, 0], 9, root=ROOT))
    engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert scheduler.blocks.used_blocks == 1
    assert engine.step().outputs == []
    assert scheduler.blocks.used_blocks == 0
    assert not engine.has_work()


def test_who_depends_on_its_last_token_waits_for_it_and_others_do_not() -> None:
    engine, executor, _ = ahead()
    engine.submit(request("a", [0, 1, 0], 4, sampling=Sampling(temperature=0.0, presence_penalty=1.0), root=ROOT))
    engine.submit(request("b", [1, 1, 0], 4, root=ROOT))
    got: dict[object, int] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            got[output.key] = got.get(output.key, 0) + 1
    assert got == {"a": 4, "b": 4}
    assert executor.unknown == 3  # of b


def test_without_a_free_block_the_step_under_way_ends_before_anyone_is_preempted() -> None:
    engine, executor, scheduler = ahead(5, block_size=2)
    prompts = {"a": [0, 1, 1], "b": [1, 0, 0]}
    for key, prompt in prompts.items():
        engine.submit(request(key, prompt, 5, root=ROOT))
    tokens: dict[object, list[int]] = {"a": [], "b": []}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.key].append(output.token)
        check(engine, executor, scheduler)
    assert tokens == {key: expected_tokens(prompt, 5, WORDS) for key, prompt in prompts.items()}
    assert scheduler_stats(scheduler).preemptions == 1


_requests = st.tuples(
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9),
    st.integers(1, 12),  # max_tokens
    st.booleans(),  # stops at STOP
    st.booleans(),  # depends on its last token
)
_history = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), _requests),
        st.tuples(st.just("submit"), _requests),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=12,
    max_size=40,
)


@examples(200)
@given(
    history=_history,
    block_size=st.integers(1, 4),
    total_blocks=st.integers(3, 16),
    max_running=st.integers(1, 5),
    max_batched_tokens=st.integers(1, 20),
    mixed_chunk_tokens=st.integers(0, 4),
    prefix_cache=st.booleans(),
)
def test_any_history_ends_with_the_tokens_of_steps_in_turn(
    history: list[tuple[str, object]],
    block_size: int,
    total_blocks: int,
    max_running: int,
    max_batched_tokens: int,
    mixed_chunk_tokens: int,
    prefix_cache: bool,
) -> None:
    engine, executor, scheduler = ahead(
        total_blocks,
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        mixed_chunk_tokens=mixed_chunk_tokens,
        prefix_cache=prefix_cache,
    )
    mirror = Mirror()
    asked: dict[object, tuple[list[int], int, bool]] = {}
    tokens: dict[object, list[int]] = {}
    ends: dict[object, str] = {}

    def take(result: StepResult) -> None:
        check(engine, executor, scheduler)
        mirror.apply(result.events)
        for output in result.outputs:
            assert output.key not in ends
            tokens[output.key].append(output.token)
            if output.finish:
                ends[output.key] = output.finish
        for failure in result.failures:
            ends[failure.key] = "failed"

    for number, (kind, detail) in enumerate(history):
        if kind == "submit":
            prompt, max_tokens, stops, penalised = detail  # type: ignore[misc]
            sampling = Sampling(temperature=0.0, presence_penalty=1.0 if penalised else 0.0)
            more = {"token_ids": (STOP,)} if stops else {}
            submission = request(number, prompt, max_tokens, sampling=sampling, root=ROOT, **more)
            if len(prompt) >= total_blocks * block_size:
                with pytest.raises(RequestError):
                    engine.submit(submission)
                continue
            engine.submit(submission)
            asked[number], tokens[number] = (prompt, max_tokens, stops), []
        elif kind == "cancel":
            if engine.cancel(detail):
                ends[detail] = "cancelled"
        else:
            assert isinstance(detail, int)
            for _ in range(detail):
                take(engine.step())
        check(engine, executor, scheduler)
    for _ in range(2000):
        if not engine.has_work():
            break
        take(engine.step())
    assert not engine.has_work(), "it hangs"
    assert ends.keys() == asked.keys()
    assert scheduler.blocks.used_blocks == 0
    for number, (prompt, max_tokens, stops) in asked.items():
        expected = expected_tokens(prompt, min(max_tokens, 24 - len(prompt)), WORDS)
        if stops and STOP in expected:
            expected = expected[: expected.index(STOP) + 1]
        assert tokens[number] == expected[: len(tokens[number])]
        if ends[number] in ("stop", "length"):
            assert tokens[number] == expected
