"""Which encode worker computes a medium's embeddings: the one that probably has them still. Pure.

Rendezvous hashing sends the same image to the same worker, whoever routes it, and moves few images when workers come
and go. A worker with much more than its share of the load is passed over, so that one popular image overloads nobody.
"""

from collections.abc import Sequence
from math import ceil

from blake3 import blake3

from router.load_tracker import Member

SLACK = 1.25  # a worker takes at most this much of its fair share (rounded up) before the next one is asked


def by_preference(medium: bytes, members: Sequence[Member]) -> list[Member]:
    """``members`` in the order in which this medium prefers them."""
    return sorted(members, key=lambda member: _weight(medium, member), reverse=True)


def pick(medium: bytes, members: Sequence[Member]) -> tuple[Member, bool]:
    """The encode worker for a medium; True: it is the preferred one.

    Args:
        medium: digest of the first medium of a request.
        members: those that can take it, at least one.
    """
    ordered = by_preference(medium, members)
    limit = ceil(SLACK * (sum(member.load.requests for member in members) + 1) / len(members))
    for member in ordered:
        if member.load.requests < limit:
            return member, member is ordered[0]
    raise AssertionError("they cannot all have more than their share")


def _weight(medium: bytes, member: Member) -> bytes:
    worker, rank = member.place
    return blake3(f"{worker}:{rank}:".encode() + medium).digest(length=8)
