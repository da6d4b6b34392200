"""An engine whose KV events are published over ZMQ and read back, together with those of other publishers.

Each rank has a publisher that any ZMQ subscriber may read. The relay subscribes to them, and to the publishers in the
settings (a cache beside the engine, say). Their events are consolidated into one stream per rank, which replaces the
engine's own events. The stream advances only in ``step``, so the batches that the worker publishes have no gaps and add
up to a dump. To its worker, the relay is an engine like any other.

Sockets are used by the publisher's own thread only.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, cast

import structlog
import zmq

from penstock.configs.settings import WorkerSettings
from penstock.schemas.kv import KvEvent
from penstock.workers.engines.engine_protocol import Engine, EngineError, StepResult
from penstock.workers.engines.events import wire
from penstock.workers.engines.events.subscriber import Subscriber
from penstock.workers.engines.events.translator import Consolidator, EventTranslator, PublishedFormat

__all__ = ["PublisherAddresses", "Relay", "ports", "source_of", "start_relay"]

REPLAY_MESSAGES = 10_000  # kept for replay,
REPLAY_BYTES = 64 << 20  # as many of them as fit


class EventPublisher:
    """Starts at once; message numbers begin with 0.

    Args:
        endpoint: to bind the PUB socket to; a port of 0 takes any free one.
        replay: to bind the ROUTER socket for replays to.
        block_size: tokens per block.
        replay_messages: how many messages are kept for replay, of at most ``REPLAY_BYTES``.

    Attributes:
        endpoint, replay: the addresses that were bound, with their ports.

    Raises:
        zmq.ZMQError: an address cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        *,
        block_size: int = 0,
        topic: str = "",
        replay_messages: int = REPLAY_MESSAGES,
        rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._topic, self._rank, self._clock, self._block_size = topic.encode(), rank, clock, block_size
        self._queue: queue.SimpleQueue[tuple[KvEvent, ...] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes, self._most = 0, replay_messages
        self._next = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 2 * (replay_messages + 1))  # a whole replay must fit
        if "[" in endpoint:
            self._pub.setsockopt(zmq.IPV6, 1)
            self._router.setsockopt(zmq.IPV6, 1)
        try:
            self._pub.bind(endpoint)
            self._router.bind(replay)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_read, self._wake_write = os.pipe()  # readable: the queue has items
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._lock = threading.Lock()  # ensures that no thread writes to the pipe once it is closed
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kv publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Seq[KvEvent]) -> None:
        """Send one message; from any thread, never blocks."""
        self._put(tuple(events))

    def _put(self, item: tuple[KvEvent, ...] | None) -> None:
        self._queue.put(item)
        with self._lock, contextlib.suppress(BlockingIOError):  # full pipe: the thread wakes up anyway
            if self._open:
                os.write(self._wake_write, b"!")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while True:
                if self._wake_read in dict(poller.poll()):
                    os.read(self._wake_read, 65_536)  # before the queue: later items make it readable again
                while not self._queue.empty():
                    events = self._queue.get()
                    if events is None:
                        return
                    self._send(wire.encode(self._clock(), events, self._block_size, self._rank))
                while self._router.poll(0):
                    self._send_replay(self._router.recv_multipart())
        finally:
            self._context.destroy(linger=200)
            with self._lock:
                self._open = False
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _send(self, payload: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._most or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart(wire.frames(self._topic, number, payload))

    def _send_replay(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[2]) != 8:
            return
        client, first = parts[0], int.from_bytes(parts[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._router.send_multipart([client, b"", *wire.frames(self._topic, number, payload)])
        self._router.send_multipart([client, b"", *wire.frames(b"", wire.END, b"")])

    def close(self, timeout: float = 5.0) -> bool:
        """Send queued events, then end the thread and its sockets. False: the thread did not end in time."""
        self._put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()


log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step`` of an idle engine: commands of the worker wait for its end
LINGER_S = 0.5  # published events are awaited for this long; later ones call ``wake``
HIGHEST_PORT = 65535


class PublisherAddresses(NamedTuple):
    """The addresses of a publisher beside the engine."""

    endpoint: str
    replay: str = ""


class _Received(NamedTuple):
    """``source``: a rank, or the endpoint of another publisher. ``lost``: events before the payloads are missing."""

    source: int | str
    payloads: Seq[bytes]
    lost: bool


def ports(base: int, ranks: int) -> list[tuple[int, int]]:
    """Ports of each rank's events and replays.

    Events use ``base`` + rank, replays the next ``ranks`` ports. With a base of 0 all are 0: any free port.

    Raises:
        ValueError: the ports would exceed 65535.
    """
    if base + 2 * ranks - 1 > HIGHEST_PORT:
        raise ValueError(
            f"--kv-events-port {base}: {ranks} ranks need the ports up to {base + 2 * ranks - 1}, the highest is "
            f"{HIGHEST_PORT}; use {HIGHEST_PORT + 1 - 2 * ranks} at most"
        )
    return [(base + rank, base + ranks + rank) if base else (0, 0) for rank in range(ranks)]


def source_of(text: str) -> PublisherAddresses:
    """Parse ``tcp://host:port`` or ``tcp://host:port/replay_port``.

    Raises:
        ValueError: it has another form.
    """
    scheme, _, address = text.partition("://")
    host, _, numbers = address.rpartition(":")
    port, slash, replay = numbers.partition("/")
    for number in (port, replay) if slash else (port,):
        if scheme != "tcp" or not host or not number.isdigit() or not 0 < int(number) <= HIGHEST_PORT:
            raise ValueError(f"--kv-events-from {text!r}: write tcp://host:port or tcp://host:port/replay_port")
    return PublisherAddresses(f"tcp://{host}:{port}", f"tcp://{host}:{replay}" if slash else "")


def start_relay(engine: Engine, settings: WorkerSettings, root: bytes, wake: Callable[[], None]) -> Engine:
    """Wrap ``engine`` so that its events go over ZMQ. On an error, the engine is closed.

    Args:
        root: parent of the first block's name, for publishers that send tokens instead of names.
        wake: called from any thread when events arrive while the engine is idle.

    Raises:
        ValueError: a port or an address in the settings is invalid.
        EngineError: an address cannot be bound.
    """
    info = engine.info
    relay = None
    try:
        if not info.kv_events:
            raise ValueError(
                "--event-plane zmq: this engine publishes no KV events; leave the prefix cache and publishing on"
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
                "give each worker of a host ports of its own, or 0 for any free ones"
            ) from error
        raise
    return cast(Engine, relay)  # ``__getattr__`` delegates the rest of the protocol to the engine


class Relay:
    """See the module. Methods are called from the engine thread; subscribers call back from their own.

    Attributes:
        publishers: of the engine's events, by rank.
    """

    def __init__(self, engine: Engine, root: bytes, wake: Callable[[], None]) -> None:
        self._engine = engine
        self.info = engine.info
        self._root = root
        self._wake = wake
        self.publishers: list[EventPublisher] = []
        self._subscribers: list[Subscriber] = []
        self._streams = [Consolidator() for _ in range(engine.info.dp_size)]
        self._translators: dict[tuple[str, int], EventTranslator] = {}  # by publisher with its own hashes, and rank
        self._inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self._unreturned = [0] * engine.info.dp_size  # messages that were published and not yet read back
        self._awaited_until = float("-inf")
        self._idle = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # --- set up ---

    def publish(self, host: str, port: int, replay_port: int, topic: str = "") -> EventPublisher:
        """Open the next rank's publisher, and subscribe to it.

        Raises:
            zmq.ZMQError: an address cannot be bound to.
        """
        rank = len(self.publishers)
        publisher = EventPublisher(
            *(f"tcp://{host}:{number or '*'}" for number in (port, replay_port)),
            block_size=self.info.block_size,
            topic=topic,
            rank=rank,
        )
        self.publishers.append(publisher)
        self._subscribe(rank, PublisherAddresses(*map(_reachable, (publisher.endpoint, publisher.replay))))
        log.info("kv_events_published", rank=rank, endpoint=publisher.endpoint, replay=publisher.replay, topic=topic)
        return publisher

    def subscribe(self, source: PublisherAddresses) -> None:
        """Subscribe to a publisher beside the engine.

        Raises:
            zmq.ZMQError: the address cannot be used.
        """
        self._subscribe(source.endpoint, source)

    def _subscribe(self, key: int | str, source: PublisherAddresses) -> None:
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
        self._idle = True  # before the queue is checked: later events call ``wake``
        if self._inbox.empty() and not self._awaited():
            return False
        self._idle = False
        return True

    def _awaited(self) -> bool:
        return any(self._unreturned) and time.monotonic() < self._awaited_until

    def step(self) -> StepResult:
        """One step of the engine, if it has work, and the events that have arrived over ZMQ.

        Raises:
            EngineError: the engine is broken.
        """
        self._idle = False
        working = self._engine.has_work()
        result = self._engine.step() if working else StepResult([], [], [], [], 0)
        if result.events:
            self._publish(0, result.events)
        for rank, events in result.others.items():
            self._publish(rank, events)
        by_rank = self._receive(0.0 if working else WAIT_S)
        result.events, result.others = by_rank.pop(0, []), by_rank
        return result

    def _publish(self, rank: int, events: Seq[KvEvent]) -> None:
        if events:
            self.publishers[rank].publish(events)
            self._unreturned[rank] += 1
            self._awaited_until = time.monotonic() + LINGER_S

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._streams[rank].dump()

    def close(self) -> None:
        """Close the engine, all threads and sockets."""
        self._engine.close()
        closed = [each.close() for each in self._subscribers] + [each.close() for each in self.publishers]
        if not all(closed):
            log.warning("kv_events_thread_still_running")

    # --- received events ---

    def _receive(self, wait: float) -> dict[int, list[KvEvent]]:
        """The changes of each rank's stream."""
        by_rank: dict[int, list[KvEvent]] = {}
        while (received := self._next(wait)) is not None:
            wait = 0.0
            source, payloads, lost = received
            if isinstance(source, int):
                changes = self._on_own(source, payloads, lost)
            else:
                changes = self._on_other(source, payloads, lost)
            for rank, events in changes:
                if events:
                    by_rank.setdefault(rank, []).extend(events)
        return by_rank

    def _next(self, wait: float) -> _Received | None:
        try:
            return self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _on_own(self, rank: int, payloads: Seq[bytes], lost: bool) -> list[tuple[int, list[KvEvent]]]:
        stream, out = self._streams[rank], []
        if lost:  # the engine's dump is complete; events still on their way do not change the result
            self._unreturned[rank] = 0
            out += stream.drop(rank)
            out += stream.feed(rank, self._engine.dump(rank))
        for payload in payloads:
            self._unreturned[rank] = max(0, self._unreturned[rank] - 1)
            batch = wire.decode(payload)
            assert isinstance(batch, wire.NamedBatch)
            out += stream.feed(rank, batch.events)
        return [(rank, out)]

    def _on_other(self, source: str, payloads: Seq[bytes], lost: bool) -> list[tuple[int, list[KvEvent]]]:
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
        batch = wire.decode(payload, self.info.block_size)
        rank = batch.rank or 0
        if not 0 <= rank < len(self._streams):
            raise ValueError(f"rank {rank} does not exist: this worker has {len(self._streams)}")
        translator = self._translators.get((source, rank))
        if isinstance(batch, wire.NamedBatch) and translator is None:
            return rank, batch.events
        if translator is None:
            translator = self._translators[source, rank] = EventTranslator(
                PublishedFormat(self.info.block_size, self._root)
            )
        return rank, translator.feed(wire.decode_raw(payload))

    def _forget(self, source: str) -> list[tuple[int, list[KvEvent]]]:
        self._translators = {key: each for key, each in self._translators.items() if key[0] != source}
        return [(rank, stream.drop(source)) for rank, stream in enumerate(self._streams)]


def _reachable(endpoint: str) -> str:
    """An address on this machine for an endpoint that is bound to all interfaces."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
