"""Opens the transport of a worker. Needs numpy and NIXL, which only ``penstock[native]`` installs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from schemas.transfer import Endpoint, Memory
from workers.kv_transfer.agent import Agent
from workers.kv_transfer.base import QUARANTINE_S, Transport, TransportUnavailable
from workers.kv_transfer.loopback import LoopbackAgent, LoopbackNetwork
from workers.kv_transfer.transport_thread import TransportThread


def open_transport(
    backend: Literal["auto", "nixl", "loopback"],
    agent: str,
    pools: Mapping[str, Memory],
    *,
    on_renewed: Callable[[Endpoint], None] = lambda _: None,
    quarantine_s: float = QUARANTINE_S,
    network: LoopbackNetwork | None = None,
) -> Transport:
    """Open a transport for these pools, which must stay where they are until the process ends.

    Args:
        backend: "auto" is NIXL.
        agent: a name that no other incarnation of any worker ever has.
        on_renewed: called in the transport's thread when the agent had to be replaced, with the endpoint that peers
            need from then on.
        quarantine_s: how long a transfer that timed out may stay unfinished before the agent is replaced.
        network: connects the agents of "loopback".

    Raises:
        TransportUnavailable: what to install, or what failed when it was tried.
    """
    make: Callable[[str], Agent]
    if backend == "loopback":
        if network is None:
            raise TransportUnavailable("the loopback transport joins workers of one process only; it needs a network")
        make = partial(_loopback, network, pools)
    else:
        make = partial(_nixl, pools)
    return TransportThread(make, agent, on_renewed=on_renewed, quarantine_s=quarantine_s)


def _loopback(network: LoopbackNetwork, pools: Mapping[str, Memory], name: str) -> Agent:
    return LoopbackAgent(network, name, pools)


def _nixl(pools: Mapping[str, Memory], name: str) -> Agent:
    from workers.kv_transfer.nixl import NixlAgent
    from workers.kv_transfer.nixl_library import load

    return NixlAgent(load(), name, pools)
