"""One connection of the load generator: its parser on bytes cut anywhere."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.load_generator import Exchange, PooledConnection
from tests.penstock.measure.load_generator.support import TOKENS, sse, whole


class Wire(asyncio.Transport):
    """Where a connection writes; remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    abort = close


def converse(answers: bytes, cuts: list[int], requests: int = 2) -> tuple[list[Exchange], Wire]:
    """Feed the answers cut at these places to a connection that has so many requests to send."""
    done: list[Exchange] = []
    wire = Wire()
    left = iter([Exchange(b"request", done.append) for _ in range(requests)])

    def following(connection: PooledConnection) -> None:
        if (exchange := next(left, None)) is not None:
            connection.send(exchange)

    connection = PooledConnection(following, lambda _: None)
    connection.connection_made(wire)
    following(connection)
    places = [0, *sorted(cut % len(answers) for cut in cuts), len(answers)]
    for start, end in itertools.pairwise(places):
        if start < end:
            connection.data_received(answers[start:end])
    return done, wire


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=40))
def test_a_stream_is_read_the_same_however_it_is_cut(cuts: list[int]) -> None:
    first, second = sse(), sse()
    # A server answers a request only after it was sent: no read spans two answers.
    done, wire = converse(first + second, [*cuts, len(first)])
    assert [(each.output_tokens, each.prompt_tokens, each.events, each.error) for each in done] == [
        (TOKENS, 9, TOKENS + 3, "")
    ] * 2
    assert all(each.sent < each.first <= each.last <= each.ended for each in done)
    assert wire.sent == [b"request"] * 2


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=20))
def test_a_whole_answer_is_read_the_same_however_it_is_cut(cuts: list[int]) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": TOKENS, "prompt_tokens_details": {"cached_tokens": 5}}
    body = json.dumps({"usage": usage, "choices": [{"message": {"content": "x" * 3000}}]})
    (exchange,), _ = converse(whole(body.encode()), cuts, requests=1)
    assert (exchange.prompt_tokens, exchange.cached_tokens, exchange.output_tokens) == (7, 5, TOKENS)
    assert exchange.error == ""


def test_every_event_is_timed_when_each_comes_alone() -> None:
    answer = sse()
    ends = [i + 2 for i in range(len(answer)) if answer.startswith(b"\n\n", i)]
    (exchange,), _ = converse(answer, ends, requests=1)
    assert len(exchange.gaps_s) == TOKENS - 1
    assert exchange.first + sum(exchange.gaps_s) == pytest.approx(exchange.last)


def test_an_event_of_empty_text_at_the_end_is_no_token() -> None:
    answer = sse().replace(b'{"delta":{},"finish', b'{"delta":{"content":""},"finish')
    ends = [i + 2 for i in range(len(answer)) if answer.startswith(b"\n\n", i)]
    (exchange,), _ = converse(answer, ends, requests=1)
    assert len(exchange.gaps_s) == TOKENS - 1


def test_text_is_timed_on_when_the_answer_follows_the_reasoning() -> None:
    answer = sse()
    at = answer.rindex(b'"content":"word')
    answer = answer[:at].replace(b'"content":"word', b'"reasoning_content":"word') + answer[at:]
    ends = [i + 2 for i in range(len(answer)) if answer.startswith(b"\n\n", i)]
    (exchange,), _ = converse(answer, ends, requests=1)
    assert len(exchange.gaps_s) == TOKENS - 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (whole(b'{"error":"full"}', "429 Too Many Requests"), 'HTTP 429: {"error":"full"}'),
        (whole(b"", "503 Unavailable"), "HTTP 503: "),
    ],
)
def test_a_refusal_is_an_error_that_quotes_the_server(answer: bytes, error: str) -> None:
    (exchange,), _ = converse(answer, [], requests=1)
    assert (exchange.error, exchange.unreached) == (error, False)


def test_an_answer_without_usage_says_so() -> None:
    (exchange,), _ = converse(whole(b"{}"), [], requests=1)
    assert (exchange.error, exchange.output_tokens) == ("", -1)


def test_a_connection_cut_in_an_answer_is_an_error_and_one_closed_after_it_is_not() -> None:
    for answer, errors in ((sse()[:-1], ["connection lost"]), (whole(b"{}", more="Connection: close\r\n"), [""])):
        done: list[Exchange] = []
        lost: list[PooledConnection] = []
        connection = PooledConnection(lambda _: None, lost.append)
        connection.connection_made(Wire())
        connection.send(Exchange(b"r", done.append))
        connection.data_received(answer)
        connection.connection_lost(None)
        assert ([each.error for each in done], lost) == (errors, [connection])


def test_a_request_whose_connection_is_closed_fails_once_or_is_forgotten() -> None:
    for error, told in (("too late", 1), ("", 0)):
        done: list[Exchange] = []
        connection = PooledConnection(lambda _: None, lambda _: None)
        connection.connection_made(Wire())
        connection.send(Exchange(b"r", done.append))
        connection.close(error)
        connection.data_received(sse())
        connection.connection_lost(None)
        assert [each.error for each in done] == [error] * told
