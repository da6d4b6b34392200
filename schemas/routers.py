"""A router's registration: its lease, and the models that it owns. The key is the router id, its TTL ``TTL_S``."""

import heapq
from collections.abc import Mapping

import msgspec

from penstock.schemas.wire import decoder

LEASE_S = 0.9  # by the clock of each reader
RENEW_S = 0.25
TTL_S = 1  # of the key: the shortest that NATS has
_NO_BOUNDS: Mapping[str, int] = {}
MODELS = 32  # named in ``HeldByModel``
TENANTS = 8  # named per class; a lease stays small, however many tenants there are
BOUNDED = 512  # named per class besides: tenants with a bound on what waits (``--max-waiting``)


class HeldByTenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requests of one class that a router holds, counted by tenant.

    Attributes:
        tenants: names and counts of the ``TENANTS`` that have most, most first; then of the ``BOUNDED`` nearest to
            their bounds, so that gateways count these exactly.
        others: requests of all other tenants.
    """

    priority: str  # of ``Priority``; as text, so that a router reads leases of builds with other classes
    tenants: tuple[tuple[str, int], ...] = ()
    others: int = 0


class HeldByModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requests that a router holds and has not placed yet, counted by model.

    Attributes:
        models: names and counts of the ``MODELS`` that have most, most first.
        others: requests of all other models.
    """

    models: tuple[tuple[str, int], ...] = ()
    others: int = 0


class LostLeases(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often a worker lost its lease within ten minutes, over restarts under its name.

    Attributes:
        count: on its own; 0: only together.
        last_ns: Unix time of the last one, on its own if there is one.
        together: more, which it lost together with all others, or while the broker was away.
    """

    worker: str  # its name
    role: str
    model: str
    count: int
    last_ns: int
    together: int = 0


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One router.

    Attributes:
        since_ns: when it started, or came back after others had to take it for lost. Of two that claim a model, the
            earlier keeps it.
        models: that it owns, as subject tokens.
        shares: written by earlier builds, and not read: of these, whose requests all their routers place.
        server, connection: id of the server that it is connected to, and of its connection there.
        held: what it holds, of each class of which it holds something; for operators, no router reads it.
        queued: what it holds, by model; gateways count their queues by it.
        lost: workers that lost their lease lately, those that did most often first; for operators, too.
        reads_packed: requests whose prompts are packed (``PackedRequest``); False: a router of an earlier build.
    """

    router: str
    since_ns: int
    models: tuple[str, ...] = ()
    server: str = ""
    connection: int = 0
    shares: tuple[str, ...] = ()
    held: tuple[HeldByTenant, ...] = ()
    lost: tuple[LostLeases, ...] = ()
    queued: HeldByModel = HeldByModel()
    reads_packed: bool = False


def held_by_tenant(
    priority: str, counts: Mapping[str, int], others: int = 0, bounds: Mapping[str, int] = _NO_BOUNDS
) -> HeldByTenant:
    """The tenants with the highest counts by name, equal ones by their names; the rest is added to ``others``.

    Args:
        bounds: requests that may wait, of the tenants that have such a bound: they are named, too.
    """
    most = heapq.nsmallest(TENANTS, counts.items(), key=lambda each: (-each[1], each[0]))
    if bounds and len(counts) > TENANTS:
        named = {tenant for tenant, _ in most}
        bounded = [each for each in counts.items() if each[0] in bounds and each[0] not in named]
        most += heapq.nsmallest(BOUNDED, bounded, key=lambda each: (-each[1] / bounds[each[0]], each[0]))
    return HeldByTenant(priority, tuple(most), others + sum(counts.values()) - sum(count for _, count in most))


def held_by_model(counts: Mapping[str, int]) -> HeldByModel:
    """The models with the highest counts by name, equal ones by their names."""
    most = heapq.nsmallest(MODELS, counts.items(), key=lambda each: (-each[1], each[0]))
    return HeldByModel(tuple(most), sum(counts.values()) - sum(count for _, count in most))


decode = decoder(Member)
