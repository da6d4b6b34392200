"""A streamed chat passes few modules: who follows it through the code reads each of them."""

import time
from pathlib import Path

import httpx
import pytest

from penstock.infra.broker.server import EmbeddedNats
from tests.conftest import outside
from tests.pipeline.request_path import FOLDER, Call, read_calls, without
from tests.pipeline.support import MODEL, MODEL_NAME, Process, free_port

ROLES = ("router", "worker", "gateway")
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 48, "stream": True}
IDLE_S = 6.0  # what happens more seldom is not taken for the request's

MOST_MODULES = 106
MOST_OF_ROUTER = 20
DEEPEST = 20


def stream(port: int) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def enter(folder: Path, phase: str) -> None:
    (folder / "phase.part").write_text(phase)
    (folder / "phase.part").replace(folder / "phase")


def recorded(folder: Path, phase: str) -> dict[str, list[Call]]:
    """The calls of a phase that has ended."""
    files = {role: folder / f"{role}.{phase}.json" for role in ROLES}
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files.values()):
        assert time.monotonic() < deadline, f"{sorted(each.name for each in folder.iterdir())}"
        time.sleep(0.02)
    return {role: read_calls(file) for role, file in files.items()}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """What each process calls for a streamed chat, without what it calls when it is idle."""
    folder = tmp_path_factory.mktemp("calls")
    server = EmbeddedNats(folder / "nats")
    outside(server.start())
    made = Process(folder / "streams.log", "streams", "apply", nats_url=server.url("operator"))
    assert made.wait() == 0, made.log.read_text()
    enter(folder, "")
    port = free_port()
    flags = {
        "worker": ("--engine", "mock", "--mock-speedup", "0", "--model", str(MODEL)),
        "router": (),
        "gateway": ("--http-port", str(port), "--model", str(MODEL)),
    }
    ready = {"worker": "worker_registered", "router": "router_open", "gateway": "revision_serving"}
    started = []
    for role in ROLES:
        log = folder / f"{role}.log"
        argv = (role, "--log-format", "json", *flags[role])
        module = "tests.pipeline.request_path"
        started.append(Process(log, *argv, nats_url=server.url(role), module=module, **{FOLDER: str(folder)}))
    try:
        for role, process in zip(ROLES, started, strict=True):
            process.wait_for(ready[role])
        for _ in range(2):
            stream(port)
        enter(folder, "idle")
        recorded(folder, "start")
        time.sleep(IDLE_S)
        enter(folder, "chat")
        idle = recorded(folder, "idle")
        stream(port)
        enter(folder, "end")
        found = recorded(folder, "chat")
    finally:
        for process in started:
            process.kill()
        outside(server.stop())
    return {role: without(found[role], idle[role]) for role in ROLES}


def test_a_streamed_chat_passes_few_modules(calls: dict[str, list[Call]]) -> None:
    modules = {role: sorted({call.module for call in made}) for role, made in calls.items()}
    for role, passed in modules.items():
        print(f"{role}: {len(passed)}", *passed, sep="\n  ")
    everything = {module for passed in modules.values() for module in passed}
    print(f"distinct: {len(everything)}")
    assert {"gateway", "router", "workers"} <= {module.partition("/")[0] for module in everything}
    assert len(everything) <= MOST_MODULES
    assert sum(module.startswith("router/") for module in modules["router"]) <= MOST_OF_ROUTER


def test_its_own_stack_is_not_deep(calls: dict[str, list[Call]]) -> None:
    for role, made in calls.items():
        deepest = max(made, key=lambda call: call.depth)
        print(f"{role}: {deepest.depth} at {deepest.module}:{deepest.line} {deepest.name}")
        assert deepest.depth <= DEEPEST
