"""Which encode worker computes the embeddings of a medium: probably the one that still caches them. Pure.

Rendezvous hashing sends the same image to the same worker in every router, and moves few images when workers join or
leave. A worker with much more than its share of the load is skipped, so that one popular image overloads no worker.
"""

from collections.abc import Sequence
from math import ceil

from blake3 import blake3

from penstock.router.state.load import RoutingTarget

SLACK = 1.25  # a worker takes at most this multiple of its fair share, rounded up


def by_preference(medium: bytes, targets: Sequence[RoutingTarget]) -> list[RoutingTarget]:
    """``targets`` in this medium's order of preference."""
    return sorted(targets, key=lambda target: _weight(medium, target), reverse=True)


def pick(medium: bytes, targets: Sequence[RoutingTarget]) -> tuple[RoutingTarget, bool]:
    """The encode worker for a medium, and whether it is the preferred one.

    Args:
        medium: digest of the request's first medium.
        targets: the candidates, at least one.
    """
    ordered = by_preference(medium, targets)
    limit = ceil(SLACK * (sum(target.load.requests for target in targets) + 1) / len(targets))
    for target in ordered:
        if target.load.requests < limit:
            return target, target is ordered[0]
    raise AssertionError("some target is always at or below its fair share")


def _weight(medium: bytes, target: RoutingTarget) -> bytes:
    worker, rank = target.id
    return blake3(f"{worker}:{rank}:".encode() + medium).digest(length=8)
