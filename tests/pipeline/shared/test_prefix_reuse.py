"""A prompt goes to the worker that holds its beginning, which then computes the rest only; and the other modes."""

import asyncio
import os
import signal
from itertools import pairwise
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.schemas import kv
from penstock.schemas.block_hashes import split
from penstock.schemas.jobs import Candidate, Decision
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


async def test_a_session_stays_at_its_worker_where_nothing_else_decides(http: httpx.AsyncClient, bus: Bus) -> None:
    """By header, which goes before the body's name. The prompts have nothing in common."""
    places = []
    for turn in range(4):
        body = text_body(token_prompt(3 * BLOCK, 235 + turn), prompt_cache_key=f"other-{turn}")
        answer = await http.post("/v1/completions", json=body, headers={"X-Session-Id": "session-235"})
        timeline, _ = await ending(bus, answer.headers["x-request-id"])
        assert timeline.request.session == "session-235"
        decision = timeline.routed[-1].decision
        places.append(decision.chosen)
        if turn:  # ahead by its prompt, and a little behind by what it has served
            other = next(line for line in decision.candidates if line.worker != decision.chosen)
            assert other.score - chosen(decision).score > 2 * BLOCK
    assert len(set(places)) == 1


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


# -- the other modes: one router owns the model, the others stand by -------------------------------------------------


async def own_router_restarted(deployment: Deployment) -> None:
    """Start the deployment's own router again, so that one that runs meanwhile owns the model."""

    def pid() -> int | None:
        return next(process.pid for process in deployment.state.processes if process.role == "router")

    before = pid()
    assert before is not None
    os.kill(before, signal.SIGTERM)

    async def back() -> bool:
        return pid() not in (None, before)

    await until(back, "the deployment's own router is back")


async def placed(http: httpx.AsyncClient, bus: Bus, oracle: Oracle, turn: int) -> list[Decision]:
    """Send requests; the decisions about them in order."""
    bodies = [text_body(token_prompt(BLOCK, 400 + 10 * turn + i)) for i in range(10)]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    decisions = []
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == oracle.answer(body, 3)
        decisions.append(await decision_of(bus, answer))
    return sorted(decisions, key=lambda decision: decision.at_ns)


async def test_routers_of_every_mode_place_requests_one_after_the_other(
    fast: Deployment, http: httpx.AsyncClient, bus: Bus, oracle: Oracle
) -> None:
    modes = ("least_loaded", "random", "round_robin")
    routers = dict(zip(modes, await fast.also_routers(*modes), strict=True))
    by_mode: dict[str, list[Decision]] = {}
    try:
        await own_router_restarted(fast)
        for turn in range(len(modes) + 1):
            decisions = await placed(http, bus, oracle, turn)
            owners = {(decision.mode, decision.router.rpartition("-")[0]) for decision in decisions}
            assert len(owners) == 1, "one router owns the model"
            [(mode, name)] = owners
            by_mode[mode] = decisions
            if mode in routers:
                assert name == f"extra-{mode}"
                assert await stopped([routers.pop(mode)]) == [0]
    finally:
        statuses = await stopped(list(routers.values()))
    assert statuses == []
    assert set(by_mode) == {*modes, "kv"}
    turns = [decision.chosen for decision in by_mode["round_robin"]]
    assert all(one != next_one for one, next_one in pairwise(turns))
    for decision in by_mode["least_loaded"]:
        assert chosen(decision).score == min(candidate.score for candidate in decision.candidates)


async def test_in_mode_direct_the_client_names_the_worker(fast: Deployment, http: httpx.AsyncClient, bus: Bus) -> None:
    routers = await fast.also_routers("direct")
    try:
        await own_router_restarted(fast)
        body = text_body(token_prompt(BLOCK, 700))
        named = await http.post("/v1/completions", json={**body, "worker": "worker-1"})
        unnamed = await http.post("/v1/completions", json=body)
    finally:
        assert await stopped(routers) == [0]
    assert named.status_code == 200
    assert (await decision_of(bus, named)).chosen.startswith("worker-1-")
    assert unnamed.status_code == 400
    assert "worker_not_named" in unnamed.json()["error"]["message"]
