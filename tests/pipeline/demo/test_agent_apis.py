"""The Responses API and the Messages API with the clients that speak them, on the demo model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pydantic
import pytest

from tests.pipeline.support import Deployment

if TYPE_CHECKING:  # to import it takes 1.5 s, in each process that collects tests
    import anthropic

pytestmark = pytest.mark.timeout(180)

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"type": "function", "name": "get_weather", "description": "Current weather", "parameters": PARAMETERS}
TOOL: Any = {"name": "get_weather", "description": "Current weather", "input_schema": PARAMETERS}
WEATHER: Any = {"role": "user", "content": "What is the weather in Oslo?"}
SUM: Any = {"role": "user", "content": "What is 347 + 586? /think"}
GREEDY = {"temperature": 0}


@pytest.fixture
async def asking(demo: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=demo.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(demo: Deployment) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=demo.urls[0], api_key="unused", max_retries=0) as client:
        yield client


# -- responses --------------------------------------------------------------------------------------------------------


async def test_a_response_has_the_answer_and_what_it_took(asking: openai.AsyncOpenAI) -> None:
    response = await asking.responses.create(model="demo", input="What is 347 + 586?", temperature=0)
    assert "933" in response.output_text
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.temperature == 0


async def test_a_response_says_when_it_was_completed_however_it_is_read(asking: openai.AsyncOpenAI) -> None:
    """From the record it is the time of the worker's clock, otherwise of the broker's."""
    options: Any = {"model": "demo", "input": "What is 347 + 586?", "temperature": 0}
    began = int(time.time())
    whole = await asking.responses.create(**options)
    *_, last = [event async for event in await asking.responses.create(**options, stream=True)]
    assert last.type == "response.completed"
    ended = time.time()
    again, stream = await asking.responses.retrieve(whole.id), await asking.responses.retrieve(whole.id, stream=True)
    *_, replayed = [event async for event in stream]
    assert replayed.type == "response.completed"
    background = await asking.responses.create(**options, background=True)
    assert background.completed_at is None
    for each in (whole, last.response, again, replayed.response):
        assert each.completed_at is not None
        assert began <= each.created_at <= each.completed_at <= ended
    assert replayed.response.completed_at == whole.completed_at


async def test_a_call_and_its_result_make_a_conversation(asking: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "demo", "tools": [FUNCTION], "temperature": 0}
    first = await asking.responses.create(input=[WEATHER], **options)
    [call] = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    last = await asking.responses.create(input=[WEATHER, call.model_dump(exclude_none=True), result], **options)
    assert "rain" in last.output_text


async def test_a_response_that_was_cancelled_is_streamed_with_its_end(asking: openai.AsyncOpenAI) -> None:
    asked: Any = {"ignore_eos": True, "temperature": 0}
    made = await asking.responses.create(model="demo", input="Hello!", background=True, extra_body=asked)
    assert (await asking.responses.cancel(made.id)).status == "cancelled"
    events = [event async for event in await asking.responses.retrieve(made.id, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"


async def test_items_may_be_named_instead_of_sent_back(asking: openai.AsyncOpenAI) -> None:
    """As the AI SDK does where responses are stored."""
    options: Any = {"model": "demo", "tools": [FUNCTION], "temperature": 0}
    first = await asking.responses.create(input=[WEATHER], **options)
    [call] = first.output
    assert call.type == "function_call"
    named: Any = {"type": "item_reference", "id": call.id}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = await asking.responses.create(input=[WEATHER, named, result], **options)
    assert "rain" in second.output_text
    third = await asking.responses.create(input="Hello!", previous_response_id=second.id, **options)
    listed = [each.type async for each in await asking.responses.input_items.list(third.id, order="asc")]
    assert listed == ["message", "function_call", "function_call_output", "message", "message"]
    await asking.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="was deleted") as refused:
        await asking.responses.create(input=[WEATHER, named, result], **options)
    assert refused.value.param == "input[1].id"


async def test_tools_may_come_with_the_input_as_from_codex(asking: openai.AsyncOpenAI) -> None:
    brought: Any = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}
    options: Any = {"model": "demo", "temperature": 0, "store": False, "reasoning": {"summary": "auto"}}
    options["include"] = ["reasoning.encrypted_content"]
    async with asking.responses.stream(input=[brought, WEATHER], **options) as stream:
        [call] = (await stream.get_final_response()).output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given: Any = [brought, WEATHER, call.model_dump(exclude_none=True), result]
    assert "rain" in (await asking.responses.create(input=given, **options)).output_text
    [thought, _] = (await asking.responses.create(input=[SUM], **options)).output
    assert thought.type == "reasoning"
    assert thought.summary[0].text
    assert thought.encrypted_content


async def test_streamed_a_response_is_the_same_in_pieces(asking: openai.AsyncOpenAI) -> None:
    text, thoughts = "", ""
    async with asking.responses.stream(model="demo", input=[SUM], temperature=0) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.reasoning_text.delta":
                thoughts += event.delta
        final = await stream.get_final_response()
    whole = await asking.responses.create(model="demo", input=[SUM], temperature=0)
    assert final.output_text == whole.output_text == text
    assert "933" in text
    [reasoning, _] = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == thoughts


async def test_a_conversation_continues_with_its_summary(asking: openai.AsyncOpenAI) -> None:
    first = await asking.responses.create(model="demo", input="What is 347 + 586?", temperature=0)
    compacted = await asking.responses.compact(
        model="demo",
        previous_response_id=first.id,
        input="Hello!",
        extra_body={"temperature": 0, "max_output_tokens": 200},
    )
    assert compacted.object == "response.compaction"
    assert compacted.usage.output_tokens > 0
    *said, item = [each.model_dump(exclude_none=True, warnings=False) for each in compacted.output]
    assert [(each["role"], each["content"][0]["text"]) for each in said] == [
        ("user", "What is 347 + 586?"),
        ("user", "Hello!"),
    ]
    assert item["type"] == "compaction"
    question: Any = {"role": "user", "content": "What is 21 + 34?"}
    given: Any = [item, question]
    last = await asking.responses.create(model="demo", input=given, temperature=0)
    alone = await asking.responses.create(model="demo", input=[question], temperature=0)
    assert last.usage is not None
    assert alone.usage is not None
    assert last.usage.input_tokens > alone.usage.input_tokens
    listed = [each async for each in await asking.responses.input_items.list(last.id, order="asc")]
    assert [each.type for each in listed] == ["compaction", "message"]
    more = await asking.responses.create(model="demo", input="Hello!", previous_response_id=last.id)
    assert more.status == "completed"

    with pytest.raises(openai.NotFoundError):  # it is an answer, and no response
        await asking.responses.retrieve(compacted.id)
    stored: Any = await asking.get(f"/requests/{compacted.id.removeprefix('resp_')}", cast_to=object)
    assert stored["result"]["output"][-1] == item
    damaged: Any = [{**item, "encrypted_content": item["encrypted_content"][4:]}, question]
    with pytest.raises(openai.BadRequestError) as caught:
        await asking.responses.create(model="demo", input=damaged)
    assert caught.value.param == "input[0].encrypted_content"


async def test_a_compaction_that_is_not_stored_can_be_used(asking: openai.AsyncOpenAI) -> None:
    options: Any = {"temperature": 0, "max_output_tokens": 200, "store": False}
    compacted = await asking.responses.compact(model="demo", input="Hello!", extra_body=options)
    assert [each.type for each in compacted.output] == ["message", "compaction"]
    given: Any = [each.model_dump(exclude_none=True, warnings=False) for each in compacted.output]
    assert (await asking.responses.create(model="demo", input=given)).status == "completed"


async def test_a_response_that_cannot_be_served_is_an_error_as_clients_expect(asking: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await asking.responses.create(model="demo", input="a", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        await asking.responses.create(model="gpt-6", input="a")


# -- messages ---------------------------------------------------------------------------------------------------------


async def test_a_message_has_the_answer_and_what_it_took(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(model="demo", max_tokens=200, messages=[SUM], extra_body=GREEDY)
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking
    assert text.type == "text"
    assert "933" in text.text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    assert message._request_id == message.id.removeprefix("msg_")
    count = await claude.messages.count_tokens(model="demo", messages=[SUM])
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_a_tool_is_used_and_its_result_read(claude: anthropic.AsyncAnthropic) -> None:
    options: Any = {"model": "demo", "max_tokens": 200, "tools": [TOOL], "extra_body": GREEDY, "system": "Be brief."}
    first = await claude.messages.create(messages=[WEATHER], **options)
    [use] = first.content
    assert use.type == "tool_use"
    assert (use.name, use.input, first.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]}
    last = await claude.messages.create(messages=[WEATHER, said, result], **options)
    assert last.content[0].type == "text"
    assert "rain" in last.content[0].text
    assert last.stop_reason == "end_turn"


async def test_streamed_a_message_is_the_same_in_pieces(claude: anthropic.AsyncAnthropic) -> None:
    for question, tools in ((SUM, []), (WEATHER, [TOOL])):
        options: Any = {"model": "demo", "max_tokens": 200, "tools": tools, "extra_body": GREEDY}
        async with claude.messages.stream(messages=[question], **options) as stream:
            final = await stream.get_final_message()
        whole = await claude.messages.create(messages=[question], **options)
        shown, expected = [
            [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
            for message in (final, whole)
        ]
        assert shown == expected
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens


async def test_a_stop_sequence_is_named(claude: anthropic.AsyncAnthropic) -> None:
    question: Any = {"role": "user", "content": "Spell the word harbour."}
    message = await claude.messages.create(
        model="demo", max_tokens=200, messages=[question], stop_sequences=["b-o"], extra_body=GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "b-o")


async def test_a_message_that_cannot_be_served_is_an_error_as_clients_expect(claude: anthropic.AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(model="claude", max_tokens=9, messages=[SUM])
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model="demo", max_tokens=0, messages=[SUM])
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="claude", messages=[SUM])


async def test_a_call_is_forced_and_thoughts_are_limited(
    asking: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    greeting: Any = {"role": "user", "content": "Hello!"}
    response = await asking.responses.create(
        model="demo", input=[greeting], tools=[FUNCTION], tool_choice="required", temperature=0, max_output_tokens=200
    )
    assert [item.type for item in response.output if item.type != "reasoning"] == ["function_call"]
    options: Any = {"model": "demo", "max_tokens": 200, "tools": [TOOL], "extra_body": GREEDY}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = await claude.messages.create(messages=[greeting], tool_choice=choice, **options)
        assert message.stop_reason == "tool_use"
    thinking: Any = {"type": "enabled", "budget_tokens": 10}
    message = await claude.messages.create(model="demo", max_tokens=200, messages=[SUM], thinking=thinking)
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens <= 10 + 8  # and the marks around them


PATCH = """start: "*** Begin Patch" LF change ~ 1..3 "*** End Patch"
change: ("+" | "-") /[a-z"\\\\]{1,9}/ LF
%import common.LF
"""


@pytest.mark.parametrize(
    ("syntax", "grammar", "pattern"),
    [
        ("lark", PATCH, r'\*\*\* Begin Patch\n([+-][a-z"\\]{1,9}\n){1,3}\*\*\* End Patch'),
        ("regex", r'[A-C]{3}"\d{2}', r'[A-C]{3}"\d{2}'),
    ],
)
@pytest.mark.parametrize("forced", [True, False])
async def test_the_text_of_a_custom_tool_matches_its_grammar(
    asking: openai.AsyncOpenAI, syntax: str, grammar: str, pattern: str, forced: bool
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": grammar}
    options: Any = {"tools": [{"type": "custom", "name": "get_weather", "description": "Weather", "format": form}]}
    if forced:
        options["tool_choice"] = {"type": "custom", "name": "get_weather"}
    response = await asking.responses.create(
        model="demo", input=[WEATHER], temperature=0, max_output_tokens=300, **options
    )
    [call] = [each for each in response.output if each.type != "reasoning"]
    assert call.type == "custom_tool_call"
    assert re.fullmatch(pattern, call.input)
    form["definition"] = "start: x" if syntax == "lark" else "(?=x)"
    with pytest.raises(openai.BadRequestError, match="get_weather"):
        await asking.responses.create(model="demo", input=[WEATHER], **options)


async def test_output_matches_its_schema(asking: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    class Answer(pydantic.BaseModel):
        number: int

    parsed = await asking.responses.parse(model="demo", input=[SUM], text_format=Answer, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Answer)
    form: Any = {"format": {"type": "json_schema", "schema": Answer.model_json_schema()}}
    message = await claude.messages.create(model="demo", max_tokens=200, messages=[SUM], output_config=form)
    last = message.content[-1]
    assert last.type == "text"
    Answer.model_validate_json(last.text)


async def test_output_matches_its_schema_behind_thoughts_that_are_cut_off(asking: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}}
    answer = await asking.chat.completions.create(
        model="demo", messages=[SUM], response_format=form, max_tokens=200, extra_body={"max_thinking_tokens": 4}
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["number"], int)


# -- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_any_gateway_continues_a_stream_behind_any_event(demo: Deployment, path: str) -> None:
    more = {"input": [SUM]} if path == "/v1/responses" else {"messages": [SUM], "max_tokens": 200}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        answer = await client.post(demo.urls[0] + path, json={"model": "demo", "stream": True, **GREEDY, **more})
        blocks = answer.text.split("\n\n")
        url = f"{demo.urls[1]}/v1/requests/{answer.headers['x-request-id']}"
        for at in (0, len(blocks) // 2, len(blocks) - 3):
            last = blocks[at].partition("\n")[0].removeprefix("id: ")
            rest = await client.get(f"{url}/stream", headers={"last-event-id": last})
            assert rest.text.split("\n\n") == blocks[at + 1 :]
        status = (await client.get(url)).json()
    assert status["state"] == "done"
    assert "933" in json.dumps(status["result"])
