"""A tenant's limits, in the ``tenants`` bucket: ``penstock tenants`` writes them, gateways and routers follow it.

The tenant ``default`` needs no entry. Names and passwords of its broker users are not here.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.schemas.keys import PerMinute, PerMonth
from penstock.schemas.wire import decoder

MAX_PENDING = 20_000  # default; as many as one consumer may have outstanding

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tenant may use.

    Attributes:
        models: models that its requests may name; empty: all.
        max_pending: submissions that gateways process at once; further ones wait. Also service requests at one gateway
            at once; further ones are refused.
        shared_cache: its requests reuse the KV of other requests, and others that of its own.
        weight: of its share of the work of requests that wait, against other tenants of the same class.
        tokens_per_month: budget of a month (UTC), prompts and answers, of all its keys and over NATS; 0: no limit.
        max_waiting: requests of both APIs that wait for a worker; further ones are refused, and submissions stay in
            their stream. 0: only the limits of classes hold.
        requests_per_minute, tokens_per_minute: of both APIs and all its keys, at all gateways together; 0: no limit.
    """

    models: tuple[str, ...] = ()
    max_pending: int = MAX_PENDING
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    shared_cache: bool = False
    tokens_per_month: PerMonth = 0
    max_waiting: int = 0
    requests_per_minute: PerMinute = 0
    tokens_per_minute: PerMinute = 0

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


decode = decoder(Limits)


def check_name(name: str) -> str:
    """The name, which is also a token of subjects and part of the names of streams and accounts.

    Raises:
        ValueError: it is not a valid name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"tenant {name!r}: use a lower-case word of at most 32 letters, digits or '-'")
    return name
