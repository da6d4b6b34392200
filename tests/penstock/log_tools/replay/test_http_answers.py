"""Requests as HTTP bodies, and answers from event streams."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.export.recording import RecordedRun
from penstock.log_tools.replay.comparison import compare_texts
from penstock.log_tools.replay.http import HttpAnswer, body_of, unsupported
from penstock.schemas.done import Done, Outcome
from penstock.schemas.requests import Parsing, Sampling, Stop
from penstock.schemas.wire import unpack_tokens
from penstock.workers.engines.openai.chat import AnswerText
from tests.penstock.log_tools.traces import samples

STREAM = (
    b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"ab","token_ids":[5,6]}]}\n\n'
    b': comment\n\ndata: {"id":"cmpl-1",'
    b'"choices":[{"index":0,"text":"c","token_ids":[7],"finish_reason":"length"}]}\n\n'
    b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(1, len(STREAM)), max_size=8))
def test_an_answer_is_the_same_however_its_bytes_are_cut(cuts: list[int]) -> None:
    answer, at = HttpAnswer(samples.request(), 1_000_000), 0
    for number, cut in enumerate([*sorted(cuts), len(STREAM)]):
        answer.feed(STREAM[at:cut], 2_000_000 + number)
        at = max(at, cut)
    answer.end(9_000_000)
    run = answer.run("cmpl-1")
    assert (answer.name, answer.texts, answer.exact) == ("cmpl-1", ["abc"], True)
    assert run.done is not None
    [choice] = run.done.choices
    assert (list(unpack_tokens(choice.tokens)), choice.reason, run.done.code) == ([5, 6, 7], "length", "")
    assert (run.done.usage.prompt, run.e2e_ms) == (9, 8.0)


def test_a_stream_that_breaks_off_or_reports_an_error_has_failed() -> None:
    cut = HttpAnswer(samples.request(), 0)
    cut.feed(STREAM[:60], 1)
    cut.end(2)
    wrong = HttpAnswer(samples.request(), 0)
    wrong.feed(b'data: {"error":{"message":"gone","code":"worker_lost"}}\n\n', 1)
    wrong.end(2)
    codes = [run.done.code for run in (cut.run("a"), wrong.run("b")) if run.done is not None]
    assert codes == ["incomplete", "worker_lost"]
    with pytest.raises(ValueError, match="cannot be read"):
        HttpAnswer(samples.request(), 0).feed(b"data: {nonsense\n", 1)


def test_a_body_has_the_tokens_and_leaves_out_extensions_that_were_not_used() -> None:
    plain = msgspec.json.decode(body_of(samples.request(), "m"))
    assert (plain["model"], plain["prompt"][:3], plain["seed"], plain["max_tokens"]) == ("m", [0, 1, 2], 3, 9)
    assert not {"top_k", "ignore_eos", "stop", "logit_bias", "repetition_penalty"} & set(plain)
    request = samples.request(
        sampling=Sampling(top_k=4, logit_bias={7: -1.0}, logprobs=2),
        stop=Stop(max_tokens=3, strings=("x",), ignore_eos=True),
    )
    body = msgspec.json.decode(body_of(request, "m"))
    assert (body["top_k"], body["logit_bias"], body["logprobs"], body["stop"], body["ignore_eos"]) == (
        4, {"7": -1.0}, 2, ["x"], True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("new", "outcome", "position"), [("the plan", "same", None), ("the plot", "tokens", 6), ("the", "tokens", 3)]
)
def test_texts_are_compared_to_the_first_other_character(new: str, outcome: str, position: int | None) -> None:
    def run(name: str) -> RecordedRun:
        return RecordedRun(name, samples.request(), Done(name, "m", 1, choices=(Outcome(b"", "stop"),)), stored={})

    found = compare_texts(run("a"), run("b"), ["the plan"], [new])
    assert found.outcome == outcome
    assert (found.text_difference.position if found.text_difference else None) == position


def test_stop_strings_that_count_in_the_content_only_cannot_be_asked_for_over_http() -> None:
    stop = Stop(max_tokens=3, strings=("x",))
    assert unsupported(samples.request(stop=stop)) == ""
    assert unsupported(samples.request(parsing=Parsing("basic"))) == ""
    assert "content only" in unsupported(samples.request(stop=stop, parsing=Parsing("basic")))


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0.5}


def test_a_chat_goes_to_a_server_as_its_client_gave_it_with_what_was_changed() -> None:
    asked = samples.request(chat=msgspec.json.encode(CHAT), sampling=Sampling(temperature=0.5, seed=3))
    assert unsupported(asked) == ""
    body = msgspec.json.decode(body_of(asked, "m"))
    assert isinstance(body.pop("seed"), int)
    assert body == CHAT | {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    changed = msgspec.structs.replace(
        asked, sampling=Sampling(temperature=0.0, top_k=4), stop=Stop(max_tokens=3, strings=("x",)), n=2
    )
    body = msgspec.json.decode(body_of(changed, "m"))
    assert (body["temperature"], body["top_k"], body["max_tokens"], body["stop"], body["n"]) == (0.0, 4, 3, ["x"], 2)


def test_a_chats_answer_is_compared_with_the_text_that_the_engine_recorded() -> None:
    def chunk(delta: dict[str, object], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "token_ids": [1]}
        return b"data: " + msgspec.json.encode({"id": "c", "choices": [choice]}) + b"\n\n"

    answer = HttpAnswer(samples.request(chat=msgspec.json.encode(CHAT)), 0)
    answer.feed(chunk({"role": "assistant", "reasoning_content": "so"}) + chunk({"content": "Hello"}), 1)
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
    answer.feed(chunk({"tool_calls": [call]}) + chunk({}, "tool_calls"), 2)
    answer.end(3)
    text = AnswerText()
    wanted = [text.take(each) for each in ({"reasoning_content": "so"}, {"content": "Hello"}, {"tool_calls": [call]})]
    assert answer.texts == ["".join(wanted) + text.close()]
    assert not answer.exact, "its tokens are not those that were recorded"
    run = answer.run("c")
    assert run.done is not None
    assert (run.done.code, run.done.choices[0].reason) == ("", "stop")
    with pytest.raises(ValueError, match="cannot be read"):
        HttpAnswer(samples.request(chat=b"{}"), 0).feed(chunk({"tool_calls": [{"index": 0}]}), 1)
