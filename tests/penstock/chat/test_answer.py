"""Streamed answers, in pieces of any length."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.client import MAX_EVENT_BYTES, StreamedAnswer, StreamedToolCall


def event(id: str, *, finish: str | None = None, **delta: Any) -> bytes:
    chunk = {"id": "chatcmpl-r1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"id: %s\ndata: %s\n\n" % (id.encode(), msgspec.json.encode(chunk))


STREAM = b"".join(
    [
        event("1", role="assistant", reasoning_content="hm"),
        event("2", content="a "),
        event("3", content="b\u00e9"),
        event("4", tool_calls=[{"index": 1, "id": "c2", "function": {"name": "g", "arguments": ""}}]),
        event("5", tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"x"'}}]),
        event("6", tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        event("7", finish="tool_calls"),
        b'data: {"id": "chatcmpl-r1", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n',
        b"data: [DONE]\n\n",
    ]
)


@given(cuts=st.lists(st.integers(0, len(STREAM))), crlf=st.booleans())
def test_an_answer_is_the_same_however_its_bytes_are_cut(cuts: list[int], crlf: bool) -> None:
    answer, parts = StreamedAnswer(), []
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    for begin, end in pairwise(sorted({0, *cuts, len(stream)})):
        parts += answer.feed(stream[begin:end])
    assert [(part.text, part.thought) for part in parts] == [("", "hm"), ("a ", ""), ("b\u00e9", "")]
    assert (answer.text, answer.thoughts) == ("a b\u00e9", "hm")
    assert answer.calls == [StreamedToolCall("c1", "f", '{"x": 1}'), StreamedToolCall("c2", "g", "")]
    assert (answer.finish, answer.request_id, answer.last_event) == ("tool_calls", "r1", "7")
    assert (answer.prompt_tokens, answer.tokens, answer.complete) == (5, 3, True)


def test_a_broken_stream_continues_with_the_next_whole_event() -> None:
    answer = StreamedAnswer()
    list(answer.feed(event("1", content="a") + event("2", content="b")[:-5]))
    assert (answer.text, answer.last_event) == ("a", "1")
    answer.restart()
    list(answer.feed(event("2", content="b")))
    assert (answer.text, answer.last_event) == ("ab", "2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'data: {"error": {"message": "the worker failed"}}\n\n', "the worker failed"),
        (b"data: <html>\n\n", "not a stream of chat completion chunks"),
        (b"x" * (MAX_EVENT_BYTES + 1), "larger than 8 MiB"),
    ],
)
def test_errors_in_a_stream_are_raised_with_their_cause(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(StreamedAnswer().feed(data))


def test_an_answer_that_never_ends_is_not_kept_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.chat.client.MAX_CHARS", 10)
    answer = StreamedAnswer()
    assert len(list(answer.feed(event("1", content="abc", reasoning_content="def")))) == 1
    call = [{"index": 0, "function": {"name": "f", "arguments": "xyzuv"}}]
    with pytest.raises(ValueError, match="the answer is longer than"):
        list(answer.feed(event("2", tool_calls=call)))
    assert (answer.text, answer.thoughts) == ("abc", "def")


def test_what_came_with_an_error_is_yielded_before_it() -> None:
    parts = StreamedAnswer().feed(event("1", content="a") + b'data: {"error": {"message": "the worker failed"}}\n\n')
    assert next(parts).text == "a"
    with pytest.raises(ValueError, match="the worker failed"):
        next(parts)


def test_calls_of_any_index_are_kept() -> None:
    answer = StreamedAnswer()
    for index in (-5, 10**12):
        list(answer.feed(event("1", tool_calls=[{"index": index, "id": "c", "function": {"name": "f"}}])))
    assert (answer.calls[0], answer.calls[127]) == (StreamedToolCall("c", "f"), StreamedToolCall("c", "f"))
