"""A prompt goes to the worker that holds its beginning, which then computes the rest only; and the other modes."""

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import pytest

from infra.bus.connection import Bus
from infra.bus.direct_get import read
from schemas import kv
from schemas.blocks import split
from schemas.jobs import Candidate, Decision
from tests.pipeline.support import Deployment, Oracle, ending, stopped, token_prompt, until

BLOCK = 32


def text_body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 3, **more}


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def decision_of(bus: Bus, answer: httpx.Response) -> Decision:
    timeline, _ = await ending(bus, answer.headers["x-request-id"])
    return timeline.routed[-1].decision


def chosen(decision: Decision) -> Candidate:
    [line] = [candidate for candidate in decision.candidates if candidate.worker == decision.chosen]
    return line


async def published(bus: Bus, digests: bytes) -> None:
    """Until some worker has said that it holds all these blocks."""
    wanted = set(split(digests))

    async def stored() -> bool:
        seen: set[bytes] = set()
        async for entry in read(bus, bus.subjects.stream("KV"), bus.subjects.all("kv")):
            for event in kv.decode(entry.data).events:
                if isinstance(event, kv.Stored):
                    seen.update(split(event.digests))
        return wanted <= seen

    await until(stored, "the KV events of these blocks")


async def ask_and_settle(http: httpx.AsyncClient, bus: Bus, body: dict[str, Any]) -> Decision:
    """Send a request; returns where it went, once the log says what the worker holds now."""
    answer = await http.post("/v1/completions", json=body)
    timeline, _ = await ending(bus, answer.headers["x-request-id"])
    await published(bus, timeline.request.digests)
    return timeline.routed[-1].decision


@pytest.mark.parametrize("seed", [201, 202, 203, 204])
async def test_the_same_prompt_goes_to_its_holder_and_is_not_computed_again(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle, seed: int
) -> None:
    body = text_body(token_prompt(10 * BLOCK + 5, seed))
    first = await ask_and_settle(http, bus, body)
    assert first.mode == "kv"
    assert chosen(first).overlap_blocks == 0
    again = await http.post("/v1/completions", json=body)
    assert cached(again) == 10 * BLOCK
    assert again.json()["choices"][0]["text"] == oracle.answer(body, 3)
    second = await decision_of(bus, again)
    assert second.chosen == first.chosen
    assert (chosen(second).overlap_blocks, second.prompt_blocks) == (10, 10)
    other = next(candidate for candidate in second.candidates if candidate.worker != second.chosen)
    assert other.overlap_blocks == 0
    assert other.score > chosen(second).score


async def test_a_common_beginning_is_reused_up_to_where_the_prompts_part(http: httpx.AsyncClient, bus: Bus) -> None:
    common = token_prompt(20 * BLOCK, 210)
    holder = (await ask_and_settle(http, bus, text_body(common + token_prompt(40, 211)))).chosen
    for tail in range(5):
        answer = await http.post("/v1/completions", json=text_body(common + token_prompt(100, 212 + tail)))
        decision = await decision_of(bus, answer)
        assert decision.chosen == holder
        assert chosen(decision).overlap_blocks == 20
        assert cached(answer) == 20 * BLOCK


async def test_the_next_turn_of_a_conversation_reuses_the_answer_too(http: httpx.AsyncClient, bus: Bus) -> None:
    prompt = token_prompt(3 * BLOCK, 220)
    body = text_body(prompt, max_tokens=5 * BLOCK, logprobs=0)
    answer = await http.post("/v1/completions", json=body)
    timeline, end = await ending(bus, answer.headers["x-request-id"])
    said = [int.from_bytes(end.choices[0].tokens[i : i + 4], "little") for i in range(0, 20 * BLOCK, 4)]
    follow_up = text_body(prompt + said + token_prompt(BLOCK, 221))

    async def reused() -> bool:  # the answer's blocks are named as they fill
        return cached(await http.post("/v1/completions", json=follow_up)) >= 7 * BLOCK

    await until(reused, "the blocks of prompt and answer are reused")
    assert timeline.routed[0].decision.chosen


async def test_another_cache_salt_shares_nothing(http: httpx.AsyncClient, bus: Bus) -> None:
    body = text_body(token_prompt(8 * BLOCK + 1, 230), cache_salt="one")
    await ask_and_settle(http, bus, body)
    assert cached(await http.post("/v1/completions", json={**body, "cache_salt": "two"})) == 0
    assert cached(await http.post("/v1/completions", json=text_body(body["prompt"]))) == 0
    assert cached(await http.post("/v1/completions", json=body)) == 8 * BLOCK


async def test_choices_of_one_request_share_their_prompt(http: httpx.AsyncClient, bus: Bus, oracle: Oracle) -> None:
    body = text_body(token_prompt(8 * BLOCK + 1, 240), n=4, temperature=1, seed=4)
    await ask_and_settle(http, bus, body)
    again = await http.post("/v1/completions", json=body)
    assert cached(again) == 8 * BLOCK
    assert [choice["text"] for choice in again.json()["choices"]] == [oracle.answer(body, 3, c) for c in range(4)]


async def test_new_prompts_are_spread_and_a_named_worker_is_obeyed(http: httpx.AsyncClient, bus: Bus) -> None:
    bodies = [text_body(token_prompt(20 * BLOCK, 300 + i)) for i in range(20)]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    places = [(await decision_of(bus, answer)).chosen for answer in answers]
    assert len(set(places)) == 2
    for name in ("worker-0", "worker-1"):
        answer = await http.post("/v1/completions", json={**bodies[0], "worker": name})
        assert (await decision_of(bus, answer)).chosen.startswith(name + "-")


# -- the other modes: routers of several modes share the requests ---------------------------------------------------


async def placed_by_each(
    http: httpx.AsyncClient, bus: Bus, oracle: Oracle, modes: set[str]
) -> dict[str, list[Decision]]:
    """Send requests until routers of all these modes have placed some; their decisions in order, by mode."""
    decisions: dict[str, list[Decision]] = {}
    for turn in range(20):
        bodies = [text_body(token_prompt(BLOCK, 400 + 10 * turn + i)) for i in range(10)]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == oracle.answer(body, 3)
            decision = await decision_of(bus, answer)
            decisions.setdefault(decision.mode, []).append(decision)
        if modes <= {mode for mode, placed in decisions.items() if len(placed) >= 4}:
            break
    return {mode: sorted(placed, key=lambda decision: decision.at_ns) for mode, placed in decisions.items()}


async def test_routers_of_any_mode_place_requests_side_by_side(
    fast: Deployment, http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    modes = {"round_robin", "random", "least_loaded"}
    routers = await fast.also_routers(*sorted(modes))
    try:
        decisions = await placed_by_each(http, bus, oracle, {*modes, "kv"})
    finally:
        statuses = await stopped(routers)
    assert statuses == [0, 0, 0]
    assert set(decisions) == {*modes, "kv"}
    for mode in modes:
        assert {decision.router.rpartition("-")[0] for decision in decisions[mode]} == {f"extra-{mode}"}
    turns = [decision.chosen for decision in decisions["round_robin"]]
    assert all(one != next_one for one, next_one in pairwise(turns))
    for decision in decisions["least_loaded"]:
        assert chosen(decision).score == min(candidate.score for candidate in decision.candidates)
    assert (await http.post("/v1/completions", json=text_body(token_prompt(5, 1)))).status_code == 200


async def test_in_mode_direct_the_client_names_the_worker(fast: Deployment, http: httpx.AsyncClient, bus: Bus) -> None:
    routers = await fast.also_routers("direct")
    try:
        named, unnamed = [], []
        for turn in range(20):
            body = text_body(token_prompt(BLOCK, 700 + turn))
            named.append(await http.post("/v1/completions", json={**body, "worker": "worker-1"}))
            # several at once, so that each of the routers takes some
            unnamed += await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(8)))
            if {answer.status_code for answer in unnamed} == {200, 400}:
                break
    finally:
        assert await stopped(routers) == [0]
    assert {answer.status_code for answer in named} == {200}
    refused = [answer for answer in unnamed if answer.status_code != 200]
    assert refused
    assert all("worker_not_named" in answer.json()["error"]["message"] for answer in refused)
    for answer in named:
        assert (await decision_of(bus, answer)).chosen.startswith("worker-1-")
