"""One handoff's lease, folded from the lines of the handoff ledger. Pure."""

from collections.abc import Iterable

import msgspec

from penstock.schemas.transfer import Handoff

_OWNER_ENDS = frozenset({"released", "expired"})  # written by the owner of the blocks


class TicketLease(msgspec.Struct):
    """One ticket and its latest ledger line.

    Attributes:
        ended: the owner has released the blocks.
        quarantined: blocks of the reader that cannot be used yet.
    """

    offer: Handoff
    last: Handoff
    ended: bool = False
    quarantined: int = 0

    def is_open(self, now_ns: int) -> bool:
        """Whether some worker still holds blocks. An owner that died writes no end: its lease ends with its time."""
        return bool(self.quarantined) or (not self.ended and now_ns <= self.offer.lease_ns)

    def apply(self, line: Handoff) -> None:
        """Count one more line about this ticket."""
        if line.state in _OWNER_ENDS:
            self.ended = True
        if line.state == "quarantined":
            self.quarantined = line.blocks
        elif line.state == "settled":
            self.quarantined = 0
        if line.at_ns >= self.last.at_ns:
            self.last = line


def ticket_leases(lines: Iterable[Handoff]) -> dict[str, TicketLease]:
    """Leases by ticket id, from ledger lines in stream order.

    The lines of two workers about one ticket may cross, so lines before the offer wait for it. A ticket without an
    offer has no lease.
    """
    leases: dict[str, TicketLease] = {}
    early: dict[str, list[Handoff]] = {}
    for line in lines:
        lease = leases.get(line.ticket)
        if line.state == "offered":
            lease = leases[line.ticket] = TicketLease(line, line)
            for earlier in early.pop(line.ticket, ()):
                lease.apply(earlier)
        elif lease is None:
            early.setdefault(line.ticket, []).append(line)
        else:
            lease.apply(line)
    return leases
