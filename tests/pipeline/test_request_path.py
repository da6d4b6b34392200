"""A streamed chat passes few modules: who follows it through the code reads each of them.

``python -m tests.pipeline.test_request_path`` writes the list of them into ARCHITECTURE.md.
"""

import itertools
import re
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from tests.conftest import outside
from tests.pipeline.request_path import FOLDER, ROOT, Call, in_all, read_calls, without
from tests.pipeline.support import MODEL, MODEL_NAME, Process, free_port

ROLES = ("router", "worker", "gateway")
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 48, "stream": True}
LOG_LINES = "configs/logs.py"  # on a loaded machine, processes say that they are late
CHATS = ("first", "second", "third")  # a snapshot of caches may take as long as two on a loaded machine
IDLE_S = 6.0  # what happens more seldom is not taken for the request's

MOST_MODULES = 80
MOST_OF_ROUTER = 18
DEEPEST = 12

PAGE = ROOT / "ARCHITECTURE.md"
LIST = re.compile(r"(<!-- made by [^>]*test_request_path[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


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


def trace(folder: Path) -> dict[str, list[Call]]:
    """What each process calls for a streamed chat, without what it calls when it is idle, or not for each."""
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
        phases = {}
        for phase, then in itertools.pairwise(("idle", *CHATS, "end")):
            if phase in CHATS:
                stream(port)
            enter(folder, then)
            phases[phase] = recorded(folder, phase)
    finally:
        for process in started:
            process.kill()
        outside(server.stop())
    always = {role: without(in_all(*(phases[chat][role] for chat in CHATS)), phases["idle"][role]) for role in ROLES}
    return {role: [call for call in made if call.module != LOG_LINES] for role, made in always.items()}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    return trace(tmp_path_factory.mktemp("calls"))


def passed(calls: dict[str, list[Call]]) -> dict[str, list[str]]:
    """The modules that each process passes."""
    return {role: sorted({call.module for call in made}) for role, made in calls.items()}


def table(modules: dict[str, list[str]]) -> str:
    """The list for ARCHITECTURE.md: a row for each top-level folder."""
    rows = ["", "| folder | modules |", "|---|---|"]
    paths = sorted({module.removesuffix(".py") for some in modules.values() for module in some})
    for folder, members in itertools.groupby(paths, lambda path: path.partition("/")[0]):
        rows.append(f"| `{folder}/` | {', '.join(f'`{path[len(folder) + 1 :]}`' for path in members)} |")
    return "\n".join([*rows, "", ""])


def listed(text: str) -> set[str]:
    """The modules in a list that ``table`` made."""
    rows = re.findall(r"^\| `([^`]+/)` \| (.*) \|$", text, re.MULTILINE)
    return {f"{folder}{name}.py" for folder, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_a_streamed_chat_passes_few_modules(calls: dict[str, list[Call]]) -> None:
    modules = passed(calls)
    for role, names in modules.items():
        print(f"{role}: {len(names)}", *names, sep="\n  ")
    everything = {module for names in modules.values() for module in names}
    print(f"distinct: {len(everything)}")
    assert {"gateway", "router", "workers"} <= {module.partition("/")[0] for module in everything}
    assert len(everything) <= MOST_MODULES
    assert sum(module.startswith("router/") for module in modules["router"]) <= MOST_OF_ROUTER


def test_its_own_stack_is_not_deep(calls: dict[str, list[Call]]) -> None:
    for role, made in calls.items():
        deepest = max(made, key=lambda call: call.depth)
        print(f"{role}: {deepest.depth} at {deepest.module}:{deepest.line} {deepest.name}")
        assert deepest.depth <= DEEPEST


def test_the_architecture_lists_the_modules_that_a_streamed_chat_passes(calls: dict[str, list[Call]]) -> None:
    """Run ``python -m tests.pipeline.test_request_path`` if it does not."""
    made = LIST.search(PAGE.read_text(encoding="utf-8"))
    assert made is not None
    found = {module for names in passed(calls).values() for module in names}
    assert found - listed(made[0]) == set()
    assert len(listed(made[0]) - found) <= 4  # what few chats do without, depending on how busy the machine is


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        new = table(passed(trace(Path(temporary))))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(LIST.sub(lambda found: found[1] + new + found[2], text), encoding="utf-8")
