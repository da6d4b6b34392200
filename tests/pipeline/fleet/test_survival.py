"""SIGKILL of each kind of process in the middle of 30 streams: every request ends once, with the undisturbed text."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any
from zlib import crc32

import httpx
import nats
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.schemas import done, tokens, usage
from penstock.schemas.subjects import HEADER_EVENT_ID, HEADER_FINAL, HEADER_MSG_ID, HEADER_REPLY_TO, HEADER_REQUEST
from penstock.schemas.tokens import PROMPT
from penstock.schemas.usage import UsageRow
from penstock.schemas.wire import pack_tokens
from tests.pipeline.support import (
    Deployment,
    Oracle,
    accepted,
    described,
    idle_workers,
    ok,
    registrations,
    token_prompt,
    until,
    words,
)

STREAMS = 30
ASLEEP_S = 5.0  # leases end after 3 s
TOKENS = 150
SLOW_MACHINE_S = 5.0  # without what is shown here, requests wait for 30 s and longer
pytestmark = pytest.mark.timeout(180)


def body(number: int) -> dict[str, Any]:
    # Some share their beginnings, so that prefix caches and steering take part; not all, or one worker may have all.
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{number % 4} " + words(40) + f" question {number}"}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


class Reader:
    """One client: reads a stream, and re-attaches with the last event's id if it breaks."""

    def __init__(self, urls: tuple[str, ...], number: int) -> None:
        self.urls = urls
        self.number = number
        self.text = ""
        self.events = 0
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.request = ""
        self.last_id = ""
        self.attached = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        url = self.urls[self.number % len(self.urls)]
        await self._read(client.stream("POST", url + "/v1/chat/completions", json=body(self.number)))
        while not self.usage:
            self.attached += 1
            assert self.attached < 300, f"{self.request} cannot be re-attached"
            url = self.urls[(self.number + self.attached) % len(self.urls)]
            headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
            await self._read(client.stream("GET", f"{url}/v1/requests/{self.request}/stream", headers=headers))
            await asyncio.sleep(0.05)  # a gateway that is being started again refuses connections

    async def _read(self, opened: Any) -> None:
        try:
            async with opened as answer:
                assert answer.status_code == 200, await answer.aread()
                self.request = answer.headers["x-request-id"]
                async for line in answer.aiter_lines():
                    self._take(line)
        except httpx.TransportError:
            assert self.request, "the connection broke before the request was accepted"

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._id = line[4:]
        elif line.startswith("data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            self.last_id = self._id  # an event counts when it is whole
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                self.text += choice["delta"].get("content", "")
                self.events += 1
                self.finish = choice["finish_reason"] or self.finish


async def used(bus: Bus) -> UsageRow:
    """What the ledger says was used, once it counts all records."""
    subjects, row = bus.subjects, UsageRow(0, "")

    async def counted() -> bool:
        last = await get_last(bus, subjects.stream("DONE"), subjects.all("done"), newest=True)
        newest = await get_last(bus, subjects.stream("USAGE"), subjects.all("usage"), newest=True)
        return last is None or (newest is not None and usage.decode(newest.data).last >= last.seq)

    await until(counted, "all records are counted")
    async for entry in read(bus, subjects.stream("USAGE"), subjects.all("usage")):
        for each in usage.decode(entry.data).rows:
            row = usage.added(row, each)
    return row


async def disturb(fleet: Deployment, bus: Bus, role: str) -> list[Reader]:
    """Start the streams, kill one process of ``role`` when they are well under way, and read them to the end.

    What their clients are told that they used is what the ledger gets.
    """
    before = await used(bus)
    readers = [Reader(fleet.urls, number) for number in range(STREAMS)]
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        runs = [asyncio.create_task(reader.run(client)) for reader in readers]

        async def under_way() -> bool:
            return sum(reader.events for reader in readers) > STREAMS * TOKENS // 10

        await until(under_way, "the streams begin")
        victim = next(process for process in fleet.state.processes if process.role == role)
        os.kill(victim.pid, signal.SIGKILL)
        assert not all(reader.finish for reader in readers), "killed too late to disturb anything"
        await asyncio.gather(*runs)

        async def restarted() -> bool:
            if not all(process.pid and process.pid != victim.pid for process in fleet.state.processes):
                return False
            try:
                return all([(await client.get(url + "/health/ready")).status_code == 200 for url in fleet.urls])
            except httpx.TransportError:
                return False

        await until(restarted, f"another {role} is ready", within_s=30)
    after, told = await used(bus), [reader.usage for reader in readers]
    assert after.requests - before.requests == len(readers)
    assert after.prompt - before.prompt == sum(each["prompt_tokens"] for each in told)
    assert after.completion - before.completion == sum(each["completion_tokens"] for each in told)
    assert after.cached - before.cached == sum(each["prompt_tokens_details"]["cached_tokens"] for each in told)
    return readers


async def check(fleet: Deployment, bus: Bus, oracle: Oracle, readers: list[Reader]) -> list[done.Done]:
    for reader in readers:
        assert reader.text == oracle.answer(body(reader.number), TOKENS), f"stream {reader.number}"
        assert reader.finish == "length"
    return await ended_once(fleet, bus, {reader.request for reader in readers})


async def ended_once(fleet: Deployment, bus: Bus, requests: set[str]) -> list[done.Done]:
    """The terminal events of these requests: one each. Afterwards no worker holds a block."""
    subjects = bus.subjects
    ends: list[done.Done] = []

    async def all_ended() -> bool:
        ends.clear()
        async for entry in read(bus, subjects.stream("DONE"), subjects.all("done")):
            event = done.decode(entry.data)
            if isinstance(event, done.Done) and event.request in requests:
                ends.append(event)
        return {event.request for event in ends} == requests

    await until(all_ended, "terminal events")
    assert max(Counter(event.request for event in ends).values()) == 1
    assert {event.code for event in ends} == {""}
    await until(lambda: idle_workers(bus), "all blocks are free")
    return ends


async def test_a_killed_workers_requests_continue_elsewhere_behind_the_last_token(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    ends = await check(fleet, fleet_bus, oracle, await disturb(fleet, fleet_bus, "worker"))
    assert any(event.attempt > 1 for event in ends)


@pytest.mark.slow  # so does an answer above
async def test_scoring_a_prompt_continues_elsewhere_behind_what_was_streamed(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    """Killed in the midst of a prompt: the next worker's scores follow the last stored ones, as if nothing had been."""
    prompt = token_prompt(30_000, 77)
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 3, "prompt_logprobs": 1, "n": 2}
    subjects = fleet_bus.subjects

    async def scored() -> dict[int, int]:
        """By attempt, how many positions the token stream has."""
        found: Counter[int] = Counter()
        async for entry in read(fleet_bus, subjects.stream("TOKENS"), subjects.all("tokens")):
            for item in tokens.decode(entry.data).items:
                if item.choice == PROMPT and item.request == request.id:
                    found[item.attempt] += len(item.logprobs or ())
        return dict(found)

    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={**asked, "user": "scorer"}))
        (request,) = await until(lambda: accepted(fleet_bus, "scorer"), "the request is accepted")
        await until(lambda: scored(), "the first scores")
        (worker,) = [
            entry.subject.rpartition(".")[2]
            async for entry in read(fleet_bus, subjects.stream("WORK"), subjects.all("work"))
            if entry.headers.get(HEADER_MSG_ID) == f"{request.id}:1"
        ]
        os.kill((await registrations(fleet_bus))[worker].pid, signal.SIGKILL)
        answer = await asking
    assert answer.status_code == 200, answer.text

    def compare() -> None:
        for choice in answer.json()["choices"]:
            assert choice["text"] == oracle.answer(asked, 3)
            found = described(choice["prompt_logprobs"], prompt, 1)
        rng = random.Random(5)
        for at in (1, 2, 511, 512, len(prompt) - 1, *rng.choices(range(1, len(prompt)), k=200)):
            state = crc32(pack_tokens(prompt[:at]))
            assert found[at - 1] == oracle.vocabulary.score(state, prompt[at], 1)

    await asyncio.to_thread(compare)  # seconds, in which the broker's pings must be answered
    scores = await scored()
    assert set(scores) == {1, 2}
    assert scores[1] + scores[2] == len(prompt) - 1, "the second worker began behind the first"
    (end,) = await ended_once(fleet, fleet_bus, {request.id})
    assert end.attempt == 2
    assert [(each.attempt, each.worker, each.lost) for each in end.timings.earlier_workers] == [(1, worker, True)]

    async def restarted() -> bool:
        return len(await registrations(fleet_bus)) == 2

    await until(restarted, "another worker is ready", within_s=30)


async def test_a_killed_router_loses_nothing(fleet: Deployment, fleet_bus: Bus, oracle: Oracle) -> None:
    ends = await check(fleet, fleet_bus, oracle, await disturb(fleet, fleet_bus, "router"))
    assert {event.attempt for event in ends} == {1}


async def test_a_killed_gateways_clients_continue_at_another_one(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    readers = await disturb(fleet, fleet_bus, "gateway")
    await check(fleet, fleet_bus, oracle, readers)
    assert any(reader.attached for reader in readers)


async def test_a_killed_broker_comes_back_with_everything(fleet: Deployment, fleet_bus: Bus, oracle: Oracle) -> None:
    await check(fleet, fleet_bus, oracle, await disturb(fleet, fleet_bus, "nats"))


async def test_answers_continue_when_a_machine_wakes_up_that_slept_for_longer_than_any_lease(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    """As after ``docker pause``, or with a laptop's lid."""
    readers = [Reader(fleet.urls, number) for number in range(STREAMS)]
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        runs = [asyncio.create_task(reader.run(client)) for reader in readers]

        async def under_way() -> bool:
            return sum(reader.events for reader in readers) > STREAMS * TOKENS // 10

        await until(under_way, "the streams begin")
        pids = [
            *(process.pid for process in fleet.state.processes),
            fleet.pid,
        ]  # the broker's and, last, the launcher's
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            assert not all(reader.finish for reader in readers), "too late to disturb anything"
            await asyncio.sleep(ASLEEP_S)
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*runs)
    await check(fleet, fleet_bus, oracle, readers)
    assert pids[:-1] == [process.pid for process in fleet.state.processes], "nothing was started again"


async def test_a_killed_gateways_nats_submissions_are_answered_by_another_one(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    nc = await nats.connect(fleet.state.client_nats_url)
    try:
        answers = [Answer() for _ in range(STREAMS)]
        for number, answer in enumerate(answers):
            inbox = nc.new_inbox()
            await nc.subscribe(inbox, cb=answer.take)
            await nc.jetstream().publish(
                "ps.submit.tiny", json.dumps(body(number)).encode(), headers={HEADER_REPLY_TO: inbox}
            )

        async def under_way() -> bool:
            return sum(len(answer.pieces) for answer in answers) > STREAMS * TOKENS // 10

        await until(under_way, "the answers begin")
        assert not all(answer.final for answer in answers)
        for process in fleet.state.processes:  # both: whichever answers must be replaced
            if process.role == "gateway":
                os.kill(process.pid, signal.SIGKILL)

        async def complete() -> bool:
            return all(answer.final for answer in answers)

        await until(complete, "all answers", within_s=60)
        for number, answer in enumerate(answers):
            assert "".join(answer.pieces.values()) == oracle.answer(body(number), TOKENS)
        await ended_once(fleet, fleet_bus, {answer.request for answer in answers})
    finally:
        await nc.close()


class Answer:
    """What came on one reply subject; pieces by event id, since a second gateway begins anew."""

    def __init__(self) -> None:
        self.pieces: dict[str, str] = {}
        self.final = False
        self.request = ""

    async def take(self, message: Any) -> None:
        headers = message.headers
        event = json.loads(message.data)
        assert "error" not in event, event
        self.request = headers[HEADER_REQUEST]
        piece = "".join(choice["delta"].get("content", "") for choice in event["choices"])
        event_id = headers[HEADER_EVENT_ID]
        assert self.pieces.setdefault(event_id, piece) == piece, "the same event twice, with another content"
        self.final |= HEADER_FINAL in headers


async def longest_wait(fleet: Deployment, strike: signal.Signals) -> float:
    """Of 40 short requests that come while a router is struck."""
    victim = next(process for process in fleet.state.processes if process.role == "router")
    waited: list[float] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        began = time.monotonic()
        short = {"model": "tiny", "prompt": token_prompt(20, 900 + number), "max_tokens": 1, "temperature": 0}
        await ok(client.post(fleet.urls[0] + "/v1/completions", json=short))
        waited.append(time.monotonic() - began)

    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        os.kill(victim.pid, strike)
        try:
            tasks = []
            for number in range(40):
                tasks.append(asyncio.create_task(ask(client, number)))
                await asyncio.sleep(0.075)
            await asyncio.gather(*tasks)
        finally:
            with suppress(ProcessLookupError):  # its supervisor kills a router that stands still
                os.kill(victim.pid, signal.SIGCONT)
    return max(waited)


async def test_a_stopped_router_holds_up_no_request_for_more_than_five_seconds(fleet: Deployment) -> None:
    """The broker gives it requests until its connection counts as dead, after 3 s; each comes again after 1.5 s."""
    assert await longest_wait(fleet, signal.SIGSTOP) < 5.0 + SLOW_MACHINE_S
