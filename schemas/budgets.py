"""What gateways have taken of one API key's limits: an entry of the ``budgets`` bucket, changed by compare-and-set."""

import msgspec

from penstock.schemas.wire import decoder


class Holder(msgspec.Struct, frozen=True):
    """One gateway's share of the requests at a time; it ends with ``until_ns`` (Unix time) unless it is renewed."""

    slots: int
    until_ns: int


class Ledger(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        requests, tokens: what was taken, by the second (Unix time) in which it was; older seconds are left out.
        holders: by gateway.
    """

    requests: dict[int, int] = {}
    tokens: dict[int, int] = {}
    holders: dict[str, Holder] = {}


decode = decoder(Ledger)
