"""The whole pipeline on the native engine and the demo model: answers that mean something."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from infra.bus.connection import Bus, connect
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, ending, idle_workers, until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def demo(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--engine", "native", "--workers", "2", "--threads", "1")


@pytest.fixture
async def demo_bus(demo: Deployment) -> AsyncIterator[Bus]:
    bus = await connect(demo.state.nats_url, role="client", name="test")
    yield bus
    await bus.close()


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
    told, _ = await ending(demo_bus, second.id.removeprefix("chatcmpl-"))
    decision = told.routed[0].decision
    [chosen] = [candidate for candidate in decision.candidates if candidate.worker == decision.chosen]
    assert chosen.overlap_blocks >= decision.prompt_blocks - 1


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
            "max_tokens": 400,
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
        undisturbed = await asyncio.gather(*(read(client, number, [0]) for number in range(8)))
        seen = [0]
        again = [asyncio.create_task(read(client, number, seen)) for number in range(8)]

        async def under_way() -> bool:
            return seen[0] > 8 * 100

        await until(under_way, "the answers begin", within_s=60)
        victim = next(process for process in demo.state.processes if process.role == "worker")
        os.kill(victim.pid, signal.SIGKILL)
        assert not any(task.done() for task in again)
        assert list(await asyncio.gather(*again)) == list(undisturbed)
    await until(lambda: idle_workers(demo_bus), "all blocks are free")
