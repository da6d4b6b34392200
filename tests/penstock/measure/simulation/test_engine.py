"""The simulated engine against the same model pass by pass."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.simulation.engine import EngineSequence, SimulatedEngine
from tests.penstock.measure.simulation import naive_engine
from tests.properties import examples

SIZE = 4


@dataclass
class Job:
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    family: int

    def keys(self, index: int) -> list[int]:
        """Blocks of the same family are shared up to the eighth; the last ones are the request's own."""
        full = self.prompt_tokens // SIZE
        return [self.family * 1000 + n if n < 8 else (index + 100) * 1000 + n for n in range(full)]


@dataclass
class Seen:
    """What a client and a router see: times of tokens, and the keys held after each pass."""

    first: dict[int, int]
    ended: dict[int, int]
    rejected: set[int]
    cached: dict[int, int]
    held: dict[int, frozenset[int]]
    preemptions: int


JOBS = st.lists(
    st.builds(
        Job,
        arrival_ns=st.integers(0, 400).map(lambda ms: ms * 1_000_000),
        prompt_tokens=st.integers(1, 70),
        output_tokens=st.integers(1, 40),
        family=st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


def run_naive(jobs: list[Job], blocks: int, batch: int, budget: int) -> Seen:
    engine = naive_engine.NaiveEngine(blocks, SIZE, batch, budget)
    sequences = [
        naive_engine.Sequence(n, job.prompt_tokens, job.output_tokens, job.keys(n)) for n, job in enumerate(jobs)
    ]
    seen = Seen({}, {}, set(), {}, {}, 0)
    now, arrived = 0, 0
    while True:
        while arrived < len(jobs) and jobs[arrived].arrival_ns <= now:
            engine.waiting.append(sequences[arrived])
            arrived += 1
        step = engine.step() if engine.running or engine.waiting else None
        if step is None:
            if arrived == len(jobs):
                break
            now = jobs[arrived].arrival_ns
            continue
        # Arrivals during the pass wait for its end, but join in their own order.
        end = now + step.duration_ns
        while arrived < len(jobs) and jobs[arrived].arrival_ns <= end:
            engine.waiting.append(sequences[arrived])
            arrived += 1
        now = end
        seen.first.update(dict.fromkeys(step.first, now))
        seen.ended.update(dict.fromkeys(step.ended, now))
        seen.rejected.update(step.rejected)
        seen.held[now] = step.held
    seen.cached = {each.index: each.cached_tokens or 0 for each in sequences}
    seen.preemptions = engine.preemptions
    return seen


def run_fast(jobs: list[Job], blocks: int, batch: int, budget: int) -> Seen:
    engine = SimulatedEngine(blocks, SIZE, max_sequences=batch, max_batched_tokens=budget)
    sequences = [EngineSequence(n, job.prompt_tokens, job.output_tokens, job.keys(n)) for n, job in enumerate(jobs)]
    seen = Seen({}, {}, set(), {}, {}, 0)
    held: set[int] = set()
    now, arrived = 0, 0
    while True:
        while arrived < len(jobs) and jobs[arrived].arrival_ns <= now:
            engine.add(sequences[arrived])
            arrived += 1
        durations = engine.form() if engine.has_work else []
        if not durations:
            if arrived == len(jobs):
                break
            now = jobs[arrived].arrival_ns
            continue
        passes, end = 1, now + durations[0]
        while passes < len(durations):
            if arrived < len(jobs) and jobs[arrived].arrival_ns <= end and engine.takes_more:
                break
            end += durations[passes]
            passes += 1
        while arrived < len(jobs) and jobs[arrived].arrival_ns <= end:
            engine.add(sequences[arrived])
            arrived += 1
        now = end
        outcome = engine.finish(passes)
        assert held.issuperset(outcome.removed)
        held = (held - set(outcome.removed)) | {key for keys, _ in outcome.stored for key in keys}
        seen.first.update({each.index: now for each in outcome.first})
        seen.ended.update({each.index: now for each in outcome.ended})
        seen.rejected.update(each.index for each in outcome.rejected)
        seen.held[now] = frozenset(held)
    seen.cached = {each.index: each.cached_tokens for each in sequences}
    seen.preemptions = engine.preemptions
    return seen


@examples(150)
@given(JOBS, st.integers(6, 60), st.integers(1, 6), st.integers(7, 64))
def test_runs_of_passes_are_equal_to_single_passes(jobs: list[Job], blocks: int, batch: int, budget: int) -> None:
    jobs = sorted(jobs, key=lambda job: job.arrival_ns)
    budget = max(budget, batch)
    naive, fast = run_naive(jobs, blocks, batch, budget), run_fast(jobs, blocks, batch, budget)
    assert fast.first == naive.first
    assert fast.ended == naive.ended
    assert fast.rejected == naive.rejected
    assert fast.cached == naive.cached
    assert fast.preemptions == naive.preemptions
    assert all(naive.held[time] == keys for time, keys in fast.held.items())


def test_a_long_answer_is_planned_in_few_runs() -> None:
    engine = SimulatedEngine(1000, 64)
    engine.add(EngineSequence(0, 100, 1000, [1]))
    runs = 0
    while engine.has_work:
        engine.finish(len(engine.form()))
        runs += 1
    assert runs < 40


def test_a_preempted_sequence_ends_and_every_block_is_free_or_cached() -> None:
    engine = SimulatedEngine(12, 4, max_sequences=8)
    for index in range(4):
        engine.add(EngineSequence(index, 9, 20, [index * 10, index * 10 + 1]))
    ended = []
    while engine.has_work:
        ended += engine.finish(len(engine.form())).ended
    assert engine.preemptions > 0
    assert sorted(each.index for each in ended) == [0, 1, 2, 3]
    assert engine.cache.active == 0


def test_half_the_speed_takes_twice_the_time() -> None:
    def total(slowness: float, decode_slowness: float = 1.0) -> int:
        engine = SimulatedEngine(1000, 64, slowness=slowness, decode_slowness=decode_slowness)
        engine.add(EngineSequence(0, 5000, 100, list(range(78))))
        ns = 0
        while engine.has_work:
            durations = engine.form()
            engine.finish(len(durations))
            ns += sum(durations)
        return ns

    assert abs(total(2.0) - 2 * total(1.0)) <= 200
    assert total(1.0) < total(1.0, 2.0) < total(2.0)
