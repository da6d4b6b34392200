"""The engine's loop with the mock engine, in a thread of its own and in an event loop's: every token comes out once and
in order, however slow its consumer.
"""

import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from zlib import crc32

import pytest

from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import block_hashes, kv, wire
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.tokens import PROMPT, Logprob, TokenItem
from penstock.workers.engine_loop.loop import (
    AHEAD_S,
    EXPECTED_LATE_S,
    FAST_STEP_S,
    LEAST_WAIT_S,
    MAX_AHEAD,
    MOST_IDLE_S,
    WRITE_S,
    WRITE_SHARE,
    EngineLoop,
    EngineThread,
    StepPace,
)
from penstock.workers.engine_loop.step_output import PROMPT_ITEM_BYTES, CacheSnapshot, Flush, SequenceState, StepOutput
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import (
    Engine,
    EngineError,
    EngineStats,
    Failure,
    Output,
    SequenceRequest,
    StepResult,
)
from penstock.workers.engines.mock.executor import GREEDY, MockVocabulary, expected_tokens

VOCABULARY = MockVocabulary(1000)
ROOT = block_hashes.root("rev")


class Counted:
    """An engine that counts its steps and can be made to wait or to fail before one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps = 0
        self.gate: threading.Semaphore | None = None
        self.begun = threading.Semaphore(0)  # steps, while there is a gate
        self.error: Exception | None = None
        self.closed = False

    def step(self) -> StepResult:
        if self.gate is not None:
            self.begun.release()
            assert self.gate.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.steps += 1
        return self._engine.step()

    def close(self) -> None:
        self.closed = True
        self._engine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Harness:
    """An engine whose flushes the test takes one by one; by default a second passes whenever it looks at the clock."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        wall_ns: Callable[[], int] = lambda: 77,
        late: bool = False,
        **options: Any,
    ) -> None:
        self.late = late  # flush in the middle of steps, too
        defaults: dict[str, Any] = {"vocab_size": 1000, "block_size": 4, "total_blocks": 256, "speedup": 0}
        ranks = options.pop("ranks", 1)
        given = mock.MockOptions(**defaults | options)
        self.engine = Counted(mock.build_data_parallel(ranks, given) if ranks > 1 else mock.build(given))
        self.flushes: queue.SimpleQueue[Flush] = queue.SimpleQueue()
        self.failures: list[BaseException] = []
        self.loop = EngineLoop(wall_ns=wall_ns, clock=clock or count().__next__)
        self.loop.begin_session(self.flushes.put)
        self.thread = EngineThread(lambda: self.engine, self.loop, self.failures.append)
        self.all: list[Flush] = []
        self.thread.start()
        self.thread.wait_ready(10)

    def take(self) -> Flush:
        """The next flush, as consumed."""
        flush = self.flushes.get(timeout=10)
        self.all.append(flush)
        self.loop.flush_consumed()
        if self.late:
            self.loop.flush_late()
        return flush

    def take_until_ended(self, count: int) -> list[SequenceState]:
        ended: list[SequenceState] = []
        while len(ended) < count:
            ended += self.take().ended
        return ended

    def ask(self, question: Callable[[Any], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop.ask(question, answer.put)
        return answer.get(timeout=10)

    def stats(self) -> EngineStats:
        result = self.ask(lambda engine: engine.stats())
        assert isinstance(result, EngineStats)
        return result

    def tokens(self, choice: SequenceState) -> list[int]:
        """What its flushes say, checked for gaps and repeats."""
        found: list[int] = []
        for flush in self.all:
            for item in flush.items.get(choice.token_address, ()):
                if (item.request, item.choice) == (choice.request_id, choice.index):
                    assert item.first == len(found)
                    found += wire.unpack_tokens(item.tokens)
        return found

    def items(self) -> list[TokenItem]:
        return [item for flush in self.all for items in flush.items.values() for item in items]


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for one in made:
        if one.engine.gate is not None:
            one.engine.gate.release(10_000)
        one.loop.stop()
        assert one.thread.join(10)
        assert one.engine.closed


def new_choice(request: str = "r", index: int = 0, gateway: str = "gw", **options: Any) -> SequenceState:
    return SequenceState(None, request, 1, index, gateway, array("I"), options.pop("logprobs", False), **options)


def sequence(
    choice: SequenceState, prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY, rank: int = 0
) -> SequenceRequest:
    stop = Stop(max_tokens=max_tokens, ignore_eos=True)
    return SequenceRequest(choice, prompt, sampling, stop, choice=choice.index, root=ROOT, rank=rank)


def refuse(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("late", [False, True])
def test_all_tokens_arrive_in_order_and_are_the_expected_ones(harness: Callable[..., Harness], late: bool) -> None:
    h = harness(late=late)
    choices = [new_choice(f"r{i}", gateway=f"gw{i % 2}") for i in range(5)]
    for i, choice in enumerate(choices):
        h.loop.submit([sequence(choice, [i, 2, 3], 20 + i)], refuse)
    ended = h.take_until_ended(5)
    assert set(map(id, ended)) == set(map(id, choices))
    for i, choice in enumerate(choices):
        assert h.tokens(choice) == expected_tokens([i, 2, 3], 20 + i, VOCABULARY)
        assert choice.tokens.tolist() == h.tokens(choice)
        assert choice.finish is not None
        assert choice.finish.reason == "length"
        assert choice.started_ns == 77
    assert {choice.request_id for flush in h.all for choice in flush.started} == {f"r{i}" for i in range(5)}
    finishes = [item for item in h.items() if item.finish is not None]
    assert len(finishes) == 5


@pytest.mark.parametrize("top", [0, 20])
def test_scores_of_a_prompt_come_in_bounded_items_before_its_first_token(
    harness: Callable[..., Harness], top: int
) -> None:
    h = harness(total_blocks=2048, max_batched_tokens=4096)
    scored, plain = new_choice("a"), new_choice("b")
    prompt = [(7 * i) % 1000 for i in range(3000)]
    sampling = Sampling(temperature=0.0, prompt_logprobs=top)
    asked = sequence(scored, prompt, 3, sampling)
    asked.score = 1
    h.loop.submit([asked, sequence(plain, prompt, 3)], refuse)
    h.take_until_ended(2)
    known: list[Logprob] = []
    begun = False
    for item in h.items():
        assert len(wire.encode(item)) <= PROMPT_ITEM_BYTES + 200
        if item.choice == PROMPT:
            assert (item.request, item.first, item.tokens, item.finish) == ("a", 1 + len(known), b"", None)
            assert not begun
            known += item.logprobs or ()
        begun = begun or (item.request == "a" and item.choice == 0)
    assert len(known) == len(prompt) - 1
    assert {len(each.top) for each in known} == {top}
    assert known[-1] == VOCABULARY.score(crc32(wire.pack_tokens(prompt[:-1])), prompt[-1], top)
    assert (scored.scored_tokens, plain.scored_tokens) == (len(prompt), 0)


@pytest.mark.parametrize(("sequences", "steps"), [(1, 2), (15, 3), (64, 4)])
def test_flushes_of_many_sequences_are_further_apart(
    harness: Callable[..., Harness], sequences: int, steps: int
) -> None:
    h = harness(clock=count(0.0, 0.0005).__next__)  # which is read at each step, twice, and each flush
    choices = [new_choice(f"r{number}") for number in range(sequences)]
    h.loop.submit([sequence(choice, [number, 2], 12) for number, choice in enumerate(choices)], refuse)
    h.take_until_ended(sequences)
    between = [item for flush in h.all[1:-1] for items in flush.items.values() for item in items]
    assert all(len(item.tokens) // wire.TOKEN_BYTES >= steps for item in between)
    for number, choice in enumerate(choices):
        assert h.tokens(choice) == expected_tokens([number, 2], 12, VOCABULARY)


def test_a_step_is_flushed_immediately_if_the_last_flush_was_consumed_while_it_ran(
    harness: Callable[..., Harness],
) -> None:
    h = harness()
    h.engine.gate = threading.Semaphore(0)
    choice = new_choice()
    h.loop.submit([sequence(choice, [1, 2], 4)], refuse)
    for number in range(4):
        assert h.engine.begun.acquire(timeout=10)
        if number:
            h.loop.flush_consumed()
        h.engine.gate.release()
        (item,) = h.flushes.get(timeout=10).items[choice.token_address]
        assert (item.first, len(item.tokens) // wire.TOKEN_BYTES) == (number, 1)


def test_a_slow_consumer_makes_flushes_fewer_and_never_more_than_some_steps_large(
    harness: Callable[..., Harness],
) -> None:
    h = harness()
    choice = new_choice()
    h.loop.submit([sequence(choice, [1, 2], 400)], refuse)
    ended = 0
    while not ended:
        flush = h.flushes.get(timeout=10)  # not taken: the engine runs ahead, then waits
        h.all.append(flush)
        sent = h.engine.steps
        if not flush.ended:
            seen = -1
            while seen != h.engine.steps:  # until it stands still
                seen = h.engine.steps
                threading.Event().wait(0.01)
            assert h.engine.steps - sent <= MAX_AHEAD
        ended += len(flush.ended)
        h.loop.flush_consumed()
    assert h.tokens(choice) == expected_tokens([1, 2], 400, VOCABULARY)
    assert len(h.all) < h.engine.steps / 3
    assert all(len(item.tokens) // 4 <= MAX_AHEAD + 1 for item in h.items())


def test_the_consumer_of_the_last_flush_leaves_the_thread_asleep(harness: Callable[..., Harness]) -> None:
    h = harness()
    wakes: list[int] = []
    wake = h.loop.wake
    h.loop.wake = lambda: (wakes.append(1), wake())  # type: ignore[assignment, func-returns-value]
    h.loop.submit([sequence(new_choice(), [1, 2], 40)], refuse)
    while not h.flushes.get(timeout=10).ended:
        h.loop.flush_consumed()
    for _ in range(2):  # the first may be answered while it gives way
        h.stats()
    assert wakes
    wakes.clear()
    h.loop.flush_consumed()
    assert not wakes


def test_an_engine_faster_than_the_clock_gathers_its_output(harness: Callable[..., Harness]) -> None:
    h = harness(clock=lambda: 5.0)
    choice = new_choice()
    h.loop.submit([sequence(choice, [1, 2], 2 * MAX_AHEAD + 11)], refuse)
    h.take_until_ended(1)
    assert [len(item.tokens) // 4 for item in h.items()] == [1, MAX_AHEAD, MAX_AHEAD, 10]
    assert h.tokens(choice) == expected_tokens([1, 2], 2 * MAX_AHEAD + 11, VOCABULARY)


@pytest.mark.parametrize(("step_s", "waits"), [(FAST_STEP_S / 2, WRITE_S), (FAST_STEP_S * 2, 0.0)])
def test_a_fast_engine_lets_first_tokens_be_written_before_its_next_step(step_s: float, waits: float) -> None:
    """Else they would wait for the interpreter, which such an engine holds."""
    made = mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0))
    loop = EngineLoop(clock=count(1.0, step_s).__next__)
    flushes: list[Flush] = []

    def advance(flushed: int) -> float | None:
        """The pause behind the step that makes so many flushes."""
        while True:
            pause = loop.advance(made)
            if len(flushes) == flushed:
                return pause

    loop.begin_session(flushes.append)
    loop.submit([sequence(new_choice("short"), [1, 2], 1)], refuse)
    assert advance(1) == 0.0  # it has nothing else to do
    loop.flush_consumed()
    loop.submit([sequence(new_choice("first"), [1, 2], 99)], refuse)
    assert advance(2) == waits
    loop.flush_consumed()
    assert advance(3) == 0.0  # no first token is in it
    loop.submit([sequence(new_choice("second"), [1, 2], 99)], refuse)
    loop.flush_consumed()
    assert advance(4) == waits


class RunsAhead(Counted):
    """Each call returns ``step_s`` after the last one returned, however late it comes: the device is as fast."""

    def __init__(self, engine: Engine, step_s: float, launch_s: float) -> None:
        super().__init__(engine)
        self.now = 0.0
        self.step_s, self.launch_s = step_s, launch_s
        self._returned = 0.0

    def step(self) -> StepResult:
        result = super().step()
        launched, ended = self.now + self.launch_s, self._returned + self.step_s
        self.now = self._returned = max(launched, ended)
        result.ahead_s = max(0.0, ended - launched)
        return result


def test_an_engine_that_runs_ahead_is_asked_for_the_next_step_when_the_running_one_is_about_to_end() -> None:
    made = RunsAhead(mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0)), 0.006, 0.0005)
    loop = EngineLoop(clock=lambda: made.now)
    flushes: list[Flush] = []
    loop.begin_session(flushes.append)
    loop.submit([sequence(new_choice("long"), [1, 2], 900)], refuse)

    def waits(steps: int = 5) -> list[float]:
        found, until = [], made.steps + steps
        while made.steps < until:
            pause = loop.advance(made)
            while len(flushes) > 0:
                flushes.pop()
                loop.flush_consumed()
            if pause:
                found.append(pause)
                made.now += pause
        return found

    waits(80)
    assert waits() == pytest.approx([0.006 - 0.0005 - AHEAD_S] * 5, abs=1e-5)
    before = loop.pace.busy_s, made.now
    waits()
    assert loop.pace.busy_s - before[0] == pytest.approx(made.now - before[1])  # the device was busy all the time
    made.now += 0.002  # of the pause behind the last step
    loop.submit([sequence(new_choice("new"), [3, 4], 9)], refuse)
    steps = made.steps
    loop.advance(made)
    assert made.steps == steps  # the command was run, and the step is not planned for that
    assert waits()
    made.launch_s = 0.002  # more threads need the interpreter
    assert waits(80)[-1] == pytest.approx(0.006 - 0.002 - AHEAD_S, abs=1e-5)
    made.step_s, made.launch_s = 0.02, 0.008
    waits(80)
    made.step_s, made.launch_s = 0.006, 0.0005  # fewer rows: a step takes less than it was planned ahead
    assert loop._lead_s > made.step_s
    assert waits(400)[-5:] == pytest.approx([0.006 - 0.0005 - AHEAD_S] * 5, abs=1e-5)


class Ahead:
    """A loop with an engine that runs ahead and one long answer, in virtual time."""

    def __init__(self, step_s: float, launch_s: float) -> None:
        made = mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0))
        self.made = RunsAhead(made, step_s, launch_s)
        self.loop = EngineLoop(clock=lambda: self.made.now)
        self._flushes: list[Flush] = []
        self.loop.begin_session(self._flushes.append)
        self.submit("long", 900)

    def submit(self, name: str, tokens: int = 9) -> None:
        self.loop.submit([sequence(new_choice(name), [len(name)], tokens)], refuse, name)

    def pause(self) -> float:
        """The next one."""
        while True:
            found = self.loop.advance(self.made) or 0.0
            while self._flushes:
                self._flushes.pop()
                self.loop.flush_consumed()
            if found:
                return found

    def until(self, steps: int) -> None:
        """Until so many are done, and the next is to be planned."""
        while self.made.steps < steps or not self.loop._plan_at or self.made.now < self.loop._plan_at:
            self.made.now += self.pause()


def test_a_step_waits_for_a_request_that_is_expected_within_milliseconds() -> None:
    at = Ahead(0.006, 0.0005)
    at.until(80)
    made, loop = at.made, at.loop
    steps, lead_s, left_s = made.steps, loop._lead_s, loop._ends_at - made.now
    assert left_s == pytest.approx(lead_s, abs=1e-5)
    loop.expect("request", left_s + MOST_IDLE_S / 2)
    assert at.pause() == pytest.approx(left_s + MOST_IDLE_S / 2 + EXPECTED_LATE_S)
    made.now += 0.001
    at.submit("another")
    assert at.pause() == pytest.approx(left_s + MOST_IDLE_S / 2 + EXPECTED_LATE_S - 0.001, abs=1e-6)
    assert made.steps == steps
    loop.expect("request", MOST_IDLE_S / 4)  # it is known better
    assert at.pause() == pytest.approx(MOST_IDLE_S / 4 + EXPECTED_LATE_S, abs=1e-6)
    at.submit("request")
    at.pause()
    assert made.steps == steps + 1
    assert loop._plan_at - made.now == pytest.approx(0.006 - lead_s, abs=1e-5)  # the next is planned as always
    assert loop._lead_s == lead_s  # why that one was late says nothing of later ones

    at.until(made.steps + 1)
    steps = made.steps
    loop.expect("request", loop._ends_at - made.now + MOST_IDLE_S + 0.001)  # too late to wait for
    at.pause()
    assert made.steps > steps

    at.until(made.steps + 1)
    steps = made.steps
    loop.expect("request", 0.001)
    loop.expect("next", 0.002)
    assert at.pause() == pytest.approx(0.002 + EXPECTED_LATE_S)
    at.submit("next")
    made.now += at.pause()  # the other did not come
    at.pause()
    assert made.steps > steps


def test_a_short_step_waits_for_no_request_that_is_expected_after_it_could_have_ended() -> None:
    """The device would be idle for longer than the request would wait for the step."""
    at = Ahead(0.003, 0.0002)
    at.until(80)
    made, loop = at.made, at.loop
    assert loop._step_s < MOST_IDLE_S
    steps = made.steps
    loop.expect("request", loop._ends_at - made.now + (loop._step_s + MOST_IDLE_S) / 2)
    at.pause()
    assert made.steps > steps
    at.until(made.steps + 1)
    steps, within_s = made.steps, loop._ends_at - made.now + loop._step_s / 2
    loop.expect("request", within_s)
    assert at.pause() == pytest.approx(within_s + EXPECTED_LATE_S)
    assert made.steps == steps


def test_a_step_that_is_planned_immediately_waits_for_an_expected_request_too() -> None:
    """The device computes meanwhile."""
    at = Ahead(0.006, 0.0055)
    made, loop = at.made, at.loop
    while made.steps < 80 or not loop._lead_is_all:
        made.now += at.pause()
    loop.expect("request", 0.004)
    steps = made.steps
    assert at.pause() == pytest.approx(0.004 + EXPECTED_LATE_S)
    assert made.steps == steps
    at.submit("request")
    at.pause()
    assert made.steps > steps


@pytest.mark.parametrize("step_s", [0.012, 0.0045, 0.002])
def test_an_engine_that_runs_ahead_has_its_output_written_before_it_launches_another_step(step_s: float) -> None:
    """Else that would wait for the interpreter, while the device computes."""
    made = RunsAhead(
        mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0)), step_s, step_s / 2 - 0.0005
    )
    loop = EngineLoop(clock=lambda: made.now)
    loop._lead_s = step_s  # it does not wait for the end of a step
    flushes: list[Flush] = []
    loop.begin_session(flushes.append)
    loop.submit([sequence(new_choice("long"), [1, 2], 200)], refuse)

    def step() -> float:
        """The wait behind the next step that makes a flush, the ones before having been consumed."""
        while True:
            while flushes:
                flushes.pop()
                loop.flush_consumed()
            pause = loop.advance(made) or 0.0
            if flushes:
                return pause
            made.now += pause

    for _ in range(5):
        step()
    waits = step()
    share_s = step_s * WRITE_SHARE
    assert waits == pytest.approx(min(WRITE_S, share_s) if share_s > LEAST_WAIT_S else 0.0)
    if not waits:
        return
    steps = made.steps
    made.now += 0.0005
    loop.wake()  # a command that came meanwhile
    assert loop.advance(made) == 0.0
    assert loop.advance(made) == pytest.approx(waits - 0.0005)
    assert made.steps == steps
    loop.flush_consumed()
    while made.steps == steps:
        assert not loop.advance(made) or made.steps > steps


def test_an_engine_that_was_held_up_is_not_waited_for_as_long_again() -> None:
    made = RunsAhead(mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0)), 0.006, 0.0005)
    loop = EngineLoop(clock=lambda: made.now)
    flushes: list[Flush] = []
    loop.begin_session(flushes.append)
    loop.submit([sequence(new_choice("long"), [1, 2], 200)], refuse)

    def run(steps: int) -> float:
        until, began = made.steps + steps, made.now
        while made.steps < until:
            pause = loop.advance(made)
            if flushes:
                flushes.pop()
                loop.flush_consumed()
            made.now += pause or 0.0
        return made.now - began

    run(5)
    made.step_s = 9.0
    run(3)
    made.step_s = 0.006
    assert run(20) < 1.0


def test_an_engine_whose_step_is_short_is_asked_for_the_next_one_immediately() -> None:
    made = RunsAhead(mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0)), 0.002, 0.0005)
    loop = EngineLoop(clock=lambda: made.now)
    loop.begin_session(lambda flush: None)
    loop.submit([sequence(new_choice("long"), [1, 2], 40)], refuse)
    pauses = [loop.advance(made) for _ in range(30)]
    assert made.steps > 20
    assert not any(pauses)


def test_output_of_before_the_first_session_waits_for_it() -> None:
    """An engine that gets KV events of its own accord has some while its worker still starts."""
    made = mock.build(mock.MockOptions(vocab_size=1000, block_size=4, speedup=0))
    loop = EngineLoop()
    choice = new_choice()
    loop.submit([sequence(choice, [1, 2], 2 * MAX_AHEAD)], refuse)
    while loop.advance(made) is not None:
        pass
    assert loop.steps == MAX_AHEAD
    flushes: list[Flush] = []
    loop.begin_session(flushes.append)
    consumed = 0
    while not any(flush.ended for flush in flushes):
        assert loop.advance(made) is not None or consumed < len(flushes)
        while consumed < len(flushes):
            loop.flush_consumed()
            consumed += 1
    assert list(choice.tokens) == expected_tokens([1, 2], 2 * MAX_AHEAD, VOCABULARY)
    numbers = [batch.seq for flush in flushes for batch in flush.batches]
    assert numbers == list(range(len(numbers)))
    assert numbers


def test_commands_do_not_let_the_engine_run_further_ahead(harness: Callable[..., Harness]) -> None:
    h = harness()
    h.loop.submit([sequence(new_choice(), [1, 2], 500)], refuse)
    h.flushes.get(timeout=10)
    while h.engine.steps < 1 + MAX_AHEAD:
        h.stats()
    for _ in range(50):
        h.stats()
    assert h.engine.steps == 1 + MAX_AHEAD
    h.loop.flush_consumed()


def test_a_cancel_is_not_held_up_by_a_consumer_that_is_away(harness: Callable[..., Harness]) -> None:
    h = harness()
    choice = new_choice()
    h.loop.submit([sequence(choice, [1, 2], 500)], refuse)
    h.all.append(h.flushes.get(timeout=10))  # never taken
    done = threading.Event()
    h.loop.cancel([choice], done.set)
    assert done.wait(5)
    assert h.stats().used_blocks == 0


def test_a_cancelled_sequence_frees_its_blocks_after_its_tokens_were_flushed(
    harness: Callable[..., Harness],
) -> None:
    h = harness()
    choice, other = new_choice("a"), new_choice("b")
    h.engine.gate = threading.Semaphore(0)
    h.loop.submit([sequence(choice, [1, 2, 3, 4, 5], 500)], refuse)
    h.loop.submit([sequence(other, [9], 30)], refuse)
    while len(h.tokens(choice)) < 5:
        h.engine.gate.release(2)
        h.take()
    done = threading.Event()
    flushed = []

    def cancelled() -> None:
        flushed.append(h.flushes.qsize())
        done.set()

    h.loop.cancel([choice], cancelled)
    h.engine.gate.release(1000)
    assert done.wait(10)
    before = [h.flushes.get(timeout=10) for _ in range(flushed[0])]  # flushed before the callback
    for flush in before:
        h.all.append(flush)
        h.loop.flush_consumed()
    seen = h.tokens(choice)
    assert seen == expected_tokens([1, 2, 3, 4, 5], len(seen), VOCABULARY)
    h.take_until_ended(1)
    assert h.tokens(choice) == seen, "tokens after the cancel"
    assert h.tokens(other) == expected_tokens([9], 30, VOCABULARY)
    assert h.stats().used_blocks == 0
    assert h.stats().running == 0


def test_what_a_cancel_leaves_behind_is_still_flushed(harness: Callable[..., Harness]) -> None:
    """KV events of a sequence that was revoked without a word must not wait for the next request."""
    h = harness()
    choice = new_choice()
    h.loop.submit([sequence(choice, list(range(12)), 500)], refuse)
    h.all.append(h.flushes.get(timeout=10))
    while h.engine.steps < 1 + MAX_AHEAD:
        h.stats()
    h.loop.cancel([choice])
    h.loop.flush_consumed()
    folded, _ = fold(h.all)
    dumped = set(map(bytes, names(h.ask(lambda engine: engine.dump()))))
    while folded != dumped:
        h.take()
        folded, _ = fold(h.all)
    assert len(dumped) >= 3


def test_a_stop_string_ends_generation(harness: Callable[..., Harness]) -> None:
    tokenizer = load_tokenizer(TINY)
    detokenizer = Detokenizer(tokenizer)
    vocabulary = MockVocabulary(256)
    prompt = [1, 2, 3]
    expected = expected_tokens(prompt, 40, vocabulary)
    plain = detokenizer.stream()
    texts = [plain.push(token) for token in expected]
    wanted = next(i for i in range(8, 40) if texts[i].isascii() and texts[i].strip() and texts[i] not in texts[:i])
    h = harness(vocab_size=256)
    choice = new_choice(stream=detokenizer.stream((texts[wanted],)))
    h.loop.submit([sequence(choice, prompt, 500)], refuse)
    h.take_until_ended(1)
    whole = "".join(texts)
    end = next(i for i in range(40) if texts[wanted] in "".join(texts[: i + 1]))
    assert whole
    assert h.tokens(choice) == expected[: end + 1]
    assert choice.finish is not None
    assert (choice.finish.reason, choice.finish.stop) == ("stop", texts[wanted])
    assert h.stats().used_blocks == 0


def test_logprobs_come_one_per_token(harness: Callable[..., Harness]) -> None:
    h = harness()
    choice = new_choice(logprobs=True)
    h.loop.submit([sequence(choice, [1], 30, Sampling(temperature=0, logprobs=2))], refuse)
    h.take_until_ended(1)
    for item in h.items():
        assert item.logprobs is not None
        assert len(item.logprobs) == len(item.tokens) // 4
    assert sum(len(item.logprobs or ()) for item in h.items()) == 30


def test_a_request_of_which_one_choice_is_refused_runs_none(harness: Callable[..., Harness]) -> None:
    h = harness()
    refused: queue.SimpleQueue[Any] = queue.SimpleQueue()
    good, bad = new_choice(index=0), new_choice(index=1)
    h.loop.submit([sequence(good, [1], 5), sequence(bad, [], 5)], refused.put)
    assert refused.get(timeout=10).code == "invalid_request"
    assert h.stats().running == h.stats().waiting == 0
    assert h.items() == []


def test_a_broken_engine_is_reported_once_and_closed() -> None:
    h = Harness()
    h.engine.error = EngineError("device lost")
    h.loop.submit([sequence(new_choice(), [1], 5)], refuse)
    assert h.thread.join(10)
    assert h.failures == [h.engine.error]
    assert h.engine.closed


def test_an_engine_that_cannot_be_built_fails_whoever_waits_for_it() -> None:
    def build() -> Engine:
        raise ValueError("no weights")

    failures: list[BaseException] = []
    thread = EngineThread(build, EngineLoop(), failures.append)
    thread.start()
    with pytest.raises(ValueError, match="no weights"):
        thread.wait_ready(10)
    assert thread.join(10)
    assert not failures


def test_a_stop_ends_the_engine_in_the_middle_of_work(harness: Callable[..., Harness]) -> None:
    h = harness()
    h.loop.submit([sequence(new_choice(), [1], 500)], refuse)
    h.flushes.get(timeout=10)
    h.loop.stop()
    assert h.thread.join(10)


def test_a_failed_sequence_ends_once_even_if_its_last_token_completes_a_stop_string() -> None:
    choice = new_choice(stream=_AlwaysStopped())
    step = StepResult([Output(choice, 1)], [], [], [Failure(choice, "out_of_blocks", "")], 1)
    output = StepOutput()
    assert output.add(_Idle(), step, 0)  # type: ignore[arg-type]
    assert output.ended == [choice]
    assert choice.finish is not None
    assert choice.finish.reason == "stop"


@pytest.mark.parametrize(
    ("code", "falls_back", "said", "returned"),
    [
        ("engine_error", True, False, True),
        ("engine_error", True, True, False),
        ("engine_error", False, False, False),
        ("invalid_request", True, False, False),
    ],
)
def test_a_sequence_that_failed_without_a_token_is_left_to_a_router_if_another_model_may_run_it(
    code: str, falls_back: bool, said: bool, returned: bool
) -> None:
    choice, output = new_choice(), StepOutput()
    choice.falls_back = falls_back
    outputs = [Output(choice, 1)] if said else []
    assert output.add(_Idle(), StepResult(outputs, [], [], [Failure(choice, code, "it broke")], 1), 0)  # type: ignore[arg-type]
    assert output.ended == [choice]
    assert (choice.lost_input == "failed engine_error it broke") is returned
    assert (choice.finish is None) is returned
    assert choice.dirty is not returned, "its reader hears nothing of it"


def test_tokens_behind_a_stop_string_in_the_same_step_are_dropped() -> None:
    choice = new_choice(stream=_AlwaysStopped())
    output = StepOutput()
    assert output.add(_Idle(), StepResult([Output(choice, token) for token in (7, 8, 9)], [], [], [], 3), 0)  # type: ignore[arg-type]
    assert output.ended == [choice]
    assert list(choice.buffer) == [7]


class _AlwaysStopped:
    stop = "x"

    def push(self, token: int) -> str:
        return ""


class _Idle:
    def cancel(self, key: object) -> bool:
        return False


# --- KV events ---


def names(events: list[kv.KvEvent]) -> set[bytes]:
    return {name for event in events if isinstance(event, kv.Stored) for name in block_hashes.split(event.digests)}


def fold(flushes: list[Flush], upto: int | None = None, rank: int = 0) -> tuple[set[bytes], list[int]]:
    """What a router knows of a rank after the batches up to a sequence, and the sequences."""
    known: set[bytes] = set()
    seqs = []
    for batch in (batch for flush in flushes for batch in flush.batches if batch.rank == rank):
        if upto is not None and batch.seq > upto:
            continue
        seqs.append(batch.seq)
        for event in batch.events:
            match event:
                case kv.Stored():
                    known.update(block_hashes.split(event.digests))
                case kv.Removed():
                    known.difference_update(block_hashes.split(event.digests))
                case kv.Cleared():
                    known.clear()
    return known, seqs


@pytest.mark.parametrize(("step_s", "carrier"), [(FAST_STEP_S / 2, 1), (FAST_STEP_S * 2, 0)])
def test_kv_events_of_a_fast_step_leave_with_the_next_flush_unless_a_sequence_ends(
    harness: Callable[..., Harness], step_s: float, carrier: int
) -> None:
    h = harness(clock=count(1.0, step_s).__next__)  # read at the beginning and the end of a step
    h.engine.gate = threading.Semaphore(0)
    h.loop.submit([sequence(new_choice("long"), list(range(9)), 13)], refuse)
    h.engine.gate.release()
    h.take()
    h.engine.gate.release(12)
    h.take_until_ended(1)
    assert next(index for index, flush in enumerate(h.all) if flush.batches) == carrier
    assert len(fold(h.all)[0]) == 5  # 21 tokens, of which the last is not computed

    h.loop.submit([sequence(new_choice("short"), list(range(100, 109)), 1)], refuse)
    h.engine.gate.release(1)
    assert h.take().batches


def test_a_dump_is_what_the_batches_up_to_its_sequence_add_up_to(harness: Callable[..., Harness]) -> None:
    h = harness(total_blocks=24)
    dumps: queue.SimpleQueue[list[CacheSnapshot]] = queue.SimpleQueue()
    ended = 0
    for number in range(12):
        choice = new_choice(f"r{number}")
        h.loop.submit([sequence(choice, [number, *range(10)], 20)], refuse)
        if number % 3 == 0:
            h.loop.dump(dumps.put)
        ended += len(h.take_until_ended(1))
    h.loop.dump(dumps.put)
    h.stats()
    while not h.flushes.empty():
        h.take()
    _, seqs = fold(h.all)
    assert seqs == list(range(len(seqs)))
    assert any(isinstance(event, kv.Removed) for flush in h.all for batch in flush.batches for event in batch.events), (
        "nothing was evicted"
    )
    checked = 0
    while not dumps.empty():
        ((events, seq),) = dumps.get()
        assert seq < len(seqs)
        assert names(events) == fold(h.all, seq)[0]
        checked += 1
    assert checked == 5


def test_a_dump_before_any_event_names_no_batch_and_a_new_session_says_that_the_cache_was_not_empty(
    harness: Callable[..., Harness],
) -> None:
    h = harness()
    dumps: queue.SimpleQueue[list[CacheSnapshot]] = queue.SimpleQueue()
    h.loop.dump(dumps.put)
    assert dumps.get(timeout=10) == [([], -1)]
    h.loop.submit([sequence(new_choice("a"), list(range(9)), 3)], refuse)
    h.take_until_ended(1)
    h.loop.begin_session(h.flushes.put)
    h.loop.dump(dumps.put)
    ((events, seq),) = dumps.get(timeout=10)
    assert seq == 0
    assert names(events)
    h.all.clear()
    h.loop.submit([sequence(new_choice("b"), list(range(20, 29)), 3)], refuse)
    h.take_until_ended(1)
    assert fold(h.all)[1][0] == 1


def test_each_rank_has_its_own_batches_and_dump(harness: Callable[..., Harness]) -> None:
    h = harness(ranks=3, total_blocks=24)
    asked: dict[int, list[list[int]]] = {0: [], 2: []}
    for number in range(8):
        rank = number % 2 * 2
        prompt = [number, *range(8)]
        asked[rank].append(prompt)
        h.loop.submit([sequence(new_choice(f"r{number}"), prompt, 3, rank=rank)], refuse)
        h.take_until_ended(1)
    dumps: queue.SimpleQueue[list[CacheSnapshot]] = queue.SimpleQueue()
    h.loop.dump(dumps.put)
    found = dumps.get(timeout=10)
    while not h.flushes.empty():
        h.take()
    assert len(found) == 3
    assert found[1] == ([], -1)
    for rank, prompts in asked.items():
        known, seqs = fold(h.all, rank=rank)
        assert seqs == list(range(len(seqs)))
        assert found[rank].seq == seqs[-1]
        assert names(found[rank].events) == known
        ours = {
            digest
            for prompt in prompts
            for digest in block_hashes.split(block_hashes.chain(wire.pack_tokens(prompt), 4, ROOT))
        }
        assert ours <= known
    assert not fold(h.all, rank=0)[0] & fold(h.all, rank=2)[0]
    assert h.stats().cached_blocks == sum(len(fold(h.all, rank=rank)[0]) for rank in (0, 2))


def test_a_rank_that_does_not_exist_is_refused_and_ranks_share_nothing(harness: Callable[..., Harness]) -> None:
    h = harness(ranks=2)
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    h.loop.submit([sequence(new_choice("x"), [1], 3, rank=2)], errors.put)
    assert "this worker has 2" in str(errors.get(timeout=10))
    cached = []
    for rank in (0, 0, 1, 1):
        choice = new_choice(f"r{len(cached)}")
        h.loop.submit([sequence(choice, list(range(9)), 3, rank=rank)], refuse)
        h.take_until_ended(1)
        cached.append(choice.cached)
    assert cached == [0, 8, 0, 8]


def test_ranks_wait_for_the_slowest_of_them() -> None:
    slept: list[float] = []
    engine = mock.build_data_parallel(2, mock.MockOptions(vocab_size=100, block_size=4), sleep=slept.append)
    alone = mock.build(mock.MockOptions(vocab_size=100, block_size=4), sleep=slept.append)
    long, short = list(range(64)), [1, 2]
    alone.submit(sequence(new_choice("a"), long, 1))
    alone.step()
    engine.submit(sequence(new_choice("b"), long, 1, rank=1))
    engine.submit(sequence(new_choice("c"), short, 1))
    result = engine.step()
    assert len(result.outputs) == 2
    assert len(slept) == 2
    assert slept[0] == slept[1] > 0


def test_steps_that_compute_no_prompt_are_counted_apart(harness: Callable[..., Harness]) -> None:
    h = harness()
    h.loop.submit([sequence(new_choice("a"), list(range(9)), 6)], refuse)
    h.take_until_ended(1)
    assert h.loop.pace.decodes == 5  # the first token comes with the prompt
    assert 0 < h.loop.pace.decode_s < h.loop.pace.busy_s


def test_the_pace_is_of_the_last_minute_and_quiet_only_with_something_to_do() -> None:
    now = [0.0]
    pace = StepPace(lambda: now[0])

    def step(seconds: float, *, computed: bool = True) -> None:
        began = now[0]
        pace.begins(began)
        now[0] += seconds
        pace.stepped(began, now[0], computed=computed)

    now[0] = 1000.0  # idle since the start
    assert pace.quiet_s == 0
    step(6.0)
    step(0.1)
    assert (pace.slowest_s, pace.quiet_s) == (pytest.approx(6.0), 0.0)
    began = now[0]
    pace.begins(began)
    now[0] += 7.0  # a step that does not end
    assert pace.quiet_s == pytest.approx(7.0)
    pace.stepped(began, now[0], computed=False)  # and returned nothing
    assert pace.quiet_s == pytest.approx(7.0)
    pace.waits()
    assert pace.quiet_s == 0
    now[0] += 25.0
    step(0.1)
    assert pace.slowest_s == pytest.approx(7.0)
    now[0] += 31.0
    step(0.1)
    now[0] += 31.0
    step(0.2)
    assert pace.slowest_s == pytest.approx(0.2)
    now[0] += 61.0
    assert pace.slowest_s == 0
