"""The limits of an API key, in two parts: what all gateways have taken of them together, and what one gateway does with
its share. Pure; the time is an argument.

A gateway takes units of the requests and tokens per minute from the ledger, and spends them on requests within
``SPEND_S``. They count from the second in which they were taken, and for ``CHARGED_S``: so in no 60 seconds is more
spent than the limit, by however many gateways, as long as their clocks agree within ``SKEW_S``. What was not spent goes
back to the second in which it was taken.

A request is usually paid from units at hand, without a message. Few are taken at a time: what waiting requests need,
and as many as were spent in the last seconds, but never more than a ``SPARE`` th of the limit beyond the need, so that
few lie idle at other gateways. Those of a busy key are taken before they are needed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.schemas.keys import Holder, Ledger, Limited

MINUTE_S = 60
SPEND_S = 2
SKEW_S = 1
CHARGED_S = MINUTE_S + SPEND_S + SKEW_S
HOLD_NS = 6_000_000_000  # a gateway that does not renew its share of requests at a time for so long has lost it

EMPTY = Ledger()


class Amount(msgspec.Struct, frozen=True, array_like=True):
    """Units of each limit; those of limits that the key does not have are 0."""

    requests: int = 0
    tokens: int = 0
    slots: int = 0


def taken(charges: Mapping[int, int], now_s: int) -> int:
    """Units that still count."""
    return sum(units for second, units in charges.items() if second > now_s - CHARGED_S)


def seconds_until(charges: Mapping[int, int], limit: int, units: int, now_s: int) -> int:
    """After how many seconds this many units can be taken, if none are taken meanwhile; 0: now."""
    excess = taken(charges, now_s) + units - limit
    if excess <= 0:
        return 0
    for second in sorted(second for second in charges if second > now_s - CHARGED_S):
        excess -= charges[second]
        if excess <= 0:
            return second + CHARGED_S - now_s
    return CHARGED_S


def seconds_until_reset(charges: Mapping[int, int], now_s: int) -> int:
    """After how many seconds nothing counts any more."""
    return max((second + CHARGED_S - now_s for second, units in charges.items() if units), default=0)


def held_by_others(ledger: Ledger, gateway: str, now_ns: int) -> int:
    return sum(h.slots for name, h in ledger.holders.items() if name != gateway and h.until_ns > now_ns)


def free(ledger: Ledger, limits: Amount, gateway: str, now_ns: int) -> Amount:
    """What the gateway could take now; of slots, in all, with those that it holds."""
    now_s = now_ns // 1_000_000_000
    return Amount(
        max(0, limits.requests - taken(ledger.requests, now_s)) if limits.requests else 0,
        max(0, limits.tokens - taken(ledger.tokens, now_s)) if limits.tokens else 0,
        max(0, limits.slots - held_by_others(ledger, gateway, now_ns)) if limits.slots else 0,
    )


def charged(charges: Mapping[int, int], now_s: int, units: int, refunds: Mapping[int, int]) -> dict[int, int]:
    """The charges with units taken in this second, and others given back to the second in which they were taken."""
    left = {second: count for second, count in charges.items() if second > now_s - CHARGED_S}
    for second, count in refunds.items():
        if second in left:
            left[second] = max(0, left[second] - count)
    if units:
        left[now_s] = left.get(now_s, 0) + units
    return {second: count for second, count in left.items() if count}


def holding(ledger: Ledger, gateway: str, slots: int, now_ns: int) -> dict[str, Holder]:
    """The holders when this gateway holds this many slots; those whose time is over are left out."""
    holders = {name: each for name, each in ledger.holders.items() if each.until_ns > now_ns and name != gateway}
    return holders | {gateway: Holder(slots, now_ns + HOLD_NS)} if slots else holders


SPARE = 16
RENEW_NS = HOLD_NS // 3
# Requests per second from which on a key's units are taken ahead. Otherwise 3 to 6 % of a busy key's requests wait for
# the ledger, and whatever waits together passes one by one.
BUSY = 8
_S = 1_000_000_000


class Reservation:
    """What one request has been given; ``second``: to which it is given back, by the tokens' parts."""

    __slots__ = ("requests", "slots", "tokens")

    def __init__(self, requests: int, tokens: list[tuple[int, int]], slots: int) -> None:
        self.requests = requests  # the second of its unit; 0: none
        self.tokens = tokens  # (second, units)
        self.slots = slots


class Proposal(NamedTuple):
    """A change of the ledger: what it would be, and what this gateway has once that is stored."""

    ledger: Ledger
    granted: Amount
    now_s: int
    refunds: tuple[dict[int, int], dict[int, int]]
    slots: int
    until_ns: int


class Account:
    """
    Args:
        limits: of the key; 0: none.
    """

    def __init__(self, key_id: str, gateway: str, limits: Amount) -> None:
        self.key_id = key_id
        self.by: Limited | None = None  # whose limits these are
        self.flushing = False  # slots are about to be given up
        self.looking = 0  # requests that wait for a slot to be given up
        self.gateway = gateway
        self.limits = limits
        self.running = 0  # requests that were paid and have not ended
        self.open = 0  # of these, those that hold a slot
        self.slots = 0
        self.until_ns = 0  # when the slots end
        self.waiting = Amount()  # needs of requests that wait for the ledger
        self._lots: tuple[dict[int, int], dict[int, int]] = ({}, {})  # requests, tokens: unspent, by second
        self._refunds: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._spent = [0, 0]  # since the last sweep
        self._pace = [0, 0]
        self._ahead = False  # units for the next second are to be taken

    # --- requests ---

    def take(self, tokens: int, now_ns: int) -> Reservation | None:
        """Pay for a request with units at hand; None: there are too few."""
        limits, now_s = self.limits, now_ns // _S
        lots_requests, lots_tokens = self._lots
        if limits.slots and (self.open >= self.slots or now_ns >= self.until_ns):
            return None
        if not self.has(tokens, now_ns):
            return None
        self.running += 1
        self.open += bool(limits.slots)
        second = _spend(lots_requests, 1, now_s)[0][0] if limits.requests else 0
        parts = _spend(lots_tokens, tokens, now_s) if limits.tokens else []
        self._spent[0] += 1
        self._spent[1] += tokens
        return Reservation(second, parts, 1 if limits.slots else 0)

    def has(self, tokens: int, now_ns: int) -> bool:
        """Whether a request and this many tokens are at hand, apart from a slot."""
        limits, now_s = self.limits, now_ns // _S
        if limits.requests and not _unspent(self._lots[0], now_s):
            return False
        return not limits.tokens or _unspent(self._lots[1], now_s) >= tokens

    def settle(self, reservation: Reservation, used_tokens: int, now_ns: int) -> None:
        """A request has ended: its slot is free, and tokens that it did not use can be spent again."""
        self.running -= 1
        self.open -= reservation.slots
        reservation.slots = 0
        over = -used_tokens
        for _, units in reservation.tokens:
            over += units
        for second, units in reversed(reservation.tokens):
            back = min(units, over)
            if back <= 0:
                break
            over -= back
            self._back(1, second, back, now_ns // _S)
        reservation.tokens = []

    def undo(self, reservation: Reservation, now_ns: int) -> None:
        """A request was not accepted after all."""
        if reservation.requests:
            self._back(0, reservation.requests, 1, now_ns // _S)
            reservation.requests = 0
        self.settle(reservation, 0, now_ns)

    def _back(self, kind: int, second: int, units: int, now_s: int) -> None:
        pool = self._lots[kind] if now_s < second + SPEND_S else self._refunds[kind]
        pool[second] = pool.get(second, 0) + units

    # --- the ledger ---

    def propose(self, ledger: Ledger, now_ns: int) -> Proposal:
        """The ledger with everything that this gateway gives back, and what it takes for the requests that wait.

        What is not free is left out: ``granted`` may be less than ``waiting``.
        """
        now_s = now_ns // _S
        self._expire(now_s)
        refunds = (dict(self._refunds[0]), dict(self._refunds[1]))
        given_back = Ledger(
            charged(ledger.requests, now_s, 0, refunds[0]), charged(ledger.tokens, now_s, 0, refunds[1]), ledger.holders
        )
        at_most = free(given_back, self.limits, self.gateway, now_ns)
        granted = Amount(
            self._portion(0, self.waiting.requests, self.limits.requests, at_most.requests, now_s),
            self._portion(1, self.waiting.tokens, self.limits.tokens, at_most.tokens, now_s),
        )
        slots = self._wanted_slots(at_most.slots)
        self.slots = min(self.slots, slots)  # those given up may be another gateway's from now on
        return Proposal(
            Ledger(
                charged(given_back.requests, now_s, granted.requests, {}),
                charged(given_back.tokens, now_s, granted.tokens, {}),
                holding(ledger, self.gateway, slots, now_ns),
            ),
            granted,
            now_s,
            refunds,
            slots,
            now_ns + HOLD_NS,
        )

    def stored(self, proposal: Proposal) -> None:
        """The proposal is the ledger now."""
        for kind, units in ((0, proposal.granted.requests), (1, proposal.granted.tokens)):
            if units:
                lots = self._lots[kind]
                lots[proposal.now_s] = lots.get(proposal.now_s, 0) + units
        self.gave_back(proposal)
        self._ahead = False
        self.slots, self.until_ns = proposal.slots, proposal.until_ns

    def gave_back(self, proposal: Proposal) -> None:
        """The proposal is or may be the ledger now: what it gives back must not be given back again."""
        for mine, theirs in zip(self._refunds, proposal.refunds, strict=True):
            for second, back in theirs.items():
                left = mine.pop(second, back) - back
                if left:
                    mine[second] = left

    def unspent(self, now_ns: int) -> Amount:
        return Amount(_unspent(self._lots[0], now_ns // _S), _unspent(self._lots[1], now_ns // _S))

    def sweep(self, now_ns: int) -> bool:
        """Call it about every second; returns whether the ledger should be changed."""
        self._pace, self._spent = self._spent, [0, 0]
        self._expire(now_ns // _S)
        self._ahead = self._pace[0] >= BUSY and bool(self.limits.requests or self.limits.tokens)
        renew = self.slots and now_ns > self.until_ns - HOLD_NS + RENEW_NS
        return bool(self._ahead or self._refunds[0] or self._refunds[1] or renew) or self.gives_up_slots

    @property
    def gives_up_slots(self) -> bool:
        """Whether it holds more slots than it should keep."""
        return self.slots > self.open + self.limits.slots // SPARE

    @property
    def idle(self) -> bool:
        waits = self.looking or self.waiting != Amount()
        return not (waits or self.running or self.slots or any(self._lots) or any(self._refunds) or any(self._pace))

    def _portion(self, kind: int, needed: int, limit: int, at_most: int, now_s: int) -> int:
        unspent = _unspent(self._lots[kind], now_s)
        needed -= unspent
        if not limit or (needed <= 0 and not self._ahead):
            return 0
        needed = max(0, needed)
        spare = min(limit // SPARE, max(self._pace[kind], self._spent[kind]), max(0, at_most - needed) // 2)
        if self._ahead:  # what is at hand ends before the next second does
            spare = min(spare + spare // 4, max(0, limit // SPARE - unspent))
        return min(needed + spare, at_most)

    def _wanted_slots(self, at_most: int) -> int:
        if not self.limits.slots:
            return 0
        wanted = self.open + self.waiting.slots
        spare = self.limits.slots // SPARE if wanted else 0
        # Requests that run are counted also when the share was lost meanwhile: no further one is admitted then.
        return max(self.open, min(wanted + spare, at_most))

    def _expire(self, now_s: int) -> None:
        for lots, refunds in zip(self._lots, self._refunds, strict=True):
            for second in [second for second in lots if now_s >= second + SPEND_S]:
                units = lots.pop(second)
                if units:
                    refunds[second] = refunds.get(second, 0) + units
            for second in [second for second in refunds if second <= now_s - CHARGED_S]:
                del refunds[second]  # it no longer counts


def _unspent(lots: dict[int, int], now_s: int) -> int:
    unspent = 0
    for second, units in lots.items():  # at most three: a sum over a comprehension takes longer
        if now_s < second + SPEND_S:
            unspent += units
    return unspent


def _spend(lots: dict[int, int], units: int, now_s: int) -> list[tuple[int, int]]:
    """Take units, the oldest first; by the second in which they were taken from the ledger."""
    parts: list[tuple[int, int]] = []
    for second in sorted(lots):
        had = lots[second]
        if had and now_s < second + SPEND_S:
            part = units if units < had else had
            lots[second] = had - part
            parts.append((second, part))
            units -= part
            if not units:
                break
    return parts
