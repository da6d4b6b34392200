"""An engine whose KV events go out over ZMQ and come back from there, together with those of further publishers.

Each rank has a publisher of its own, whom anybody may read. A subscriber of ours reads it too, and others that are
named (a cache beside the engine, say); what they tell is one stream per rank, which takes the place of the engine's
events. It is fed in ``step`` only: so the batches that the worker makes of it have no gaps, and a dump is what they add
up to. To its worker this is an engine like any other.
"""

import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, cast

import structlog
import zmq

from configs.settings import WorkerSettings
from schemas.kv import KvEvent
from workers.engines.base import Engine, EngineError, StepResult
from workers.engines.events import wire
from workers.engines.events.consolidator import Consolidator
from workers.engines.events.publisher import Publisher
from workers.engines.events.subscriber import Subscriber
from workers.engines.vllm.kv_events import Translator

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step`` of an idle engine: commands of the worker wait behind it
LINGER_S = 0.5  # how long what was published is waited for, before that is left to ``wake``
HIGHEST_PORT = 65535


class Source(NamedTuple):
    """A publisher beside the engine."""

    endpoint: str
    replay: str = ""


class _Received(NamedTuple):
    """``source``: a rank's number, or the endpoint of another publisher. ``lost``: something before the payloads."""

    source: int | str
    payloads: Seq[bytes]
    lost: bool


def ports(base: int, ranks: int) -> list[tuple[int, int]]:
    """Of each rank, for events and for replay: ``base`` + rank, then as many again. All 0 with a base of 0: any.

    Raises:
        ValueError: there are no such ports.
    """
    if base + 2 * ranks - 1 > HIGHEST_PORT:
        raise ValueError(
            f"--kv-events-port {base}: {ranks} ranks need the ports up to {base + 2 * ranks - 1}, the highest is "
            f"{HIGHEST_PORT}; use {HIGHEST_PORT + 1 - 2 * ranks} at most"
        )
    return [(base + rank, base + ranks + rank) if base else (0, 0) for rank in range(ranks)]


def source_of(text: str) -> Source:
    """``tcp://host:port``, or ``tcp://host:port/replay_port``.

    Raises:
        ValueError: it is neither.
    """
    scheme, _, rest = text.partition("://")
    host, _, numbers = rest.rpartition(":")
    port, slash, replay = numbers.partition("/")
    for number in (port, replay) if slash else (port,):
        if scheme != "tcp" or not host or not number.isdigit() or not 0 < int(number) <= HIGHEST_PORT:
            raise ValueError(f"--kv-events-from {text!r}: write tcp://host:port or tcp://host:port/replay_port")
    return Source(f"tcp://{host}:{port}", f"tcp://{host}:{replay}" if slash else "")


def relayed(engine: Engine, settings: WorkerSettings, root: bytes, wake: Callable[[], None]) -> Engine:
    """``engine`` with its events over ZMQ, as the settings say; it is closed if that cannot be done.

    Args:
        root: of the names of blocks, for publishers that tell tokens.
        wake: called from any thread when there is news while the engine has nothing to do.

    Raises:
        ValueError: ports or addresses that cannot be.
        EngineError: an address cannot be used.
    """
    info = engine.info
    relay = None
    try:
        if not info.kv_events:
            raise ValueError(
                "--event-plane zmq: this engine tells of no KV events; leave the prefix cache and publishing on"
            )
        sources = [source_of(text) for text in settings.kv_events_from]
        relay = Relay(engine, root, wake)
        for events, replay in ports(settings.kv_events_port, info.dp_size):
            relay.publish(settings.kv_events_host, events, replay, settings.kv_events_topic)
        for source in sources:
            relay.subscribe(source)
    except BaseException as error:
        (relay or engine).close()
        if isinstance(error, zmq.ZMQError):
            raise EngineError(
                f"--kv-events-host {settings.kv_events_host}, --kv-events-port {settings.kv_events_port}: {error}; "
                "give each worker of a host ports of its own, or 0 for any that are free"
            ) from error
        raise
    return cast(Engine, relay)  # what it has not itself, it has from the engine


class Relay:
    """See the module. Methods are the engine thread's, except for what subscribers hand over."""

    def __init__(self, engine: Engine, root: bytes, wake: Callable[[], None]) -> None:
        self._engine = engine
        self.info = engine.info
        self._root = root
        self._wake = wake
        self._publishers: list[Publisher] = []  # by rank
        self._subscribers: list[Subscriber] = []
        self._streams = [Consolidator() for _ in range(engine.info.dp_size)]
        self._translators: dict[tuple[str, int], Translator] = {}  # of publishers with hashes of their own, by rank
        self._inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self._coming = [0] * engine.info.dp_size  # messages that were published and have not come back
        self._awaited_until = float("-inf")
        self._idle = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # --- set up ---

    def publish(self, host: str, port: int, replay_port: int, topic: str = "") -> Publisher:
        """Open the next rank's publisher, and read it.

        Raises:
            zmq.ZMQError: an address cannot be bound to.
        """
        rank = len(self._publishers)
        publisher = Publisher(
            *(f"tcp://{host}:{number or '*'}" for number in (port, replay_port)),
            block_size=self.info.block_size,
            topic=topic,
            rank=rank,
        )
        self._publishers.append(publisher)
        self._listen(rank, Source(*map(_reachable, (publisher.endpoint, publisher.replay))))
        log.info("kv_events_published", rank=rank, endpoint=publisher.endpoint, replay=publisher.replay, topic=topic)
        return publisher

    def subscribe(self, source: Source) -> None:
        """Read another publisher.

        Raises:
            zmq.ZMQError: the address cannot be used.
        """
        self._listen(source.endpoint, source)

    def _listen(self, key: int | str, source: Source) -> None:
        def take(payloads: list[bytes], lost: bool) -> None:
            self._inbox.put(_Received(key, payloads, lost))
            if self._idle:
                self._wake()

        watched = isinstance(key, str)
        self._subscribers.append(Subscriber(source.endpoint, source.replay, take, watched=watched))

    # --- as an engine ---

    def has_work(self) -> bool:
        if self._engine.has_work():
            return True
        self._idle = True  # before the look into the queue: what comes after that wakes
        if self._inbox.empty() and not self._awaited():
            return False
        self._idle = False
        return True

    def _awaited(self) -> bool:
        return any(self._coming) and time.monotonic() < self._awaited_until

    def step(self) -> StepResult:
        """One step of the engine, if it has work, with what has come over ZMQ until now.

        Raises:
            EngineError: the engine is broken.
        """
        self._idle = False
        working = self._engine.has_work()
        result = self._engine.step() if working else StepResult([], [], [], [], 0)
        if result.events:
            self._say(0, result.events)
        for rank, events in result.others.items():
            self._say(rank, events)
        news = self._news(0.0 if working else WAIT_S)
        return result._replace(events=news.pop(0, []), others=news)

    def _say(self, rank: int, events: Seq[KvEvent]) -> None:
        if events:
            self._publishers[rank].publish(events)
            self._coming[rank] += 1
            self._awaited_until = time.monotonic() + LINGER_S

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._streams[rank].dump()

    def close(self) -> None:
        """End the engine, all threads and sockets."""
        self._engine.close()
        closed = [each.close() for each in self._subscribers] + [each.close() for each in self._publishers]
        if not all(closed):
            log.warning("kv_events_thread_hangs")

    # --- what came ---

    def _news(self, wait: float) -> dict[int, list[KvEvent]]:
        """New events by rank."""
        news: dict[int, list[KvEvent]] = {}
        while (received := self._next(wait)) is not None:
            wait = 0.0
            source, payloads, lost = received
            told = self._own(source, payloads, lost) if isinstance(source, int) else self._other(source, payloads, lost)
            for rank, events in told:
                if events:
                    news.setdefault(rank, []).extend(events)
        return news

    def _next(self, wait: float) -> _Received | None:
        try:
            return self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _own(self, rank: int, payloads: Seq[bytes], lost: bool) -> list[tuple[int, list[KvEvent]]]:
        stream, out = self._streams[rank], []
        if lost:  # the engine knows; what is still on its way changes nothing in the end
            self._coming[rank] = 0
            out += stream.drop(rank)
            out += stream.feed(rank, self._engine.dump(rank))
        for payload in payloads:
            self._coming[rank] = max(0, self._coming[rank] - 1)
            batch = wire.decode(payload)
            assert isinstance(batch, wire.Batch)
            out += stream.feed(rank, batch.events)
        return [(rank, out)]

    def _other(self, source: str, payloads: Seq[bytes], lost: bool) -> list[tuple[int, list[KvEvent]]]:
        out = self._forget(source) if lost else []
        for payload in payloads:
            try:
                rank, events = self._read(source, payload)
            except ValueError as error:
                log.warning("kv_events_refused", publisher=source, error=str(error), action="forgetting its blocks")
                out += self._forget(source)
                continue
            out.append((rank, self._streams[rank].feed(source, events)))
        return out

    def _read(self, source: str, payload: bytes) -> tuple[int, Seq[KvEvent]]:
        """
        Raises:
            ValueError: no KV events, or not of such blocks or ranks as there are here.
        """
        batch = wire.decode(payload, self.info.block_size)
        rank = batch.rank or 0
        if not 0 <= rank < len(self._streams):
            raise ValueError(f"rank {rank}, this worker has {len(self._streams)}")
        translator = self._translators.get((source, rank))
        if isinstance(batch, wire.Batch) and translator is None:
            return rank, batch.events
        if translator is None:
            translator = self._translators[source, rank] = Translator(self.info.block_size, self._root)
        return rank, translator.feed(wire.decode_any(payload))

    def _forget(self, source: str) -> list[tuple[int, list[KvEvent]]]:
        self._translators = {key: each for key, each in self._translators.items() if key[0] != source}
        return [(rank, stream.drop(source)) for rank, stream in enumerate(self._streams)]


def _reachable(endpoint: str) -> str:
    """From here, an address that stands for all of them."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


__all__ = ["Relay", "Source", "ports", "relayed", "source_of"]
