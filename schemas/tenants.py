"""What a tenant may do, as kept in the ``tenants`` bucket: ``penstock tenants`` writes it, gateways follow it.

The tenant ``default`` needs no entry. Names and passwords of its broker users are not here.
"""

import re

import msgspec

from schemas.wire import decoder

MAX_PENDING = 20_000  # without a limit of its own: what one consumer may have outstanding

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        models: names a request may have; empty: all.
        max_pending: submissions that gateways work on at once; further ones wait. Also asks at one gateway at once;
            further ones are refused.
    """

    models: tuple[str, ...] = ()
    max_pending: int = MAX_PENDING


decode = decoder(Limits)


def check_name(name: str) -> str:
    """The name, which is also a token of subjects and part of the names of streams and accounts.

    Raises:
        ValueError: it cannot be that.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"tenant {name!r}: use a lower-case word of at most 32 letters, digits or '-'")
    return name
