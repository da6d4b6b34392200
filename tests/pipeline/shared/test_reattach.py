"""Streams of a killed gateway go on at another one together, without hurting those whom it serves already."""

import asyncio
import json
import re
from contextlib import AsyncExitStack, suppress

import httpx
import pytest

from tests.chaos.reattach import measure, rss_mb
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, connected, joined, parse_sse, until


@pytest.mark.slow  # fleet/test_survival has a few of them
@pytest.mark.timeout(180)
async def test_the_streams_of_a_killed_gateway_resume_at_once_and_together(new_deployment: NewDeployment) -> None:
    deployment = new_deployment("--mock-speedup", "0.5", "--gateways", "2", "--max-running", "256")
    figures = await measure(deployment, 80, tokens=100, bystanders=4)
    assert figures.refused == 0
    assert figures.incomplete == 0
    assert figures.next_max_s < 10.0  # 0.7 s on an idle machine
    assert figures.gap_s < 2.0  # of those who were here before; 0.1 s on an idle machine
    assert figures.grown_mb < 60.0


async def test_clients_that_do_not_read_cost_little_and_get_the_rest_when_they_do(
    fast: Deployment, oracle: Oracle
) -> None:
    """Ten of them ask for as much as the model can say; one reads on, and one waits until its deadline."""
    [gateway, *_] = [process for process in fast.state.processes if process.role == "gateway"]
    asked = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 40_000, "ignore_eos": True}

    async with AsyncExitStack() as stack:
        before = rss_mb(gateway.pid)
        clients = []
        for number in range(10):
            more = {"timeout_s": 6} if number == 9 else {"max_tokens": 60_000} if number == 0 else {}
            reader, writer = await stack.enter_async_context(connected(fast.urls[0]))
            data = json.dumps({**asked, **more, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            clients.append(reader)
        answered = await clients[0].readuntil(b"\r\n\r\n")
        request_id = answered.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

        async def has_ended() -> bool:
            async with httpx.AsyncClient(base_url=fast.urls[1], trust_env=False, timeout=30) as http:
                return (await http.get(f"/v1/requests/{request_id}")).json()["state"] == "done"

        await until(has_ended, "the answer is in the log", 60)
        assert rss_mb(gateway.pid) - before < 60
        text = b""
        async with asyncio.timeout(60):
            while b"data: [DONE]" not in text:
                part = await clients[0].read(1 << 20)
                assert part
                text += part
            with suppress(ConnectionError):
                late = b""  # cut off at its deadline, or finished before
                while b"data: [DONE]" not in late and (part := await clients[9].read(1 << 20)):
                    late = late[-20:] + part
    shown = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + text).removesuffix(b"\r\n0\r\n\r\n")
    events = parse_sse(shown.partition(b"data: [DONE]")[0] + b"data: [DONE]\n\n")
    assert joined(events) == oracle.answer(asked, 60_000)
