"""Which prefill worker can transfer KV to a decode worker, and at what cost. Pure.

KV blocks move only between pools of the same layout and backend. A pair costs what the prefill worker costs plus the
transfer, and a transfer has one of three distances. The cheapest partner of a decode worker is therefore the best on
its host, the best with RDMA, or the best of all: one pass over the prefill workers and one over the decode workers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock.router.state.load import RoutingTarget
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import DecisionInputs, Link

NEAR, MEDIUM, FAR = 0.02, 0.1, 0.5  # cost of moving a token, as a share of computing it
_PATHS = {NEAR: "on the same host", MEDIUM: "over RDMA", FAR: "over the network"}

TransferKind = tuple[str, str, int, int, str]


def transfer_kind(registration: Registration) -> TransferKind | None:
    """Workers of the same kind can transfer KV to each other; None: this worker has no transfer endpoint."""
    endpoint = registration.transfer
    if endpoint is None:
        return None
    pool = endpoint.pools.get("kv")
    layout, size = (pool.layout, pool.block_bytes) if pool is not None else ("", 0)
    return (endpoint.backend, layout, size, registration.block_size, registration.revision)


def distance(source: Registration, target: Registration) -> float:
    """NEAR, MEDIUM or FAR; both workers must have an endpoint."""
    one, two = source.transfer, target.transfer
    assert one is not None
    assert two is not None
    if one.host and one.host == two.host:
        return NEAR
    return MEDIUM if one.rdma and two.rdma else FAR


def describe_path(source: Registration, target: Registration) -> str:
    """The distance in words."""
    return _PATHS[distance(source, target)]


def links(registrations: Iterable[Registration | None]) -> tuple[Link, ...]:
    """The workers of a score table as its record has them, so that pairs can be decided again. None: it has left."""
    kinds: dict[TransferKind, int] = {}
    hosts: dict[str, int] = {}
    links = []
    for each in registrations:
        endpoint, kind = (each.transfer, transfer_kind(each)) if each is not None else (None, None)
        role = each.role if each is not None else ""
        if endpoint is None or kind is None:
            links.append(Link(role))
            continue
        host = hosts.setdefault(endpoint.host, len(hosts) + 1) if endpoint.host else 0
        links.append(Link(role, kinds.setdefault(kind, len(kinds) + 1), host, endpoint.rdma))
    return tuple(links)


def with_pairs(inputs: DecisionInputs, registrations: Sequence[Registration | None]) -> DecisionInputs:
    """The inputs of a decision with what decides about pairs, for the workers of its score table."""
    present = [(at, each) for at, each in enumerate(registrations) if each is not None]
    return msgspec.structs.replace(
        inputs,
        links=links(registrations),
        pair_only=tuple(at for at, each in present if each.pair_only),
        on_gpu=tuple(at for at, each in present if each.transfer is not None and each.transfer.gpu),
    )


class _Cheapest:
    """The lowest costs among the prefill workers of one kind."""

    __slots__ = ("any", "hosts", "rdma")

    def __init__(self) -> None:
        self.any = self.rdma = float("inf")
        self.hosts: dict[str, float] = {}

    def add(self, registration: Registration, cost: float) -> None:
        endpoint = registration.transfer
        assert endpoint is not None
        self.any = min(self.any, cost)
        if endpoint.rdma:
            self.rdma = min(self.rdma, cost)
        if endpoint.host:
            self.hosts[endpoint.host] = min(cost, self.hosts.get(endpoint.host, cost))


class ScoredTarget(NamedTuple):
    """A prefill worker and the cost of computing the prompt there."""

    target: RoutingTarget
    cost: float


class PrefillPool:
    """Prefill workers as partners of decode workers.

    Args:
        available: those that can take the request now.
        full: those that could take it later.
        cost: of computing the prompt at a prefill worker.
        weight: of the transfer.
    """

    def __init__(
        self,
        available: Sequence[RoutingTarget],
        full: Iterable[RoutingTarget],
        cost: Callable[[RoutingTarget], float],
        weight: float,
    ) -> None:
        self._weight = weight
        self._cheapest: dict[TransferKind, _Cheapest] = {}
        self.scored = [ScoredTarget(target, cost(target)) for target in available]
        for target, value in self.scored:
            kind = transfer_kind(target.registration)
            if kind is not None:
                cheapest = self._cheapest.get(kind)
                if cheapest is None:
                    cheapest = self._cheapest[kind] = _Cheapest()
                cheapest.add(target.registration, value)
        self._full = {kind for target in full if (kind := transfer_kind(target.registration)) is not None}

    def __bool__(self) -> bool:
        """Whether any of these workers can transfer KV, now or later."""
        return bool(self._cheapest or self._full)

    def cheapest(self, decode: Registration, blocks: int) -> float | None:
        """The cost of the best partner including the transfer of ``blocks``; None: there is none now."""
        endpoint, kind = decode.transfer, transfer_kind(decode)
        if endpoint is None or kind is None or (lowest := self._cheapest.get(kind)) is None:
            return None
        step = self._weight * blocks * decode.block_size
        cost = lowest.any + FAR * step
        if endpoint.rdma:
            cost = min(cost, lowest.rdma + MEDIUM * step)
        if endpoint.host in lowest.hosts:
            cost = min(cost, lowest.hosts[endpoint.host] + NEAR * step)
        return cost

    def has_full_partner(self, decode: Registration) -> bool:
        """Whether a partner exists that is only full."""
        return transfer_kind(decode) in self._full

    def partners(self, decode: Registration, blocks: int) -> list[ScoredTarget]:
        """All partners, each with its cost including the transfer of ``blocks``."""
        kind = transfer_kind(decode)
        step = self._weight * blocks * decode.block_size
        return [
            ScoredTarget(target, cost + distance(target.registration, decode) * step)
            for target, cost in self.scored
            if kind is not None and transfer_kind(target.registration) == kind
        ]
