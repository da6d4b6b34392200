"""A cluster of brokers of our own, of which one at a time is away."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Self

from infra.broker.main import apply_at
from infra.broker.server import EmbeddedNats
from tests.chaos.plan import BROKER
from tests.cluster_support import NODES, LocalCluster
from tests.tls_support import Pair, TlsNats

AWAY_S = 2.0  # of a broker that was killed
CATCH_UP_S = 4.0


class Brokers:
    """Three; ``whole``: none of them is away."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.names = [f"{BROKER}-{index}" for index in range(NODES)]
        self.whole = True

    @classmethod
    async def started(cls, home: Path, pair: Pair | None = None) -> Self:
        """``pair``: they speak TLS with this certificate."""
        cluster = LocalCluster(home, make=partial(TlsNats, pair=pair) if pair else EmbeddedNats)
        await cluster.start()
        await apply_at(cluster.url(), cluster.subjects, replicas=NODES)
        return cls(cluster)

    async def stop(self) -> None:
        await self._cluster.stop()

    @property
    def url(self) -> str:
        return self._cluster.url()

    @property
    def client_url(self) -> str:
        """Of the tenant "default"."""
        return self._cluster.url("client")

    @property
    def pids(self) -> dict[str, int]:
        return {name: node.pid for name, node in zip(self.names, self._cluster.nodes, strict=True) if node.pid}

    async def back(self, name: str, hold_s: float) -> None:
        """Once it is hit: start it again if it ended, and let it catch up before another one is hit."""
        self.whole = False
        node = self._cluster.nodes[self.names.index(name)]
        try:
            await asyncio.sleep(AWAY_S + hold_s)
            if not hold_s:
                await asyncio.wait_for(node.wait(), AWAY_S * 10)
                await node.start()
            await asyncio.sleep(CATCH_UP_S)
        finally:
            self.whole = True
