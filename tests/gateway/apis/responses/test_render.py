"""Streamed and whole responses, as the real client's own types read them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.gateway.apis.chat.segments import SegmentRenderer, WholeAnswer
from penstock.gateway.apis.responses.bodies import (
    ENCODED_REASONING,
    ReasoningConfig,
    ResponsesRequest,
    parse_response,
)
from penstock.gateway.apis.responses.chat import chat_of
from penstock.gateway.apis.responses.record import encode_stored
from penstock.gateway.apis.responses.render import ResponseEvents, response
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Sampling
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.answers import CALL, DETOKENIZER, ID, LENGTH, STOP, TEXTS, items, request
from tests.properties import examples

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


def asked(**fields: Any) -> GenerateRequest:
    body = ResponsesRequest(model="demo", input="hi", metadata={"a": "b"}, **{"tools": TOOLS, **fields})
    scores = 1 if fields.get("top_logprobs") else None
    return request("response", encode_stored(body), sampling=Sampling(temperature=0.0, logprobs=scores))


def renderer_of(made: GenerateRequest) -> SegmentRenderer:
    return SegmentRenderer(made, DETOKENIZER, ResponseEvents(made, DETOKENIZER))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        head, kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert head == f"id: {event['sequence_number']}"
        found.append(event)
    return found


def streamed(made: GenerateRequest, given: list[TokenItem], *, after: int | None = None) -> list[dict[str, Any]]:
    renderer = renderer_of(made)
    if after is not None:
        renderer.resume(str(after))
    raw = renderer.push([]) + b"".join(renderer.push([item]) for item in given)
    assert renderer.done
    return events_of(raw)


def whole(made: GenerateRequest, given: list[TokenItem]) -> dict[str, Any]:
    aggregator = WholeAnswer(made, DETOKENIZER, response)
    assert aggregator.push(given)
    found: dict[str, Any] = json.loads(aggregator.response())
    return found


@examples(100)
@given(TEXTS, st.sampled_from([STOP, LENGTH]), st.booleans(), st.sampled_from([None, "auto"]))
def test_the_events_add_up_to_the_whole_response(text: str, finish: Finish, logprobs: bool, summary: Any) -> None:
    made = asked(top_logprobs=1 if logprobs else None, reasoning=ReasoningConfig(summary=summary))
    given = items(text, finish, logprobs=logprobs)
    events, body = streamed(made, given), whole(made, given)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    Response.model_validate(body, strict=True)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == ("response.incomplete" if finish is LENGTH else "response.completed")
    assert events[-1]["response"] == body
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    thought, content = ("reasoning_summary_text", "summary") if summary else ("reasoning_text", "content")
    for item in body["output"]:
        parts = {"message": "output_text", "reasoning": thought, "function_call": "function_call_arguments"}
        kind = f"response.{parts[item['type']]}.delta"
        pieces = [event["delta"] for event in events if event["type"] == kind and event["item_id"] == item["id"]]
        holds = content if item["type"] == "reasoning" else "content"
        assert "".join(pieces) == (item["arguments"] if "arguments" in item else item[holds][0]["text"])
        if item["type"] == "reasoning":
            assert [len(item.get(kind, ())) for kind in ("content", "summary")] == ([0, 1] if summary else [1, 0])


@given(TEXTS, st.data())
def test_any_gateway_continues_behind_any_event(text: str, data: st.DataObject) -> None:
    made, given = asked(), items(text)
    events = streamed(made, given)
    after = data.draw(st.integers(0, len(events) - 1))
    assert streamed(made, items(text, size=4), after=after) == events[after + 1 :]


@pytest.mark.parametrize("fields", [{"include": [ENCODED_REASONING]}, {"reasoning": ReasoningConfig(summary="auto")}])
def test_a_thought_returns_to_the_model_from_what_codex_sends_back(fields: dict[str, Any]) -> None:
    thought = whole(asked(store=False, **fields), items("<think>Hm. é</think>Yes."))["output"][0]
    thought.pop("content", None)  # Codex leaves out
    body = {"model": "demo", "input": [thought, {"role": "user", "content": "And?"}]}
    assert chat_of(parse_response(json.dumps(body).encode())).body.messages[0].reasoning_content == "Hm. é"


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    body = whole(asked(), items(f"<think>Hm.</think>Look:{CALL}{CALL}"))
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in body["output"]}) == 4
    assert body["status"] == "completed"
    assert body["id"] == f"resp_{ID}"
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 1


def test_a_call_of_a_function_in_a_namespace_names_both() -> None:
    made = asked(tools=[{"type": "namespace", "name": "mcp__weather", "tools": TOOLS}])
    item = whole(made, items(CALL))["output"][0]
    assert (item["namespace"], item["name"]) == ("mcp__weather", "get_weather")
    events = streamed(made, items(CALL))
    ended = next(event["item"] for event in events if event["type"] == "response.output_item.done")
    assert (ended["namespace"], ended["name"]) == ("mcp__weather", "get_weather")
    assert "namespace" not in whole(asked(), items(CALL))["output"][0]


PATCH = '*** Begin Patch\n+ "a\u2028b"\n*** End Patch'


@pytest.mark.parametrize(("arguments", "text"), [({"input": PATCH}, PATCH), ({"patch": "x"}, "x"), (PATCH, PATCH)])
def test_a_call_of_a_custom_tool_has_its_text(arguments: Any, text: str) -> None:
    made = asked(tools=[{"type": "custom", "name": "apply_patch"}, *TOOLS])
    said = json.dumps({"name": "apply_patch", "arguments": arguments})
    given = items(f"<tool_call>{said}</tool_call>{CALL}", STOP)
    events, body = streamed(made, given), whole(made, given)
    for event in events:
        EVENT.validate_python(event, strict=True)
    Response.model_validate(body, strict=True)
    call, other = body["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", text)
    assert other["type"] == "function_call"
    assert events[-1]["response"] == body
    told = {event["type"]: event for event in events if event.get("output_index") == 0}
    added, finished = told["response.output_item.added"]["item"], told["response.output_item.done"]["item"]
    assert (added, finished) == ({**call, "status": "in_progress", "input": ""}, call)
    assert told["response.custom_tool_call_input.delta"]["delta"] == text
    assert told["response.custom_tool_call_input.done"]["input"] == text
    assert not any("function_call_arguments" in kind for kind in told)


SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
EXEC = {"type": "namespace", "name": "functions", "description": "d", "tools": [{"type": "custom", "name": "exec"}]}


def test_a_search_for_tools_and_a_custom_tool_of_a_namespace_are_called_as_such() -> None:
    search = '<tool_call>{"name": "tool_search", "arguments": {"query": "mail"}}</tool_call>'
    run = '<tool_call>{"name": "exec", "arguments": {"input": "ls"}}</tool_call>'
    made = asked(tools=[SEARCH, EXEC], reasoning=None)
    events, body = streamed(made, items(search + run)), whole(made, items(search + run))
    for event in events:
        EVENT.validate_python(event, strict=True)
    searched, ran = body["output"]
    assert (searched["type"], searched["arguments"], searched["execution"]) == (
        "tool_search_call",
        {"query": "mail"},
        "client",
    )
    assert (ran["type"], ran["name"], ran["namespace"], ran["input"]) == ("custom_tool_call", "exec", "functions", "ls")
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == body["output"]


def test_what_was_cut_off_is_incomplete() -> None:
    body = whole(asked(), items("<think>Hm.</think>Look", LENGTH))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize(("finish", "completed_at"), [(STOP, 1_700_000_000), (LENGTH, None)])
def test_only_a_completed_response_says_when_it_was_completed(finish: Finish, completed_at: int | None) -> None:
    made, given = asked(), items("Look", finish)
    renderer = SegmentRenderer(made, DETOKENIZER, ResponseEvents(made, DETOKENIZER), lambda: 1_700_000_000_900_000_000)
    answer = WholeAnswer(made, DETOKENIZER, response, lambda: 1_700_000_000_900_000_000)
    answer.push(given)
    assert json.loads(answer.response())["completed_at"] == completed_at
    first, *_, last = events_of(renderer.push(given))
    assert [each["response"]["completed_at"] for each in (first, last)] == [None, completed_at]


def test_an_answer_without_text_is_an_empty_message() -> None:
    body = whole(asked(), items(""))
    assert body["output"][0]["content"][0]["text"] == ""
    Response.model_validate(body, strict=True)


@pytest.mark.parametrize(("code", "status"), [(Code.worker_lost, "failed"), (Code.cancelled, "cancelled")])
def test_a_failure_ends_the_stream_with_what_there_was(code: Code, status: str) -> None:
    renderer = renderer_of(asked())
    raw = renderer.push(items("Look: it", None)) + renderer.fail(ServingError(code, "why"))
    *_, last = events_of(raw)
    EVENT.validate_python(last)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == status
    assert last["response"]["output"][0]["content"][0]["text"] == "Look: it"
    assert (last["response"]["error"] or {}).get("message") == ("why" if status == "failed" else None)
    assert renderer.fail(ServingError(code, "again")) == b""


def test_a_gateway_that_stops_says_so_without_ending_the_response() -> None:
    renderer = renderer_of(asked())
    renderer.push(items("Look: it", None))
    raw = renderer.fail(ServingError(Code.shutting_down, "elsewhere"), finished=False)
    event = json.loads(raw.decode().split("data: ")[1])
    EVENT.validate_python(event)
    assert (event["type"], event["message"]) == ("error", "elsewhere")
    assert b"id:" not in raw


def test_a_background_response_begins_queued() -> None:
    types = [event["type"] for event in streamed(asked(background=True), items("Hi."))]
    assert types[:3] == ["response.created", "response.queued", "response.in_progress"]
