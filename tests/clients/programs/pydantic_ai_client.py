"""``pydantic-ai``: agents on chat completions, on responses and on messages."""

from harness import (
    BASE,
    KEY,
    MODEL,
    PERSON,
    PERSON_IS,
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
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai_provider = OpenAIProvider(base_url=BASE, api_key=KEY)
chat_model = OpenAIChatModel(MODEL, provider=openai_provider)
responses_model = OpenAIResponsesModel(MODEL, provider=openai_provider)
messages_model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
GREEDY = {"temperature": 0.0, "max_tokens": 200}


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Current weather of a city"""
    assert city == "Oslo"
    return REPORT


@check("chat", "Agent.run")
async def chat() -> None:
    ended = await Agent(chat_model, model_settings=GREEDY).run(SUM)
    assert SUM_IS in ended.output
    assert ended.usage.output_tokens > 0


@check("stream", "Agent.run_stream")
async def stream() -> None:
    async with Agent(chat_model, model_settings=GREEDY).run_stream(SUM) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    several(pieces)
    assert SUM_IS in "".join(pieces)


@check("tools", "an agent with a tool")
async def tools() -> None:
    assert REPORTED in (await Agent(chat_model, tools=[get_weather], model_settings=GREEDY).run(WEATHER)).output


@check("forced", "ToolOutput: the output is a forced call")
async def tool_output() -> None:
    ended = await Agent(chat_model, output_type=ToolOutput(Person), model_settings=GREEDY).run(PERSON)
    assert isinstance(ended.output, Person)


@check("schema", "NativeOutput")
async def native_output() -> None:
    ended = await Agent(chat_model, output_type=NativeOutput(Person), model_settings=GREEDY).run(PERSON)
    assert ended.output == Person(**PERSON_IS)


@check("schema", "NativeOutput, streamed")
async def streamed_output() -> None:
    agent = Agent(chat_model, output_type=NativeOutput(Person), model_settings=GREEDY)
    async with agent.run_stream(PERSON) as answer:
        assert await answer.get_output() == Person(**PERSON_IS)


@check("json", "PromptedOutput")
async def prompted_output() -> None:
    # The instructions hold the schema; the demo model reads best what it was trained on, so they are one line.
    output = PromptedOutput(Person, template="You answer in JSON with the keys name and age.")
    ended = await Agent(chat_model, output_type=output, model_settings=GREEDY).run("Mia is 31 years old.")
    assert ended.output == Person(**PERSON_IS)


@check("responses", "OpenAIResponsesModel: text, a tool, NativeOutput")
async def responses() -> None:
    assert SUM_IS in (await Agent(responses_model, model_settings=GREEDY).run(SUM)).output
    assert REPORTED in (await Agent(responses_model, tools=[get_weather], model_settings=GREEDY).run(WEATHER)).output
    ended = await Agent(responses_model, output_type=NativeOutput(Person), model_settings=GREEDY).run(PERSON)
    assert ended.output == Person(**PERSON_IS)


@check("messages", "AnthropicModel: text, a tool, ToolOutput")
async def messages() -> None:
    # The newest anthropic package sends no temperature, so the model's own settings apply, and it may err.
    assert (await Agent(messages_model, model_settings={"max_tokens": 200}).run(SUM)).output
    extra = {"max_tokens": 200, "extra_body": {"temperature": 0}}
    assert REPORTED in (await Agent(messages_model, tools=[get_weather], model_settings=extra).run(WEATHER)).output
    ended = await Agent(messages_model, output_type=ToolOutput(Person), model_settings=extra).run(PERSON)
    assert isinstance(ended.output, Person)


@check("errors", "ModelHTTPError")
async def errors() -> None:
    from pydantic_ai.exceptions import ModelHTTPError

    try:
        await Agent(OpenAIChatModel("missing", provider=openai_provider)).run(SUM)
    except ModelHTTPError as error:
        if error.status_code == 404:
            return
    raise AssertionError("ModelHTTPError was not raised with status 404")


run("pydantic-ai-slim")
