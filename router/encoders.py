"""Which encode worker computes a medium's embeddings: the one that probably has them still. Pure.

Rendezvous hashing sends the same image to the same worker, whoever routes it, and moves few images when workers come
and go. A worker with much more than its share of the load is passed over, so that one popular image overloads nobody.
"""

from collections.abc import Sequence
from math import ceil

from blake3 import blake3

from router.load_tracker import RoutingTarget

SLACK = 1.25  # a worker takes at most this much of its fair share (rounded up) before the next one is asked


def by_preference(medium: bytes, targets: Sequence[RoutingTarget]) -> list[RoutingTarget]:
    """``targets`` in the order in which this medium prefers them."""
    return sorted(targets, key=lambda target: _weight(medium, target), reverse=True)


def pick(medium: bytes, targets: Sequence[RoutingTarget]) -> tuple[RoutingTarget, bool]:
    """The encode worker for a medium; True: it is the preferred one.

    Args:
        medium: digest of the first medium of a request.
        targets: those that can take it, at least one.
    """
    ordered = by_preference(medium, targets)
    limit = ceil(SLACK * (sum(target.load.requests for target in targets) + 1) / len(targets))
    for target in ordered:
        if target.load.requests < limit:
            return target, target is ordered[0]
    raise AssertionError("they cannot all have more than their share")


def _weight(medium: bytes, target: RoutingTarget) -> bytes:
    worker, rank = target.place
    return blake3(f"{worker}:{rank}:".encode() + medium).digest(length=8)
