"""As ``sglang.srt.disaggregation.kv_events``: the events, byte for byte what crosses the wire."""

import json
from typing import Any

import msgspec
from vllm.distributed.kv_events import ZmqEventPublisher as _Publisher  # the same sockets and frames


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class KVEventsConfig:
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class ZmqEventPublisher(_Publisher):
    def publish(self, events: EventBatch) -> None:  # type: ignore[override]
        if events.attn_dp_rank is None:
            events.attn_dp_rank = self._rank
        self._queue.put(events)  # type: ignore[arg-type]


def publisher(config: str | None, rank: int) -> ZmqEventPublisher | None:
    """The publisher of one rank, whose ports are the configured ones plus its number."""
    given = json.loads(config) if config else {}
    known = KVEventsConfig.__annotations__
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"kv_events_config: unexpected {unknown}")
    if given.pop("publisher", "null") != "zmq":
        return None
    given.pop("bind", None)
    for name in ("endpoint", "replay_endpoint"):
        if rank and given.get(name, "").startswith("tcp://"):
            host, _, port = given[name].rpartition(":")
            given[name] = f"{host}:{int(port) + rank}"
    return ZmqEventPublisher(rank, **given)
