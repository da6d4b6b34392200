"""Engines over two machines in the real pipeline, as two addresses of this one; their packages are stand-ins."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.infra.model.modeldir import DEMO, TINY
from penstock.workers.engines.external.runtime import children_of
from penstock.workers.session.process import EXIT_CONFIG, EXIT_ENGINE, EXIT_START
from tests import standins
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, Process, free_port

LEADER = "127.0.0.2"
WAIT_S = 60.0
FLAGS = ("--model", str(DEMO), "--max-model-len", "2048", "--max-running", "8", "--tensor-parallel-size", "4")
ENGINES = ("vllm", pytest.param("sglang", marks=pytest.mark.slow))

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(standins.real("vllm") or standins.real("sglang"), reason="counts the stand-ins' processes"),
]


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--engine", "native", "--workers", "0")


class Nodes:
    """The machines of one engine. ``one``: only computes; it has no broker."""

    def __init__(self, deployment: Deployment, folder: Path, engine: str) -> None:
        self.port = free_port()
        self._deployment = deployment
        self._folder = folder
        self._engine = engine
        self.started: list[Process] = []

    def start(self, node: int, *flags: str, engine: str = "", wait_s: float = WAIT_S) -> Process:
        argv = ["--engine", engine or self._engine, *FLAGS, "--name", self._engine, "--nodes", "2"]
        argv += ["--node-rank", str(node), "--leader-address", LEADER, "--leader-port", str(self.port)]
        argv += ["--nodes-wait-s", str(wait_s), "--drain-s", "10", "--log-format", "json", *flags]
        url = "" if node else self._deployment.state.nats_url
        log = self._folder / f"{self._engine}-{node}-{len(self.started)}.log"
        variables = {"PYTHONPATH": f"{standins.FOLDER}:{ROOT}"}
        process = Process(log, "worker", *argv, nats_url=url, **variables)
        self.started.append(process)
        return process


@pytest.fixture(params=ENGINES)
def nodes(deployment: Deployment, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(deployment, tmp_path, request.param)
    yield made
    for process in made.started:
        process.kill()


def ask(deployment: Deployment, tokens: int = 8) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 347 + 586?"}], "max_tokens": tokens}
    return httpx.post(f"{deployment.urls[0]}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def ranks(process: Process) -> list[int]:
    """Pids of a follower's processes that take part in each step."""
    return [pid for pid in children_of(process.pid) if b"nodes.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not gone(pids):
        assert time.monotonic() < deadline, "ranks of a node that has ended still run"
        time.sleep(0.05)


def test_an_engine_over_two_machines_serves_and_drains_when_any_of_them_is_asked_to_stop(
    deployment: Deployment, nodes: Nodes
) -> None:
    follower = nodes.start(1)
    follower.wait_for("waiting_for_leader")
    leader = nodes.start(0)
    leader.wait_for("worker_registered")
    assert len(ranks(follower)) == 2
    answer = ask(deployment)
    assert answer.status_code == 200, answer.text
    own = ranks(follower)
    follower.ask_to_stop()
    assert (leader.wait(), follower.wait()) == (0, 0)
    assert '"event":"draining"' in leader.log.read_text()
    until_gone(own)


@pytest.mark.slow  # external/test_nodes has the ranks
def test_a_rank_that_was_killed_elsewhere_ends_the_worker_at_once(deployment: Deployment, nodes: Nodes) -> None:
    leader, follower = nodes.start(0), nodes.start(1)
    leader.wait_for("worker_registered")
    os.kill(ranks(follower)[0], signal.SIGKILL)
    assert (leader.wait(), follower.wait()) == (EXIT_ENGINE, EXIT_ENGINE)
    assert "node 1 of 2 (127.0.0.1) has failed" in leader.log.read_text()


@pytest.mark.slow
def test_a_machine_that_is_gone_ends_the_others(deployment: Deployment, nodes: Nodes) -> None:
    leader, follower = nodes.start(0), nodes.start(1)
    leader.wait_for("worker_registered")
    follower.kill()
    assert leader.wait() == EXIT_ENGINE
    assert "node 1 of 2 (127.0.0.1) has ended, or its connection has" in leader.log.read_text()

    leader, follower = nodes.start(0), nodes.start(1)
    leader.wait_for("worker_registered")
    own = ranks(follower)
    leader.kill()
    assert follower.wait() == EXIT_START
    assert "node 0 (127.0.0.2) has ended" in follower.log.read_text()
    until_gone(own)


@pytest.mark.slow
def test_a_machine_that_is_lost_while_the_ranks_meet_ends_the_start(deployment: Deployment, nodes: Nodes) -> None:
    leader = nodes.start(0)
    leader.wait_for("waiting_for_nodes")
    follower = nodes.start(1)
    follower.wait_for("node_starts")
    follower.kill()
    assert leader.wait() in (EXIT_START, EXIT_ENGINE)  # while it starts, or a moment later
    assert "node 1 of 2" in leader.log.read_text()


@pytest.mark.slow
def test_machines_that_wait_in_vain_say_for_whom(deployment: Deployment, nodes: Nodes) -> None:
    leader = nodes.start(0, wait_s=1)
    assert leader.wait() == EXIT_START
    assert f"node 1 of 2 did not connect to {LEADER}:{nodes.port} within 1 s" in leader.log.read_text()
    follower = nodes.start(1, wait_s=1)
    assert follower.wait() == EXIT_START
    assert f"node 0 did not start the engine within 1 s ({LEADER}:{nodes.port}" in follower.log.read_text()


@pytest.mark.slow
def test_a_machine_with_another_model_is_refused_and_the_leader_waits_on(deployment: Deployment, nodes: Nodes) -> None:
    leader = nodes.start(0)
    leader.wait_for("waiting_for_nodes")
    other = nodes.start(1, "--model", str(TINY))
    assert other.wait() == EXIT_CONFIG
    assert "all nodes need the same files of the model" in other.log.read_text()
    follower = nodes.start(1)
    leader.wait_for("worker_registered")
    leader.ask_to_stop()
    assert (leader.wait(), follower.wait()) == (0, 0)
