"""Publishes a worker's KV events over ZMQ in the public multipart format, with replay.

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
from typing import Any

import zmq

from penstock.schemas.kv import KvEvent
from penstock.workers.engines.events import wire

REPLAY_MESSAGES = 10_000  # kept for replay,
REPLAY_BYTES = 64 << 20  # as many of them as fit


class Publisher:
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
