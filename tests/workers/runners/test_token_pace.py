"""The pace of a worker's tokens, from looks at requests with known times."""

from array import array

from penstock.schemas.tokens import Finish
from penstock.workers.engine_loop.loop import StepPace
from penstock.workers.engine_loop.step_output import SequenceState, token_item
from penstock.workers.runners.flush_publisher import KNOWN_S, LEAST_PROMPTS, LEAST_TOKENS, TokenPace
from penstock.workers.runners.token_runner import tier_costs
from penstock.workers.session.requests import RunningRequest
from tests.workers.support import request as make_request

PROMPT = 100


class Worker:
    """A worker with one clock, which is told what its requests do."""

    def __init__(self, role: str = "aggregated") -> None:
        self.pace = TokenPace(role)
        self.now = 1_000.0
        self.engine = StepPace(lambda: self.now)
        self.running: list[RunningRequest] = []
        self.look()

    @property
    def now_ns(self) -> int:
        return int(self.now * 1e9)

    def look(self) -> None:
        self.pace.look(self.running, self.now, self.now_ns, self.engine)

    def passes(self, seconds: float, *, decoded: bool = False) -> None:
        began = self.now
        self.now += seconds
        self.engine.stepped(began, self.now, computed=True, decoded=decoded)

    def start(self, *, resumed: int = 0, prefilled: bool = False, choices: int = 1) -> RunningRequest:
        request = make_request(range(PROMPT))
        made = RunningRequest(request, 1, None, [], [], 0, prefilled=prefilled)
        for index in range(choices):
            sequence = SequenceState(made, request.id, 1, index, "g", array("I", range(resumed)), want_logprobs=False)
            sequence.started_ns = self.now_ns
            made.sequences.append(sequence)
        self.running.append(made)
        return made

    def token(self, running: RunningRequest, count: int = 1) -> None:
        for sequence in running.sequences:
            if not sequence.first and not running.first_token_ns:
                running.first_token_ns = self.now_ns
            sequence.buffer += [7] * count
            token_item(sequence)

    def end(self, running: RunningRequest) -> None:
        for sequence in running.sequences:
            sequence.finish = Finish("length")
        self.running.remove(running)
        self.pace.count(running, self.now_ns)


def generate(worker: Worker, running: RunningRequest, tokens: int, each_s: float) -> None:
    for _ in range(tokens):
        worker.passes(each_s, decoded=bool(running.sequences[0].first))
        worker.token(running)
        worker.look()


def test_tokens_of_running_requests_count_before_an_answer_ends() -> None:
    worker = Worker()
    running = worker.start()
    generate(worker, running, LEAST_TOKENS, 0.5)
    assert worker.pace.measured == (0, 0, 0, 0)  # the first one came after the prompt's computing, not after a token
    generate(worker, running, 2, 0.5)
    latency_us, engine_us, work_ns, decode_us = worker.pace.measured
    assert latency_us == decode_us == 500_000
    assert abs(engine_us - 500_000) <= 500_000 / LEAST_TOKENS
    assert 0 < work_ns < 500_000_000 * (LEAST_TOKENS + 2) / (PROMPT + LEAST_TOKENS)


def test_short_requests_that_no_look_sees_count_as_they_end() -> None:
    worker = Worker()
    for _ in range(LEAST_TOKENS):
        running = worker.start()
        worker.passes(0.002)
        worker.token(running)
        worker.passes(0.01)
        worker.token(running)
        worker.end(running)
    worker.passes(1.0)
    worker.look()
    assert worker.pace.measured[0] == 10_000


def test_a_request_that_another_worker_began_has_its_tokens_counted_from_its_start_here() -> None:
    for resumed, prefilled in ((5, False), (1, True)):
        worker = Worker("decode")
        generate(worker, worker.start(resumed=resumed, prefilled=prefilled), LEAST_TOKENS, 0.5)
        worker.passes(1.0)
        worker.look()
        latency_us, _, work_ns, _ = worker.pace.measured
        assert 500_000 <= latency_us <= 600_000
        assert work_ns >= 500_000_000  # no prompt was computed here


def test_a_choice_that_ended_before_the_others_does_not_look_slow() -> None:
    worker = Worker()
    running = worker.start(choices=2)
    generate(worker, running, LEAST_TOKENS, 0.5)
    first, second = running.sequences
    first.finish = Finish("stop")
    for _ in range(40):
        worker.passes(0.5)
        second.buffer.append(7)
        token_item(second)
        worker.look()
    assert 490_000 <= worker.pace.measured[0] <= 510_000


def test_prefill_workers_are_measured_by_their_prompts() -> None:
    worker = Worker("prefill")
    for _ in range(LEAST_PROMPTS):
        running = worker.start()
        worker.passes(0.3)
        worker.token(running)
        worker.end(running)
    worker.passes(1.0)
    worker.look()
    latency_us, _, work_ns, decode_us = worker.pace.measured
    assert latency_us == 300_000
    assert decode_us == 0
    assert work_ns > 1e9 * 0.3 / (PROMPT + 1)


def test_what_a_worker_did_is_known_for_a_while_after_routers_avoid_it_and_then_forgotten() -> None:
    worker = Worker()
    running = worker.start()
    generate(worker, running, 2 * LEAST_TOKENS, 0.5)
    worker.end(running)
    measured = worker.pace.measured
    assert measured[0] == 500_000
    for _ in range(int(KNOWN_S) - 100):
        worker.now += 1.0
        worker.look()
    assert worker.pace.measured == measured
    for _ in range(200):
        worker.now += 1.0
        worker.look()
    assert worker.pace.measured == (0, 0, 0, 0)


def test_a_worker_that_recovered_looks_so_within_two_windows() -> None:
    worker = Worker()
    running = worker.start()
    generate(worker, running, 100, 0.5)
    assert worker.pace.measured[0] == 500_000
    generate(worker, running, 7_000, 0.01)
    assert worker.pace.measured[0] == 10_000


def test_a_worker_that_routers_avoid_is_measured_over_as_long_as_its_few_tokens_take() -> None:
    """It got one short request a minute, no window ever had enough tokens, and nothing named it."""
    worker = Worker()
    for _ in range(4):
        running = worker.start()
        generate(worker, running, LEAST_TOKENS // 3 + 1, 0.5)
        worker.end(running)
        for _ in range(60):
            worker.now += 1.0
            worker.look()
    assert worker.pace.measured[0] == 500_000


def test_what_tiers_cost_is_registered_again_only_where_it_differs() -> None:
    assert tier_costs((), 0.0, 0.0, 1.0) == ()
    assert tier_costs((), 0.001, 0.0, 0.01) == (0.1,)
    known = tier_costs((0.1,), 0.001, 0.004, 0.01)
    assert known == (0.1, 0.5)
    assert tier_costs(known, 0.0012, 0.0045, 0.01) is known
    assert tier_costs(known, 0.0012, 0.009, 0.01) == (0.12, 1.0)
