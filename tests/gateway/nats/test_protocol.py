"""What NATS clients write, and how answers are numbered."""

import hashlib
import re

import msgspec
import pytest

from penstock.gateway.nats.messages import DeliveredMessage, StreamMessages, failure
from penstock.gateway.nats.protocol import (
    Origin,
    key_of,
    may_ask_for_no_store,
    origin_of,
    parse_headers,
    parse_query,
    shape_of,
)
from penstock.schemas import wire
from penstock.schemas.control import Cancel
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Stop
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.pipeline.support import MODEL, Oracle


@pytest.mark.parametrize(
    ("subject", "kind", "origin"),
    [
        ("ps.submit.acme.tiny", "submit", Origin("acme", False)),
        ("ps.submit.acme.other.tiny", "submit", Origin("acme", False)),
        ("ps.submit.tiny", "submit", Origin("default", True)),
        ("ps.ask.acme.tiny", "ask", Origin("acme", False)),
        ("ps.read.acme", "read", Origin("acme", False)),
        ("ps.read", "read", Origin("default", True)),
        ("ps.cancel.acme", "cancel", Origin("acme", False)),
    ],
)
def test_a_subject_shows_whose_message_it_is(subject: str, kind: str, origin: Origin) -> None:
    assert origin_of(subject, kind) == origin


def test_the_key_of_an_answer_can_be_computed_by_any_client() -> None:
    assert key_of("order-17") == hashlib.sha256(b"order-17").hexdigest()[:32]


@pytest.mark.parametrize(
    ("body", "endpoint", "form"),
    [
        (b'{"messages":[]}', "chat", ""),
        (b'{"prompt":"x","stream":true}', "text", "stream"),
        (b'{"messages":[],"stream":true,"stream_options":{"include_usage":true}}', "chat", "stream+usage"),
        (b'{"messages":null,"stream":false}', "text", ""),
        (b'{"input":["x"],"prompt":null}', "embedding", ""),
        (b'{"query":"x","documents":["y"]}', "rerank", ""),
        (b'{"messages":[],"documents":["y"],"query":"x"}', "chat", ""),
        (b'{"queries":"x","documents":["y"]}', "score", ""),
        (b'{"text_1":"x","text_2":"y"}', "score", ""),
        (b"nonsense", "text", ""),
        (rb'{"messages":[{"content":"\ud83d"}],"stream":true}', "chat", "stream"),
    ],
)
def test_a_body_states_how_it_wants_its_answer(body: bytes, endpoint: str, form: str) -> None:
    kind = shape_of(body)
    assert (kind.endpoint, kind.form) == (endpoint, form)


@pytest.mark.parametrize(
    "headers",
    [
        {"Penstock-Reply-To": "ps.request.x"},
        {"Penstock-Reply-To": "_INBOX_gateway.x"},
        {"Penstock-Reply-To": "_INBOX.*"},
        {"Penstock-No-Store": "maybe"},
        {"Penstock-From": "-1"},
        {"Penstock-From": "many"},
        {"Nats-Msg-Id": "x" * 256},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_used_is_named(headers: dict[str, str]) -> None:
    with pytest.raises(ServingError, match=next(iter(headers))) as error:
        parse_headers(headers, "ps")
    assert error.value.code is Code.invalid_request


@pytest.mark.parametrize("first", ["0", "1"])
def test_of_a_header_in_two_cases_one_wish_not_to_be_stored_is_enough(first: str) -> None:
    second = "1" if first == "0" else "0"
    assert parse_headers({"penstock-no-store": first, "Penstock-No-Store": second}, "ps").no_store


@pytest.mark.parametrize(
    ("headers", "body", "asks"),
    [
        ({"penstock-no-store": "1"}, b"{}", True),
        ({"penstock-no-store": "0", "Penstock-No-Store": "1"}, b"{}", True),
        ({"Penstock-No-Store": "perhaps"}, b"{}", True),
        ({"Penstock-No-Store": "0"}, b'{"no_store": false}', False),
        ({}, b'{"no\\u005fstore": true}', True),
        ({}, b'{"no_store": "yes"}', True),
        ({}, b'{"store": false}', True),
        ({}, b'{"store": true}', False),
        ({}, b'{"prompt": "no_store"}', False),
        ({}, rb'{"prompt": "half of a pair: \ud83d"}', False),
        ({}, rb'{"prompt": "half of a pair: \ud83d", "store": false}', True),
    ],
)
def test_a_submission_that_may_have_wanted_not_to_be_stored_counts_as_one(
    headers: dict[str, str], body: bytes, asks: bool
) -> None:
    assert may_ask_for_no_store(headers, body) == asks


def test_the_no_store_header_counts_in_any_case() -> None:
    assert parse_headers({"PENSTOCK-NO-STORE": "true"}, "ps").no_store


def test_a_cancellation_of_an_earlier_release_is_understood() -> None:
    found = parse_query(wire.encode(Cancel("some-id", "changed my mind")))
    assert (found.id, found.reason) == ("some-id", "changed my mind")
    assert parse_query(b'{"key":"k","from":3,"until":4}').first == 3


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"id": "x", "form": 3}', "form"),
        (b"what is new?", "what is new?"),
        (b"[1]", "JSON object"),
        (b"", "JSON object"),
        (b'{"id": "x", "reader": "%s"}' % (b"r" * 129), "reader"),
        (b'{"id": "x", "from": "3"}', "from"),
    ],
)
def test_a_query_that_cannot_be_used_says_why(body: bytes, named: str) -> None:
    with pytest.raises(ServingError, match=re.escape(named)) as error:
        parse_query(body)
    assert error.value.code is Code.invalid_request
    assert "got `int`" not in error.value.message


def request_of(oracle: Oracle, form: str) -> GenerateRequest:
    stop = Stop(max_tokens=8)
    return GenerateRequest(
        "01932c07-a4b8-7000-8000-0123456789ab", "tiny", "g", b"", stop, 0, 0, endpoint="text", form=form
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 8])
def test_numbers_do_not_depend_on_how_tokens_arrived(cut: int) -> None:
    oracle = Oracle(MODEL)
    request = request_of(oracle, "stream+usage")
    tokens = oracle.tokens({"prompt": "The harbour is", "temperature": 0}, 8)
    chunks = StreamMessages(request, oracle.model.detokenizer)
    out: list[DeliveredMessage] = []
    for start in range(0, 8, cut):
        part = tokens[start : start + cut]
        finish = Finish("length") if start + cut >= 8 else None
        out += chunks.push([TokenItem(request.id, 0, 0, start, pack_tokens(part), finish)])
    assert [message.number for message in out] == list(range(len(out)))
    assert [message.final for message in out] == [False] * (len(out) - 1) + [True]
    whole = StreamMessages(request, oracle.model.detokenizer)
    assert whole.push([TokenItem(request.id, 0, 0, 0, pack_tokens(tokens), Finish("length"))]) == out
    assert "usage" in msgspec.json.decode(out[-1].body)


def test_a_text_with_the_marks_of_an_event_stays_in_one_piece() -> None:
    oracle = Oracle(MODEL)
    request = request_of(oracle, "stream")
    tokens = oracle.model.tokenizer.encode("data: one\n\ndata: two", add_special_tokens=False).ids
    chunks = StreamMessages(request, oracle.model.detokenizer)
    out = chunks.push([TokenItem(request.id, 0, 0, 0, pack_tokens(tokens), Finish("stop"))])
    text = "".join(msgspec.json.decode(message.body)["choices"][0]["text"] for message in out)
    assert text == "data: one\n\ndata: two"


def test_a_call_that_failed_has_no_number() -> None:
    message = failure(ServingError(Code.request_not_found, "no such request"), -1)
    assert message.headers({}) == {"Penstock-Final": "1", "Penstock-Error": "request_not_found"}
