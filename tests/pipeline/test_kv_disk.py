"""A worker that starts again finds its KV in files, and its router knows that before it is asked."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.model import modeldir
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, bus_of, ending, registrations, stopped, until, words


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--workers", "0")


bus = bus_of("deployment")


@pytest.mark.slow  # engines/native/test_host_pool restarts the engine alone
async def test_a_worker_that_starts_again_has_its_cache(deployment: Deployment, bus: Bus, tmp_path: Path) -> None:
    flags = ("--engine", "native", "--model", str(modeldir.DEMO), "--kv-blocks", "120", "--threads", "1")
    flags += ("--kv-disk", str(tmp_path), "--kv-offloading-size", "0.1")
    found = []
    for _ in range(2):
        worker = deployment.also("worker", *flags)
        await asyncio.to_thread(worker.wait_for, "worker_registered")
        answer = await until(lambda: asked(deployment, bus), "the gateway knows the worker")
        timeline, _ = await ending(bus, answer["id"].removeprefix("cmpl-"))
        found.append((answer, timeline.routed[0]))
        assert await stopped([worker]) == [0]

        async def gone() -> bool:
            return not await registrations(bus)

        await until(gone, "the worker left")
    (first, _), (second, routed) = found
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 64
    assert routed.overlap_blocks == routed.decision.prompt_blocks
    (brought,) = routed.lower_tiers
    assert brought.disk_blocks == routed.overlap_blocks


async def asked(deployment: Deployment, bus: Bus) -> dict[str, Any] | None:
    (model,) = {each.model for each in (await registrations(bus)).values()}
    body = {"model": model, "prompt": words(60), "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code in (200, 404, 503), answer.text
    return dict(answer.json()) if answer.status_code == 200 else None
