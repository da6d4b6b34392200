"""Three nats-servers of this machine as one cluster, whose nodes a test may stop, kill and start again.

async with three_nodes(tmp_path) as cluster:
    await apply_at(cluster.url(), cluster.subjects, replicas=3)
    leader = await cluster.leader("ps_DONE")
    cluster.freeze(leader)
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from penstock.infra.nats_server.config import USERS, Cluster
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects, inbox_prefix
from tests.pipeline.support import free_port

NODES = 3
ELECTED_S = 30.0


class LocalCluster:
    """Nodes are called by their place, 0 to 2."""

    def __init__(
        self, folder: Path, namespace: str = "ps", *, make: Callable[..., EmbeddedNats] = EmbeddedNats, **options: Any
    ) -> None:
        self.subjects = Subjects(namespace)
        ports = [free_port() for _ in range(2 * NODES)]
        clients, routes = ports[:NODES], ports[NODES:]
        addresses = tuple(f"127.0.0.1:{port}" for port in routes)
        first = folder / "node-0" / "secrets.json"
        first.parent.mkdir(parents=True)
        load_secrets(first, USERS)
        self.nodes: list[EmbeddedNats] = []
        for index, (port, route) in enumerate(zip(clients, routes, strict=True)):
            home = folder / f"node-{index}"
            home.mkdir(exist_ok=True)
            if index:
                shutil.copy(first, home / "secrets.json")
            place = Cluster(f"test-{namespace}", f"node-{index}", route, addresses)
            self.nodes.append(make(home, namespace, port, cluster=place, **options))
        self._frozen: set[int] = set()

    async def start(self) -> None:
        await asyncio.gather(*(node.start() for node in self.nodes))

    async def stop(self) -> None:
        for index in list(self._frozen):
            self.thaw(index)
        for node in self.nodes:
            node.kill()  # nobody reads these stores again
        await asyncio.gather(*(node.stop() for node in self.nodes))

    def url(self, role: str = "operator", nodes: Sequence[int] = range(NODES)) -> str:
        """For ``--nats-url``: the named nodes', comma-separated."""
        return ",".join(self.nodes[index].url(role) for index in nodes)

    def freeze(self, index: int) -> None:
        """SIGSTOP: its connections stay open and nothing answers."""
        pid = self.nodes[index].pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(index)

    def thaw(self, index: int) -> None:
        self._frozen.discard(index)
        pid = self.nodes[index].pid
        assert pid
        os.kill(pid, signal.SIGCONT)

    def kill(self, index: int) -> None:
        """SIGKILL. ``restart`` brings it back on its store and ports."""
        self._frozen.discard(index)
        self.nodes[index].kill()

    async def restart(self, index: int) -> None:
        await self.nodes[index].start()

    async def client(self, index: int, role: str = "operator") -> Client:
        """A connection to this very node, which goes nowhere else."""
        client = Client()
        try:
            async with asyncio.timeout(5):
                await client.connect(
                    self.nodes[index].url(role),
                    inbox_prefix=inbox_prefix(role),
                    name=f"test-node-{index}",
                    allow_reconnect=False,
                    dont_randomize=True,
                )
        except BaseException:
            await client.close()
            raise
        return client

    async def placement(self, stream: str) -> tuple[int, list[int]]:
        """The stream's leader and its followers; waits for an election under way."""
        async with asyncio.timeout(ELECTED_S):
            while True:
                for index in range(NODES):
                    if index in self._frozen or not self.nodes[index].pid:
                        continue
                    with suppress(nats.errors.Error, OSError, TimeoutError, KeyError, ValueError):
                        return await self._ask(index, stream)
                await asyncio.sleep(0.1)

    async def leader(self, stream: str) -> int:
        return (await self.placement(stream))[0]

    async def _ask(self, index: int, stream: str) -> tuple[int, list[int]]:
        client = await self.client(index)
        try:
            reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=1.0)
            cluster = json.loads(reply.data)["cluster"]
            leader = int(cluster["leader"].rpartition("-")[2])
            return leader, [int(replica["name"].rpartition("-")[2]) for replica in cluster.get("replicas", ())]
        finally:
            await client.close()


@asynccontextmanager
async def three_nodes(folder: Path, namespace: str = "ps", **options: Any) -> AsyncIterator[LocalCluster]:
    """Running, and ended with the block."""
    cluster = LocalCluster(folder, namespace, **options)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
