"""Entries of the audit log: who changed or read something. Subject: ``<namespace>.audit.<user>``.

The broker lets each user publish under its own name only, so the subject proves who wrote an entry. Routers also write
the broker's reports about other users: such an entry names the other user in ``user``.
"""

import re

import msgspec

from penstock.schemas.wire import decoder

# The action of an entry by a gateway that knew of API keys when the broker has none.
KEYS_LOST = "keys lost"


PUBLIC_KEY = re.compile("U[A-Z2-7]{55}")  # the broker's name of a user that logs in by an nkey or a JWT


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        action: "keys create", "drain", "read", ...; "api": a request to JetStream; "stored": an entry of a bucket.
        what: its object: a key, a tenant, a worker, a stream, a path.
        detail: the change, with values before and after.
        by: person and machine, as reported by the command.
        key: for requests over HTTP, the prefix of the API key.
        user: user of the connection, as reported by the broker to a router; "": the subject has the user.
        connection: name, host and number of the connection, also as reported by the broker.
        count: number of equal actions within a second.
        error: the reason of a failure; "": it succeeded, or has only started.
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
