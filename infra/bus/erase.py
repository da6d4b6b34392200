"""Deletes single messages of a stream, and overwrites their bytes on the broker's disk.

That costs the broker a lot: it rewrites the message's block, 8 MB and 6 ms of CPU time in a stream like TOKENS (on
2.15.1), while others wait. So whoever has several to delete rests in between (``Eraser``).

A stream that discards a message by its limits, or because it was acknowledged, leaves its bytes in the file until the
file is rewritten or removed. In a cluster, each node overwrites its copy in the stream; what a node's replication log
still has of the message goes with that log's next snapshot.

With a full disk the broker confirms a deletion that it cannot write: the message is gone from its memory, and back
after its restart. So whoever deletes has an entry stored before (``check_stores``).
"""

import asyncio
import json
import time

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import ApiError, decode_publish_reply
from penstock.schemas.errors import Code, ServingError

ERASE_S = 5.0
SHARE = 0.05  # of the time in which an ``Eraser`` has the broker overwrite something
MOST_REST_S = 2.0
KEEP_S = 120  # of an entry
# More than a block of a file system: on a full disk, smaller ones fit into the last blocks of their file.
ENTRY = bytes(4_608)
# No room for the account, the server or the stream's node. A refusal for another reason, as of a full bucket, says
# nothing of other streams.
NO_ROOM = frozenset({10002, 10023, 10047})
GONE = frozenset({10037, 10043, 10057})  # the stream has no message with this sequence (any more)


class _Reply(msgspec.Struct):
    success: bool = False
    error: ApiError | None = None


_decode = msgspec.json.Decoder(_Reply).decode


async def stores(bus: Bus, name: str, timeout: float) -> bool:
    """Whether the broker stores an entry, over the one before of the same ``name``.

    Raises:
        nats.errors.Error, TimeoutError, OSError, msgspec.MsgspecError: it did not answer in time.
    """
    subject = f"$KV.{bus.subjects.bucket('idempotency')}.written.{name}"
    message = await bus.nc.request(subject, ENTRY, timeout=timeout, headers={"Nats-TTL": str(KEEP_S)})
    error = decode_publish_reply(message.data).error
    return error is None or error.err_code not in NO_ROOM


async def check_stores(bus: Bus, name: str) -> None:
    """
    Args:
        name: of who deletes.
    Raises:
        ServingError: broker_unavailable: what would be deleted now could come back.
    """
    try:
        if await stores(bus, name, ERASE_S):
            return
        why = "is its disk full?"
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        why = f"is its disk full? {error!r}"
    raise ServingError(
        Code.broker_unavailable,
        f"nothing was deleted: the broker stores nothing at the moment ({why}), so that it could come back when the "
        "broker restarts; delete it again later",
        retry_after=5.0,
    )


async def erase(bus: Bus, stream: str, seq: int) -> bool:
    """Delete one message and overwrite its bytes; False: it was gone already.

    Raises:
        ServingError: broker_unavailable: it was not confirmed in time, or this user may not delete messages.
    """
    subject = f"$JS.API.STREAM.MSG.DELETE.{stream}"
    body = json.dumps({"seq": seq}).encode()  # without "no_erase"
    try:
        reply = _decode((await bus.nc.request(subject, body, timeout=ERASE_S)).data)
    except (NatsError, OSError, TimeoutError) as error:
        raise _failed(stream, seq, f"{error!r}; may this user publish to {subject}?") from None
    if reply.error is None:
        return True
    if reply.error.err_code in GONE:
        return False
    raise _failed(stream, seq, str(reply.error))


class Eraser:
    """Erases one message at a time, and rests before the next for longer than that took: others hardly notice.

    Args:
        waiting: how many more may wait for their turn.
    """

    def __init__(self, bus: Bus, waiting: int = 1 << 30) -> None:
        self._bus = bus
        self._most = waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._rests_until = 0.0  # monotonic

    async def erase(self, stream: str, seq: int) -> bool:
        """Delete one message and overwrite its bytes, in turn; False: too many wait, so it was left.

        Raises:
            ServingError: as ``erase``.
        """
        if self._waiting > self._most:
            return False
        self._waiting += 1
        try:
            async with self._turn:
                began = time.monotonic()
                if began < self._rests_until:
                    await asyncio.sleep(self._rests_until - began)
                    began = time.monotonic()
                try:
                    await erase(self._bus, stream, seq)
                finally:
                    now = time.monotonic()
                    self._rests_until = now + min(MOST_REST_S, (now - began) * (1 / SHARE - 1))
        finally:
            self._waiting -= 1
        return True


def _failed(stream: str, seq: int, why: str) -> ServingError:
    return ServingError(Code.broker_unavailable, f"message {seq} of {stream} was not erased: {why}", retry_after=1.0)
