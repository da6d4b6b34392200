"""What a client saw: streams and whole answers come to the same, and events that come again are noticed."""

from typing import Any

import pytest

from tests.chaos.seen import Seen, Shown, goes_on


def chat(text: str, index: int = 0, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    part = {"index": index, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprobs}
    return {"choices": [part]}


def test_a_stream_and_a_whole_answer_come_to_the_same() -> None:
    streamed, whole = Seen("t", "r", "stream"), Seen("t", "r", "whole")
    content = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    streamed.take(chat("a", logprobs={"content": content[:1]}), "1", 0.0)
    streamed.take(chat("b", logprobs={"content": content[1:]}, finish="stop"), "2f", 0.1)
    message = {"message": {"content": "ab"}, "index": 0, "finish_reason": "stop", "logprobs": {"content": content}}
    whole.take_whole({"choices": [message]})
    assert streamed.choices == whole.choices == {0: Shown("ab", "stop", [("a", -1.0), ("b", -2.0)])}
    assert streamed.finished
    assert list(streamed.arrivals) == [0.0, 0.1]


def test_text_completions_are_read_as_chats_are() -> None:
    seen = Seen("t", "r", "stream", 2)
    logprobs = {"tokens": ["x"], "token_logprobs": [-0.5]}
    seen.take({"choices": [{"index": 1, "text": "x", "finish_reason": None, "logprobs": logprobs}]}, "0.1", 0.0)
    assert seen.choices[1] == Shown("x", "", [("x", -0.5)])
    assert not seen.finished


def test_responses_and_vectors_are_one_choice() -> None:
    seen = Seen("t", "r", "background")
    message = {
        "type": "message",
        "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}],
    }
    seen.take_whole({"status": "completed", "output": [{"type": "reasoning"}, message]})
    assert seen.choices == {0: Shown("ab", "completed")}
    seen.take_whole({"data": [{"embedding": "AAAA"}, {"embedding": [0.5, -1]}]})
    assert seen.choices == {0: Shown("AAAA [0.5, -1]", "stop")}


@pytest.mark.parametrize(
    ("last", "event_id", "goes"),
    [
        ("", "1", True),
        ("1", "2", True),
        ("2", "2f", True),
        ("2f", "2fu", True),
        ("9", "10", True),
        ("1.4", "2.4", True),
        ("2", "2", False),
        ("5", "4", False),
        ("2f", "2", False),
        ("3.4", "4.3", False),
    ],
)
def test_an_event_that_names_no_more_tokens_than_the_last_one_is_a_repeat(last: str, event_id: str, goes: bool) -> None:
    assert goes_on(last, event_id) is goes
    seen = Seen("t", "r", "stream")
    for each in filter(None, (last, event_id)):
        seen.take(chat("a"), each, 0.0)
    assert seen.repeats == (not goes)
