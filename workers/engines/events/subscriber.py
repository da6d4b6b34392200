"""Reads one publisher's KV events over ZMQ in a thread: in order, with gaps filled by replays.

A publisher numbers its messages 0, 1, 2, ... and keeps the latest of them for replay. Live messages arrive in order;
some may be missing (the subscriber connected late, or a queue overflowed). ``EventReorderBuffer`` (pure) detects gaps
and drops repeats. A loss that no replay can fill is reported (``lost``): nothing is then known of the publisher's
blocks.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.workers.engines.events import wire

T = TypeVar("T")

MAX_WAITING = 10_000  # messages kept while a replay is awaited; beyond that, the missing ones are given up


class Ready(NamedTuple, Generic[T]):
    """Messages that are in order now. ``lost``: messages before the first of ``items`` will never arrive."""

    items: list[T]
    lost: bool = False


class EventReorderBuffer(Generic[T]):
    """The messages of one publisher.

    Attributes:
        expected: number of the next message in order.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.expected = 0
        self._latest = -1  # number of the latest live message
        self._waiting: dict[int, T] = {}
        self._max_waiting = max_waiting

    @property
    def missing(self) -> int | None:
        """The number from which a replay is needed; None: nothing is missing."""
        return self.expected if self._waiting else None

    def push_live(self, number: int, item: T) -> Ready[T]:
        """Add a message as it was published. A number not above the latest means that the publisher has restarted."""
        lost = False
        if number <= self._latest:
            self._waiting.clear()
            self.expected, lost = 0, True
        self._latest = number
        ready = self.push_replayed(number, item)
        if len(self._waiting) > self._max_waiting:
            ready = self.give_up()
        return Ready(ready.items, lost or ready.lost)

    def push_replayed(self, number: int, item: T) -> Ready[T]:
        """Add a message of a replay; one that was received before is dropped."""
        if number >= self.expected:
            self._waiting[number] = item
        return Ready(self._take())

    def give_up(self) -> Ready[T]:
        """Stop waiting for a replay: the messages that are still missing are lost."""
        if not self._waiting:
            return Ready([])
        items: list[T] = []
        lost = False
        while self._waiting:  # with several gaps, the messages before the last one are useless too
            self.expected = min(self._waiting)
            items, lost = self._take(), True
        return Ready(items, lost)

    def _take(self) -> list[T]:
        items = []
        while self.expected in self._waiting:
            items.append(self._waiting.pop(self.expected))
            self.expected += 1
        return items


log = structlog.get_logger("engine")

REPLAY_S = 2.0  # a replay that takes longer is given up
CHECK_S = 1.0  # a lost message that none follows leaves no gap, so a replay is requested this often
RECONNECT_MS = 20  # the publisher may start after us
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3000  # a watched publisher that answers none for this long is gone
POLL_MS = 100  # ``close`` waits this long at most for the thread to notice


class Subscriber:
    """Starts at once.

    Args:
        endpoint: where events are published. With ``binds``, the publisher connects to us.
        replay: where replays are requested; empty: there are none.
        take: called in the thread with (payloads in order, lost).
        watched: once the publisher has ended, hangs or cannot be reached, report everything as lost. When it is back,
            even if only the connection was lost, it is read from the first message that it still keeps: it may be
            another process.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        take: Callable[[list[bytes], bool], None],
        *,
        topic: str = "",
        binds: bool = False,
        watched: bool = False,
        check_s: float = CHECK_S,
    ) -> None:
        self._take = take
        self._check_s = check_s
        self._buffer: EventReorderBuffer[bytes] = EventReorderBuffer()
        self._received = False  # something of this publisher is known
        self._requested_at: float | None = None  # a replay is on its way
        self._requested_for_gap = False
        self._checked_at = float("-inf")
        self._gap_at = time.monotonic()  # when the gap was seen; the present while there is none
        self._poller = zmq.Poller()
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.IPV6, 1)  # besides IPv4
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)  # a dropped message costs a replay, or everything that is known
        self._sub.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._replay = replay
        self._dealer: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[Any] | None = None
        try:
            if watched:
                self._sub.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
                self._sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
                self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            if binds:
                self._sub.bind(endpoint)
            else:
                self._sub.connect(endpoint)
            self._open_replay()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def _open_replay(self) -> None:
        if not self._replay:
            return
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._dealer.setsockopt(zmq.IMMEDIATE, 1)  # do not queue requests for a publisher that is not there yet
        self._dealer.connect(self._replay)
        self._poller.register(self._dealer, zmq.POLLIN)

    def _run(self) -> None:
        self._poller.register(self._sub, zmq.POLLIN)
        if self._monitor is not None:
            self._poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(self._poller.poll(POLL_MS))
                if self._dealer is not None and self._dealer in ready:
                    self._on_replay(wire.parse_message(self._dealer.recv_multipart()))
                if self._monitor is not None and self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    while self._sub.poll(0):  # messages from before the disconnect
                        self._on_live()
                    self._on_disconnect()
                elif self._sub in ready:
                    self._on_live()
                self._request_replay()
        except (zmq.ZMQError, ValueError) as error:
            log.error("kv_events_unreadable", error=repr(error), action="this worker's blocks are no longer announced")
            self._take([], True)
        finally:
            if self._monitor is not None:
                self._sub.disable_monitor()
            self._context.destroy(linger=0)

    def _on_live(self) -> None:
        self._deliver(self._buffer.push_live(*wire.parse_message(self._sub.recv_multipart())))

    def _on_disconnect(self) -> None:
        self._buffer, self._requested_at = EventReorderBuffer(), None
        if self._dealer is not None:  # also drops the replayed messages that it may still hold
            self._poller.unregister(self._dealer)
            self._dealer.close(0)
            self._open_replay()
        if self._received:
            self._received = False
            log.warning("kv_publisher_lost", action="forgetting its blocks")
            self._take([], True)

    def _on_replay(self, message: wire.NumberedPayload) -> None:
        if message.number != wire.END:
            self._requested_at = time.monotonic()  # more is on its way
            self._deliver(self._buffer.push_replayed(*message))
            return
        self._requested_at = None
        if self._requested_for_gap:  # otherwise a gap that exists now appeared after the request
            self._deliver(self._buffer.give_up())

    def _request_replay(self) -> None:
        """Request events that may be missing; one request at a time, until its replay has ended or is overdue."""
        now = time.monotonic()
        gap = self._buffer.missing is not None
        if not gap:
            self._gap_at = now
        if self._dealer is None:
            self._deliver(self._buffer.give_up())
        elif self._requested_at is not None and now - self._requested_at <= REPLAY_S:
            pass
        elif now - self._gap_at > REPLAY_S:
            self._requested_at = None
            self._deliver(self._buffer.give_up())
        elif gap or now - self._checked_at >= self._check_s:
            self._requested_at = None
            with contextlib.suppress(zmq.Again):  # the publisher is not there yet
                self._dealer.send_multipart(wire.replay_request(self._buffer.expected), zmq.NOBLOCK)
                self._requested_at = self._checked_at = now
                self._requested_for_gap = gap

    def _deliver(self, ready: Ready[bytes]) -> None:
        if ready.lost:
            log.warning("kv_events_lost", action="forgetting this publisher's blocks")
        if ready.items or ready.lost:
            self._received = True
            self._take(ready.items, ready.lost)

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread and its sockets; False: the thread did not end in time. May be called twice."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()
