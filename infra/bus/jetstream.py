"""JetStream's answers to publishes and API requests, the error codes that Penstock handles, and compare-and-set.

Codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT

if TYPE_CHECKING:  # a stopped deployment is read without the client, which loads slowly
    from nats.aio.client import Client

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


class Message(Protocol):
    """``headers`` is None if the message has none; ``reply`` is "" if no answer is expected."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def reply(self) -> str: ...

    @property
    def headers(self) -> dict[str, str] | None: ...


PAUSE_S = 0.05


async def compare_and_set(
    nc: "Client", subject: str, value: bytes, revision: int, within_s: float, *, ttl_s: int = 0
) -> PublishReply:
    """Store a value in the place of ``revision`` (0: there is none yet).

    In a cluster a leader may be changing, or another client's write to the subject be on its way: neither says anything
    about the revision.

    Args:
        ttl_s: the value is gone after this; 0: never.

    Raises:
        NatsError, OSError, TimeoutError, msgspec.MsgspecError: no answer in time, or none that can be read. The value
            may be stored nevertheless.
    """
    from nats.errors import NoRespondersError

    headers = {HEADER_LAST_ON_SUBJECT: str(revision)} | ({"Nats-TTL": str(ttl_s)} if ttl_s else {})
    until = time.monotonic() + within_s
    while True:
        last = until - time.monotonic() <= PAUSE_S
        try:
            left = max(PAUSE_S, until - time.monotonic())
            message = await nc.request(subject, value, timeout=left, headers=headers)
            reply = decode_publish_reply(message.data)
            if last or reply.error is None or reply.error.err_code not in BUSY:
                return reply
        except NoRespondersError:  # a cluster's stream without a leader
            if last:
                raise
        await asyncio.sleep(PAUSE_S)
