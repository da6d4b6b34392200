"""Streams as snapshots: the files that the JetStream API makes of a stream, and makes it of again.

The server sends a snapshot in chunks and waits for acknowledgements, so that a slow disk here slows it down there. It
takes no message out and stops nobody; what is published meanwhile may be in it or not. Sequences and times stay.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nats.aio.client import Client
from nats.errors import Error as NatsError

from penstock.infra.nats_server.jetstream_api import BrokerProblem, Config, request

CHUNK_BYTES = 128 << 10
CHUNK_S = 30.0  # for the next chunk, or for its acknowledgement; the server itself gives up after a few seconds
END_S = 300.0  # for a stream to be rebuilt from a snapshot of gigabytes
_STATUS, _DESCRIPTION = "Status", "Description"
_WHOLE = "204"  # the status of the last message, if it has one


class SnapshotHead(NamedTuple):
    """What has to be given back with a snapshot: the stream's configuration, and its state."""

    config: Config
    state: Config


async def take_snapshot(nc: Client, stream: str, write: Callable[[bytes], object]) -> SnapshotHead:
    """Read a stream on file, without its consumers.

    Args:
        write: called with the chunks, in order.
    Raises:
        BrokerProblem: there is no such stream, this user may not read it, or the broker did not send all of it.
    """
    inbox = nc.new_inbox()
    chunks = await nc.subscribe(inbox)
    try:
        body = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
        head = await request(nc, f"STREAM.SNAPSHOT.{stream}", body)
        if head["config"]["storage"] != "file":
            raise BrokerProblem(f"{stream} is in memory, so that nothing of it is on a disk: it has no snapshot")
        while True:
            chunk = await chunks.next_msg(timeout=CHUNK_S)
            if not chunk.data:
                break
            write(chunk.data)
            if chunk.reply:
                await nc.publish(chunk.reply)
        headers = chunk.headers or {}
        if headers.get(_STATUS, _WHOLE) != _WHOLE:
            raise BrokerProblem(f"the broker stopped sending {stream}: {headers.get(_DESCRIPTION, headers[_STATUS])}")
        return SnapshotHead(head["config"], head["state"])
    except (NatsError, TimeoutError) as error:
        raise BrokerProblem(f"the broker did not send all of {stream} ({error!r}): back up again") from error
    finally:
        await chunks.unsubscribe()


async def restore_snapshot(nc: Client, head: SnapshotHead, chunks: Iterable[bytes]) -> None:
    """Make a stream of a snapshot; there must be none of its name.

    Args:
        head: of the snapshot; placement and the number of replicas may differ, the name not.
    Raises:
        BrokerProblem: there is such a stream, no room for it, or the snapshot is damaged.
    """
    name = head.config["name"]
    # The server adds metadata of its own to its answers; it must not be sent back.
    metadata = {k: v for k, v in (head.config.get("metadata") or {}).items() if not k.startswith("_nats.")}
    body = {"config": head.config | {"metadata": metadata}, "state": head.state}
    to = (await request(nc, f"STREAM.RESTORE.{name}", body))["deliver_subject"]
    try:
        for chunk in chunks:
            await asyncio.sleep(0)  # a reply that is there at once would leave no turn to others
            _check(name, (await nc.request(to, chunk, timeout=CHUNK_S)).data)
        _check(name, (await nc.request(to, b"", timeout=END_S)).data)
    except (NatsError, TimeoutError) as error:
        raise BrokerProblem(f"the broker did not take all of {name} ({error!r})") from error


def _check(name: str, reply: bytes) -> None:
    error = json.loads(reply).get("error") if reply else None
    if error:
        raise BrokerProblem(f"the broker does not take the snapshot of {name}: {error.get('description', error)}")
