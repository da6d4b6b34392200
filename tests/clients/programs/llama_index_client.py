"""``llama-index``: ``OpenAILike`` as a chat model, for completions, tools and structured output."""

from harness import BASE, KEY, MODEL, PERSON, PERSON_IS, REPORT, REPORTED, SUM, SUM_IS, WEATHER, check, run, several
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

COMMON = {"model": MODEL, "api_base": BASE, "api_key": KEY, "temperature": 0, "max_tokens": 100, "max_retries": 0}
llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=8192, **COMMON)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Current weather of a city"""
    assert city == "Oslo"
    return REPORT


tool = FunctionTool.from_defaults(get_weather, description="Current weather of a city")


@check("chat", "chat, achat")
async def chat() -> None:
    asked = [ChatMessage(role="user", content=SUM)]
    assert SUM_IS in llm.chat(asked).message.content
    assert SUM_IS in (await llm.achat(asked)).message.content


@check("stream", "stream_chat")
def stream() -> None:
    pieces = [part.delta for part in llm.stream_chat([ChatMessage(role="user", content=SUM)]) if part.delta]
    several(pieces)
    assert SUM_IS in "".join(pieces)


@check("tools", "chat_with_tools")
def tools() -> None:
    answer = llm.chat_with_tools([tool], WEATHER)
    call = llm.get_tool_calls_from_response(answer)[0]
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"})


@check("tools", "FunctionAgent")
async def agent() -> None:
    own = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=8192, **COMMON)
    assert REPORTED in str(await FunctionAgent(tools=[tool], llm=own).run(WEATHER))


@check("forced", "chat_with_tools(tool_required=True), predict_and_call")
def forced() -> None:
    answer = llm.chat_with_tools([tool], "Hello!", tool_required=True)
    assert isinstance(llm.get_tool_calls_from_response(answer)[0].tool_kwargs["city"], str)
    assert REPORTED in str(llm.predict_and_call([tool], WEATHER))


@check("forced", "structured_predict, by a forced call")
def structured_by_call() -> None:
    assert isinstance(llm.structured_predict(Person, PromptTemplate("{text}"), text=PERSON), Person)


@check("schema", "should_use_structured_outputs: as_structured_llm")
def schema() -> None:
    strict = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, context_window=8192, **COMMON)
    answer = strict.as_structured_llm(Person).chat([ChatMessage(role="user", content=PERSON)])
    assert answer.raw == Person(**PERSON_IS)


@check("logprobs", "logprobs=True")
def logprobs() -> None:
    scored = OpenAILike(is_chat_model=True, logprobs=True, top_logprobs=2, **COMMON)
    answer = scored.chat([ChatMessage(role="user", content=SUM)])
    assert answer.logprobs
    assert all(each[0].logprob <= 0 for each in answer.logprobs)


@check("completions", "complete, stream_complete")
def completions() -> None:
    text = OpenAILike(is_chat_model=False, context_window=8192, **COMMON)
    prompt = "<|im_start|>user\nWhat is 347 + 586?<|im_end|>\n<|im_start|>assistant\n"
    assert SUM_IS in text.complete(prompt).text
    pieces = [part.delta for part in text.stream_complete(prompt)]
    several(pieces)
    assert SUM_IS in "".join(pieces)


@check("errors", "openai.NotFoundError")
def errors() -> None:
    import openai

    try:
        OpenAILike(is_chat_model=True, **{**COMMON, "model": "missing"}).chat([ChatMessage(role="user", content=SUM)])
    except openai.NotFoundError:
        return
    raise AssertionError("NotFoundError was not raised")


run("llama-index-llms-openai-like", "llama-index-core")
