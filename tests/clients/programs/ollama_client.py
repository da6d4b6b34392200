"""The ``ollama`` package for Python."""

import json
from typing import Any

import ollama
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
    TEXTS,
    TOOL,
    URL,
    WEATHER,
    check,
    run,
    several,
    vectors,
)

GREEDY = {"temperature": 0, "num_predict": 100}
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
ASK = [{"role": "user", "content": SUM}]


@check("chat", "chat, generate")
def chat() -> None:
    answer = client.chat(model=MODEL, messages=ASK, options=GREEDY)
    assert SUM_IS in answer.message.content
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count > 0 and answer.eval_count > 0  # noqa: PT018
    assert answer.total_duration >= answer.eval_duration > 0
    text = client.generate(model=f"{MODEL}:latest", prompt=SUM, options=GREEDY)
    assert SUM_IS in text.response


@check("chat", "num_predict and stop end the answer")
def limits() -> None:
    short = client.chat(model=MODEL, messages=ASK, options={"temperature": 0, "num_predict": 2})
    assert (short.done_reason, short.eval_count) == ("length", 2)
    stopped = client.chat(model=MODEL, messages=ASK, options={**GREEDY, "stop": ["933"]})
    assert stopped.done_reason == "stop"
    assert "933" not in stopped.message.content


@check("stream", "chat and generate with stream=True")
def stream() -> None:
    for parts in (
        [each.message.content for each in client.chat(model=MODEL, messages=ASK, options=GREEDY, stream=True)],
        [each.response for each in client.generate(model=MODEL, prompt=SUM, options=GREEDY, stream=True)],
    ):
        several(parts)
        assert SUM_IS in "".join(parts)
    last = list(client.chat(model=MODEL, messages=ASK, options=GREEDY, stream=True))[-1]
    assert last.done_reason == "stop"
    assert last.eval_count > 0


@check("tools", "a call, whole and streamed, its result, and the answer")
def tools() -> None:
    question: list[Any] = [{"role": "user", "content": WEATHER}]
    asked = client.chat(model=MODEL, messages=question, tools=[TOOL], options=GREEDY)
    streamed = [
        call
        for each in client.chat(model=MODEL, messages=question, tools=[TOOL], options=GREEDY, stream=True)
        for call in each.message.tool_calls or ()
    ]
    for [call] in (asked.message.tool_calls, streamed):
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "content": REPORT, "tool_name": "get_weather"}
    told = client.chat(model=MODEL, messages=[*question, asked.message, result], tools=[TOOL], options=GREEDY)
    assert REPORTED in told.message.content
    assert TOOL["function"]["parameters"] == CITY_SCHEMA


@check("schema", "format with a JSON schema")
def schema() -> None:
    asked = [{"role": "user", "content": PERSON}]
    answer = client.chat(model=MODEL, messages=asked, format=PERSON_SCHEMA, options=GREEDY)
    assert json.loads(answer.message.content) == PERSON_IS


@check("json", "format='json'")
def json_mode() -> None:
    asked = [{"role": "user", "content": PERSON}]
    assert json.loads(client.chat(model=MODEL, messages=asked, format="json", options=GREEDY).message.content)


@check("reasoning", "think=True and False")
def reasoning() -> None:
    options = {"temperature": 0, "num_predict": 1200}
    thought = client.chat(model=MODEL, messages=ASK, think=True, options=options).message
    assert thought.thinking
    assert SUM_IS in thought.content
    assert not client.chat(model=MODEL, messages=ASK, think=False, options=options).message.thinking


@check("models", "list, show, ps; a model that is loaded before it is asked")
def models() -> None:
    assert MODEL in [each.model for each in client.list().models]
    assert MODEL in [each.model for each in client.ps().models]
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert 8192 in shown.modelinfo.values()
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL, keep_alive=0).done_reason == "unload"


@check("embeddings", "embed, and embeddings of one text")
def embeddings() -> None:
    found = client.embed(model=f"{MODEL}:latest", input=TEXTS)
    vectors([list(each) for each in found.embeddings])
    assert found.prompt_eval_count > 0
    assert list(client.embeddings(model=MODEL, prompt=TEXTS[0]).embedding) == list(found.embeddings[0])


@check("keys", "a header, and a wrong key: ResponseError with 401")
def keys() -> None:
    _refused(ollama.Client(host=URL, headers={"Authorization": "Bearer sk-wrong"}), 401, model=MODEL)


@check("errors", "ResponseError with the status")
def errors() -> None:
    _refused(client, 404, model="missing")
    _refused(client, 400, model=MODEL, options={"temperature": 9})


def _refused(asked: ollama.Client, status: int, **options: Any) -> None:
    try:
        asked.chat(messages=ASK, **options)
    except ollama.ResponseError as error:
        assert (error.status_code, bool(error.error)) == (status, True)  # noqa: PT017
        return
    raise AssertionError("ResponseError was not raised")


run("ollama")
