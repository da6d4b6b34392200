"""Scoring a prompt: each position once and in order, however it is cut, preempted, cached before or resumed."""

from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.block_hashes import root
from penstock.schemas.requests import Sampling
from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.running import SchedulerConfig, block_digests
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import ScheduledSequence, scored_to
from penstock.workers.engines.engine_protocol import EngineInfo, SequenceRequest, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary
from tests.properties import examples
from tests.workers.engines.core.support import PoolMemory, check_pool, request

ROOT = root("weights")
WORDS = MockVocabulary(50)
ASKED = Sampling(temperature=0.0, prompt_logprobs=2)


class Watched(PoolMemory):
    """Counts the rows of logits that a step is asked for."""

    def __init__(self, total_blocks: int, size: int) -> None:
        super().__init__(MockExecutor(WORDS, total_blocks * size, speedup=0), size, ROOT)
        self.most = 0

    def execute(self, plan, scoring=()):  # type: ignore[no-untyped-def]
        assert all(scheduled in plan for scheduled in scoring)
        self.most = max(self.most, sum(scheduled.count for scheduled in scoring))
        return super().execute(plan, scoring)


class Bench:
    def __init__(
        self, *, total_blocks: int = 64, size: int = 4, batched: int = 64, at_once: int = 512, running: int = 8
    ) -> None:
        self.blocks = BlockManager(total_blocks)
        self.scheduler = Scheduler(
            self.blocks,
            SchedulerConfig(
                block_size=size,
                max_running=running,
                max_batched_tokens=batched,
                max_model_len=1000,
                max_scored_tokens=at_once,
            ),
        )
        self.executor = Watched(total_blocks, size)
        info = EngineInfo("mock", size, total_blocks, running, 1000, 50, (), True)
        self.engine = ScheduledEngine(info, self.scheduler, self.executor)
        self.values: dict[object, list[Logprob]] = {}
        self.first: dict[object, int] = {}
        self.answers: dict[object, list[int]] = {}
        self.cached: dict[object, int] = {}

    def submit(self, asked: SequenceRequest) -> None:
        self.engine.submit(msgspec.structs.replace(asked, root=ROOT))

    def step(self) -> StepResult:
        result = self.engine.step()
        assert result.failures == []
        for key, first, logprobs in result.scored:
            known = self.values.setdefault(key, [])
            assert first == self.first.setdefault(key, first) + len(known)
            assert logprobs
            known += logprobs
        for started in result.started:
            self.cached[started.key] = started.cached_tokens
        for output in result.outputs:
            self.answers.setdefault(output.key, []).append(output.token)
        return result

    def run(self, *asked: SequenceRequest) -> None:
        for each in asked:
            self.submit(each)
        for _ in range(3000):
            if not self.engine.has_work():
                check_pool(self.blocks, [])
                return
            self.step()
        raise AssertionError("work is left")


def expected(prompt: list[int], first: int = 1, wanted: int = 2) -> list[Logprob]:
    return [WORDS.score(crc32(pack_tokens(prompt[:at])), prompt[at], wanted) for at in range(first, len(prompt))]


PROMPT = [(7 * i * i + 3) % 50 for i in range(40)]


def test_a_cached_prompt_is_computed_again_and_keeps_its_names() -> None:
    bench = Bench()
    bench.run(request("a", PROMPT))
    dumped = len(bench.blocks.dump())
    bench.run(request("b", PROMPT, sampling=ASKED, score=1))
    assert bench.cached == {"a": 0, "b": 0}
    assert bench.values == {"b": expected(PROMPT)}
    assert len(bench.blocks.dump()) == dumped
    bench.run(request("c", PROMPT))
    assert bench.cached["c"] == 36
    assert bench.answers["a"] == bench.answers["b"] == bench.answers["c"]


@pytest.mark.parametrize(("first", "cached"), [(1, 0), (4, 0), (5, 4), (39, 36), (40, 36), (99, 36)])
def test_what_was_scored_before_may_come_from_the_cache(first: int, cached: int) -> None:
    bench = Bench()
    bench.run(request("a", PROMPT))
    bench.run(request("b", PROMPT, sampling=ASKED, score=first))
    assert bench.cached["b"] == cached
    assert bench.values.get("b", []) == expected(PROMPT, first)


def test_a_prompt_of_one_token_has_none() -> None:
    bench = Bench()
    bench.run(request("a", [5], sampling=ASKED, score=1))
    assert bench.values == {}
    assert len(bench.answers["a"]) == 8


def test_rows_of_logits_are_bounded_and_others_continue_beside() -> None:
    bench = Bench(at_once=6)
    bench.submit(request("plain", PROMPT[:8], max_tokens=30))
    for key in ("a", "b"):
        bench.submit(request(key, PROMPT, sampling=ASKED, score=1))
    bench.submit(request("late", PROMPT[3:30], max_tokens=4))
    shapes = []
    while "b" not in bench.answers:
        bench.step()
        shapes.append({scheduled.sequence.key: scheduled.count for scheduled in bench.executor.plans[-1]})
    assert bench.executor.most == 6
    assert shapes[0] == {"plain": 8, "a": 6, "late": 27}
    assert [shape.get("a") for shape in shapes[:7]] == [6, 6, 6, 6, 6, 6, 4]
    assert [shape.get("b", 0) for shape in shapes[:8]] == [0, 0, 0, 0, 0, 0, 2, 6]
    bench.run()
    assert bench.values == {"a": expected(PROMPT), "b": expected(PROMPT)}


def test_a_request_that_does_not_ask_plans_nothing() -> None:
    bench = Bench()
    bench.submit(request("a", PROMPT))
    while bench.engine.has_work():
        result = bench.step()
        assert (result.scored, bench.scheduler.scoring.sequences) == ((), [])


def test_a_reservation_is_let_go_of_and_the_prompt_computed() -> None:
    """Also one that is shorter than a block, whose only copy lies in the tail."""
    for length in (3, 40):
        bench = Bench()
        digests = block_digests(request("x", PROMPT[:length], root=ROOT), *_arrays(PROMPT[:length]), 4)
        reservation = bench.scheduler.reservations.reserve(digests, int(length % 4 > 0), 1)
        assert reservation is not None
        bench.run(request("a", PROMPT[:length], sampling=ASKED, score=1, reservation=reservation))
        assert bench.values == {"a": expected(PROMPT[:length])}
        assert bench.engine.stats().pinned_blocks == 0


def _arrays(tokens: list[int]):  # type: ignore[no-untyped-def]
    from array import array

    return array("I", tokens), tokens


@examples(60)
@given(st.data())
def test_any_history_scores_each_position_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    blocks = data.draw(st.integers(60 // size + 2, 100))
    bench = Bench(
        total_blocks=blocks,
        size=size,
        batched=data.draw(st.integers(1, 40)),
        at_once=data.draw(st.integers(1, 20)),
        running=data.draw(st.integers(1, 4)),
    )
    asked = []
    for key in range(data.draw(st.integers(1, 6))):
        prompt = PROMPT[data.draw(st.sampled_from([0, 0, 7])) :][: data.draw(st.integers(1, 30))]
        score = data.draw(st.sampled_from([0, 1, 1, 5]))
        generated = data.draw(st.lists(st.integers(0, 49), max_size=4))
        asked.append((key, prompt, score, generated))
    for key, prompt, score, generated in asked:
        sampling = ASKED if score else Sampling(temperature=0.0)
        count = len(generated) + data.draw(st.integers(1, 20))
        bench.submit(request(key, prompt, count, sampling=sampling, score=score, generated=generated))
        for _ in range(data.draw(st.integers(0, 3))):
            if bench.engine.has_work():
                bench.step()
    bench.run()
    assert bench.values == {
        key: values for key, prompt, score, _ in asked if score and (values := expected(prompt, score))
    }
    assert set(bench.answers) == {key for key, *_ in asked}


def test_a_slot_scores_up_to_the_token_behind_it_but_none_of_the_answer() -> None:
    bench = Bench()
    bench.submit(request("a", PROMPT, sampling=ASKED, score=1, generated=[1, 2, 3]))
    (scheduled,) = bench.scheduler.schedule()
    assert scored_to(ScheduledSequence(scheduled.sequence, 0, 5, False)) == 6
    assert scored_to(scheduled) == 40
