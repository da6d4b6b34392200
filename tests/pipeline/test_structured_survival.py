"""Structured output through a handoff of KV and the death of the worker that writes it."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import jsonschema
import pytest

from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, joined, ok, parse_sse

pytestmark = pytest.mark.timeout(120)

NUMBERS = 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": NUMBERS}},
    "required": ["numbers"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count. " * 40}],
    "structured_outputs": {"json": SCHEMA},
    "temperature": 1,
    "seed": 3,
    "n": 2,
    "max_tokens": 400,
    "stream": True,
}


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--model", "demo", "--mock-speedup", "0.5", "--prefill", "1", "--decode", "2"),
        *("--local-prefill-tokens", "16"),
    )


async def test_a_killed_decode_workers_answer_continues_and_is_the_undisturbed_one(fleet: Deployment) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        undisturbed = await ok(http.post("/v1/chat/completions", json=BODY))
        raw, killed = b"", 0
        async with http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            async for part in answer.aiter_bytes():
                raw += part
                if not killed and raw.count(b"data: ") > NUMBERS:
                    killed = await _kill_the_writer(http, answer.headers["x-request-id"], fleet)
    assert killed
    for choice in range(2):
        text = joined(parse_sse(raw), choice)
        assert text == joined(parse_sse(undisturbed.content), choice)
        jsonschema.validate(json.loads(text), SCHEMA)


async def _kill_the_writer(http: httpx.AsyncClient, request: str, fleet: Deployment) -> int:
    """Kill all decode workers, one after the other: one of them writes the answer."""
    pids = [each.pid for each in fleet.state.processes if each.name.startswith("decode") and each.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0)
    return len(pids)
