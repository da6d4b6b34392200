"""A cluster of brokers of our own, of which one at a time is away; and how much of a broker's memory is in use."""

import asyncio
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.launch.readiness import get
from tests.chaos.plan import BROKER
from tests.cluster_support import NODES, LocalCluster
from tests.tls_support import Pair, TlsNats

AWAY_S = 2.0  # of a broker that was killed
CATCH_UP_S = 4.0
COLLECTIONS = 3  # its pools of buffers are empty after two
PROFILE_S = 20.0
HEAP_BYTES = 1024  # a stored request, of what the broker refers to
HEAP_SLACK = 8 << 20  # tables and buffers that are as large as they were ever needed
SETTLE_S = 12.0  # for which the broker keeps each block (8 MiB) that was written or read


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
    def logs(self) -> dict[str, Path]:
        return {name: node.log_path for name, node in zip(self.names, self._cluster.nodes, strict=True)}

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


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Every nats-server that starts meanwhile, here or in a process of ours, tells about its heap (``live_heap``)."""
    binary, path = find_server(), os.environ["PATH"]
    wrapper = folder / "profiled" / "nats-server"
    wrapper.parent.mkdir()
    tell = 'case "$1" in -c) set -- "$@" --profile -1 ;; esac'  # on a port that is in its log
    wrapper.write_text(f'#!/bin/sh\n{tell}\nexec {shlex.quote(str(binary))} "$@"\n')
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{wrapper.parent}{os.pathsep}{path}"
    find_server.cache_clear()
    try:
        yield
    finally:
        os.environ["PATH"] = path
        find_server.cache_clear()


def heap_problems(before: Mapping[str, int], after: Mapping[str, int], stored: int) -> list[str]:
    """Brokers that refer to more than before by more than so many stored requests may take (``live_heap``)."""
    return [
        f"{name} uses {after[name] >> 20} MiB after {stored} more requests, {was >> 20} before, "
        f"{(after[name] - was) / max(1, stored):.0f} bytes a request"
        for name, was in sorted(before.items())
        if name in after and after[name] - was > HEAP_SLACK + HEAP_BYTES * stored
    ]


async def live_heap(log: Path) -> int:
    """Bytes that a nats-server still refers to once its garbage is collected, but for blocks of streams' files.

    Resident memory says less: it has garbage, up to as much as is in use, and what was given back to the runtime only.
    Blocks (of up to 8 MiB) are in memory for ten seconds after they were read or written: those of leases always.

    Args:
        log: of a ``profiled`` one.
    """
    ports = re.findall(r"profiling port: (\d+)", await asyncio.to_thread(log.read_text, errors="replace"))
    page = b""
    for _ in range(COLLECTIONS):
        status, page = await get("127.0.0.1", int(ports[-1]), "/debug/pprof/heap?debug=1&gc=1", timeout_s=PROFILE_S)
        assert status == 200, f"no profile of the broker with the log {log}"
    return heap_of(page.decode())


def heap_of(profile: str) -> int:
    """Of a Go heap profile as text (``debug=1``)."""
    used = re.search(r"^# HeapAlloc = (\d+)$", profile, re.MULTILINE)
    rate = re.match(r"heap profile: .* @ heap/(\d+)\n", profile)
    assert used is not None
    assert rate is not None
    sampled_every = int(rate[1]) / 2
    blocks = 0.0
    for part in profile.split("\n\n"):
        found = re.search(r"^(\d+): (\d+) \[.*\] @ 0x", part, re.MULTILINE)
        if found is not None and int(found[1]) and "server.getMsgBlockBuf+" in part:
            size = int(found[2]) / int(found[1])
            blocks += int(found[2]) / (1 - math.exp(-size / sampled_every))  # those that no sample was taken of, too
    return int(used[1]) - int(blocks)
