"""What JetStream answers to a publish or an API request, and the error codes that Penstock acts on.

Codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

import msgspec

CONSUMER_NOT_FOUND = 10014
NO_MESSAGE_FOUND = 10037
STREAM_NOT_FOUND = 10059
WRONG_LAST_SEQUENCE = 10071  # the subject has another last sequence than the publisher expects
# No leader; a publish with this id, or to this subject, is in flight; too many publishes are in flight.
BUSY = frozenset({10008, 10158, 10164, 10167})
# Expected elsewhere, too large, malformed: repeating does not help. Everything else (a full disk, a limit) may pass.
FINAL = frozenset({10053, 10054, 10060, 10070, WRONG_LAST_SEQUENCE, 10097, 10109, 10165, 10166})


class ApiError(msgspec.Struct):
    """Why a request was refused. ``code`` is like an HTTP status, ``err_code`` names the reason."""

    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.err_code})"


class PublishReply(msgspec.Struct):
    """The answer to a publish: stored at ``seq`` (``duplicate``: some time ago), or ``error``."""

    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


decode_publish_reply = msgspec.json.Decoder(PublishReply).decode
