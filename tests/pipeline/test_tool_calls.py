"""Tool calls and thoughts through the whole pipeline, written by a real model: as the openai client gets them."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import openai
import pytest

from infra.bus.connection import connect
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, accepted, parse_sse, registrations, stopped, until
from tests.pipeline.test_nats_door import Submitter

pytestmark = pytest.mark.timeout(180)

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
QUESTION = "What is the weather in Oslo?"
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 200,
}
CALL = ("get_weather", {"city": "Oslo"})


@pytest.fixture(scope="module")
def demo(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--engine", "native", "--workers", "1", "--threads", "1", "--gateways", "2")


@pytest.fixture
async def asking(demo: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=demo.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_the_demo_models_worker_says_what_it_writes(demo: Deployment) -> None:
    bus = await connect(demo.state.nats_url, role="client", name="test")
    [worker] = (await registrations(bus)).values()
    assert (worker.reasoning_parser, worker.tool_call_parser) == ("basic", "hermes")
    await bus.close()


async def test_the_openai_client_gets_a_call_and_the_model_its_result(asking: openai.AsyncOpenAI) -> None:
    answer = await asking.chat.completions.create(**BODY)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == CALL
    said = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*BODY["messages"], choice.message.model_dump(exclude_none=True), said]
    last = await asking.chat.completions.create(**{**BODY, "messages": messages})
    assert "rain" in str(last.choices[0].message.content)
    assert last.choices[0].finish_reason == "stop"


async def test_streamed_it_is_the_same_call_in_pieces(asking: openai.AsyncOpenAI) -> None:
    whole = (await asking.chat.completions.create(**BODY)).choices[0].message.tool_calls
    assert whole
    name, arguments, pieces, finish = "", "", 0, None
    async for chunk in await asking.chat.completions.create(**BODY, stream=True):
        [choice] = chunk.choices
        assert choice.delta.content is None
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            pieces += 1
        finish = choice.finish_reason or finish
    assert (name, arguments, finish) == ("get_weather", whole[0].function.arguments, "tool_calls")  # type: ignore[union-attr]
    assert pieces > 2
    async with asking.chat.completions.stream(**BODY) as stream:  # which adds the pieces up itself
        final = await stream.get_final_completion()
    [added] = final.choices[0].message.tool_calls or []
    assert (added.function.name, json.loads(added.function.arguments)) == CALL


async def test_thoughts_come_apart_from_the_answer(asking: openai.AsyncOpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is 347 + 586? /think"}]
    for options in ({}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}):
        answer = await asking.chat.completions.create(model="demo", messages=question, temperature=0, **options)  # type: ignore[call-overload]
        message = answer.choices[0].message
        assert message.reasoning_content
        assert "think>" not in message.reasoning_content + message.content
        assert "933" in message.content


async def test_without_tools_in_the_request_or_the_choice_there_is_no_call(asking: openai.AsyncOpenAI) -> None:
    for options in ({"tool_choice": "none"}, {"tools": []}):
        answer = await asking.chat.completions.create(**{**BODY, **options})
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="forced tool calls"):
        await asking.chat.completions.create(**BODY, tool_choice="required")


async def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came(asking: openai.AsyncOpenAI) -> None:
    whole = (await asking.chat.completions.create(**BODY)).choices[0].message.tool_calls
    assert whole
    arguments = whole[0].function.arguments  # type: ignore[union-attr]
    shown = set()
    for tokens in range(1, 60):
        choice = (await asking.chat.completions.create(**{**BODY, "max_tokens": tokens})).choices[0]
        if choice.finish_reason != "length":
            break
        for call in choice.message.tool_calls or []:
            assert arguments.startswith(call.function.arguments)  # type: ignore[union-attr]
            shown.add(call.function.arguments)  # type: ignore[union-attr]
        if not choice.message.tool_calls:
            assert choice.message.content
            assert choice.message.content.startswith("<tool_call>")
    assert len(shown) > 2


async def test_every_replica_and_the_nats_door_show_the_same(demo: Deployment) -> None:
    stream = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        answer = await client.post(demo.urls[0] + "/v1/chat/completions", json=stream)
        request_id, events = answer.headers["x-request-id"], parse_sse(answer.content)
        for at, event in list(enumerate(events[:-2]))[::3]:
            url = f"{demo.urls[at % 2]}/v1/requests/{request_id}/stream"
            rest = await client.get(url, headers={"last-event-id": event.id})
            assert parse_sse(rest.content) == events[at + 1 :]
        status = (await client.get(f"{demo.urls[1]}/v1/requests/{request_id}")).json()
    message = status["result"]["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == CALL
    assert any(call["id"] in event.data for event in events)
    nc = await nats.connect(demo.state.client_nats_url)
    try:
        door = Submitter(nc)
        pieces = await door.ask(stream, model="demo")
        [one] = await door.ask(BODY, model="demo")
    finally:
        await nc.close()

    def deltas(bodies: list[Any]) -> list[Any]:
        found = [choice["delta"] for body in bodies for choice in body["choices"]]
        for call in (call for delta in found for call in delta.get("tool_calls", [])):
            call.pop("id", None)  # follows from the request
        return found

    streamed = [event.body for event in events if event.data != "[DONE]"]
    assert deltas([json.loads(piece.data) for piece in pieces]) == deltas(streamed)
    [choice] = json.loads(one.data)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == call["function"]


async def test_of_workers_that_disagree_the_older_decides_and_gateways_say_so_once(
    demo: Deployment, asking: openai.AsyncOpenAI
) -> None:
    [other] = await demo.also_workers("--model", "demo", "--tool-call-parser", "mistral")

    async def told() -> bool:
        return demo.logs("gateway").count("workers_name_different_parsers") >= 2

    try:
        await until(told, "both gateways warn")
        bus = await connect(demo.state.nats_url, role="client", name="test")
        with contextlib.suppress(openai.APIError):  # the other worker's engine answers anything
            await asking.chat.completions.create(**{**BODY, "max_tokens": 2}, user="after the warning")
        [request] = await accepted(bus, "after the warning")
        await bus.close()
        assert request.parsing is not None
        assert request.parsing.tools == "hermes"
    finally:
        await stopped([other])
    assert demo.logs("gateway").count("workers_name_different_parsers") == 2
