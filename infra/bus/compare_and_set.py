"""A write that the broker refuses if the revision has changed, repeated while it refuses for a moment only."""

import asyncio
import time

from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import BUSY, PublishReply, decode_publish_reply
from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT

PAUSE_S = 0.05


async def compare_and_set(
    bus: Bus, subject: str, value: bytes, revision: int, within_s: float, *, ttl_s: int = 0
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
    headers = {HEADER_LAST_ON_SUBJECT: str(revision)} | ({"Nats-TTL": str(ttl_s)} if ttl_s else {})
    until = time.monotonic() + within_s
    while True:
        last = until - time.monotonic() <= PAUSE_S
        try:
            left = max(PAUSE_S, until - time.monotonic())
            message = await bus.nc.request(subject, value, timeout=left, headers=headers)
            reply = decode_publish_reply(message.data)
            if last or reply.error is None or reply.error.err_code not in BUSY:
                return reply
        except NoRespondersError:  # a cluster's stream without a leader
            if last:
                raise
        await asyncio.sleep(PAUSE_S)
