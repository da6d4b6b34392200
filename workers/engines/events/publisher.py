"""Publishes a worker's KV events over ZMQ in the public multipart format, with replay.

Sockets are touched by the publisher's own thread only.
"""

import contextlib
import os
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
        self._heard, self._bell = os.pipe()  # something is in the queue
        os.set_blocking(self._heard, False)
        os.set_blocking(self._bell, False)
        self._turn = threading.Lock()  # nobody rings once the bell is taken down
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kv publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Seq[KvEvent]) -> None:
        """One message; from any thread, never blocks."""
        self._put(tuple(events))

    def _put(self, item: tuple[KvEvent, ...] | None) -> None:
        self._queue.put(item)
        with self._turn, contextlib.suppress(BlockingIOError):  # full: it rings already
            if self._open:
                os.write(self._bell, b"!")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._heard, zmq.POLLIN)
        poller.register(self._again, zmq.POLLIN)
        try:
            while True:
                if self._heard in dict(poller.poll()):
                    os.read(self._heard, 65_536)  # before the queue: what comes after that rings again
                while not self._queue.empty():
                    events = self._queue.get()
                    if events is None:
                        return
                    self._send(wire.encode(self._clock(), events, self._block_size, self._rank))
                while self._again.poll(0):
                    self._answer(self._again.recv_multipart())
        finally:
            self._context.destroy(linger=200)
            with self._turn:
                self._open = False
                os.close(self._heard)
                os.close(self._bell)

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
        self._put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()
