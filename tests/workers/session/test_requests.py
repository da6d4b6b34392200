"""From a job to sequences, and from ended sequences to the one terminal event."""

import msgspec
import pytest

from penstock.infra.model.modeldir import DEMO, TINY, load_tokenizer
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import block_hashes, done, jobs, wire
from penstock.schemas.errors import Code
from penstock.schemas.jobs import Decision, DecisionInputs, EarlierWorker, Job, Stage
from penstock.schemas.requests import Fallback, GenerateRequest, Parsing, Sampling, Stop
from penstock.schemas.tokens import Finish
from penstock.workers.session.requests import RunningRequest, admit, already_over, next_job, sequence_requests, terminal

PROMPT = [1, 2, 3, 4]
DIGESTS = block_hashes.chain(wire.pack_tokens(PROMPT), 2, block_hashes.root("rev", "lora", "salt"))


def request(n: int = 2, **options: object) -> GenerateRequest:
    stop = options.pop("stop", Stop(max_tokens=5))
    return GenerateRequest(
        id="r",
        model="m",
        gateway="gw",
        prompt=wire.pack_tokens(PROMPT),
        stop=stop,  # type: ignore[arg-type]
        created_ns=10,
        deadline_ns=20,
        digests=DIGESTS,
        block_size=2,
        n=n,
        salt="salt",
        lora="lora",
        user="u",
        **options,  # type: ignore[arg-type]
    )


def active(
    asked: GenerateRequest,
    *,
    resume: tuple[bytes, ...] = (),
    finished: tuple[int, ...] = (),
    detokenizer: Detokenizer | None = None,
    scored: int = 0,
) -> RunningRequest:
    decision = Decision(mode="kv", chosen="w", router="r", at_ns=15)
    job = Job(msgspec.Raw(wire.encode(asked)), 3, decision, resume, finished, scored=scored)
    return admit(job, asked, None, detokenizer)


S = 10**9


@pytest.mark.parametrize(
    ("fields", "started", "earlier", "late"),
    [
        ({}, False, (), True),
        ({}, True, (), False),
        ({"fallback_after_s": 0.0}, False, (), False),
        ({"fallbacks": ()}, False, (), False),
        ({"fallback": 1, "fell_back_at": 3}, False, (), False),
        ({}, False, (EarlierWorker(2, "v", f"returned: {jobs.WAITED}: 5 s"),), False),
        ({}, False, (EarlierWorker(2, "v", "returned: draining"),), True),
    ],
    ids=["late", "started", "patient", "alone", "begun as a fallback", "returned before", "drained"],
)
def test_a_request_that_may_fall_back_waits_for_its_start_for_a_time(
    fields: dict[str, object], started: bool, earlier: tuple[EarlierWorker, ...], late: bool
) -> None:
    given: dict[str, object] = {"fallbacks": (Fallback("small"),), "fallback_after_s": 5.0} | fields
    asked = msgspec.structs.replace(request(), created_ns=0, deadline_ns=60 * S, **given)
    decision = Decision(mode="kv", chosen="w", router="r", at_ns=2 * S)
    job = Job(msgspec.Raw(wire.encode(asked)), 3, decision, inputs=DecisionInputs(earlier_workers=earlier))
    running = admit(job, asked, None, None)
    running.started_ns = S * started
    assert running.waits_too_long(6 * S) is late
    assert not running.waits_too_long(4 * S)


def test_a_new_request_becomes_one_sequence_per_choice() -> None:
    asked = request(sampling=Sampling(logprobs=1))
    state = active(asked)
    made = sequence_requests(state, "rev", state.request.block_size)
    assert [s.choice for s in made] == [0, 1]
    for sequence, choice in zip(made, state.sequences, strict=True):
        assert sequence.key is choice
        assert list(sequence.prompt) == PROMPT
        assert list(sequence.generated) == []
        assert sequence.root == block_hashes.root("rev", "lora", "salt")
        assert b"".join(sequence.digests) == DIGESTS
        assert choice.want_logprobs
        assert (choice.attempt, choice.token_address, choice.owner) == (3, "gw", state)
    assert not state.ended


def test_a_resumed_choice_continues_after_what_was_streamed_and_a_finished_one_is_not_run() -> None:
    state = active(request(), resume=(wire.pack_tokens([7, 8]), wire.pack_tokens([9])), finished=(1,))
    (only,) = sequence_requests(state, "rev", state.request.block_size)
    assert list(only.generated) == [7, 8]
    assert state.sequences[0].first == 2, "the next token is numbered behind the streamed ones"
    assert state.outcomes[0] is None
    assert state.outcomes[1] is not None
    assert state.outcomes[1].tokens == wire.pack_tokens([9])
    only.generated.append(1)  # type: ignore[attr-defined]
    assert state.sequences[0].tokens.tolist() == [7, 8], "the engine's copy is its own"


@pytest.mark.parametrize(("known", "score"), [(0, 1), (1, 1), (3, 3), (4, 0), (9, 0)])
def test_one_choice_scores_the_prompt_from_where_earlier_attempts_were(known: int, score: int) -> None:
    state = active(request(n=3, sampling=Sampling(prompt_logprobs=1)), resume=(b"",) * 3, finished=(0,), scored=known)
    assert [s.score for s in sequence_requests(state, "rev", 2)] == [score, 0]
    assert [s.score for s in sequence_requests(state, "rev", 2, opaque=b"state")] == [0, 0], "scored before"
    assert next_job(state).scored == known
    state.sequences[1].scored_tokens = 4
    assert next_job(state).scored == max(known, 4)


def test_a_prompt_is_not_scored_unasked() -> None:
    state = active(request(sampling=Sampling(logprobs=1)))
    assert [s.score for s in sequence_requests(state, "rev", 2)] == [0, 0]


def test_a_request_whose_choices_all_ended_is_over_before_it_runs() -> None:
    state = active(request(n=1), resume=(b"",), finished=(0,))
    assert state.ended
    assert sequence_requests(state, "rev", state.request.block_size) == []


def test_a_resumed_choice_that_had_reached_its_end_is_recognised() -> None:
    asked = request(n=1)
    assert already_over(active(asked).sequences[0], asked) is None
    full = active(asked, resume=(wire.pack_tokens(range(5)),))
    assert already_over(full.sequences[0], asked) == Finish("length")


@pytest.mark.parametrize(("min_tokens", "over"), [(0, True), (100, False)])
def test_a_resumed_choice_that_had_completed_a_stop_string_is_recognised(min_tokens: int, over: bool) -> None:
    tokenizer = load_tokenizer(TINY)
    asked = request(n=1, stop=Stop(max_tokens=50, min_tokens=min_tokens, strings=("END",)))
    ids = tokenizer.encode("so the END", add_special_tokens=False).ids
    state = active(asked, resume=(wire.pack_tokens(ids),), detokenizer=Detokenizer(tokenizer))
    assert already_over(state.sequences[0], asked) == (Finish("stop", "END") if over else None)


@pytest.mark.parametrize(
    ("text", "stop", "over"),
    [
        ("<think>1 + 2 END", "END", False),
        ("<think>1 + 2 END</think>It is", "END", False),
        ("<think>1 + 2</think>It is END", "END", True),
        ('<think>x</think><tool_call>{"name": "w", "arguments": {"city": "Par', "Par", False),
        ('<think>x</think><tool_call>{"name": "w", "arguments": {"city": "Paris"}}</tool_call> Par', "Par", True),
        ("Par", "Par", True),
    ],
)
@pytest.mark.parametrize("resumed", [0.0, 0.5, 1.0])
def test_a_stop_string_ends_the_content_of_an_answer_and_no_thought_or_call(
    text: str, stop: str, over: bool, resumed: float
) -> None:
    """Also where another worker continues in the middle of a thought or a call."""
    tokenizer = load_tokenizer(DEMO)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parsing = Parsing("basic", "hermes")
    asked = request(n=1, stop=Stop(max_tokens=500, strings=(stop,)), parsing=parsing, endpoint="chat")
    before = int(len(ids) * resumed)
    state = active(asked, resume=(wire.pack_tokens(ids[:before]),), detokenizer=Detokenizer(tokenizer))
    search = state.sequences[0].stream
    assert search is not None
    for token in ids[before:]:
        search.push(token)
    assert search.stop == (stop if over else None)
    assert already_over(state.sequences[0], asked) == (Finish("stop", stop) if over else None)


def end(state: RunningRequest, *outcomes: done.Outcome) -> None:
    state.outcomes[:] = outcomes


def test_the_terminal_event_has_tokens_usage_and_times() -> None:
    state = active(request())
    end(state, done.Outcome(wire.pack_tokens([7, 8]), "length"), done.Outcome(wire.pack_tokens([9]), "stop", "x"))
    state.cached, state.started_ns, state.first_token_ns = 2, 16, 17
    event = terminal(state, "w", 18, done.MadeWith("2f6c", "mock"))
    assert (event.request, event.model, event.attempt, event.worker, event.user) == ("r", "m", 3, "w", "u")
    assert event.usage == done.Usage(prompt=4, completion=3, cached=2)
    assert event.timings == done.Timings(10, 15, 16, 17, 18, made_with=done.MadeWith("2f6c", "mock"), router="r")
    assert event.choices == tuple(state.outcomes)
    assert (event.code, event.message) == ("", "")
    assert done.decode(wire.encode(event)) == event


def test_times_are_the_brokers_where_the_workers_clock_differs() -> None:
    """Durations that go from one machine to another, such as the wait in a worker, are those of one clock."""
    state = active(request())
    end(state, done.Outcome(b"", "stop"), done.Outcome(b"", "stop"))
    state.started_ns, state.stamp_times = 16, {"received_ns": 15}
    event = terminal(state, "w", 118, done.MadeWith(), 100)
    assert (event.timings.started_ns, event.timings.first_token_ns, event.timings.ended_ns) == (116, 0, 118)
    assert event.stamps is not None
    assert event.stamps.received_ns == 115
    state.prefilled = True  # by another worker, which had not begun: it was announced
    assert state.times(100) == (116, 0)


def test_a_cancelled_request_keeps_what_it_had_generated() -> None:
    state = active(request())
    end(state, done.Outcome(wire.pack_tokens([7]), "stop"), None)  # type: ignore[arg-type]
    state.sequences[1].tokens.extend([5, 6])
    state.cancelled = (Code.cancelled, "client gone")
    event = terminal(state, "w", 18, done.MadeWith())
    assert event.choices[1] == done.Outcome(wire.pack_tokens([5, 6]), "cancelled")
    assert (event.code, event.message) == ("cancelled", "client gone")
    assert event.usage.completion == 3


def test_a_choice_that_failed_makes_the_request_fail() -> None:
    state = active(request())
    end(state, done.Outcome(b"", "error"), done.Outcome(wire.pack_tokens([1]), "length"))
    state.sequences[0].finish = Finish("error", None, 0, Code.out_of_blocks, "too long")
    state.sequences[1].finish = Finish("length")
    event = terminal(state, "w", 18, done.MadeWith())
    assert (event.code, event.message) == ("out_of_blocks", "too long")


@pytest.mark.parametrize(
    ("route", "left", "rank"),
    [
        ((), 0, 3),
        ((), 1, 3),  # whoever made this job knows of no route
        (("prefill", "decode"), 1, 10),
        (("prefill", "decode"), 0, 11),
        (("encode", "prefill", "decode"), 2, 10),
        (("encode", "prefill", "decode"), 1, 11),
        (("encode", "prefill", "decode"), 0, 12),
    ],
)
def test_every_stage_runs_on_the_rank_that_it_was_placed_on(route: tuple[str, ...], left: int, rank: int) -> None:
    stages = tuple(Stage(role, f"w-{role}", 10 + at) for at, role in enumerate(route))
    decision = Decision("kv", "w", "r", 15, rank=10 if route else 3, route=stages)
    later = (stages or (Stage("decode", "d", 7),))[-left:] if left else ()
    asked = request()
    job = Job(msgspec.Raw(wire.encode(asked)), 3, decision, route=later)
    assert jobs.rank_of(job) == rank
    assert [each.rank for each in sequence_requests(admit(job, asked, None, None), "rev", 2)] == [rank, rank]
