"""Who may hand KV to whom, and what the way costs: the best prefill worker for each decode worker. Pure.

Blocks move only between pools of one layout over one backend. The cost of a pair is a sum of what the prefill worker
has to do and of the way, and the way has only three lengths; so the best partner is found among the best of a host,
the best with RDMA and the best of all, in one pass over the prefill workers and one over the decode workers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from router.load_tracker import RoutingTarget
from schemas.fleet import Registration

NEAR, MEDIUM, FAR = 0.02, 0.1, 0.5  # moving a block, as a share of computing it
_WAYS = {NEAR: "on the same host", MEDIUM: "over RDMA", FAR: "over the network"}

Kind = tuple[str, str, int, int, str]


def kind_of(registration: Registration) -> Kind | None:
    """Workers of one kind can hand KV to each other; None: this one can to nobody."""
    endpoint = registration.transfer
    if endpoint is None:
        return None
    pool = endpoint.pools.get("kv")
    layout, size = (pool.layout, pool.block_bytes) if pool is not None else ("", 0)
    return (endpoint.backend, layout, size, registration.block_size, registration.revision)


def distance(source: Registration, decode: Registration) -> float:
    """NEAR, MEDIUM or FAR; both have an endpoint."""
    one, two = source.transfer, decode.transfer
    assert one is not None
    assert two is not None
    if one.host and one.host == two.host:
        return NEAR
    return MEDIUM if one.rdma and two.rdma else FAR


def way(source: Registration, decode: Registration) -> str:
    """The distance in words."""
    return _WAYS[distance(source, decode)]


class _Best:
    """The cheapest prefill workers of one kind."""

    __slots__ = ("any", "hosts", "rdma")

    def __init__(self) -> None:
        self.any = self.rdma = float("inf")
        self.hosts: dict[str, float] = {}

    def take(self, registration: Registration, cost: float) -> None:
        endpoint = registration.transfer
        assert endpoint is not None
        self.any = min(self.any, cost)
        if endpoint.rdma:
            self.rdma = min(self.rdma, cost)
        if endpoint.host:
            self.hosts[endpoint.host] = min(cost, self.hosts.get(endpoint.host, cost))


class Scored(NamedTuple):
    """A prefill worker and what it costs to compute the prompt there."""

    target: RoutingTarget
    cost: float


class Partners:
    """Prefill workers, as decode workers see them.

    Args:
        open_: those that can take the request now.
        full: those that will be able to, later.
    """

    def __init__(
        self,
        open_: Sequence[RoutingTarget],
        full: Iterable[RoutingTarget],
        cost: Callable[[RoutingTarget], float],
        weight: float,
    ) -> None:
        self._weight = weight
        self._kinds: dict[Kind, _Best] = {}
        self.scored = [Scored(target, cost(target)) for target in open_]
        for target, value in self.scored:
            kind = kind_of(target.registration)
            if kind is not None:
                best = self._kinds.get(kind)
                if best is None:
                    best = self._kinds[kind] = _Best()
                best.take(target.registration, value)
        self._full = {kind for target in full if (kind := kind_of(target.registration)) is not None}

    def __bool__(self) -> bool:
        """Whether any worker of this pool will ever take the request."""
        return bool(self._kinds or self._full)

    def cheapest(self, decode: Registration, blocks: int) -> float | None:
        """What the best partner costs with the way of so many blocks; None: there is none now."""
        endpoint, kind = decode.transfer, kind_of(decode)
        if endpoint is None or kind is None or (best := self._kinds.get(kind)) is None:
            return None
        step = self._weight * blocks
        cost = best.any + FAR * step
        if endpoint.rdma:
            cost = min(cost, best.rdma + MEDIUM * step)
        if endpoint.host in best.hosts:
            cost = min(cost, best.hosts[endpoint.host] + NEAR * step)
        return cost

    def will_be(self, decode: Registration) -> bool:
        """Whether there is a partner that is only full."""
        return kind_of(decode) in self._full

    def of(self, decode: Registration, blocks: int) -> list[Scored]:
        """All partners, each with the cost of its way."""
        kind = kind_of(decode)
        step = self._weight * blocks
        return [
            Scored(target, cost + distance(target.registration, decode) * step)
            for target, cost in self.scored
            if kind is not None and kind_of(target.registration) == kind
        ]
