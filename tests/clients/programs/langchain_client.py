"""``langchain-openai``: ``ChatOpenAI`` on chat completions and on responses, and an agent."""

from typing import Any

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
    TEXTS,
    WEATHER,
    check,
    run,
    several,
    vectors,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

llm = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_retries=0)
responses_llm = ChatOpenAI(
    model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_retries=0, use_responses_api=True
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Current weather of a city"""
    assert city == "Oslo"
    return REPORT


@check("chat", "invoke")
def chat() -> None:
    answer = llm.invoke(SUM)
    assert SUM_IS in answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@check("stream", "stream, and astream of two at once")
async def stream() -> None:
    import asyncio

    async def streamed() -> str:
        pieces = [chunk.text async for chunk in llm.astream(SUM) if chunk.text]
        several(pieces)
        return "".join(pieces)

    pieces = [chunk.text for chunk in llm.stream(SUM) if chunk.text]
    several(pieces)
    for text in ("".join(pieces), *await asyncio.gather(streamed(), streamed())):
        assert SUM_IS in text


@check("tools", "bind_tools: a call, its result, and the answer")
def tools() -> None:
    bound = llm.bind_tools([get_weather])
    asked = bound.invoke(WEATHER)
    assert asked.tool_calls[0]["args"] == {"city": "Oslo"}
    result = get_weather.invoke(asked.tool_calls[0])
    assert REPORTED in bound.invoke([("user", WEATHER), asked, result]).content


@check("tools", "a streamed call")
def streamed_call() -> None:
    whole: Any = None
    chunks = 0
    for chunk in llm.bind_tools([get_weather]).stream(WEATHER):
        whole, chunks = (chunk if whole is None else whole + chunk), chunks + bool(chunk.tool_call_chunks)
    assert chunks >= 2
    assert whole.tool_calls[0]["args"] == {"city": "Oslo"}


@check("tools", "an agent of langchain")
def agent() -> None:
    from langchain.agents import create_agent

    ended = create_agent(llm, [get_weather]).invoke({"messages": [("user", WEATHER)]})
    assert REPORTED in ended["messages"][-1].content
    assert [message.type for message in ended["messages"]] == ["human", "ai", "tool", "ai"]


@check("forced", 'bind_tools with tool_choice "any", a name, and strict=True')
def forced() -> None:
    for options in ({"tool_choice": "any"}, {"tool_choice": "get_weather"}, {"tool_choice": "any", "strict": True}):
        answer = llm.bind_tools([get_weather], **options).invoke("Hello!")
        assert answer.tool_calls[0]["name"] == "get_weather"
        assert isinstance(answer.tool_calls[0]["args"]["city"], str)


@check("schema", 'with_structured_output(method="json_schema")')
def json_schema() -> None:
    assert llm.with_structured_output(Person, method="json_schema").invoke(PERSON) == Person(**PERSON_IS)


@check("schema", 'with_structured_output(method="function_calling")')
def function_calling() -> None:
    assert isinstance(llm.with_structured_output(Person, method="function_calling").invoke(PERSON), Person)


@check("schema", "with_structured_output, streamed")
def streamed_schema() -> None:
    assert list(llm.with_structured_output(Person).stream(PERSON))[-1] == Person(**PERSON_IS)


@check("json", 'with_structured_output(method="json_mode")')
def json_mode() -> None:
    assert llm.with_structured_output(Person, method="json_mode").invoke(PERSON) == Person(**PERSON_IS)


@check("logprobs", "bind(logprobs=True)")
def logprobs() -> None:
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(SUM)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in content).startswith(answer.content)


@check("completions", "OpenAI, two prompts as a batch")
def completions() -> None:
    from langchain_openai import OpenAI

    prompt = "<|im_start|>user\nWhat is 347 + 586?<|im_end|>\n<|im_start|>assistant\n"
    answers = OpenAI(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_tokens=20).generate([prompt] * 2)
    assert all(SUM_IS in each[0].text for each in answers.generations)


@check("responses", "use_responses_api: invoke and stream")
def responses() -> None:
    assert SUM_IS in responses_llm.invoke(SUM).text
    pieces = [chunk.text for chunk in responses_llm.stream(SUM) if chunk.text]
    several(pieces)
    assert SUM_IS in "".join(pieces)


@check("responses", "use_responses_api: tools, structured output")
def responses_tools() -> None:
    bound = responses_llm.bind_tools([get_weather])
    asked = bound.invoke(WEATHER)
    assert asked.tool_calls[0]["args"] == {"city": "Oslo"}
    answer = bound.invoke([("user", WEATHER), asked, get_weather.invoke(asked.tool_calls[0])])
    assert REPORTED in answer.text
    assert responses_llm.with_structured_output(Person, method="json_schema").invoke(PERSON) == Person(**PERSON_IS)


@check("embeddings", "OpenAIEmbeddings.embed_documents")
def embeddings() -> None:
    from langchain_openai import OpenAIEmbeddings

    # Without the check, it sends texts: with it, token ids of OpenAI's own tokenizer.
    embedder = OpenAIEmbeddings(model=MODEL, base_url=BASE, api_key=KEY, check_embedding_ctx_length=False)
    vectors(embedder.embed_documents(TEXTS))


@check("errors", "openai.NotFoundError")
def errors() -> None:
    import openai

    try:
        ChatOpenAI(model="missing", base_url=BASE, api_key=KEY, max_retries=0).invoke(SUM)
    except openai.NotFoundError:
        return
    raise AssertionError("NotFoundError was not raised")


run("langchain-openai", "langchain")
