"""API keys of the HTTP API, in the ``keys`` bucket: ``penstock keys`` writes them, gateways follow it.

A key is ``pst-<id>-<secret>``. Its id is public, and names its entry; of the whole key only the SHA-256 is stored. The
secret has 238 random bits, so a slow hash for chosen passwords would only cost time.

A ``Ledger`` has what gateways have taken of the limits of one API key or tenant: an entry of the ``budgets`` bucket,
changed by compare-and-set.
"""

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from penstock.schemas.requests import Priority
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.wire import decoder

PREFIX = "pst-"
ID_CHARACTERS, SECRET_CHARACTERS = 12, 40
MAX_KEY_BYTES = 128  # longer ones are refused unread
MOST_PER_MINUTE = 1_000_000_000
MOST_CONCURRENT = 100_000
MOST_PER_MONTH = 1_000_000_000_000_000

_ALPHABET = string.ascii_letters + string.digits
_KEY = re.compile(rb"pst-([a-z0-9]{12})-[A-Za-z0-9]{40}")
_ID = re.compile(r"[a-z0-9]{12}")

PerMinute = Annotated[int, Meta(ge=0, le=MOST_PER_MINUTE)]
PerMonth = Annotated[int, Meta(ge=0, le=MOST_PER_MONTH)]


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored entry of one key.

    Attributes:
        digest: SHA-256 of the whole key.
        tenant: the tenant that its requests belong to, as in the NATS API.
        models: models that its requests may name; empty: all of its tenant.
        requests_per_minute, tokens_per_minute, max_concurrent: at all gateways together; 0: no limit.
        priority: the highest class of its requests, and the class of requests without one; None: any, as without keys.
        created_ns, expires_ns, revoked_ns, changed_ns: Unix time; 0: never.
        operator: sees the requests and answers of all tenants.
        about: the operator's description.
        created_by, revoked_by: user and machine of the operator.
        changed_by: likewise, for the last change of its limits.
        tokens_per_month: tokens of prompts and answers per month (UTC); 0: no limit.
    """

    id: str
    digest: bytes
    tenant: str = DEFAULT_TENANT
    models: tuple[str, ...] = ()
    requests_per_minute: PerMinute = 0
    tokens_per_minute: PerMinute = 0
    max_concurrent: Annotated[int, Meta(ge=0, le=MOST_CONCURRENT)] = 0
    priority: Priority | None = None
    created_ns: int = 0
    expires_ns: int = 0
    revoked_ns: int = 0
    operator: bool = False
    about: str = ""
    created_by: str = ""
    revoked_by: str = ""
    changed_ns: int = 0
    changed_by: str = ""
    tokens_per_month: PerMonth = 0

    @property
    def made_by(self) -> str:
        """The operator of the entry's last change."""
        return self.revoked_by or self.changed_by or self.created_by

    @property
    def prefix(self) -> str:
        """The public part of the key."""
        return PREFIX + self.id

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)


class Limited(NamedTuple):
    """The key or tenant whose limits a request counts against.

    Attributes:
        ledger: its entry in the ``budgets`` bucket. Entries of keys have no "-".
        who: its name in errors.
        requests, tokens: per minute, at all gateways together; 0: no limit.
        slots: requests at a time.
    """

    ledger: str
    who: str
    requests: int = 0
    tokens: int = 0
    slots: int = 0


decode = decoder(ApiKey)


def check_fields(fields: Iterable[str]) -> None:
    """Raises: ValueError: a later release gave keys further fields, which a copy made here would lack."""
    if later := sorted(set(fields) - set(ApiKey.__struct_fields__)):
        raise ValueError(f"this release of penstock does not know {', '.join(later)}; use the one that made the key")


def new_key() -> tuple[str, str]:
    """A new key: its id, and the whole text, which is shown once."""
    name = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(ID_CHARACTERS))
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(SECRET_CHARACTERS))
    return name, f"{PREFIX}{name}-{secret}"


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def matches(key: bytes, digest: bytes) -> bool:
    """Whether this is the key of the digest. Takes the same time wherever they differ."""
    return hmac.compare_digest(digest_of(key), digest)


def id_of(key: bytes) -> str | None:
    """The id in a key; None: the text is not a key."""
    found = _KEY.fullmatch(key) if len(key) <= MAX_KEY_BYTES else None
    return found[1].decode() if found is not None else None


def check_id(text: str) -> str:
    """The id that a prefix (``pst-…``) or an id names; it is also a token of subjects.

    Raises:
        ValueError: it is neither. The text is not repeated, as it may be a whole key.
    """
    name = text.removeprefix(PREFIX)
    if _ID.fullmatch(name):
        return name
    if (whole := id_of(text.encode())) is not None:
        return whole
    raise ValueError("not the prefix of a key: give what `penstock keys list` shows, such as pst-0a1b2c3d4e5f")


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


decode_ledger = decoder(Ledger)
