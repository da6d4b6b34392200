"""KV events that an engine publishes over ZMQ (vLLM, SGLang): read per data-parallel rank, translated to our names."""

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import zmq

from penstock.schemas.kv import KvEvent
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo
from penstock.workers.engines.events import wire
from penstock.workers.engines.events.subscriber import Subscriber
from penstock.workers.engines.events.translator import EventTranslator, PublishedFormat
from penstock.workers.engines.external.engine import BlockCounts
from penstock.workers.engines.external.nodes import free_ports
from penstock.workers.engines.external.runtime import Inbox

log = structlog.get_logger("engine")

KV_EVENTS_S = 0.1  # events use another channel than outputs, and may follow the last output


class KvPayloads(NamedTuple):
    """Payloads of KV events of one rank. ``lost``: events before them are missing; ``emptied``: the cache was."""

    rank: int
    payloads: Seq[bytes] = ()
    lost: bool = False
    emptied: bool = False


EMPTIED = KvPayloads(0, emptied=True)


class EventStreams:
    """Implements ``external.engine.KnownBlocks`` with the names of all ranks' blocks.

    Args:
        root: parent of the first block's name for prompts without a salt.
        load: returns the blocks of running requests, as last reported, and the preemptions since the start.
    """

    def __init__(self, info: EngineInfo, root: bytes, load: Callable[[], tuple[int, int]]) -> None:
        self._total = info.total_blocks
        self._translators = [EventTranslator(PublishedFormat(info.block_size, root)) for _ in range(info.dp_size)]
        self._load = load

    def take(self, event: KvPayloads) -> dict[int, list[KvEvent]]:
        """The events in the payloads, by rank. A rank's blocks are forgotten if a payload is missing or damaged."""
        translator = self._translators[event.rank]
        events = translator.forget() if event.lost else translator.emptied() if event.emptied else []
        for payload in event.payloads:
            try:
                events += translator.feed(wire.decode_raw(payload))
            except ValueError as error:
                translator.counts.malformed += 1
                log.warning("kv_event_malformed", error=str(error), action="forgetting this rank's blocks")
                events += translator.forget()
        return {event.rank: events}

    def dump(self, rank: int) -> list[KvEvent]:
        return self._translators[rank].dump()

    def counts(self, *, active: bool, pinned: int) -> BlockCounts:
        """Counts of the pool. A named block that no request uses counts as cached."""
        (used, preemptions), total = self._load(), self._total
        pinned = min(total, pinned)
        used = min(total, max(pinned, used if active else 0))  # the last report is outdated once nothing runs
        cached = min(total - used, sum(translator.names for translator in self._translators))
        return BlockCounts(used, cached, total - used - cached, pinned, preemptions)


def channels(folder: Path, ranks: int) -> tuple[str, str]:
    """Endpoints of KV events and their replay. TCP for several ranks: rank n adds n to the port.

    Raises:
        EngineError: the folder's path is too long for a socket's.
    """
    if ranks == 1:
        if len(os.fsencode(folder / "events")) > zmq.IPC_PATH_MAX_LEN:
            raise EngineError(
                f"{folder} is too long for sockets in it, whose paths take {zmq.IPC_PATH_MAX_LEN} bytes at most: "
                "set TMPDIR to a shorter folder for temporary files"
            )
        return f"ipc://{folder}/events", f"ipc://{folder}/replay"
    first = free_ports(2 * ranks)
    return f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + ranks}"


def subscribe(config: Mapping[str, Any], rank: int, inbox: Inbox) -> Subscriber:
    """Read one rank's events into the queue.

    Args:
        config: of the engine's publisher: endpoint, replay_endpoint, topic; SGLang's may have ``bind``.

    Raises:
        EngineError: the endpoint cannot be used.
    """
    endpoint, replay = (_of_rank(config.get(key) or "", rank) for key in ("endpoint", "replay_endpoint"))
    bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    if config.get("bind") is not None:
        bound = bool(config["bind"])

    def take(payloads: list[bytes], lost: bool) -> None:
        inbox.put(KvPayloads(rank, payloads, lost))

    try:
        return Subscriber(
            endpoint.replace("*", "127.0.0.1"),
            replay.replace("*", "127.0.0.1"),
            take,
            topic=config.get("topic") or "",
            binds=not bound,  # a publisher with a plain address connects to it
        )
    except zmq.ZMQError as error:
        raise EngineError(f"kv_events_config.endpoint {endpoint}: {error}") from error


def _of_rank(endpoint: str, rank: int) -> str:
    if not rank or not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
