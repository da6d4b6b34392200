"""The fold of one request: which events its messages make, in which order, and what a compact timeline keeps."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.timeline.request_timeline import (
    AttemptReturned,
    BlocksHandedOff,
    MediaEncoded,
    PromptPrefilled,
    RequestAccepted,
    RequestContinued,
    RequestDone,
    RequestRouted,
    RequestTimeline,
    TokensStored,
)
from penstock.schemas.jobs import Revoke, Stage
from penstock.schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces.samples import (
    ID,
    at,
    done,
    encoded,
    job,
    line,
    prefilled,
    request,
    returned,
    split,
    timeline,
)


def kinds(made: RequestTimeline) -> list[str]:
    return [str(type(event).__struct_config__.tag) for event in made.events()]


def three_stages() -> list[list[Callable[[RequestTimeline], None]]]:
    """The messages of a request with media, one list per stream."""
    route = Stage("encode", "e-1"), Stage("prefill", "p-1"), Stage("decode", "d-1")
    item = TokenItem(ID, 1, 0, 0, pack_tokens([1, 2]), Finish("length"))
    return [
        [lambda made: made.add_request(request())],
        [
            lambda made: made.add_work("encode", "e-1", at(3), job(2, *route)),
            lambda made: made.add_work("prefill", "p-1", at(10), encoded("e-1", 4)),
            lambda made: made.add_work("decode", "d-1", at(22), prefilled("p-1", 12, 20)),
        ],
        [lambda made: made.add_handoff(line("offered", 21.5)), lambda made: made.add_handoff(line("read", 24))],
        [lambda made: made.add_tokens("d-1", at(30), item)],
        [lambda made: made.add_end(done(50), at(51))],
    ]


STORY = ["accepted", "queued", "routed", "assigned", "encoded", "handed_off", "assigned"]
STORY += ["transfer", "prefilled", "handed_off", "assigned", "transfer", "tokens", "done"]


@given(st.randoms(use_true_random=False))
def test_events_are_in_order_however_the_streams_interleave(rng: random.Random) -> None:
    streams = three_stages()
    made = RequestTimeline(ID)
    while left := [stream for stream in streams if stream]:
        rng.choice(left).pop(0)(made)
    assert kinds(made) == STORY


def test_a_request_on_one_worker() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1"), waited_ms=1.5))
    made.add_end(done(50, "w-1"), at(51))
    accepted, queued, routed, assigned, end = made.events()
    assert isinstance(accepted, RequestAccepted)
    assert isinstance(routed, RequestRouted)
    assert isinstance(end, RequestDone)
    assert [accepted.at_ns, queued.at_ns, routed.at_ns, assigned.at_ns, end.at_ns] == [
        at(0), at(0.5), at(2), at(3), at(51)
    ]  # fmt: skip
    assert (routed.decision.chosen, routed.overlap_blocks, routed.score) == ("w-1", 2, 1.5)
    assert accepted.prompt_tokens == 100


def test_a_later_attempt_continues_at_another_worker() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_end(returned(1, "w-1", "draining"), at(9))
    made.add_work("aggregated", "w-1", at(10), Revoke(ID, 1))
    again = job(17, Stage("aggregated", "w-2"), attempt=2, reason="returned: draining")
    made.add_work("aggregated", "w-2", at(18), again)
    assert kinds(made)[4:] == ["returned", "revoked", "queued", "routed", "continued", "assigned"]
    (back,) = [event for event in made.events() if isinstance(event, AttemptReturned)]
    assert (back.worker, back.reason) == ("w-1", "draining")
    (onward,) = [event for event in made.events() if isinstance(event, RequestContinued)]
    assert (onward.attempt, onward.previous_worker, onward.worker) == (2, "w-1", "w-2")
    assert [(stage.worker, stage.revoked) for stage in made.stages] == [("w-1", True), ("w-2", False)]


def test_a_stage_holds_what_it_made_and_handed_off() -> None:
    made = RequestTimeline(ID)
    for stream in three_stages():
        for add in stream:
            add(made)
    encode_stage, prefill, decode = made.stages
    assert isinstance(encode_stage.result, MediaEncoded)
    assert isinstance(prefill.result, PromptPrefilled)
    assert (prefill.result.first_token_ns, prefill.result.cached_tokens) == (at(20), 32)
    assert isinstance(prefill.handed_off, BlocksHandedOff)
    assert (prefill.handed_off.source, prefill.handed_off.target) == ("p-1", "d-1")
    assert decode.result is None
    assert made.leases()[prefill.handed_off.ticket].last.state == "read"


def test_a_message_that_is_stored_twice_makes_no_second_event() -> None:
    made = split()
    before = made.events()
    made.add_work("prefill", "p-1", at(41), job(2, Stage("prefill", "p-1"), Stage("decode", "d-1")))
    made.add_end(done(60), at(60))
    assert made.events() == before


@given(st.floats(-50, 100), st.floats(-50, 100), st.floats(-50, 100))
def test_a_clock_that_is_wrong_puts_no_effect_before_its_cause(decided: float, stored: float, ended: float) -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(stored), job(decided, Stage("aggregated", "w-1")))
    made.add_end(done(ended, "w-1"), at(ended))
    assert kinds(made) == ["accepted", "queued", "routed", "assigned", "done"]


def test_token_events_count_tokens_and_the_prompts_scores() -> None:
    made = timeline()
    made.add_tokens("w-1", at(5), TokenItem(ID, 1, PROMPT, 1, logprobs=(Logprob(-1.0),) * 3))
    made.add_tokens("w-1", at(6), TokenItem(ID, 1, 0, 4, pack_tokens([1, 2]), Finish("stop")))
    found = [event for event in made.events() if isinstance(event, TokensStored)]
    assert [(event.choice, event.first, event.count, event.finish) for event in found] == [
        (PROMPT, 1, 3, ""), (0, 4, 2, "stop")
    ]  # fmt: skip


def test_a_compact_timeline_keeps_counts_but_no_content() -> None:
    full, compact = timeline(compact=False), timeline(compact=True)
    for made in (full, compact):
        made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
        made.add_end(done(50, "w-1", submitted=encode(request())), at(50))
    assert kinds(full) == kinds(compact)
    assert full.request.prompt
    assert not compact.request.prompt
    assert compact.accepted is not None
    assert compact.accepted.prompt_tokens == 100
    assert full.routed[0].decision.candidates
    assert not compact.routed[0].decision.candidates
    assert (compact.routed[0].candidates, compact.routed[0].score) == (1, 1.5)
    assert compact.done is not None
    assert not compact.done.submitted
    assert len(encode(compact.events())) < 1500


def test_events_without_the_request_are_still_a_timeline() -> None:
    made = RequestTimeline(ID)
    made.add_end(done(50, "w-1"), at(50))
    assert kinds(made) == ["done"]
    with pytest.raises(ValueError, match="the log does not have request"):
        _ = made.request
