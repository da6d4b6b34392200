"""``penstock inspect``: everything about a request, read by another process from the log alone."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from penstock.infra.bus.connection import Bus
from penstock.schemas.requests import new_request_id
from tests.pipeline.support import ROOT, Deployment, ending, words

TEXT: dict[str, Any] = {"model": "tiny", "prompt": words(200, 501), "temperature": 0, "max_tokens": 9}


async def inspect(request_id: str, data_dir: Path, *flags: str) -> tuple[int, str]:
    """Exit status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "inspect", request_id, "--data-dir", str(data_dir), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"},
    )
    async with asyncio.timeout(30):
        said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_a_finished_request_is_shown_with_its_score_table_and_its_texts(
    fast: Deployment, http: httpx.AsyncClient, bus: Bus
) -> None:
    await http.post("/v1/completions", json=TEXT)
    answer = await http.post("/v1/completions", json={**TEXT, "priority": "interactive"})
    timeline, end = await ending(bus, answer.headers["x-request-id"])
    status, said = await inspect(answer.json()["id"], fast.data_dir, "--text")
    assert status == 0, said
    assert f"tokens      {end.worker}: choice 0: " in said
    assert answer.json()["choices"][0]["text"] in said
    assert TEXT["prompt"] in said
    assert answer.headers["x-request-id"] in said
    assert "class interactive" in said
    (made_with,) = [line for line in said.splitlines() if line.startswith("revision ")]
    ran = end.timings.made_with
    assert ran is not None
    assert end.timings.router == timeline.routed[-1].decision.router != ""
    assert ran.revision == timeline.routed[-1].decision.revision != ""
    assert made_with.startswith(f"revision {ran.revision}, engine mock ({ran.build}), temperature 0.0, seed ")
    assert ran.build.startswith("penstock ")
    assert "in mode kv" in said
    assert "at most 9 out" in said
    [routed] = timeline.routed
    assert len(routed.decision.candidates) == 2
    rows = {cells[0]: cells[1:] for line in said.splitlines() if (cells := line.replace(" ←", "").split())}
    for candidate in routed.decision.candidates:
        overlap = f"{candidate.overlap_blocks}/{routed.decision.prompt_blocks}"
        assert rows[candidate.worker][:2] == [f"{candidate.score:,.2f}", overlap]
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert f"prompt {usage['prompt_tokens']} tokens ({cached} from the cache), output 9 tokens" in said
    assert f"ended ok on attempt 1 at {end.worker}" in said
    for phase in ("request", "route", "aggregated", "wait", "prompt", "generate"):
        assert any(line.split()[:1] == [phase] for line in said.splitlines()), said


async def test_what_ran_beside_a_request_is_shown_by_the_beginning_of_its_id(
    fast: Deployment, http: httpx.AsyncClient, bus: Bus
) -> None:
    answers = await asyncio.gather(*(http.post("/v1/completions", json={**TEXT, "max_tokens": 400}) for _ in range(6)))
    ids = [answer.headers["x-request-id"] for answer in answers]
    ends = [(await ending(bus, request_id))[1] for request_id in ids]
    worker = max((end.worker for end in ends), key=[end.worker for end in ends].count)
    there = [end for end in ends if end.worker == worker]
    status, said = await inspect(there[0].request[:-1], fast.data_dir, "--neighbours", "--json")
    assert status == 0, said
    (beside,) = json.loads(said)["neighbours"]["workers"]
    assert beside["worker"] == worker
    overlapping = {
        end.request for end in there[1:] if end.timings.started_ns < there[0].timings.ended_ns < end.timings.ended_ns
    }
    assert overlapping <= {each["id"] for each in beside.get("requests", ())}
    assert sum(beside["parts"].values()) == len(beside["requests"])


async def test_a_failed_request_is_shown_with_its_reason(fast: Deployment, http: httpx.AsyncClient, bus: Bus) -> None:
    answer = await http.post("/v1/completions", json={**TEXT, "worker": "nobody"})
    request_id = answer.headers["x-request-id"]
    await ending(bus, request_id)
    status, said = await inspect(request_id, fast.data_dir)
    assert status == 0
    assert "invalid_request" in said
    assert "unknown_worker" in said


async def test_a_request_that_is_not_in_the_log_or_no_id_at_all(fast: Deployment) -> None:
    (unknown, said), (nonsense, _) = await asyncio.gather(
        inspect(new_request_id(), fast.data_dir), inspect("nonsense", fast.data_dir)
    )
    assert unknown == 1
    assert "no request" in said
    assert nonsense == 1


async def test_without_a_broker_it_says_how_to_reach_one(tmp_path: Path) -> None:
    status, said = await inspect(new_request_id(), tmp_path, "--nats-url", "nats://127.0.0.1:9")
    assert status == 1
    assert "penstock nats" in said
