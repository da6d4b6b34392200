"""The ``anthropic`` package for Python."""

import anthropic
from harness import (
    CITY_SCHEMA,
    KEY,
    MODEL,
    PERSON,
    PERSON_IS,
    PERSON_SCHEMA,
    REPORT,
    REPORTED,
    SUM,
    SUM_IS,
    URL,
    WEATHER,
    check,
    run,
    several,
)

GREEDY = {"temperature": 0}  # the package has no argument for it any more
client = anthropic.Anthropic(base_url=URL, api_key=KEY)
ASK = [{"role": "user", "content": SUM}]
QUESTION = [{"role": "user", "content": WEATHER}]
TOOL = {"name": "get_weather", "description": "Current weather of a city", "input_schema": CITY_SCHEMA}


@check("chat", "messages.create")
def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, extra_body=GREEDY)
    assert answer.stop_reason == "end_turn"
    assert SUM_IS in answer.content[-1].text
    assert answer.usage.output_tokens > 0


@check("messages", "system blocks and a prefilled answer")
def system() -> None:
    system_blocks = [{"type": "text", "text": "You add numbers.", "cache_control": {"type": "ephemeral"}}]
    messages = [*ASK, {"role": "assistant", "content": "347 + 586 ="}]
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=messages, system=system_blocks, extra_body=GREEDY
    )
    assert answer.content[0].text.strip().startswith(SUM_IS)


@check("messages", "messages.count_tokens")
def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=ASK).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check("stream", "messages.stream")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=ASK, extra_body=GREEDY) as events:
        pieces = list(events.text_stream)
        message = events.get_final_message()
    several(pieces)
    assert "".join(pieces) == message.content[-1].text
    assert SUM_IS in message.content[-1].text


@check("tools", "a call, its result, and the answer")
def tools() -> None:
    asked = client.messages.create(model=MODEL, max_tokens=100, messages=QUESTION, tools=[TOOL], extra_body=GREEDY)
    assert asked.stop_reason == "tool_use"
    call = next(block for block in asked.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": REPORT}
    told = [*QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=told, tools=[TOOL], extra_body=GREEDY)
    assert REPORTED in answer.content[-1].text


@check("tools", "a streamed call")
def streamed_call() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=QUESTION, tools=[TOOL], extra_body=GREEDY
    ) as events:
        deltas = [event for event in events if event.type == "input_json"]
        call = events.get_final_message().content[-1]
    assert len(deltas) >= 2
    assert call.input == {"city": "Oslo"}


@check("tools", "the tool runner")
def runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Current weather of a city"""
        assert city == "Oslo"
        return REPORT

    rounds = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, messages=QUESTION, tools=[get_weather], extra_body=GREEDY
    )
    assert REPORTED in rounds.until_done().content[-1].text


@check("forced", "tool_choice any, tool")
def forced() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=[{"role": "user", "content": "Hello!"}],
            tools=[TOOL],
            tool_choice=choice,
        )
        call = next(block for block in answer.content if block.type == "tool_use")
        assert call.name == "get_weather"
        assert isinstance(call.input["city"], str)


@check("schema", "output_config.format, and messages.parse with a pydantic model")
def schema() -> None:
    import json

    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    asked = [{"role": "user", "content": PERSON}]
    answer = client.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=asked,
        extra_body=GREEDY,
        output_config={"format": {"type": "json_schema", "schema": PERSON_SCHEMA}},
    )
    assert json.loads(answer.content[-1].text) == PERSON_IS
    parsed = client.messages.parse(model=MODEL, max_tokens=100, messages=asked, output_format=Person, extra_body=GREEDY)
    assert parsed.parsed_output == Person(**PERSON_IS)


@check("reasoning", "thinking blocks")
def reasoning() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=1200,
        messages=ASK,
        extra_body=GREEDY,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking
    assert SUM_IS in answer.content[1].text


@check("batches", "messages.batches: create, retrieve, results, list, delete")
def batches() -> None:
    import time

    params = {"model": MODEL, "max_tokens": 20, "messages": ASK, **GREEDY}
    requests = [{"custom_id": "right", "params": params}, {"custom_id": "wrong", "params": params | {"max_tokens": -1}}]
    batch = client.messages.batches.create(requests=requests)
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.2)
    found = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert found["right"].message.usage.output_tokens > 0
    assert found["wrong"].error.error.type == "invalid_request_error"
    assert batch.id in [each.id for each in client.messages.batches.list()]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"


@check("models", "models.list, models.retrieve")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list(limit=1)]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.type, model.max_input_tokens) == (MODEL, "model", 8192)


@check("keys", "x-api-key, and a wrong key: AuthenticationError")
def keys() -> None:
    try:
        anthropic.Anthropic(base_url=URL, api_key="sk-wrong", max_retries=0).messages.create(
            model=MODEL, max_tokens=1, messages=ASK
        )
    except anthropic.AuthenticationError:
        return
    raise AssertionError("AuthenticationError was not raised")


@check("errors", "NotFoundError, BadRequestError")
def errors() -> None:
    for wanted, options in (
        (anthropic.NotFoundError, {"model": "missing"}),
        (anthropic.BadRequestError, {"model": MODEL, "extra_body": {"temperature": 9}}),
    ):
        try:
            client.messages.create(max_tokens=1, messages=ASK, **options)
        except wanted as error:
            assert error.body["type"] == "error"  # noqa: PT017
            continue
        raise AssertionError(f"{wanted.__name__} was not raised")


run("anthropic")
