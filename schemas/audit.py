"""Entries of the audit log: who changed what, or read what. Subject: ``<namespace>.audit.<user>``.

The broker lets each user publish below its own name only, so the subject proves who wrote an entry. Routers write what
the broker tells them of others: such an entry has a ``user`` of its own.
"""

import re

import msgspec

from penstock.schemas.wire import decoder

# A gateway knows that there were API keys, and the broker has none: the action of an entry of its own.
KEYS_LOST = "keys lost"


PUBLIC_KEY = re.compile("U[A-Z2-7]{55}")  # as whom the broker knows a user who logs in by an nkey or a JWT


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        action: "keys create", "drain", "read", ...; "api": a request to JetStream; "stored": an entry of a bucket.
        what: what it was done to: a key, a tenant, a worker, a stream, a path.
        detail: how it was changed.
        by: person and machine, as the command says it.
        key: prefix of the API key, of requests over HTTP.
        user: of the connection, as the broker says it to the router that wrote this; "": the subject has the user.
        connection: its name, host and number, likewise.
        count: how often, within a second.
        error: why it failed; "": it did not, or was only begun.
    """

    action: str
    what: str
    detail: str = ""
    by: str = ""
    key: str = ""
    user: str = ""
    connection: str = ""
    count: int = 1
    error: str = ""


decode = decoder(AuditEntry)
