"""Prefill and decode as separate pools, over real NIXL: the same answers, the KV moved, nothing left behind.

The mock engine checks every block that it did not compute itself, so a right answer means that the right bytes came.
"""

import asyncio
import os
import signal
import time
from typing import Any
from zlib import crc32

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.log_tools.requests.leases import leases
from penstock.log_tools.timeline.request_timeline import TicketLease
from penstock.schemas import jobs, wire
from penstock.schemas.jobs import Job
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_MSG_ID
from penstock.schemas.tokens import PROMPT, TokenItem
from penstock.schemas.tokens import decode as decode_tokens
from penstock.schemas.transfer import Prefilled
from tests.chaos.log import ends_since
from tests.pipeline.pairs.test_tracing import pid_of
from tests.pipeline.support import (
    Deployment,
    Oracle,
    described,
    ending,
    idle_workers,
    ok,
    parse_sse,
    registrations,
    token_prompt,
    until,
)

BLOCK = 32
pytestmark = pytest.mark.timeout(120)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 6, **more}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> httpx.Response:
    return await ok(http.post("/v1/completions", json=asked))


async def stages(bus: Bus, request_id: str) -> list[str]:
    """Roles of the workers that got a message of the request, in stream order."""
    subjects = bus.subjects
    found = []
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work")):
        if entry.headers.get(HEADER_MSG_ID, "").startswith(request_id):
            found.append(entry.subject.split(".")[2])
    return found


async def tickets(bus: Bus, request_id: str) -> list[TicketLease]:
    return [lease for ticket, lease in (await leases(bus, time.time_ns())).items() if ticket.startswith(request_id)]


async def read_ticket(bus: Bus, request_id: str) -> TicketLease:
    """The one handoff of a request, once its blocks were let go of."""

    async def released() -> list[TicketLease]:
        return [lease for lease in await tickets(bus, request_id) if lease.ended]

    (lease,) = await until(released, "the lease ends")
    return lease


async def nothing_held(bus: Bus) -> bool:
    now = time.time_ns()
    return await idle_workers(bus) and not any(lease.is_open(now) for lease in (await leases(bus, now)).values())


def request_id(answer: httpx.Response) -> str:
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize("tokens", [65, 96, 97, 127, 128, 129, 1000])
async def test_the_answer_is_that_of_one_worker_wherever_the_prompt_ends_in_its_last_block(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle, tokens: int
) -> None:
    asked = body(token_prompt(tokens, 5000 + tokens))
    answer = await ask(http, asked)
    assert answer.json()["choices"][0]["text"] == oracle.answer(asked, 6)
    assert await stages(bus, request_id(answer)) == ["prefill", "decode"]
    lease = await read_ticket(bus, request_id(answer))
    assert lease.offer.blocks == -(-tokens // BLOCK)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 12, "n": 3},
        {"n": 2, "max_tokens": 40},
        {"logprobs": 2},
        {"max_tokens": 1},
        {"min_tokens": 3, "max_tokens": 4},
    ],
    ids=str,
)
async def test_every_option_gives_the_same_as_on_one_worker(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle, more: dict[str, Any]
) -> None:
    asked = body(token_prompt(300, crc32(str(more).encode())), **more)
    answer = (await ask(http, asked)).json()
    assert len(answer["choices"]) == more.get("n", 1)
    for choice in answer["choices"]:
        assert choice["text"] == oracle.answer(asked, asked["max_tokens"], choice["index"])
        assert choice["finish_reason"] == "length"
        if "logprobs" in more:
            assert len(choice["logprobs"]["tokens"]) == asked["max_tokens"]
    assert answer["usage"] == {
        **answer["usage"],
        "prompt_tokens": 300,
        "completion_tokens": asked["max_tokens"] * more.get("n", 1),
    }


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 4}], ids=["one", "three"])
async def test_a_prompt_is_scored_once_by_whoever_computes_it(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle, more: dict[str, Any]
) -> None:
    prompt = token_prompt(700, 84)
    asked = body(prompt, prompt_logprobs=2, **more)
    await ask(http, body(prompt, **more))  # cached at both workers, which must not matter
    answer = await ask(http, asked)
    assert await stages(bus, request_id(answer)) == ["prefill", "decode"]
    for choice in answer.json()["choices"]:
        assert choice["text"] == oracle.answer(asked, 6, choice["index"])
        assert described(choice["prompt_logprobs"], prompt, 2) == oracle.scores(asked, 2)
    items = await token_items(bus, request_id(answer))
    assert [item.first for item in items if item.choice == PROMPT] == positions(items)
    short = body(token_prompt(50, 85), prompt_logprobs=0, max_tokens=3)
    local = await ask(http, short)
    assert await stages(bus, request_id(local)) == ["decode"]
    entries = local.json()["choices"][0]["prompt_logprobs"]
    assert described(entries, short["prompt"], 0) == oracle.scores(short, 0)


async def token_items(bus: Bus, request_id: str) -> list[TokenItem]:
    """Everything in the token stream of a request."""
    subjects = bus.subjects
    found = []
    async for entry in read(bus, subjects.stream("TOKENS"), subjects.all("tokens")):
        found += [item for item in decode_tokens(entry.data).items if item.request == request_id]
    return found


def positions(items: list[TokenItem]) -> list[int]:
    """Where the pieces of the prompt's scores begin, if each begins where the one before ended."""
    found, at = [], 1
    for item in items:
        if item.choice == PROMPT:
            found.append(at)
            at += len(item.logprobs or ())
    return found


async def test_a_stop_string_that_begins_in_the_first_token_ends_the_answer(
    http: httpx.AsyncClient, oracle: Oracle
) -> None:
    prompt = token_prompt(200, 77)
    text = oracle.answer(body(prompt), 12)
    for start, stop in ((0, text[: len(text) // 3]), (2, text[2 : len(text) // 2])):
        answer = (await ask(http, body(prompt, max_tokens=12, stop=[stop]))).json()
        assert answer["choices"][0]["text"] == text[: text.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop", start


async def test_a_stream_has_every_token_once_and_the_first_comes_from_prefill(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    asked = body(token_prompt(500, 78), stream=True, max_tokens=20)
    answer = await ask(http, asked)
    text = "".join(event.body["choices"][0]["text"] for event in parse_sse(answer.content) if event.data != "[DONE]")
    assert text == oracle.answer(asked, 20)
    _, done = await ending(bus, request_id(answer))
    assert done.worker.startswith("decode")
    assert done.timings.created_ns < done.timings.started_ns < done.timings.first_token_ns < done.timings.ended_ns


async def test_prompts_with_little_to_compute_stay_on_their_decode_worker(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    short = await ask(http, body(token_prompt(60, 79)))
    assert await stages(bus, request_id(short)) == ["decode"]
    asked = body(token_prompt(600, 80))
    first = await ask(http, asked)
    assert await stages(bus, request_id(first)) == ["prefill", "decode"]

    async def local() -> bool:
        again = await ask(http, asked)
        assert again.json()["choices"][0]["text"] == oracle.answer(asked, 6)
        return await stages(bus, request_id(again)) == ["decode"]

    await until(local, "the decode worker is known to hold the adopted prompt")


async def test_only_blocks_that_the_decode_worker_lacks_are_read(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    prompt = token_prompt(640, 81)
    first = await ask(http, body(prompt[:320]))
    timeline, _ = await ending(bus, request_id(first))
    decode = timeline.routed[0].decision.route[-1].worker

    async def partly() -> bool:
        longer = await ask(http, body(prompt + token_prompt(64, int(time.time_ns() % 1_000_000))))
        timeline, _ = await ending(bus, request_id(longer))
        if not timeline.routed[0].decision.route or timeline.routed[0].decision.route[-1].worker != decode:
            return False
        lease = await read_ticket(bus, request_id(longer))
        assert lease.last.state == "released"
        return lease.offer.blocks == 22

    await until(partly, "a longer prompt goes to the same pair")


async def test_the_bulk_does_not_pass_the_broker(http: httpx.AsyncClient, bus: Bus) -> None:
    answer = await ask(http, body(token_prompt(3000, 82)))
    lease = await read_ticket(bus, request_id(answer))
    assert lease.offer.bytes == lease.offer.blocks * 64
    subjects = bus.subjects
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work")):
        if entry.headers.get(HEADER_MSG_ID, "") == f"{request_id(answer)}:1:decode":
            message = jobs.decode(entry.data)
            assert isinstance(message, Prefilled)
            assert entry.headers[HEADER_CONTENT_TYPE] == wire.content_type(Prefilled)
            job = jobs.decode_job(message.job)
            assert isinstance(job, Job)
            assert [len(wire.unpack_tokens(part)) for part in job.resume] == [1]
            assert len(entry.data) < 3000 * 4 + 16 * 94 + 8 * 94 + 4096, (
                "tokens, names, blocks, generations and little else"
            )
            return
    raise AssertionError("no Prefilled in the log")


async def test_many_at_once_all_end_right_and_leave_nothing_behind(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    asked = [body(token_prompt(70 + 13 * number, 9000 + number), max_tokens=10) for number in range(60)]
    answers = await asyncio.gather(*(ask(http, each) for each in asked))
    for each, answer in zip(asked, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == oracle.answer(each, 10)
    await until(lambda: nothing_held(bus), "all blocks are free and all leases closed")


async def computed_behind(bus: Bus, since_ns: int) -> list[str]:
    """The decode workers that computed a prompt since the prefill workers were behind, once for each prompt."""
    subjects, found = bus.subjects, []
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since_ns):
        job = jobs.decode(entry.data)
        if isinstance(job, Job) and job.decision.how.startswith("local: prefill workers are behind"):
            found.append(job.decision.chosen)
    return found


async def test_decode_workers_compute_some_prompts_of_a_burst_and_one_that_is_killed_meanwhile_loses_none(
    pairs: Deployment, http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    began_ns = time.time_ns()
    asked = [body(token_prompt(4000, 9100 + number), max_tokens=10) for number in range(24)]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(ask(http, each)) for each in asked]
        killed, *_ = await until(lambda: computed_behind(bus, began_ns), "a decode worker computes a prompt")
        os.kill(pid_of(pairs, killed.rpartition("-")[0]), signal.SIGKILL)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.result().json()["choices"][0]["text"] == oracle.answer(each, 10)

    async def all_stored() -> list[int]:  # an answer may reach its client while its end is being stored
        attempts = [end.attempt for end in await ends_since(bus, began_ns)]
        return attempts if len(attempts) >= len(asked) else []

    attempts = await until(all_stored, "all ends are stored")
    assert len(attempts) == len(asked)
    assert max(attempts) == 2, "one of those that the killed worker ran"

    async def all_serve() -> bool:
        found = await registrations(bus)
        return killed not in found and len(found) == 4 and await nothing_held(bus)

    await until(all_serve, "a successor of the killed worker is registered, and nothing is held", 90)


async def test_a_cancelled_request_frees_both_sides(http: httpx.AsyncClient, bus: Bus) -> None:
    asked = body(token_prompt(2000, 83), max_tokens=20_000, stream=True, ignore_eos=True)
    async with http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.aiter_lines()
        for _ in range(8):
            await anext(lines)
        name = request_id(answer)  # type: ignore[arg-type]
    _, done = await ending(bus, name)
    assert done.code == "cancelled"
    await until(lambda: nothing_held(bus), "all blocks are free and all leases closed")
