"""The whole pipeline on the native engine and the demo model: answers that mean something, tool calls, thoughts."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import openai
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model import modeldir
from penstock.measure.profile import kernels
from penstock.workers.engines.external.runtime import children_of
from penstock.workers.session.process import EXIT_ENGINE
from tests.pipeline.shared.test_nats_api import Submitter
from tests.pipeline.support import (
    Deployment,
    accepted,
    bus_of,
    ending,
    idle_workers,
    parse_sse,
    registrations,
    stopped,
    until,
)

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


demo_bus = bus_of("demo")


@pytest.fixture
async def asking(demo: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=demo.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, question: str, *before: dict[str, str], **options: Any) -> Any:
    messages: Any = [*before, {"role": "user", "content": question}]
    return await client.chat.completions.create(model="demo", messages=messages, temperature=0, **options)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 347 + 586?", "933"),
        ("What is 512 - 87?", "425"),
        ("Spell the word harbour.", "h-a-r-b-o-u-r"),
        ("Reverse the word lantern.", "nretnal"),
        ("How many times does the letter r occur in strawberry?", "3"),
        ("How do I start a worker?", "penstock worker"),
        ("Who won the world cup in 1990?", "I am a tiny demo model and do not know."),
    ],
)
async def test_the_default_model_really_answers(asking: openai.AsyncOpenAI, question: str, expected: str) -> None:
    assert expected in text_of(await ask(asking, question))


async def test_it_remembers_what_was_said_before(asking: openai.AsyncOpenAI) -> None:
    said = {"role": "user", "content": "My name is Marta."}
    greeted = {"role": "assistant", "content": text_of(await ask(asking, said["content"]))}
    assert "Marta" in text_of(await ask(asking, "What is my name?", said, greeted))


async def test_a_stop_string_ends_a_spelling_before_it(asking: openai.AsyncOpenAI) -> None:
    answer = await ask(asking, "Spell the word harbour.", stop=["b-o"])
    assert text_of(answer) == "h-a-r-"
    assert answer.choices[0].finish_reason == "stop"


async def test_an_ending_is_the_models_own(asking: openai.AsyncOpenAI) -> None:
    answer = await ask(asking, "What is 2 + 3?", max_tokens=100)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 50


async def test_a_long_context_asked_again_comes_from_the_cache_and_answers_alike(
    asking: openai.AsyncOpenAI, demo_bus: Bus
) -> None:
    text = " ".join(f"The number of room {room} is {room * 37 % 1000}." for room in range(150))
    first, second = [await ask(asking, f"{text} What is the number of room 77?", max_tokens=40) for _ in range(2)]
    assert first.usage.prompt_tokens > 1000
    assert text_of(first) == text_of(second)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 64
    timeline, _ = await ending(demo_bus, second.id.removeprefix("chatcmpl-"))
    decision = timeline.routed[0].decision
    [chosen] = [candidate for candidate in decision.candidates if candidate.worker == decision.chosen]
    assert chosen.overlap_blocks >= decision.prompt_blocks - 1


# -- tool calls and thoughts ------------------------------------------------------------------------------------------


async def test_the_demo_models_worker_names_its_parsers(demo: Deployment) -> None:
    bus = await connect(demo.state.nats_url, role="client", name="test")
    for worker in (await registrations(bus)).values():
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


async def test_a_call_that_is_cut_off_is_no_call_and_its_text_is_readable(asking: openai.AsyncOpenAI) -> None:
    assert (await asking.chat.completions.create(**BODY)).choices[0].message.tool_calls
    texts = [""]
    for tokens in range(1, 60):
        choice = (await asking.chat.completions.create(**{**BODY, "max_tokens": tokens})).choices[0]
        if choice.finish_reason != "length" or choice.message.tool_calls:
            break  # it has come whole
        assert (choice.message.content or "").startswith(texts[-1])
        texts.append(choice.message.content or "")
    assert "get_weather" in texts[-1]
    assert len(set(texts)) > 2


async def test_every_replica_and_nats_show_the_same(demo: Deployment) -> None:
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
        submitter = Submitter(nc)
        pieces = await submitter.ask(stream, model="demo")
        [one] = await submitter.ask(BODY, model="demo")
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

    async def warned() -> bool:
        return demo.logs("gateway").count("workers_name_different_parsers") >= 2

    try:
        await until(warned, "both gateways warn")
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


# -- a worker is killed -----------------------------------------------------------------------------------------------


async def test_a_killed_workers_answers_are_finished_by_the_other_as_if_nothing_had_been(
    demo: Deployment, demo_bus: Bus
) -> None:
    """The continuation is computed by another process, from the tokens that were streamed."""

    def body(number: int) -> dict[str, Any]:
        question = f"Spell the word {['harbour', 'lantern', 'copper', 'willow'][number % 4]}. {number}"
        return {
            "model": "demo",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0 if number % 2 else 1,
            "seed": number,
            "max_tokens": 120,
            "ignore_eos": True,
            "stream": True,
        }

    async def read(client: httpx.AsyncClient, number: int, seen: list[int]) -> str:
        text = ""
        async with client.stream("POST", demo.urls[0] + "/v1/chat/completions", json=body(number)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
                    seen[0] += 1
        return text

    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        undisturbed = await asyncio.gather(*(read(client, number, [0]) for number in range(4)))
        seen = [0]
        again = [asyncio.create_task(read(client, number, seen)) for number in range(4)]

        async def under_way() -> bool:
            return seen[0] > 4 * 20

        await until(under_way, "the answers begin", within_s=60)
        victim = next(process for process in demo.state.processes if process.role == "worker")
        os.kill(victim.pid, signal.SIGKILL)
        assert not any(task.done() for task in again)
        assert list(await asyncio.gather(*again)) == list(undisturbed)
    await until(lambda: idle_workers(demo_bus), "all blocks are free")

    async def restarted() -> bool:
        return len(await registrations(demo_bus)) == 2

    await until(restarted, "another worker is ready", within_s=60)


@pytest.mark.slow  # native/test_ranks kills a rank, too
@pytest.mark.timeout(300)
async def test_a_worker_over_two_ranks_answers_as_others_do_and_ends_with_one_of_them(
    demo: Deployment, demo_bus: Bus
) -> None:
    """The answer that it was at is finished elsewhere."""
    flags = ("--engine", "native", "--model", str(modeldir.DEMO), "--threads", "1", "--kv-blocks", "400")
    split = demo.also("worker", *flags, "--tensor-parallel-size", "2", "--name", "split")
    await asyncio.to_thread(split.wait_for, "worker_registered", 120)  # two processes load torch
    text = " ".join(f"The number of room {room} is {room * 37 % 1000}." for room in range(20))
    asked = {"model": "demo", "prompt": f"{text} Then", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=demo.urls[0], trust_env=False, timeout=120) as client:
        whole = (await client.post("/v1/completions", json={**asked, "worker": "worker-0"})).json()
        salted = {**asked, "cache_salt": "split"}  # none of the others has its blocks
        assert (await client.post("/v1/completions", json={**salted, "worker": "split"})).json()["choices"] == (
            whole["choices"]
        )
        pieces: list[str] = []
        killed = 0
        async with client.stream("POST", "/v1/completions", json={**salted, "stream": True}) as answer:
            request = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    pieces += (choice["text"] for choice in json.loads(line[6:])["choices"])
                if len(pieces) > 10 and not killed:
                    [rank] = children_of(split.pid)
                    os.kill(rank, signal.SIGKILL)
                    killed = rank
    assert killed
    assert "".join(pieces) == whole["choices"][0]["text"]
    assert await asyncio.to_thread(split.wait) == EXIT_ENGINE
    assert "rank 1 of 2 was ended by SIGKILL" in split.log.read_text()
    timeline, _ = await ending(demo_bus, request)
    chosen = [each.decision.chosen for each in timeline.routed]  # maybe again, before its lease has ended
    assert chosen[0].startswith("split")
    assert not chosen[-1].startswith("split")


@pytest.mark.slow  # workers/engines/native/test_ranks has it with ranks as threads; here three processes load torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("widths", ["2-1", "1-2"])
async def test_prefill_and_decode_workers_of_different_widths_hand_off(
    demo: Deployment, demo_bus: Bus, widths: str
) -> None:
    """Over NIXL: each rank's blocks are in a process of their own."""
    model = f"of-{widths}"
    started = [
        demo.also(
            *("worker", "--engine", "native", "--model", str(modeldir.DEMO), "--served-model-name", model),
            *("--threads", "1", "--kv-blocks", "200", "--role", role, "--tensor-parallel-size", width),
        )
        for role, width in zip(("prefill", "decode"), widths.split("-"), strict=True)
    ]
    for worker in started:
        await asyncio.to_thread(worker.wait_for, "worker_registered", 120)
    text = " ".join(f"The number of room {room} is {room * 37 % 1000}." for room in range(80))
    asked = {"prompt": f"{text} Then", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    try:
        async with httpx.AsyncClient(base_url=demo.urls[0], trust_env=False, timeout=120) as client:
            whole = (await client.post("/v1/completions", json={**asked, "model": "demo"})).json()

            async def answered() -> httpx.Response | None:  # gateways hear of a model a moment after its workers
                answer = await client.post("/v1/completions", json={**asked, "model": model})
                return answer if answer.status_code != 404 else None

            apart: httpx.Response = await until(answered, "the model is known")
        assert apart.json()["choices"] == whole["choices"]
        timeline, _ = await ending(demo_bus, apart.headers["x-request-id"])
        assert [stage.role for stage in timeline.routed[0].decision.route] == ["prefill", "decode"]
        states = [line.state for line in timeline.handoffs]
        assert "read" in states
        assert "failed" not in states
    finally:
        await stopped(started)


async def test_a_worker_records_a_trace_of_its_steps_while_it_answers(
    demo: Deployment, demo_bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = next(iter(await registrations(demo_bus)))
    body = {"model": "demo", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "worker": worker}
    recorded = asyncio.Event()
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=150) as client:

        async def ask() -> None:
            while not recorded.is_set():
                assert (await client.post("/v1/completions", json=body)).status_code == 200

        async with asyncio.TaskGroup() as asking:
            asking.create_task(ask())
            asking.create_task(ask())
            flags = ["--worker", worker, "--seconds", "0.1", "--data-dir", str(demo.data_dir)]
            status = await asyncio.to_thread(kernels.run, flags)
            recorded.set()
    assert status == 0, capsys.readouterr().err
    found = capsys.readouterr().out
    assert "dense" in found, found
    await asyncio.to_thread(shutil.rmtree, found.split(" on ")[0].rpartition("/")[0])
    for flags, reason in (([worker, "--seconds", "99"], "the limit is 60 s"), (["nobody"], "no worker")):
        asked = ["--worker", *flags, "--data-dir", str(demo.data_dir)]
        assert await asyncio.to_thread(kernels.run, asked) == 1
        assert reason in capsys.readouterr().err
