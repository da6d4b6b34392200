"""A request that crashes every worker that runs it takes three of them, and fails none that ran beside it."""

import asyncio
import json
import time
from typing import Any

import httpx
import nats
import pytest

from penstock.gateway.admission.poison_requests import WATCHED_FROM
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.schemas import jobs
from penstock.schemas.subjects import HEADER_ERROR, HEADER_REPLY_TO, HEADER_SUSPECT
from penstock.schemas.verdicts import Verdict
from penstock.schemas.wire import encode
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, bus_of, ending, http_of, ok, registrations, token_prompt, until

CRASH_TOKEN = 4001  # above those of ``token_prompt``
TOKENS = 150
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "0.5", "--workers", "4", "--mock-crash-token", str(CRASH_TOKEN), "--list-requests")
    return new_deployment(*flags, "--drain-s", "20")


bus = bus_of("fleet")
http = http_of("fleet")


def body(prompt: list[int], tokens: int = TOKENS) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def poison(seed: int) -> dict[str, Any]:
    return body([*token_prompt(40, seed), CRASH_TOKEN])


def crashes(fleet: Deployment) -> int:
    """Workers that their supervisor saw crash."""
    return (fleet.home / "up.log").read_text(errors="replace").count("crashed=True")


async def all_ready(bus: Bus, count: int = 4) -> None:
    async def ready() -> bool:
        return len(await registrations(bus)) == count

    await until(ready, f"{count} workers are registered", 60)


async def test_a_poisonous_request_takes_three_workers_at_most_and_no_other_request_with_it(
    fleet: Deployment, bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    await all_ready(bus)
    bystanders = [body(token_prompt(60, 100 + number)) for number in range(16)]
    running = [asyncio.create_task(http.post("/v1/completions", json=each)) for each in bystanders]

    async def all_are_running() -> bool:
        return sum(each.load.running for each in (await registrations(bus)).values()) == len(bystanders)

    await until(all_are_running, "all bystanders run")
    answer = await http.post("/v1/completions", json=poison(1))
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["code"] == "poisoned_request"
    assert "3 workers crashed" in answer.json()["error"]["message"]
    assert crashes(fleet) == 3
    timeline, record = await ending(bus, answer.headers["x-request-id"])
    assert record.code == "poisoned_request"
    assert [timeline.returned[attempt].poison for attempt in (1, 2, 3)] == [True, True, True]
    for asked, task in zip(bystanders, running, strict=True):
        other = await task
        assert other.status_code == 200, other.text
        assert other.json()["choices"][0]["text"] == oracle.answer(asked, TOKENS)
    assert crashes(fleet) == 3
    marks = [
        entry.headers[HEADER_SUSPECT]
        async for entry in read(bus, bus.subjects.stream("WORK"), bus.subjects.all("work"))
        if HEADER_SUSPECT in entry.headers
    ]
    assert jobs.SUSPECT in marks
    assert jobs.ALONE in marks


async def test_the_first_repeat_takes_one_worker_and_later_ones_are_refused_at_both_doors(
    fleet: Deployment, bus: Bus, http: httpx.AsyncClient
) -> None:
    await all_ready(bus)
    before = crashes(fleet)
    assert (await http.post("/v1/completions", json=poison(1))).status_code == 422
    assert crashes(fleet) == before + 1
    again = await http.post("/v1/completions", json=poison(1) | {"stream": True})
    assert again.status_code == 422
    assert "further repeats are refused" in again.text
    client = await nats.connect(fleet.state.client_nats_url)
    try:
        headers = {HEADER_REPLY_TO: (inbox := client.new_inbox())}
        reply = await client.subscribe(inbox)
        await client.jetstream().publish("ps.submit.default.tiny", json.dumps(poison(1)).encode(), headers=headers)
        refused = await reply.next_msg(timeout=30)
        assert (refused.headers or {})[HEADER_ERROR] == "poisoned_request"
        asked = await client.request("ps.ask.default.tiny", json.dumps(poison(1)).encode(), timeout=30)
        assert (asked.headers or {})[HEADER_ERROR] == "poisoned_request"
    finally:
        await client.close()
    assert crashes(fleet) == before + 1
    await all_ready(bus)
    await ok(http.post("/v1/completions", json=body(token_prompt(40, 1))))


@pytest.mark.slow  # the first two have it with one that is stored
async def test_a_poisonous_request_that_is_not_stored_is_known_in_memory(
    fleet: Deployment, bus: Bus, http: httpx.AsyncClient
) -> None:
    await all_ready(bus)
    before, asked = crashes(fleet), poison(2) | {"no_store": True}
    assert (await http.post("/v1/completions", json=asked)).status_code == 422
    assert crashes(fleet) == before + 3
    await all_ready(bus)
    assert (await http.post("/v1/completions", json=asked)).status_code == 422
    again = await http.post("/v1/completions", json=asked)
    assert again.status_code == 422
    assert "further repeats are refused" in again.text
    assert crashes(fleet) == before + 4


@pytest.mark.slow  # admission/test_poison_requests
async def test_the_next_of_a_tenant_with_several_takes_two_workers_however_it_differs(
    fleet: Deployment, bus: Bus, http: httpx.AsyncClient
) -> None:
    """Another temperature makes it another request."""
    await all_ready(bus)
    for number in range(WATCHED_FROM):
        key = f"$KV.{bus.subjects.bucket('verdicts')}.default.{number:032x}"
        await bus.js.publish(key, encode(Verdict(f"r{number}", time.time_ns())))
    before = crashes(fleet)
    answer = await http.post("/v1/completions", json=poison(1) | {"temperature": 0.5})
    assert answer.status_code == 422, answer.text
    assert "2 workers crashed" in answer.json()["error"]["message"]
    assert crashes(fleet) == before + 2
    await all_ready(bus)
    await ok(http.post("/v1/completions", json=body(token_prompt(40, 1))))
