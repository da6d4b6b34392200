"""Output that must match a schema, through the whole pipeline, with OpenAI's own client."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

MESSAGES: Any = [{"role": "user", "content": "Describe a person."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
MODEL = "tiny"


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_time")
]


class Person(pydantic.BaseModel):
    name: str
    age: int
    likes: list[Literal["tea", "coffee"]]


def valid(text: str | None) -> Any:
    value = json.loads(text or "")
    jsonschema.validate(value, SCHEMA)
    return value


def test_every_choice_matches_the_schema_and_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, n=3, temperature=1, seed=5, max_tokens=200
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        valid(choice.message.content)


def test_a_streamed_answer_matches_the_schema(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, n=2, temperature=1, max_tokens=200, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts.values():
        valid(text)


def test_the_clients_own_parsing_gets_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_completions_match_an_expression_and_a_choice(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> str:
        return client.completions.create(model=MODEL, prompt="It is", max_tokens=50, extra_body=options).choices[0].text

    assert ask(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert ask(guided_regex=r"\d{3}-\d{2}").replace("-", "").isdigit()


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_compiled_is_a_400_that_names_the_keyword(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_body={"guided_json": {"type": "array", "uniqueItems": True}},
            stream=stream,
        )
    assert "uniqueItems" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_has_valid_arguments(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    if stream:
        with client.chat.completions.stream(**options, tool_choice="required") as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**options, tool_choice="required").choices[0]  # type: ignore[assignment]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.function.name in ("get_weather", "get_time")
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=named, max_tokens=200
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["get_time"]
    assert answer.choices[0].finish_reason == "tool_calls"
