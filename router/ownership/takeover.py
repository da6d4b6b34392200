"""What a lost router had read and not placed comes again at once, instead of after the consumer's ack_wait.

No API of the broker lists the messages that a consumer waits for. But whoever may publish to an acknowledgement subject
can reject any message, and a rejection of one that is not waited for changes nothing. So every sequence between the
acknowledgement floor and the last delivered one is rejected, without reading any.
"""

import asyncio
from collections.abc import Collection

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import NAK

log = structlog.get_logger("router")

INFO_S = 2.0
AT_ONCE = 500  # 1.5 ms
MOST = 200_000  # further back, requests wait for ack_wait


async def redeliver(bus: Bus, stream: str, consumer: str, held: Collection[int]) -> int:
    """Reject what is delivered and not acknowledged; returns how many that were, ``held`` included.

    Args:
        held: sequences that this router holds itself.
    Raises:
        nats.errors.Error, TimeoutError: the broker did not answer; ack_wait does the same a second later.
    """
    info = await bus.js.consumer_info(stream, consumer, timeout=INFO_S)
    if not info.num_ack_pending or info.ack_floor is None or info.delivered is None:
        return 0
    first = max(info.ack_floor.stream_seq + 1, info.delivered.stream_seq - MOST)
    for count, seq in enumerate(range(first, info.delivered.stream_seq + 1), 1):
        if seq not in held:
            # Deliveries, stream sequence, consumer sequence (any that is in range), time, pending.
            await bus.nc.publish(f"$JS.ACK.{stream}.{consumer}.1.{seq}.{info.delivered.consumer_seq}.0.0", NAK)
        if count % AT_ONCE == 0:
            await asyncio.sleep(0)
    log.info("unplaced_requests_returned", consumer=consumer, pending=info.num_ack_pending, first=first)
    return int(info.num_ack_pending)
