"""The multipart format of KV events over ZMQ: topic, number (8 bytes, big-endian), payload in MessagePack.

It is vLLM's, and so that of every tool that reads its events. A replay is asked for with the first number that is
missing, in 8 bytes; the answers have the same parts, and the last has the number -1. Pure.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec

from schemas.kv import KvEvent

END = -1


class Message(NamedTuple):
    number: int
    payload: bytes


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The payload of our own publisher: as vLLM's, with our events, whose hashes are the names themselves."""

    time: float  # Unix, seconds
    events: tuple[KvEvent, ...]
    rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode


def frames(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    return [topic, number.to_bytes(8, "big", signed=number < 0), payload]


def message(parts: Seq[bytes]) -> Message:
    """Of a published or replayed message, whatever routing parts are in front.

    Raises:
        ValueError: it is none.
    """
    if len(parts) < 2 or len(parts[-2]) != 8:
        raise ValueError(f"no message of {len(parts)} parts")
    return Message(int.from_bytes(parts[-2], "big", signed=True), parts[-1])


def request(number: int) -> list[bytes]:
    """Ask for a replay from this number on (a DEALER's message; a REQ adds the empty part itself)."""
    return [b"", number.to_bytes(8, "big")]


def encode(time: float, events: Seq[KvEvent], rank: int | None = None) -> bytes:
    return _encode(Batch(time, tuple(events), rank))


def decode(payload: bytes) -> Batch:
    """
    Raises:
        ValueError: not a batch of our events.
    """
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def decode_any(payload: bytes) -> list[Any]:
    """The events of a payload of vLLM's, as plain data.

    Raises:
        ValueError: not [time, [events], ...].
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not MessagePack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not a batch of KV events")
    return batch[1]
