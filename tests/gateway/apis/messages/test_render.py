"""Streamed and whole messages, as the real client's own types read them."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.segments import SegmentRenderer, WholeAnswer
from penstock.gateway.apis.messages.objects import AppliedEdit, message_error, messages_status
from penstock.gateway.apis.messages.render import ClientBody, MessageEvents, message
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.answers import CALL, DETOKENIZER, ID, LENGTH, STOP, TEXTS, items, request
from tests.properties import examples

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@cache
def event_type() -> TypeAdapter[Any]:
    """The client's; it is imported late: this takes 1.5 s, in each process that collects tests."""
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(RawMessageStreamEvent)


@cache
def message_type() -> Any:
    from anthropic.types import Message

    return Message


def asked(max_tokens: int = 1000) -> GenerateRequest:
    return request("message", msgspec.json.encode(ClientBody(max_tokens)))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events that have a number; a signature has that of the event behind it."""
    found: list[dict[str, Any]] = []
    signed: list[dict[str, Any]] = []
    for block in raw.decode().split("\n\n")[:-1]:
        *head, kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if not head:
            assert event["delta"]["type"] == "signature_delta"
            signed.append(event)
            continue
        number = int(head[0].removeprefix("id: "))
        assert not found or number == found[-1]["id"] + 1
        found += [{**each, "id": number} for each in (*signed, event)]
        signed = []
    assert not signed
    return found


def streamed(made: GenerateRequest, given: list[TokenItem], *, after: int | None = None) -> list[dict[str, Any]]:
    renderer = SegmentRenderer(made, DETOKENIZER, MessageEvents(made))
    if after is not None:
        renderer.resume(str(after))
    raw = renderer.push([]) + b"".join(renderer.push([item]) for item in given)
    assert renderer.done
    return events_of(raw)


def whole(made: GenerateRequest, given: list[TokenItem]) -> dict[str, Any]:
    aggregator = WholeAnswer(made, DETOKENIZER, message)
    assert aggregator.push(given)
    found: dict[str, Any] = json.loads(aggregator.response())
    return found


@examples(100)
@given(TEXTS, st.sampled_from([STOP, LENGTH, Finish("stop", "END")]))
def test_the_events_add_up_to_the_whole_message(text: str, finish: Finish) -> None:
    made, given = asked(), items(text, finish)
    events, body = streamed(made, given), whole(made, given)
    for event in events:
        if event["type"] != "ping":
            event_type().validate_python(event)
    message_type().model_validate(body, strict=True)
    types = [event["type"] for event in events]
    assert types[:2] == ["message_start", "ping"]
    assert types[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {key: body[key] for key in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == body["usage"]
    shown: list[dict[str, Any]] = []
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(shown)
                shown.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta = event["delta"]
                name = delta["type"].removesuffix("_delta")
                if name == "input_json":
                    shown[event["index"]]["json"] += delta["partial_json"]
                else:
                    shown[event["index"]][name] += delta[name]
            case "content_block_stop":
                assert event["index"] == len(shown) - 1
    assert types.count("content_block_stop") == len(shown)
    for block, expected in zip(shown, body["content"], strict=True):
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(arguments or "{}")
            except ValueError:
                block["input"] = {"arguments": arguments}
        assert block == expected


@given(TEXTS, st.data())
def test_any_gateway_continues_behind_any_event(text: str, data: st.DataObject) -> None:
    made, given = asked(), items(text)
    events = streamed(made, given)
    after = data.draw(st.integers(0, events[-1]["id"]))
    assert streamed(made, items(text, size=4), after=after) == [event for event in events if event["id"] > after]


@pytest.mark.parametrize("text", ["<think>Hm.</think>Yes.", "<think>Hm."])
def test_a_thought_has_a_signature_since_some_clients_send_none_back_without(text: str) -> None:
    made, given = asked(), items(text, LENGTH)
    deltas = [event["delta"]["type"] for event in streamed(made, given) if event.get("delta", {}).get("type")]
    assert deltas[-1 if "Yes" not in text else deltas.index("text_delta") - 1] == "signature_delta"
    assert whole(made, given)["content"][0]["signature"]


@pytest.mark.parametrize(
    ("text", "finish", "max_tokens", "reason"),
    [
        ("Done.", STOP, 9, "end_turn"),
        (f"Look: {CALL}", STOP, 9, "tool_use"),
        ("Done", Finish("stop", "."), 9, "stop_sequence"),
        ("Done", LENGTH, 1000, "max_tokens"),
        ("Done", LENGTH, 5000, "model_context_window_exceeded"),  # the request's own limit is 1000
    ],
)
def test_a_message_says_why_it_stopped(text: str, finish: Finish, max_tokens: int, reason: str) -> None:
    body = whole(asked(max_tokens), items(text, finish))
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == ("." if reason == "stop_sequence" else None)


def test_tokens_from_the_cache_are_not_counted_as_input() -> None:
    usage = whole(asked(), items("<think>Hm.</think>Done."))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 1)
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


def test_applied_edits_are_in_the_message_and_at_the_end_of_its_stream() -> None:
    edit = AppliedEdit("clear_tool_uses_20250919", 50, cleared_tool_uses=2)
    cases: list[tuple[ClientBody, Any]] = [
        (ClientBody(9, (edit,)), {"applied_edits": [msgspec.to_builtins(edit)]}),
        (ClientBody(9, ()), {"applied_edits": []}),
        (ClientBody(9), None),
    ]
    for body, shown in cases:
        made = request("message", msgspec.json.encode(body))
        assert streamed(made, items("Hi.", STOP))[-2].get("context_management") == shown
        assert whole(made, items("Hi.", STOP)).get("context_management") == shown


def test_a_failure_ends_the_stream_with_an_error() -> None:
    made = asked()
    renderer = SegmentRenderer(made, DETOKENIZER, MessageEvents(made))
    raw = renderer.push(items("Look: it", None)) + renderer.fail(ServingError(Code.worker_lost, "why"))
    *_, last = events_of(raw)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == ID
    assert renderer.fail(ServingError(Code.worker_lost, "again")) == b""


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (Code.invalid_request, 400, "invalid_request_error"),
        (Code.model_not_found, 404, "not_found_error"),
        (Code.body_too_large, 413, "request_too_large"),
        (Code.queue_full, 429, "rate_limit_error"),
        (Code.engine_error, 500, "api_error"),
        (Code.broker_unavailable, 529, "overloaded_error"),
        (Code.deadline_exceeded, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_statuses_and_types(code: Code, status: int, kind: str) -> None:
    body = message_error(ServingError(code, "why", param="x"), "")
    assert messages_status(code) == status
    assert (body.type, body.error.type, body.error.code, body.request_id) == ("error", kind, code.value, None)
