"""Prefill and decode workers on SGLang's stand-in in the real pipeline: they meet in a room, for short prompts, too."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import TINY
from penstock.log_tools.requests.leases import leases
from penstock.schemas.wire import unpack_tokens
from tests import standins
from tests.pipeline.support import ROOT, Deployment, Process, bus_of, ending, idle_workers, ok, until

FLAGS = ("--engine", "sglang", "--model", str(TINY), "--max-model-len", "512", "--max-running", "4", "--threads", "1")
NIXL = standins.FOLDER / "sglang" / "_standin" / "path"
PROMPT = [(7 + i * 13) % 1200 for i in range(75)]
CACHED = 64  # of its tokens, in full blocks

pytestmark = pytest.mark.skipif(standins.real("sglang"), reason="the real one needs a GPU for each of the two")


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    """What the model answers to ``PROMPT``, computed here."""
    with standins.installed():
        from tensorrt_llm._standin.model import load  # type: ignore[import-not-found, unused-ignore]

        model = load(Path(TINY))
        cache, tokens = model.kv([]), list(PROMPT)
        new = tokens[:]
        for _ in range(6):
            tokens.append(int(model.forward(new, cache, [], every=False)[-1].argmax()))
            new = tokens[-1:]
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def pair(
    wanted: list[int], empty: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Process]]:
    variables = {
        "PYTHONPATH": f"{standins.FOLDER}:{NIXL}:{ROOT}",
        "SGLANG_STANDIN_KV": str(tmp_path_factory.mktemp("kv")),
    }
    workers = {
        role: empty.also("worker", *FLAGS, "--role", role, "--name", role, **variables)
        for role in ("prefill", "decode")
    }
    for worker in workers.values():
        worker.wait_for("worker_registered", 60)
    yield workers
    for worker in workers.values():
        worker.stop()


own_bus = bus_of("empty")


@pytest.mark.slow  # engines/sglang/test_handoff has both engines
async def test_a_request_runs_on_both_and_none_alone(
    wanted: list[int], pair: dict[str, Process], empty: Deployment, own_bus: Bus
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=empty.urls[0], trust_env=False, timeout=60) as http:

        async def takes_requests() -> bool:
            short = body | {"prompt": [3] * 8, "max_tokens": 1}
            return (await http.post("/v1/completions", json=short)).status_code == 200

        await until(takes_requests, "requests that other modules left waiting have ended")
        for cached in (0, CACHED):
            answer = await ok(http.post("/v1/completions", json=body | {"n": 2 if cached else 1}))
            timeline, done = await ending(own_bus, answer.headers["x-request-id"])
            assert [stage.role for stage in timeline.routed[0].decision.route] == ["prefill", "decode"]
            assert (done.code, done.attempt, done.worker.split("-")[0]) == ("", 1, "decode")
            assert [list(unpack_tokens(choice.tokens)) for choice in done.choices] == [wanted] * len(done.choices)
            assert done.usage.cached == cached

        async def let_go() -> bool:
            now = time.time_ns()
            return await idle_workers(own_bus) and not any(
                each.is_open(now) for each in (await leases(own_bus, now)).values()
            )

        await until(let_go, "all is let go of", within_s=40)
        os.kill(pair["prefill"].pid, signal.SIGKILL)
        left = await http.post("/v1/completions", json=body | {"timeout_s": 3})
        assert left.status_code in (503, 504), left.text  # nobody is there who could compute a prompt
    os.kill(pair["decode"].pid, signal.SIGQUIT)  # what SGLang's processes send when they fail
    assert pair["decode"].wait() == 70
    assert "a process of SGLang has failed" in pair["decode"].log.read_text(errors="replace")
