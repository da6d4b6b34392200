"""The ``openai`` package for Python: chat, completions and responses, as its documentation shows them."""

import json

import openai
from harness import (
    BASE,
    CITY_SCHEMA,
    FILM,
    KEY,
    MODEL,
    PERSON,
    PERSON_IS,
    PICTURE,
    REPORT,
    REPORTED,
    SEEING,
    SUM,
    SUM_IS,
    TEXTS,
    TOOL,
    WEATHER,
    check,
    run,
    several,
    vectors,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE, api_key=KEY)
ASK = [{"role": "user", "content": SUM}]
QUESTION = [{"role": "user", "content": WEATHER}]


class Person(BaseModel):
    name: str
    age: int


@check("chat", "chat.completions.create")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    assert SUM_IS in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check("chat", "AsyncOpenAI, four at once")
async def concurrent() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY) as several_at_once:
        sums = [
            several_at_once.chat.completions.create(
                model=MODEL, temperature=0, messages=[{"role": "user", "content": f"What is {n} + 20?"}]
            )
            for n in (11, 12, 13, 14)
        ]
        for n, answer in zip((11, 12, 13, 14), await asyncio.gather(*sums), strict=True):
            assert str(n + 20) in answer.choices[0].message.content


@check("stream", "stream=True, with usage")
def stream() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    several(pieces)
    assert SUM_IS in "".join(pieces)
    assert chunks[-1].usage.completion_tokens > 0


@check("stream", "chat.completions.stream")
def stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        several(deltas)
        assert SUM_IS in events.get_final_completion().choices[0].message.content


@check("tools", "a call, its result, and the answer")
def tools() -> None:
    asked = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], temperature=0)
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls"
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*QUESTION, message, result], tools=[TOOL], temperature=0
    )
    assert REPORTED in answer.choices[0].message.content


@check("tools", "a streamed call")
def streamed_call() -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL], temperature=0) as events:
        deltas = [each for each in events if each.type == "tool_calls.function.arguments.delta"]
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    assert len(deltas) >= 2
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


@check("forced", "tool_choice required, named, and a strict tool by pydantic_function_tool")
def forced() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello!"}], tools=[TOOL], tool_choice=choice
        )
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": PERSON}],
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice="required",
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


@check("schema", "chat.completions.parse with a pydantic model")
def schema() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": PERSON}], response_format=Person, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(**PERSON_IS)


@check("schema", "the same streamed")
def streamed_schema() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": PERSON}], response_format=Person, temperature=0
    ) as events:
        several([event for event in events if event.type == "content.delta"])
        assert events.get_final_completion().choices[0].message.parsed == Person(**PERSON_IS)


@check("json", "response_format json_object")
def json_mode() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PERSON}],
        response_format={"type": "json_object"},
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content) == PERSON_IS


@check("logprobs", "logprobs and top_logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    tokens = answer.logprobs.content
    assert "".join(each.token for each in tokens).startswith(answer.message.content)
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 3 for each in tokens)


@check("reasoning", "thoughts apart from the answer")
def reasoning() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": SUM + " /think"}], temperature=0
    )
    message = answer.choices[0].message
    assert message.reasoning_content
    assert SUM_IS in message.content
    assert "<think>" not in message.content


@check("completions", "one prompt, streamed, and three prompts")
def completions() -> None:
    prompt = "<|im_start|>user\nWhat is 347 + 586?<|im_end|>\n<|im_start|>assistant\n"
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=20, stream=True))
    several(chunks)
    assert SUM_IS in "".join(chunk.choices[0].text for chunk in chunks)
    answer = client.completions.create(model=MODEL, prompt=[prompt] * 3, temperature=0, max_tokens=20)
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert all(SUM_IS in each.text for each in answer.choices)


@check("responses", "responses.create, and continued")
def responses() -> None:
    first = client.responses.create(model=MODEL, input="My name is Mia.", temperature=0)
    answer = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert "Mia" in answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


@check("responses", "streamed")
def streamed_response() -> None:
    with client.responses.stream(model=MODEL, input=SUM, temperature=0) as events:
        several([event for event in events if event.type == "response.output_text.delta"])
        assert SUM_IS in events.get_final_response().output_text


@check("responses", "parse, and a function call with its result")
def parsed_response() -> None:
    answer = client.responses.parse(model=MODEL, input=PERSON, text_format=Person, temperature=0)
    assert answer.output_parsed == Person(**PERSON_IS)
    tool = {"type": "function", "name": "get_weather", "parameters": CITY_SCHEMA, "strict": False}
    tool["description"] = "Current weather of a city"
    asked = client.responses.create(model=MODEL, input=WEATHER, tools=[tool], temperature=0)
    call = next(item for item in asked.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    told = client.responses.create(
        model=MODEL, input=[result], previous_response_id=asked.id, tools=[tool], temperature=0
    )
    assert REPORTED in told.output_text


@check("responses", "in the background, polled")
def background() -> None:
    import time

    response = client.responses.create(model=MODEL, input=SUM, background=True, temperature=0)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert SUM_IS in response.output_text


@check("errors", "NotFoundError, BadRequestError")
def errors() -> None:
    for wanted, options in (
        (openai.NotFoundError, {"model": "missing", "messages": ASK}),
        (openai.BadRequestError, {"model": MODEL, "messages": ASK, "temperature": 9}),
    ):
        try:
            client.chat.completions.create(**options)
        except wanted as error:
            assert error.code in ("model_not_found", "invalid_request")  # noqa: PT017
            continue
        raise AssertionError(f"{wanted.__name__} was not raised")


@check("embeddings", "embeddings.create, as base64 and as numbers")
def embeddings() -> None:
    for options in ({}, {"encoding_format": "float"}):
        vectors([each.embedding for each in client.embeddings.create(model=MODEL, input=TEXTS, **options).data])


@check("batches", "files.create, batches.create, retrieve and list, files.content")
def batches() -> None:
    import json
    import time

    body = {"model": MODEL, "max_tokens": 20, "messages": ASK, "temperature": 0}
    bodies = {"right": body, "wrong": body | {"max_tokens": -1}}
    path = "/v1/chat/completions"
    lines = [{"custom_id": name, "method": "POST", "url": path, "body": each} for name, each in bodies.items()]
    source = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=path, completion_window="24h")
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        time.sleep(0.2)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (right,) = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert right["response"]["body"]["usage"]["completion_tokens"] > 0
    assert batch.id in [each.id for each in client.batches.list()]


@check("media", "image_url and video_url parts, whole and streamed; input_audio is refused")
def media() -> None:
    pictures = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is it?"}]
    film = [{"type": "video_url", "video_url": {"url": FILM}}, *pictures]
    sizes = []
    for content in (pictures[1:], pictures, film):
        ask = {"model": SEEING, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
        answer = client.chat.completions.create(**ask, extra_body={"ignore_eos": True})
        sizes.append(answer.usage.prompt_tokens)
        streamed = client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        assert text == answer.choices[0].message.content
    assert sizes == sorted(set(sizes)), sizes
    sound = [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]
    try:
        client.chat.completions.create(model=SEEING, messages=[{"role": "user", "content": sound}])
    except openai.BadRequestError as error:
        assert "video_url" in error.message  # noqa: PT017
    else:
        raise AssertionError("audio was taken")


@check("keys", "a wrong key: AuthenticationError")
def keys() -> None:
    try:
        openai.OpenAI(base_url=BASE, api_key="sk-wrong", max_retries=0).chat.completions.create(
            model=MODEL, messages=ASK
        )
    except openai.AuthenticationError:
        return
    raise AssertionError("AuthenticationError was not raised")


@check("models", "models.list")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


run("openai")
