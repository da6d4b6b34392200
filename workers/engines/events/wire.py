"""The multipart format of KV events over ZMQ: topic, number (8 bytes, big-endian), payload in MessagePack.

It is vLLM's format, so every tool that reads vLLM's events can read ours. A replay request is the first missing number
in 8 bytes; the replayed messages have the same parts, and the last one has the number -1. Pure.

Our own publisher's events differ from vLLM's in two ways: ``block_hashes`` are our block names (16 bytes, see
``penstock.schemas.block_hashes``), equal on every worker of a model, and ``token_ids`` is empty, since the names follow
from the tokens.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec

from penstock.schemas.block_hashes import DIGEST_BYTES, split
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored

_POSITIONS = {  # of the fields of events that are arrays
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}
END = -1  # number of the last message of a replay
MEDIA = ("GPU", "CPU", "STORAGE")  # by tier
_TIERS: dict[str | None, int] = {None: 0} | {name: tier for tier, name in enumerate(MEDIA)}


class NumberedPayload(NamedTuple):
    number: int
    payload: bytes


class NamedBatch(NamedTuple):
    """A payload whose hashes are our block names."""

    time: float  # Unix, seconds
    events: tuple[KvEvent, ...]
    rank: int | None = None


class RawBatch(NamedTuple):
    """A payload with an engine's own hashes; ``decode_raw`` returns its events."""

    rank: int | None = None


class _BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass


_Event = _BlockStored | _BlockRemoved | _AllBlocksCleared


class _Payload(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    time: float
    events: tuple[_Event, ...]
    rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def frames(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    """The parts of a published message."""
    return [topic, number.to_bytes(8, "big", signed=number < 0), payload]


def parse_message(parts: Seq[bytes]) -> NumberedPayload:
    """Read a published or replayed message, with any routing parts in front.

    Raises:
        ValueError: not a message of this format.
    """
    if len(parts) < 2 or len(parts[-2]) != 8:
        raise ValueError(f"not a KV event message: {len(parts)} parts, expected topic, 8-byte number and payload")
    return NumberedPayload(int.from_bytes(parts[-2], "big", signed=True), parts[-1])


def replay_request(number: int) -> list[bytes]:
    """The message that requests a replay from this number on, for a DEALER (a REQ adds the empty part itself)."""
    return [b"", number.to_bytes(8, "big")]


def encode(time: float, events: Seq[KvEvent], block_size: int, rank: int | None = None) -> bytes:
    return _encode(_Payload(time, tuple(_to_wire(event, block_size) for event in events), rank))


def _to_wire(event: KvEvent, block_size: int) -> _Event:
    if isinstance(event, Cleared):
        return _AllBlocksCleared()
    hashes: list[bytes | int] = [*split(event.digests)]
    medium, group = MEDIA[min(event.tier, len(MEDIA) - 1)], event.group or None
    if isinstance(event, Removed):
        return _BlockRemoved(hashes, medium, group)
    return _BlockStored(hashes, event.parent, [], block_size, None, medium, None, group)


def decode(payload: bytes, block_size: int = 0) -> NamedBatch | RawBatch:
    """
    Args:
        block_size: tokens per block of the reader; 0: any.

    Raises:
        ValueError: not a batch of KV events, or its blocks have another size.
    """
    try:
        time, events, rank = msgspec.structs.astuple(_decode(payload))
    except msgspec.MsgspecError as error:
        if not any(isinstance(each, dict) and str(each.get("type")) in _POSITIONS for each in decode_raw(payload)):
            raise ValueError(f"not a batch of KV events: {error}") from error
        _, _, *more = msgspec.msgpack.decode(payload)  # arrays, or pairs of tokens
        return RawBatch(more[0] if more and isinstance(more[0], int) else None)
    if not all(_has_names(event) for event in events):
        return RawBatch(rank)
    for event in events:
        if isinstance(event, _BlockStored) and block_size and event.block_size != block_size:
            raise ValueError(f"its blocks have {event.block_size} tokens, this worker's {block_size}")
    return NamedBatch(time, tuple(_from_wire(events)), rank)


def _has_names(event: _Event) -> bool:
    if isinstance(event, _AllBlocksCleared):
        return True
    hashes = event.block_hashes
    if isinstance(event, _BlockStored):
        if event.token_ids:
            return False
        hashes = hashes if event.parent_block_hash is None else [*hashes, event.parent_block_hash]
    return all(isinstance(each, bytes) and len(each) == DIGEST_BYTES for each in hashes)


def _from_wire(events: Seq[_Event]) -> Iterator[KvEvent]:
    for event in events:
        if isinstance(event, _AllBlocksCleared):
            yield Cleared()
            continue
        digests = b"".join(event.block_hashes)  # type: ignore[arg-type]  # they are names
        tier, group = _TIERS.get(event.medium, len(MEDIA) - 1), event.group_idx or 0
        if isinstance(event, _BlockRemoved):
            yield Removed(digests, group, tier)
        else:
            yield Stored(digests, event.parent_block_hash, group, tier)  # type: ignore[arg-type]


def decode_raw(payload: bytes) -> list[Any]:
    """The events of a payload from vLLM or SGLang, as plain data: dictionaries with the key "type".

    Raises:
        ValueError: not [time, [events], ...].
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not MessagePack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not a batch of KV events")
    return [_by_name(each) if isinstance(each, list) else each for each in batch[1]]


def _by_name(event: list[Any]) -> Any:
    """An event as SGLang 0.5.17 and earlier vLLM send it: an array that begins with its type."""
    names = _POSITIONS.get(event[0]) if event and isinstance(event[0], str) else None
    return event if names is None else {"type": event[0], **dict(zip(names, event[1:], strict=False))}
