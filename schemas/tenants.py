"""A tenant's limits, in the ``tenants`` bucket: ``penstock tenants`` writes them, gateways follow the bucket.

The tenant ``default`` needs no entry. Names and passwords of its broker users are not here.
"""

import re

import msgspec

from schemas.wire import decoder

MAX_PENDING = 20_000  # default; as many as one consumer may have outstanding

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tenant may use.

    Attributes:
        models: models that its requests may name; empty: all.
        max_pending: submissions that gateways process at once; further ones wait. Also service requests at one gateway
            at once; further ones are refused.
    """

    models: tuple[str, ...] = ()
    max_pending: int = MAX_PENDING


decode = decoder(Limits)


def check_name(name: str) -> str:
    """The name, which is also a token of subjects and part of the names of streams and accounts.

    Raises:
        ValueError: it is not a valid name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"tenant {name!r}: use a lower-case word of at most 32 letters, digits or '-'")
    return name
