"""``instructor``: every mode that a server with OpenAI's or Anthropic's API can do."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
from harness import BASE, KEY, MODEL, PERSON, PERSON_IS, URL, WEATHER, check, run
from instructor import Mode
from pydantic import BaseModel

MODES = {  # and the column of the table
    Mode.TOOLS: "forced",
    Mode.TOOLS_STRICT: "forced",
    Mode.PARALLEL_TOOLS: "tools",
    Mode.JSON: "json",
    Mode.MD_JSON: "json",
    Mode.JSON_SCHEMA: "schema",
    Mode.RESPONSES_TOOLS: "responses",
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class get_weather(BaseModel):
    """Current weather of a city"""

    city: str


def asked(text: str = PERSON) -> list[dict[str, str]]:
    """Anew for every call: some modes add to the list."""
    return [{"role": "user", "content": text}]


def client_of(mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=mode)


def create(mode: Mode) -> None:
    client = client_of(mode)
    if mode is Mode.RESPONSES_TOOLS:
        found = client.responses.create(model=MODEL, input=PERSON, response_model=Person, temperature=0)
    elif mode is Mode.PARALLEL_TOOLS:
        calls = client.chat.completions.create(
            model=MODEL, messages=asked(WEATHER), response_model=Iterable[get_weather], temperature=0
        )
        assert list(calls) == [get_weather(city="Oslo")]
        return
    else:
        found = client.chat.completions.create(model=MODEL, messages=asked(), response_model=Person, temperature=0)
    assert found.model_dump() == PERSON_IS


for each in MODES:
    check(MODES[each], f"Mode.{each.name}")(lambda each=each: create(each))


@check("stream", "create_partial")
def partial() -> None:
    client = client_of(Mode.JSON_SCHEMA)
    seen = list(
        client.chat.completions.create_partial(model=MODEL, messages=asked(), response_model=Person, temperature=0)
    )
    assert len(seen) >= 3
    assert seen[-1].model_dump() == PERSON_IS


@check("messages", "Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON")
def messages() -> None:
    for mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON):
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY), mode=mode)
        found = client.messages.create(model=MODEL, max_tokens=200, messages=asked(), response_model=Person)
        assert isinstance(found, Person)


run("instructor")
