"""One sequence as calls of SGLang, and its chunks as tokens."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import EngineInfo, MediaSpan, RequestError
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.sequences import MISSING, ActiveSequence, SequenceFailure, SequenceUpdate, Token
from penstock.workers.engines.sglang.adapter import (
    RankLoads,
    SglangCall,
    SglangFollower,
    SglangOutputCursor,
    prompt_scores,
)
from penstock.workers.engines.sglang.engine_inputs import BARRED, SglangInputs, SglangOptions, check, meeting, prepare
from tests.workers.engines.contract import ask

INFO = EngineInfo("sglang", 32, 96, 4, 512, 1280, (2,), True)
OPTIONS = SglangOptions(b"r" * 16)
PROMPT = [5, 6, 7, 8]


def params(request: Any, generated: Any = ()) -> dict[str, Any]:
    found: dict[str, Any] = prepare(request, INFO, OPTIONS, generated).arguments["sampling_params"]
    return found


def test_greedy_and_unlimited_sampling_are_said_as_sglang_takes_them() -> None:
    assert params(ask(0, PROMPT))["temperature"] == 0.0
    drawn = params(ask(0, PROMPT, sampling=Sampling(temperature=0.7, top_k=0, min_p=0.1)))
    assert "top_k" not in drawn  # SGLang refuses 0
    assert (drawn["temperature"], drawn["min_p"]) == (0.7, 0.1)
    assert params(ask(0, PROMPT, sampling=Sampling(top_k=9, seed=3)))["top_k"] == 9


def test_the_seed_is_the_same_at_every_position_and_another_for_each_choice() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    first = params(ask(0, PROMPT, 9, sampling))["sampling_seed"]
    assert params(ask(0, PROMPT, 9, sampling, generated=(5, 6)))["sampling_seed"] == first
    assert params(ask(0, PROMPT, 9, sampling, choice=1))["sampling_seed"] != first
    assert 0 <= first < 2**63


def test_penalties_of_earlier_tokens_are_a_bias() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={9: 2.0})
    found = params(ask(0, PROMPT, 9, sampling, generated=(9, 9, 4)))
    assert found["logit_bias"] == {"9": 2.0 - 1.0 - 2 * 0.5, "4": -1.0 - 0.5}


def test_before_min_tokens_no_end_can_be_drawn_and_another_call_follows() -> None:
    request = ask(0, PROMPT, 9, stop={"min_tokens": 4, "token_ids": (11,), "ignore_eos": False})
    first = prepare(request, INFO, OPTIONS)
    assert first.continues
    sampling = first.arguments["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["ignore_eos"]) == (4, True)
    assert sampling["logit_bias"] == {"11": BARRED, "2": BARRED}
    second = prepare(request, INFO, OPTIONS, [21, 22, 23, 24])
    assert not second.continues
    sampling = second.arguments["sampling_params"]
    assert second.arguments["input_ids"] == [*PROMPT, 21, 22, 23, 24]
    assert (sampling["max_new_tokens"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (5, [2, 11], False)
    assert "logit_bias" not in sampling
    whole = prepare(ask(0, PROMPT, 4, stop={"min_tokens": 4, "ignore_eos": False}), INFO, OPTIONS)
    assert not whole.continues  # its limit is the sequence's


def test_stop_ids_beside_ignored_ends_are_watched_for() -> None:
    found = prepare(ask(0, PROMPT, 9, stop={"token_ids": (11,)}), INFO, OPTIONS)
    assert found.arguments["sampling_params"]["ignore_eos"]
    assert found.stops == {11}


def test_salts_ranks_and_spans_are_passed_on() -> None:
    info = EngineInfo("sglang", 32, 96, 4, 512, 1280, (2,), True, dp_size=2)
    found = prepare(ask(0, PROMPT, rank=3, trace={"traceparent": "t"}), info, OPTIONS).arguments
    assert found["cache_salt"] == ask(0, PROMPT).root.hex()
    assert (found["routed_dp_rank"], found["external_trace_header"]) == (1, {"traceparent": "t"})
    plain = prepare(ask(0, PROMPT, base=OPTIONS.root), INFO, OPTIONS).arguments
    assert not {"cache_salt", "routed_dp_rank", "external_trace_header", "return_logprob"} & set(plain)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ask(0, PROMPT, media=(MediaSpan(0, 2, b"d"),)), Code.unsupported),
        (ask(0, PROMPT, pin=True), Code.unsupported),
        (ask(0, [1280]), Code.invalid_request),
    ],
)
def test_what_cannot_run_is_refused(request_: Any, code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        check(request_, INFO, OPTIONS)
    assert caught.value.code == code


def test_without_cache_salt_only_the_common_root_is_served() -> None:
    older = OPTIONS._replace(salts=False)
    check(ask(0, PROMPT, base=OPTIONS.root), INFO, older)
    with pytest.raises(RequestError, match="kept apart") as caught:
        check(ask(0, PROMPT), INFO, older)
    assert caught.value.code == Code.unsupported


def test_a_room_is_entered_once() -> None:
    options, consumed = OPTIONS._replace(role="prefill", layout="l"), ConsumedStates()
    assert meeting(ask(0, PROMPT, handoff="a"), INFO, options, consumed).rank is None
    with pytest.raises(ValueError, match="for decode workers only"):
        meeting(ask(0, PROMPT), INFO, options, consumed)
    with pytest.raises(ValueError, match="continues prompts"):
        meeting(ask(0, PROMPT), INFO, options._replace(role="decode"), consumed)


def chunk(*tokens: int, reason: dict[str, Any] | None = None, **info: Any) -> dict[str, Any]:
    return {"output_ids": list(tokens), "meta_info": {"finish_reason": reason, **info}}


def test_chunks_become_tokens_with_one_end() -> None:
    cursor = SglangOutputCursor()
    assert cursor.take(chunk(1, 2)) == ([Token(1), Token(2)], None)
    assert cursor.take(chunk(3, reason={"type": "stop", "matched": 3})) == ([Token(3, "stop", None, 3)], None)
    assert cursor.finished
    assert cursor.take(chunk(4)) == ([], None)
    limited = SglangOutputCursor(continues=True)
    assert limited.take(chunk(1, reason={"type": "length", "length": 1})) == ([Token(1)], None)
    assert not limited.finished
    assert SglangOutputCursor().take(chunk(1, reason={"type": "length", "length": 1}))[0][-1].finish == "length"


def test_an_engine_of_a_pair_fails_for_more_than_its_transfers() -> None:
    """SGLang names the kind of error of a grammar, for example, and none where KV did not come."""
    reason = {"type": "abort", "message": "Grammar accept_token failed", "status_code": 500}
    for kind, code in ((None, Code.transfer_failed), ("InternalServerError", Code.engine_error)):
        failure = SglangOutputCursor(adopted=True).take(chunk(reason=reason | {"err_type": kind}))[1]
        assert failure is not None
        assert failure.code == code


def test_watched_stops_end_an_output_in_the_midst_of_a_chunk() -> None:
    cursor = SglangOutputCursor(stops=(7,), min_tokens=2)
    new, failure = cursor.take(chunk(7, 1, 7, 9))
    assert ([each.token for each in new], new[-1].finish, new[-1].stop_token, failure) == ([7, 1, 7], "stop", 7, None)


@pytest.mark.parametrize(
    ("status", "adopted", "code"),
    [(400, False, Code.invalid_request), (500, False, Code.engine_error), (500, True, Code.transfer_failed),
     (None, True, Code.cancelled)],
)  # fmt: skip
def test_an_abort_says_whose_fault_it_is_and_its_repeated_token_is_dropped(
    status: int | None, adopted: bool, code: Code
) -> None:
    cursor = SglangOutputCursor(adopted=adopted)
    cursor.take(chunk(1))
    reason = {"type": "abort", "message": "m", "status_code": status}
    assert cursor.take(chunk(1, reason=reason)) == ([], SequenceFailure(code, "m"))


def test_logits_that_are_no_numbers_are_a_failure() -> None:
    """What 0.5.23 says of them; the last token is one of the request's stop ids."""
    nan = {"type": "stop", "matched": "NaN happened"}
    failure = SequenceFailure(Code.engine_error, "the engine ended the output: NaN happened")
    assert SglangOutputCursor(stops=(2,)).take(chunk(2, reason=nan)) == ([], failure)


@pytest.mark.parametrize(("responded", "code"), [(False, Code.invalid_request), (True, Code.engine_error)])
def test_what_the_engine_refuses_is_the_clients_error_and_what_fails_later_is_not(responded: bool, code: Code) -> None:
    async def refuse(**_: object) -> None:
        raise ValueError("m")

    async def follow() -> None:
        follower = SglangFollower(runtime, RankLoads(), (), 1, OPTIONS)
        await follower._follow(sequence)

    sent: list[SequenceUpdate] = []
    llm, inbox = SimpleNamespace(async_generate=refuse), SimpleNamespace(put=sent.append)
    runtime: Any = SimpleNamespace(llm=llm, api=None, loop=None, inbox=inbox)
    sequence = ActiveSequence(ask(0, PROMPT), SglangCall(lambda _: SglangInputs({}), None))
    sequence.responded = responded  # behind the tokens of the first of several calls
    asyncio.run(follow())
    assert [update.failure for update in sent] == [SequenceFailure(code, "m")]


def test_an_end_without_a_token_is_a_failure() -> None:
    _, failure = SglangOutputCursor().take(chunk(reason={"type": "stop", "matched": 2}))
    assert failure is not None
    assert failure.code == Code.engine_error


def test_logprobs_are_of_their_own_tokens() -> None:
    cursor = SglangOutputCursor(top=1)
    info = {
        "output_token_logprobs": [(-0.5, 1, None), (None, 2, None)],
        "output_top_logprobs": [[(-0.5, 1, None), (-2.0, 9, None)], None],
    }
    (one, two, three), _ = cursor.take(chunk(1, 2, 3, **info))
    assert one.logprob is not None
    assert (one.logprob.logprob, one.logprob.top) == (-0.5, ((1, -0.5),))
    assert [each.logprob.logprob for each in (two, three) if each.logprob] == [MISSING, MISSING]


def test_prompt_scores_begin_behind_the_token_before() -> None:
    rows = [(None, 5, None), (-1.0, 6, None), (-2.0, 7, None), (-3.0, 8, None), (-9.0, 99, None)]
    best = [None, [(-0.1, 3, None), (-1.0, 6, None)], [(-2.0, 7, None)], [(-0.3, 1, None)], None]
    found = prompt_scores({"input_token_logprobs": rows, "input_top_logprobs": best}, 4, 1, 2)
    assert [(each.logprob, each.rank) for each in found] == [(-1.0, 2), (-2.0, 1), (-3.0, 0)]
    assert prompt_scores({"input_token_logprobs": rows[:2]}, 4, 1, 0) == []
    later = prompt_scores({"input_token_logprobs": rows[2:]}, 4, 3, 0)
    assert [each.logprob for each in later] == [-3.0]
