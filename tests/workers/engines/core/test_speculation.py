"""Speculation changes no token: whatever is proposed, wherever the output ends, and however short memory is."""

from collections.abc import Sequence as Seq
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from penstock.schemas.requests import Sampling
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.drafts import NgramDrafter, accepted
from penstock.workers.engines.core.engine import Drafter, ScheduledEngine, Speculator
from penstock.workers.engines.core.running import SchedulerConfig
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import EngineInfo, Output, StepResult
from penstock.workers.engines.mock.executor import MockExecutor, MockVocabulary, expected_tokens
from tests.properties import examples
from tests.workers.engines.core.support import ROOT, Mirror, PoolMemory, check_pool, request
from tests.workers.engines.core.test_offload import Copier

WORDS = MockVocabulary(6, excluded=(2,))
SIZE, STOP = 4, 4


class Verifier(PoolMemory):
    """Draws behind each proposed token what follows it, from KV that must be of these very tokens."""

    def __init__(self, window: int) -> None:
        super().__init__(MockExecutor(WORDS, 1, speedup=0), SIZE, ROOT)
        self.window = window
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        self.plans.append(plan)
        found = []
        for sequence, start, count, samples in map(astuple, plan):
            tokens = [*sequence.tokens, *sequence.draft]
            assert not sequence.draft or samples
            assert samples == (start + count == len(tokens))
            for position in range(start + count):
                place = (sequence.blocks[position // SIZE], position % SIZE)
                if position < start:
                    assert self.content.get(place) == tuple(tokens[: position + 1]), "attends to other KV"
                else:
                    self.content[place] = tuple(tokens[: position + 1])
            for position in range(max(0, start + 1 - self.window), start + count) if self.window else ():
                place = (sequence.rows[position // SIZE], position % SIZE)
                if position < start:
                    assert self.rows.get(place) == tuple(tokens[: position + 1]), "attends to another row"
                else:
                    self.rows[place] = tuple(tokens[: position + 1])
            for known in range(len(sequence.tokens), len(tokens) + 1) if samples else ():
                (token,) = expected_tokens(tokens[:known], 1, WORDS)
                asked = sequence.sampling.logprobs is not None
                found.append((token, Logprob(-float(known), ()) if asked else None))
        return found


class Guess:
    """Proposes as many tokens as it may, each wrong with a probability."""

    def __init__(self, seed: int, wrong: float) -> None:
        self._random = Random(seed)
        self._wrong = wrong
        self.closed = False

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        drafts = []
        for scheduled, limit in zip(plan, limits, strict=True):
            right = expected_tokens(scheduled.sequence.tokens, limit, WORDS)
            assert scheduled.start + scheduled.count + limit <= len(scheduled.sequence.blocks) * SIZE
            drafts.append([0 if self._random.random() < self._wrong else token for token in right])
        return drafts

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(
        self,
        drafter: Drafter | None,
        tokens: int = 3,
        *,
        blocks: int = 60,
        budget: int = 64,
        prefix_cache: bool = True,
        window: int = 0,
        no_evict: bool = False,
        slots: int = 0,
    ) -> None:
        self.memory, self.mirror = Verifier(window), Mirror()
        pools = [self.memory.content, self.memory.rows][: 1 + (window > 0)] if slots and prefix_cache else []
        host, row_host = [*(HostCache(slots) for _ in pools), None, None][:2]
        copier, row_copier = [*map(Copier, pools), None, None][:2]
        self.manager = BlockManager(blocks, prefix_cache=prefix_cache, host=host)
        rows = (window - 2) // SIZE + 4
        self.windows = None
        if window:
            self.windows = WindowRows(self.manager, rows, block_size=SIZE, window=window, only=False, host=row_host)
        config = SchedulerConfig(
            block_size=SIZE, max_running=4, max_batched_tokens=budget, max_model_len=200, no_evict=no_evict
        )
        self.scheduler = Scheduler(self.manager, config, self.windows)
        info = EngineInfo("mock", SIZE, blocks, 4, 200, 6, (), True)
        speculation = Speculator(drafter, tokens) if drafter is not None else None
        self.engine = ScheduledEngine(
            info, self.scheduler, self.memory, speculation=speculation, copier=copier, row_copier=row_copier
        )

    def step(self) -> StepResult:
        result = self.engine.step()
        self.mirror.apply([event for event in result.events if not getattr(event, "tier", 0)])
        check_pool(self.manager, [sequence.blocks for sequence in self.scheduler.running])
        if self.manager.prefix_cache:
            self.memory.check_names(self.manager)
        return result

    def run(self, *requests: object) -> dict[object, list[Output]]:
        outputs: dict[object, list[Output]] = {}
        for item in requests:
            self.engine.submit(item)  # type: ignore[arg-type]
        for _ in range(2000):
            if not self.engine.has_work():
                return outputs
            result = self.step()
            assert not result.failures
            for output in result.outputs:
                outputs.setdefault(output.key, []).append(output)
        raise AssertionError("it does not end")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (i * i + salt * (i + 1)) % 3 for i in range(length)]


def test_right_proposals_are_accepted_and_one_more_token_is_drawn() -> None:
    rig = Rig(Guess(1, 0.0), 3)
    rig.engine.submit(request("a", prompt(5), 20, ignore_eos=True, root=ROOT))
    assert [len(rig.step().outputs) for _ in range(6)] == [1, 4, 4, 4, 4, 3]
    stats = rig.engine.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (5, 14, 14)


def test_the_first_wrong_proposal_ends_the_run() -> None:
    assert [accepted([1, 2, 3], drawn) for drawn in ([1, 2, 3, 4], [1, 5, 3, 4], [9, 2, 3, 4])] == [3, 1, 0]


def test_proposals_never_pass_the_limit_of_an_output_or_the_budget_of_a_step() -> None:
    rig = Rig(Guess(1, 0.0), 30, budget=9)
    outputs = rig.run(*(request(n, prompt(5, n), 13, ignore_eos=True, root=ROOT) for n in range(3)))
    assert {len(each) for each in outputs.values()} == {13}
    assert max(sum(scheduled.count for scheduled in plan) for plan in rig.memory.plans) <= 9


def test_penalties_and_processors_are_sampled_one_token_at_a_time() -> None:
    rig = Rig(Guess(1, 0.0))
    rig.run(
        request("a", prompt(5), 10, sampling=Sampling(temperature=0, presence_penalty=1.0), ignore_eos=True, root=ROOT)
    )
    assert rig.engine.stats().draft_tokens == 0


def test_blocks_that_proposals_take_are_saved_before_they_are_written() -> None:
    rig = Rig(Guess(1, 0.0), 9, blocks=14, slots=60)
    for key in range(8):
        (answer,) = rig.run(request(key, prompt(30, key % 4), 20, ignore_eos=True, root=ROOT)).values()
        assert [output.token for output in answer] == expected_tokens(prompt(30, key % 4), 20, WORDS)
    assert rig.engine.stats().loaded_blocks > 0


def test_a_closed_engine_closes_its_drafter() -> None:
    drafter = Guess(1, 0.0)
    Rig(drafter).engine.close()
    assert drafter.closed


def test_a_number_of_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        Speculator(Guess(1, 0.0), 0)


@examples(60)
@given(
    st.integers(0, 1000),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(1, 9),
    st.sampled_from((12, 20, 60)),
    st.sampled_from((1, 7, 64)),
    st.booleans(),
    st.sampled_from((0, 3, 9)),
    st.booleans(),
    st.sampled_from((0, 20)),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1), st.integers(1, 20), st.integers(0, 4)), max_size=8),
)
def test_outputs_are_those_without_speculation(
    seed: int,
    wrong: float,
    tokens: int,
    blocks: int,
    budget: int,
    prefix_cache: bool,
    window: int,
    no_evict: bool,
    slots: int,
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Also with host memory, to which blocks and rows go that proposals take."""
    options = {"blocks": blocks, "budget": budget, "prefix_cache": prefix_cache, "no_evict": no_evict, "slots": slots}
    found = []
    for drafter in (None, Guess(seed, wrong), NgramDrafter(1, 3)):
        rig = Rig(drafter, tokens, window=window, **options)  # type: ignore[arg-type]
        outputs: dict[object, list[Output]] = {}
        for key, (length, salt, count, steps) in enumerate(requests):
            sampling = Sampling(temperature=0.0, logprobs=0 if key % 2 else None)
            more = {"token_ids": (STOP,), "min_tokens": key % 3, "sampling": sampling, "root": ROOT}
            rig.engine.submit(request(key, prompt(length, salt), count, **more))
            for _ in range(steps):
                for output in rig.step().outputs:
                    outputs.setdefault(output.key, []).append(output)
        for key, more_outputs in rig.run().items():
            outputs.setdefault(key, []).extend(more_outputs)
        found.append(outputs)
        assert rig.manager.used_blocks == 0
        if no_evict:
            assert rig.engine.stats().preemptions == 0
    assert found[0] == found[1] == found[2]
