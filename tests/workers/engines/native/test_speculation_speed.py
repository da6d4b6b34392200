"""Speculation is kept or turned off by the steps that it takes."""

from collections.abc import Sequence as Seq

import pytest

from penstock.workers.engines.base import EngineInfo
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.engine import Speculator
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import PendingStep, Sampled, ScheduledSequence
from penstock.workers.engines.native import build
from penstock.workers.engines.native.build import can_pay

TOKENS = build.PROMPT + build.ANSWER
INFO = EngineInfo(
    name="test",
    block_size=8,
    total_blocks=16,
    slots=1,
    max_model_len=TOKENS,
    vocab_size=50,
    eos_token_ids=(),
    kv_events=False,
    load_seconds=0.0,
)


class Clocked:
    """An executor and a drafter whose steps take a time of their own: of the clock that is measured with."""

    def __init__(self, step_s: float, drafting_s: float) -> None:
        self.now = 0.0
        self._step_s, self._drafting_s = step_s, drafting_s
        self.closed = False

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        self.now += self._step_s
        return [(7, None) for scheduled in plan if scheduled.samples for _ in range(1 + len(scheduled.sequence.draft))]

    def launch(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> PendingStep:
        found = self.execute(plan, scoring)

        class Done:
            def result(self) -> list[Sampled]:
                return found

        return Done()

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        self.now += self._drafting_s
        return [[7] * limit for limit in limits]

    def memory(self) -> dict:
        return {}

    def close(self) -> None:
        self.closed = True


def scheduler() -> Scheduler:
    config = SchedulerConfig(block_size=8, max_running=1, max_batched_tokens=TOKENS, max_model_len=TOKENS)
    return Scheduler(BlockManager(16, prefix_cache=False), config)


@pytest.mark.parametrize(("drafting_s", "pays"), [(0.5, True), (3.9, True), (4.1, False), (20.0, False)])
def test_speculation_pays_if_a_step_with_proposals_is_shorter_than_those_it_saves(
    drafting_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked = Clocked(1.0, drafting_s)
    monkeypatch.setattr(build.time, "perf_counter", lambda: clocked.now)
    assert can_pay(clocked, Speculator(clocked, 4), 4, INFO, scheduler) is pays
    assert not clocked.closed, "the executor is still needed"
