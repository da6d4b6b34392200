"""Workers on vLLM in the real pipeline: its stand-in, or with ``PENSTOCK_CONTRACT_REAL=vllm`` the package itself."""

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.worker_leases import registrations
from penstock.infra.model.modeldir import DEMO, MODELS
from penstock.log_tools.requests.leases import leases
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.fleet import ConnectorUse
from tests import standins
from tests.demo_model.shared_weights import join
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.shared.test_prefix_reuse import cached, chosen, published
from tests.pipeline.support import (
    ROOT,
    Deployment,
    Process,
    bus_of,
    ending,
    free_port,
    http_of,
    idle_workers,
    metrics,
    ok,
    stopped,
    until,
)
from tests.workers.engines.native.pictures import COUNT, TOKENS, expected, picture, prompt

REAL = os.environ.get("PENSTOCK_CONTRACT_REAL") == "vllm"
START_S = 240.0 if REAL else 60.0
BLOCK = 32
TRIES = 5  # to kill a worker before it has computed an answer
VISION = MODELS / "demo-vision"
FLAGS = ("--engine", "vllm", "--model", str(DEMO), "--max-model-len", "2048", "--max-running", "8", "--threads", "1")
EXACT = ("--dtype", "float32", "--override-engine-args", '{"enforce_eager": true}')
QUESTION = "The code of the red door is 4711. The code of the blue door is 1234. " * 3 + "What is 347 + 586?"

pytestmark = [
    pytest.mark.timeout(900 if REAL else 180),
    pytest.mark.skipif(REAL and not standins.real("vllm"), reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if REAL:
        return {}
    return {"PYTHONPATH": f"{standins.FOLDER}:{ROOT}", "VLLM_STANDIN_KV": str(tmp_path_factory.mktemp("kv"))}


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--engine", "native", "--workers", "0", "--local-prefill-tokens", "16")


bus = bus_of("deployment")
http = http_of("deployment")


class Fleet:
    """Two whole workers, started when they are first asked for; one may be killed."""

    def __init__(self, deployment: Deployment, variables: dict[str, str]) -> None:
        self.ports = {name: free_port() for name in ("one", "two")}
        self.workers = {
            name: deployment.also(
                "worker", *FLAGS, *EXACT, "--name", name, "--metrics-port", str(port), "--drain-s", "3", **variables
            )
            for name, port in self.ports.items()
        }
        for worker in self.workers.values():
            worker.wait_for("worker_registered", START_S)

    def of(self, name: str) -> Process:
        """The one whose registered name begins so."""
        return self.workers[name.split("-")[0].split(".")[0]]


@pytest.fixture(scope="module")
def fleet(deployment: Deployment, variables: dict[str, str]) -> Iterator[Fleet]:
    made = Fleet(deployment, variables)
    yield made
    for worker in made.workers.values():
        worker.stop()


@pytest.fixture(scope="module", autouse=True)
def reference(fleet: Fleet, deployment: Deployment) -> str:
    """What one whole worker answers to ``QUESTION``; asked before a test stops them."""
    answer = httpx.post(deployment.urls[0] + "/v1/chat/completions", json=chat(QUESTION), timeout=60, trust_env=False)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def session_of(pid: int) -> set[int]:
    """Processes of a worker's session that still run: its own, and whatever its engine started."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == pid and state != "Z":
                found.add(int(folder.name))
    return found


async def all_end(workers: list[Process]) -> None:
    """All that these workers have started; the last of them a moment after the worker."""

    async def ended() -> bool:
        return not any(session_of(worker.pid) for worker in workers)

    await until(ended, "the end of the engines' processes", within_s=30)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def long_answer(text: str) -> dict[str, Any]:
    return chat(text, max_tokens=500 if REAL else 80, ignore_eos=True, stream=True)


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await ok(http.post("/v1/chat/completions", json={**body, "stream": False}))
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def piece(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line[6:])
    assert "error" not in event, event
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def test_what_was_recorded_gives_the_same_tokens_again_one_at_a_time(
    fleet: Fleet, deployment: Deployment, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert len(fleet.workers) == 2
    ids = []
    for number, question in enumerate(("What is 347 + 586?", "Spell strawberry.", QUESTION)):
        for temperature in (0, 0.8):
            body = chat(question, max_tokens=24, seed=number) | {"temperature": temperature}
            answer = await ok(http.post("/v1/chat/completions", json=body))
            ids.append(str(answer.headers["x-request-id"]))
    async with await connect(deployment.state.nats_url, role="operator", name="test") as bus:
        for each in ids:
            await ending(bus, each)
    report = tmp_path / "report.json"
    flags = ["--speed", "max", "--concurrency", "1", "--data-dir", str(deployment.data_dir), "--json", str(report)]
    assert await asyncio.to_thread(main, ["replay", *ids, *flags]) == 0
    found = json.loads(report.read_text())
    assert (found["requests"], found["outcomes"]["same"]) == (6, 6)
    assert found["compared_tokens"] > 6


async def test_answers_stream_with_logprobs_and_usage(fleet: Fleet, reference: str, http: httpx.AsyncClient) -> None:
    assert reference
    body = chat("What is 347 + 586?", max_tokens=24, logprobs=True, top_logprobs=2)
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    (choice,) = answer["choices"]
    listed = choice["logprobs"]["content"]
    assert len(listed) in (answer["usage"]["completion_tokens"], answer["usage"]["completion_tokens"] - 1)
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in listed)
    assert listed[0]["top_logprobs"][0]["token"] == listed[0]["token"]
    text, pieces = "", 0
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            text += (said := piece(line))
            pieces += bool(said)
    assert text == choice["message"]["content"]
    assert pieces > 1


async def test_the_router_learns_of_blocks_from_the_engine_s_events(
    fleet: Fleet, bus: Bus, http: httpx.AsyncClient
) -> None:
    body = {"model": "demo", "prompt": [(7 + i * 13) % 1200 for i in range(6 * BLOCK + 5)], "max_tokens": 3}
    decisions = []
    for round in range(2):
        answer = await http.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True})
        timeline, _ = await ending(bus, answer.headers["x-request-id"])
        await published(bus, timeline.request.digests)
        decisions.append(timeline.routed[-1].decision)
        assert cached(answer) == (6 * BLOCK if round else 0)
    first, second = decisions
    assert second.chosen == first.chosen
    assert (chosen(first).overlap_blocks, chosen(second).overlap_blocks, second.prompt_blocks) == (0, 6, 6)


async def test_metrics_of_the_engine_are_beside_ours(fleet: Fleet, http: httpx.AsyncClient) -> None:
    await whole(http, chat("Hello", max_tokens=4))
    pages = [await metrics(f"http://127.0.0.1:{port}") for port in fleet.ports.values()]
    assert all(any(name.startswith("penstock_worker") for name in page) for page in pages)
    if REAL:
        tokens = [
            value for page in pages for name, value in page.items() if name.startswith("vllm:generation_tokens_t")
        ]
        assert sum(tokens) > 0


async def test_a_client_that_leaves_ends_its_request_in_the_engine(
    fleet: Fleet, bus: Bus, http: httpx.AsyncClient
) -> None:
    body = long_answer("Tell me all.") | {"max_tokens": 500}  # more than are computed before it is noticed
    async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if piece(line):
                break
        request = stream.headers["x-request-id"]
    _, done = await ending(bus, request)
    assert done.code == "cancelled"
    await until(lambda: idle_workers(bus), "all blocks are free")


async def killed_at_work(fleet: Fleet, bus: Bus, request: str) -> tuple[Process, set[int]] | None:
    """The worker of a request and its processes, killed; None if the worker had computed the whole answer."""
    sessions = {worker.pid: session_of(worker.pid) for worker in fleet.workers.values()}
    running = set().union(*sessions.values())
    for pid in running:
        os.kill(pid, signal.SIGSTOP)  # nothing is computed while it is asked how far they are
    try:
        timeline = await read_timeline(bus, request)
        if timeline.done is not None:
            return None
        victim = fleet.of(timeline.routed[-1].decision.chosen)
        victim.kill()
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return victim, sessions[victim.pid]


async def test_a_killed_worker_s_answer_continues_elsewhere_and_its_processes_end(
    fleet: Fleet, bus: Bus, http: httpx.AsyncClient
) -> None:
    body = long_answer("What are the codes of the doors?")
    wanted = await whole(http, body)
    for _ in range(TRIES):
        text, killed = "", None
        async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            request = stream.headers["x-request-id"]
            async for line in stream.aiter_lines():
                text += piece(line)
                if killed is None and len(text) > 20 and not (killed := await killed_at_work(fleet, bus, request)):
                    break
        if killed:
            break
    assert killed, "each answer was computed before its worker could be killed"
    assert text == wanted
    _, done = await ending(bus, request)
    assert (done.code, done.attempt > 1) == ("", True)
    victim, processes = killed
    assert victim.wait() == -signal.SIGKILL
    assert victim.pid in processes
    assert len(processes) > 1
    await all_end([victim])


async def test_a_worker_that_is_asked_to_ends_with_all_its_processes(
    fleet: Fleet, bus: Bus, http: httpx.AsyncClient
) -> None:
    running = [worker for worker in fleet.workers.values() if session_of(worker.pid)]
    assert running
    assert await stopped(running) == [0] * len(running)
    await all_end(running)


async def test_prefill_and_decode_hand_off_by_vllm_s_own_connector(
    fleet: Fleet, reference: str, deployment: Deployment, variables: dict[str, str], bus: Bus, http: httpx.AsyncClient
) -> None:
    await stopped([worker for worker in fleet.workers.values() if session_of(worker.pid)])
    roles = {
        role: deployment.also("worker", *FLAGS, *EXACT, "--role", role, "--name", role, "--drain-s", "3", **variables)
        for role in ("prefill", "decode")
    }
    for worker in roles.values():
        await asyncio.to_thread(worker.wait_for, "worker_registered", START_S)
    lost: list[str] = []
    for round in range(2):
        answer = await ok(http.post("/v1/chat/completions", json=chat(QUESTION)))
        timeline, done = await ending(bus, answer.headers["x-request-id"])
        assert not done.code
        lost += [each.decision.reason for each in timeline.routed[1:]]
        if not round:
            assert [stage.role for stage in timeline.routed[0].decision.route] == ["prefill", "decode"]
            assert done.worker.startswith("decode")
        assert answer.json()["choices"][0]["message"]["content"] == reference
    assert "handoff_state_unusable" not in roles["decode"].log.read_text(errors="replace")

    async def nothing_held() -> bool:
        now = time.time_ns()
        return await idle_workers(bus) and not any(each.is_open(now) for each in (await leases(bus, now)).values())

    await until(nothing_held, "all is let go of", within_s=40)
    connectors = [each.load.connector for each in await registrations(bus) if each.role in roles]
    assert connectors == [ConnectorUse("NixlConnector")] * 2, "it says no more"
    ends = {lease.last.state for lease in (await leases(bus, time.time_ns())).values()}
    # A machine without CPU time for 3 s costs workers their lease, and an attempt; what was pinned for it then expires.
    assert ends == {"released"} or (lost and ends <= {"released", "expired"}), lost
    assert await stopped(list(roles.values())) == [0, 0]
    await all_end(list(roles.values()))


@pytest.mark.slow  # engines/vllm/test_images has the engine alone, disagg/test_disaggregation the stages
@pytest.mark.parametrize(
    "roles", [("aggregated",), ("prefill", "decode"), ("encode", "prefill", "decode")], ids="-".join
)
async def test_images_are_seen_and_their_blocks_are_known_by_them(
    deployment: Deployment,
    variables: dict[str, str],
    bus: Bus,
    http: httpx.AsyncClient,
    tmp_path: Path,
    roles: tuple[str, ...],
) -> None:
    """The same question about the same picture comes from the cache; about another one, it does not."""
    model = "-".join(("vision", *roles))
    join(VISION, tmp_path / model)
    flags = [str(tmp_path / model) if flag == str(DEMO) else flag for flag in FLAGS]
    names = {role: f"sees-as-{role}" for role in roles}
    encoder = (
        "--engine",
        "native",
        "--model",
        str(tmp_path / model),
        "--dtype",
        "float32",
    )  # vLLM takes its embeddings
    workers = [
        deployment.also(
            "worker",
            *(encoder if role == "encode" else (*flags, *EXACT)),
            *("--role", role, "--name", name, "--drain-s", "3"),
            **variables,
        )
        for role, name in names.items()
    ]
    for worker in workers:
        await asyncio.to_thread(worker.wait_for, "worker_registered", START_S)
    known = await http.get("/v1/models")
    assert model in [each["id"] for each in known.json()["data"]]

    async def asked(number: int) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(picture(number)).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe the picture."}]
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        answer = await ok(http.post("/v1/chat/completions", json=body | {"max_tokens": COUNT, "ignore_eos": True}))
        timeline, done = await ending(bus, answer.headers["x-request-id"])
        assert not done.code
        went = [stage.role for stage in timeline.routed[0].decision.route]
        if number not in seen:  # what is cached may need one worker only
            assert went == (list(roles) if len(roles) > 1 else [])
        seen.add(number)
        found: dict[str, Any] = answer.json()
        return found

    seen: set[int] = set()
    first, other, again = [await asked(number) for number in (1, 2, 1)]
    texts = [each["choices"][0]["message"]["content"] for each in (first, other, again)]
    tokenizer = Tokenizer.from_file(str(VISION / "tokenizer.json"))
    assert texts[0] == texts[2] == tokenizer.decode(expected(prompt(1), (1,)))
    assert texts[1] == tokenizer.decode(expected(prompt(1), (2,)))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS // BLOCK * BLOCK
    assert (other["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) < TOKENS
    assert await stopped(workers) == [0] * len(workers)
