"""Three nats-servers, streams with three replicas: any node and any stream's leader may go under load.

One case by default; ``PENSTOCK_CLUSTER=all`` kills and stops the leader of each stream in turn (three minutes).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.launch.nats import apply_at
from tests.cluster_support import NODES, LocalCluster
from tests.conftest import outside
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.fleet.test_no_store import traces
from tests.pipeline.fleet.test_survival import Reader, check
from tests.pipeline.support import Deployment, Oracle, token_prompt, until

STREAMS = 30
STOPPED_S = 12.0  # longer than any election
ALL = ("ps_TOKENS", "ps_DONE", "ps_WORK", "ps_REQUESTS", "ps_KV", "KV_ps_workers")
CASES = [(how, name) for name in ALL for how in ("kill", "stop")]
LONG = os.environ.get("PENSTOCK_CLUSTER") == "all"
if not LONG:
    CASES = [("kill", "ps_TOKENS")]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("cluster"))
    outside(made.start())
    try:
        outside(apply_at(made.url(), made.subjects, replicas=NODES))
        yield made
    finally:
        outside(made.stop())


@pytest.fixture(scope="module")
def fleet(cluster: LocalCluster, new_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "0.2", "--workers", "2", "--gateways", "2", "--routers", "2", "--no-store-grace-s", "1")
    return new_deployment("--nats-url", cluster.url(), *flags)


@pytest.fixture
async def bus(cluster: LocalCluster) -> AsyncIterator[Bus]:
    made = await connect(cluster.url(), role="operator", name="test")
    yield made
    await made.close()


@pytest.mark.parametrize(("how", "stream"), CASES)
async def test_a_stream_that_loses_its_leader_costs_no_request_its_end_or_a_token(
    cluster: LocalCluster, fleet: Deployment, bus: Bus, oracle: Oracle, how: str, stream: str
) -> None:
    leader = await cluster.leader(stream)
    readers = [Reader(fleet.urls, number) for number in range(STREAMS)]
    async with httpx.AsyncClient(trust_env=False, timeout=90, limits=httpx.Limits(max_connections=None)) as client:
        runs = [asyncio.create_task(reader.run(client)) for reader in readers]

        async def under_way() -> bool:
            return sum(reader.events for reader in readers) > STREAMS * 20

        await until(under_way, "the streams begin")
        assert not all(reader.finish for reader in readers), "too late to disturb anything"
        await (killed(cluster, leader, runs) if how == "kill" else halted(cluster, leader, runs))
    await check(fleet, bus, oracle, readers)


async def test_a_request_with_no_store_leaves_nothing_on_any_node(
    cluster: LocalCluster, fleet: Deployment, bus: Bus, oracle: Oracle
) -> None:
    """Nor in the nodes' replication logs, and its answer outlives a node."""
    asked = {"model": "tiny", "prompt": token_prompt(40, 77), "temperature": 0, "max_tokens": 24}
    asked["no_store"] = asked["ignore_eos"] = True
    wanted = traces(oracle, asked)
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=30) as client:
        answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == oracle.answer(asked, 24)
    info = await bus.js.stream_info(bus.subjects.stream("MEMORY_TOKENS"))
    assert (info.config.num_replicas, str(info.config.storage)) == (3, "memory")
    assert info.state.messages
    for node in cluster.nodes:
        for path in (node.data_dir / "nats").rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not [each for each in wanted if each in data], path


async def killed(cluster: LocalCluster, node: int, runs: list[asyncio.Task[None]]) -> None:
    """Away until all answers are whole."""
    cluster.kill(node)
    try:
        await asyncio.gather(*runs)
    finally:
        await cluster.restart(node)


async def halted(cluster: LocalCluster, node: int, runs: list[asyncio.Task[None]]) -> None:
    """SIGSTOP for a while: the node wakes up deposed."""
    cluster.freeze(node)
    try:
        await asyncio.wait(runs, timeout=STOPPED_S)
    finally:
        cluster.thaw(node)
    await asyncio.gather(*runs)
