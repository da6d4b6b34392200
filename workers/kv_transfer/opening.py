"""Opens the transport of a worker. Needs numpy and NIXL, which only ``penstock[native]`` installs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.agent import Agent
from penstock.workers.kv_transfer.base import QUARANTINE_S, Transport
from penstock.workers.kv_transfer.transport_thread import TransportThread


def open_transport(
    backend: Literal["auto", "nixl"],
    agent: str,
    pools: Mapping[str, Memory],
    *,
    on_renewed: Callable[[Endpoint], None] = lambda _: None,
    quarantine_s: float = QUARANTINE_S,
) -> Transport:
    """Open a transport for these pools, which must stay where they are until the process ends.

    Args:
        backend: NIXL is the only one, so "auto" selects it.
        agent: a name that no other incarnation of any worker ever has.
        on_renewed: called in the transport's thread when the agent had to be replaced, with the endpoint that peers
            need from then on.
        quarantine_s: how long a transfer that timed out may stay unfinished before the agent is replaced.

    Raises:
        TransportUnavailable: what to install, or what failed when it was tried.
    """
    return TransportThread(partial(_nixl, pools), agent, on_renewed=on_renewed, quarantine_s=quarantine_s)


def _nixl(pools: Mapping[str, Memory], name: str) -> Agent:
    from penstock.workers.kv_transfer.nixl import NixlAgent
    from penstock.workers.kv_transfer.nixl_library import load

    return NixlAgent(load(), name, pools)
