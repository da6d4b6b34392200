"""Publishes a worker's KV events over ZMQ in the public multipart format, with replay.

Sockets are touched by the publisher's own thread only.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import zmq

from schemas.kv import KvEvent
from workers.engines.events import wire

KEPT = 10_000  # messages for replay
TICK_MS = 20  # how long a replay may wait


class Publisher:
    """Starts at once; sequence numbers begin with 0.

    Args:
        endpoint, replay: to bind to; with a port of 0 any free one, see ``endpoint`` and ``replay`` of the object.
        block_size: tokens.
        kept: messages for replay.

    Raises:
        zmq.ZMQError: an address cannot be bound to.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        *,
        block_size: int = 0,
        topic: str = "",
        kept: int = KEPT,
        rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._topic, self._rank, self._clock, self._block_size = topic.encode(), rank, clock, block_size
        self._queue: queue.SimpleQueue[tuple[KvEvent, ...] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._next = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._news, self._again = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._again.setsockopt(zmq.SNDHWM, 2 * (kept + 1))  # a whole replay must fit
        if "[" in endpoint:
            self._news.setsockopt(zmq.IPV6, 1)
            self._again.setsockopt(zmq.IPV6, 1)
        try:
            self._news.bind(endpoint)
            self._again.bind(replay)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._news.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._again.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kv publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Seq[KvEvent]) -> None:
        """One message; from any thread, never blocks."""
        self._queue.put(tuple(events))

    def _run(self) -> None:
        try:
            while True:
                try:
                    events = self._queue.get(timeout=TICK_MS / 1000)
                except queue.Empty:
                    events = ()
                if events is None:
                    return
                if events:
                    self._send(wire.encode(self._clock(), events, self._block_size, self._rank))
                while self._again.poll(0):
                    self._answer(self._again.recv_multipart())
        finally:
            self._context.destroy(linger=200)

    def _send(self, payload: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._news.send_multipart(wire.frames(self._topic, number, payload))

    def _answer(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[2]) != 8:
            return
        client, first = parts[0], int.from_bytes(parts[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._again.send_multipart([client, b"", *wire.frames(self._topic, number, payload)])
        self._again.send_multipart([client, b"", *wire.frames(b"", wire.END, b"")])

    def close(self, timeout: float = 5.0) -> bool:
        """Send what is queued, end the thread and its sockets; False: it still hangs."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()
