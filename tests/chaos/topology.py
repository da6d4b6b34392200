"""The deployments that can be attacked: flags of ``penstock up``, how often what is hit, and what else there is."""

from typing import NamedTuple

from penstock.launch.plan import cell_of
from tests.chaos.plan import BROKER

WORKERS = ("worker", "prefill", "decode", "encode", "embed", "diffusion")
ROLES = (*WORKERS, "router", "gateway")
GROUP = "cell-"  # before the number of a cell: all of its workers


class Topology(NamedTuple):
    """Flags of ``penstock up``, how often what is hit, and the model as clients name it."""

    flags: tuple[str, ...]
    targets: dict[str, float]
    model: str
    real: bool = False
    images: bool = False
    tokens: int = 90
    cluster: bool = False  # three brokers with three copies of each stream, of which one at a time is lost
    tls: bool = False  # of gateways, and of the brokers of a cluster
    embed: str = ""  # name of the embedding model
    painter: bool = False  # there are workers that make images
    keys: bool = False  # every request needs an API key, and some have one with limits, or none
    clock_s: float = 0.0  # how far apart the clocks of our processes are, at most

    @property
    def links(self) -> bool:
        """Whether processes reach the broker over links that can stall; a cluster tells them further addresses."""
        return not self.cluster

    @property
    def disk(self) -> bool:
        """Whether the broker's disk can be full: its supervisor, which mends that, is ours only with a lone one."""
        return not self.cluster

    @property
    def lone_workers(self) -> bool:
        """Whether a model of several has only one worker."""
        return len(self.names("worker")) == self.flags.count("--model") > 1

    def names(self, role: str) -> list[str]:
        """Processes of a role, or of workers of a role, as ``penstock up`` names them."""
        flag = f"--{role}" if f"--{role}" in self.flags else f"--{role}s"
        count = int(self.flags[self.flags.index(flag) + 1]) if flag in self.flags else 0
        found = [f"{role}-{number}" for number in range(count)]
        models = [name for at, name in zip(self.flags, self.flags[1:], strict=False) if at == "--model"]
        if role not in WORKERS or len(models) < 2:
            return found
        return [f"{model.partition('=')[0]}-{name}" for model in models for name in found]

    @property
    def gateways(self) -> int:
        return int(self.flags[self.flags.index("--gateways") + 1])

    @property
    def cells(self) -> int:
        return int(self.flags[self.flags.index("--cells") + 1]) if "--cells" in self.flags else 1

    @property
    def brokers(self) -> list[str]:
        """Those that ``penstock up`` starts: one for each cell, home first."""
        return [BROKER, *(f"{BROKER}-{cell}" for cell in range(1, self.cells))]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The workers of each cell, which may be hit together, by the name of the group."""
        workers = [name for role in WORKERS for name in self.names(role)]
        return {
            f"{GROUP}{cell}": [name for name in workers if cell_of(name, self.cells) == cell]
            for cell in range(self.cells)
        }

    @property
    def links_of(self) -> dict[str, tuple[str, str]]:
        """By the name of a link: the process, and the broker that it reaches over it. Gateways reach all."""
        found = {}
        for name in [name for role in ROLES for name in self.names(role)]:
            for cell, broker in enumerate(self.brokers):
                if name.startswith("gateway"):
                    found[f"{name}>{broker}" if cell else name] = name, broker
                elif cell_of(name, self.cells) == cell:
                    found[name] = name, broker
        return found


TOPOLOGIES = {
    "aggregated": Topology(
        (
            *("--mock-speedup", "1", "--workers", "3", "--embed", "1", "--embed-served-name", "vectors"),
            *("--gateways", "2", "--routers", "2", "--kv-blocks", "4000"),
        ),
        {"worker": 5, "embed": 1, "gateway": 2, "router": 2, BROKER: 1},
        "tiny",
        embed="vectors",
        keys=True,
    ),
    # Two models, each with a worker: what the first one's loses before the first token runs on the second.
    "fallback": Topology(
        (
            *("--mock-speedup", "1", "--workers", "1", "--model", "tiny", "--model", "spare=tiny"),
            *("--fallback", "tiny=spare", "--fallback-after-s", "5", "--gateways", "2", "--routers", "2"),
            *("--kv-blocks", "4000"),
        ),
        {"tiny-worker": 5, "spare-worker": 2, "gateway": 2, "router": 2, BROKER: 1},
        "tiny",
    ),
    "cluster": Topology(
        ("--mock-speedup", "1", "--workers", "3", "--gateways", "2", "--routers", "2", "--kv-blocks", "4000"),
        {"worker": 2, "gateway": 1, "router": 1, BROKER: 4},
        "tiny",
        cluster=True,
    ),
    "tls": Topology(
        (
            *("--mock-speedup", "1", "--prefill", "1", "--decode", "1", "--workers", "1", "--embed", "1"),
            *("--embed-served-name", "vectors", "--gateways", "3", "--routers", "2", "--kv-blocks", "4000"),
            *("--local-prefill-tokens", "64", "--handoff-lease-s", "10"),
        ),
        {"prefill": 2, "decode": 2, "worker": 2, "embed": 2, "gateway": 3, "router": 2, BROKER: 3},
        "tiny",
        cluster=True,
        tls=True,
        embed="vectors",
        keys=True,
    ),
    "pd": Topology(
        (
            *("--mock-speedup", "1", "--prefill", "2", "--decode", "2", "--encode", "1", "--workers", "1"),
            *("--model", "demo-vision", "--gateways", "2", "--routers", "2", "--kv-blocks", "4000"),
            *("--local-prefill-tokens", "64", "--prefill-queue-tokens", "500", "--handoff-lease-s", "10"),
        ),
        {"prefill": 3, "decode": 3, "worker": 1, "encode": 1, "gateway": 2, "router": 2, BROKER: 1},
        "demo-vision",
        images=True,
        clock_s=30,
    ),
    # Two cells with a broker each: in both a pair and a worker for all stages, and a router; home has a second router.
    "cells": Topology(
        (
            *("--cells", "2", "--mock-speedup", "1", "--prefill", "2", "--decode", "2", "--workers", "2"),
            *("--gateways", "2", "--routers", "3", "--kv-blocks", "4000"),
            *("--local-prefill-tokens", "64", "--handoff-lease-s", "10"),
        ),
        {"worker": 2, "prefill": 1, "decode": 1, "gateway": 2, "router": 2, BROKER: 3, GROUP: 3},
        "tiny",
        keys=True,
    ),
    # Images are made by a real pipeline of two tiny networks.
    "pictures": Topology(
        (
            *("--mock-speedup", "1", "--workers", "2", "--embed", "1", "--embed-served-name", "vectors"),
            *("--diffusion", "2", "--diffusion-served-name", "painter", "--gateways", "2", "--routers", "2"),
        ),
        {"worker": 2, "embed": 1, "diffusion": 3, "gateway": 2, "router": 2, BROKER: 1},
        "tiny",
        embed="vectors",
        painter=True,
        clock_s=30,
    ),
    # Without step times, the engines step in their workers' event loops; answers are long, or few are interrupted.
    "event-loop": Topology(
        (
            *("--mock-speedup", "0", "--prefill", "1", "--decode", "1", "--workers", "2"),
            *("--gateways", "2", "--routers", "2", "--kv-blocks", "4000"),
            *("--local-prefill-tokens", "64", "--handoff-lease-s", "10"),
        ),
        {"worker": 5, "prefill": 2, "decode": 2, "gateway": 2, "router": 2, BROKER: 1},
        "tiny",
        tokens=300,
    ),
    "vision": Topology(
        (
            *("--engine", "native", "--model", "demo-vision", "--threads", "1", "--kv-blocks", "600"),
            *("--prefill", "1", "--decode", "1", "--encode", "1", "--workers", "1"),
            *("--gateways", "2", "--routers", "2"),
            *("--local-prefill-tokens", "16", "--handoff-lease-s", "10"),
        ),
        {"prefill": 2, "decode": 2, "worker": 2, "encode": 1, "gateway": 2, "router": 2, BROKER: 1},
        "demo-vision",
        real=True,
        images=True,
        tokens=40,
    ),
}
