"""The shared part of an API key's limits: what all gateways together have taken. Pure; the time is an argument.

A gateway takes units of the requests and tokens per minute from the ledger, and spends them on requests within
``SPEND_S``. They count from the second in which they were taken, and for ``CHARGED_S``: so in no 60 seconds is more
spent than the limit, by however many gateways, as long as their clocks agree within ``SKEW_S``. What was not spent
goes back to the second in which it was taken.
"""

from collections.abc import Mapping

import msgspec

from penstock.schemas.budgets import Holder, Ledger
from penstock.schemas.keys import ApiKey

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


def limits_of(key: ApiKey) -> Amount:
    return Amount(key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)


def taken(charges: Mapping[int, int], now_s: int) -> int:
    """Units that still count."""
    return sum(units for second, units in charges.items() if second > now_s - CHARGED_S)


def seconds_until(charges: Mapping[int, int], limit: int, units: int, now_s: int) -> int:
    """After how many seconds so many units can be taken, if nobody takes any meanwhile; 0: now."""
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
    """The holders when this gateway holds so many slots; those whose time is over are left out."""
    holders = {name: each for name, each in ledger.holders.items() if each.until_ns > now_ns and name != gateway}
    return holders | {gateway: Holder(slots, now_ns + HOLD_NS)} if slots else holders
