"""An agent that moves bytes within one process and behaves as if between two.

A ``LoopbackNetwork`` connects the agents. An agent in it can be killed or stalled: a transfer posted to a stalled agent
does not complete until the agent resumes; then the bytes move even if nothing waits for them.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.agent import WORD_BYTES, CopyOp, MemoryRanges, PeerLost, TransferRejected
from penstock.workers.kv_transfer.inflight import digest
from penstock.workers.kv_transfer.transport_protocol import QUARANTINE_S, Transport
from penstock.workers.kv_transfer.transport_thread import TransportThread

VERSION = "1.0"


class LoopbackNetwork:
    """The agents that can reach each other. ``host``: of their endpoints; "" makes ``path_between`` a write."""

    def __init__(self, host: str = "loopback") -> None:
        self.host = host
        self.lock = threading.RLock()  # held while bytes move, so that after ``kill`` none do
        self.agents: dict[str, LoopbackAgent] = {}
        self._stalled: set[str] = set()

    def kill(self, name: str) -> None:
        """End an agent as if its process were killed: its memory may be freed afterwards."""
        with self.lock:
            self.agents.pop(name, None)

    def stall(self, name: str) -> None:
        with self.lock:
            self._stalled.add(name)

    def resume(self, name: str) -> None:
        with self.lock:
            self._stalled.discard(name)

    def stalled(self, name: str) -> bool:
        return name in self._stalled


@dataclass(eq=False, slots=True)
class _Posted:
    op: str
    peer: str
    move: CopyOp
    done: bool = False


class LoopbackAgent:
    """Moves CPU memory only."""

    def __init__(self, network: LoopbackNetwork, name: str, pools: Mapping[str, Memory]) -> None:
        self._network = network
        self._loaded: set[str] = set()
        self._posted: list[_Posted] = []
        self.events: tuple[int, ...] = ()
        metadata = f"loopback {name}".encode()
        self.endpoint = Endpoint(
            agent=name,
            backend="loopback",
            version=VERSION,
            pools=dict(pools),
            metadata=metadata,
            digest=digest(metadata),
            host=network.host,
        )
        self._memory = [
            (start, start + size)
            for pool in pools.values()
            for start, size in (
                (pool.base, pool.blocks * pool.block_bytes),
                (pool.generations, pool.blocks * WORD_BYTES if pool.generations else 0),
            )
        ]
        with network.lock:
            network.agents[name] = self

    def add(self, peer: Endpoint) -> None:
        if peer.metadata != f"loopback {peer.agent}".encode():
            raise TransferRejected("its metadata belong to another agent")
        if peer.agent not in self._network.agents:
            raise PeerLost("it is not there")
        self._loaded.add(peer.agent)

    def remove(self, name: str) -> None:
        self._loaded.discard(name)

    def post(self, op: str, peer: str, move: CopyOp) -> _Posted:
        with self._network.lock:
            if peer not in self._loaded:
                raise TransferRejected("it is not loaded")
            owner = self._network.agents.get(peer)
            if owner is None:
                raise PeerLost("it is not there")
            if not (self._knows(move.local) and owner._knows(move.remote)):
                raise TransferRejected("its memory description is invalid")
            posted = _Posted(op, peer, move)
            self._posted.append(posted)
            self._move(posted)
            return posted

    def done(self, handle: _Posted) -> bool:
        with self._network.lock:
            if not handle.done and handle.peer not in self._network.agents:
                raise PeerLost("it has ended")
            self._move(handle)
            return handle.done

    def release(self, handle: _Posted) -> None:
        """A transfer that is not done keeps moving bytes, as with NIXL."""
        if handle.done or handle.peer not in self._network.agents:
            self._posted.remove(handle)

    def register(self, address: int, size: int, kind: str = "cpu", device: int = 0) -> None:
        self._memory.append((address, address + size))

    def progress(self) -> None:
        with self._network.lock:
            for posted in self._posted:
                self._move(posted)

    def close(self) -> None:
        with self._network.lock:
            self._posted.clear()
            if self._network.agents.get(self.endpoint.agent) is self:
                del self._network.agents[self.endpoint.agent]

    def _knows(self, ranges: MemoryRanges) -> bool:
        return ranges.kind == "cpu" and all(
            any(low <= start and start + size <= high for low, high in self._memory)
            for start, size, _ in ranges.rows.tolist()
        )

    def _move(self, posted: _Posted) -> None:
        if posted.done or posted.peer not in self._network.agents or self._network.stalled(posted.peer):
            return
        for local, remote in zip(posted.move.local.rows.tolist(), posted.move.remote.rows.tolist(), strict=True):
            local_run, remote_run = local[0], remote[0]
            ctypes.memmove(*((local_run, remote_run) if posted.op == "READ" else (remote_run, local_run)), local[1])
        posted.done = True


def open_loopback(
    network: LoopbackNetwork,
    agent: str,
    pools: Mapping[str, Memory],
    *,
    on_renewed: Callable[[Endpoint], None] = lambda _: None,
    quarantine_s: float = QUARANTINE_S,
) -> Transport:
    """``open_transport`` for an agent of ``network``."""
    make = partial(LoopbackAgent, network, pools=pools)
    return TransportThread(make, agent, on_renewed=on_renewed, quarantine_s=quarantine_s)
