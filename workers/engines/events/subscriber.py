"""Reads one publisher's KV events over ZMQ, in a thread: in order, gaps asked for again.

What is lost for good is said (``lost``), since all that is known of the publisher's blocks is void then.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from workers.engines.events import wire
from workers.engines.events.reorder_buffer import Order, Ready

log = structlog.get_logger("engine")

REPLAY_S = 2.0  # an answer to a request for replay takes no longer
CHECK_S = 1.0  # a message that was lost at the end of many shows no gap: so the publisher is asked now and then
RECONNECT_MS = 20  # we may be here before the publisher
BEAT_MS, SILENT_MS = 1000, 3000  # a watched publisher that answers no heartbeat for so long is gone
TICK_MS = 100  # how soon ``close`` is seen


class Subscriber:
    """Starts at once.

    Args:
        endpoint: where events are published. With ``binds``, the publisher connects to us.
        replay: where they can be asked for again; empty: nowhere.
        take: called in the thread with (payloads in order, lost).
        watched: once the publisher has died, hangs or cannot be reached, all that it said is lost. When it is back,
            also if it never was away, it is heard from the first message that it still keeps: nothing tells whether
            it is the same.
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
        self._order: Order[bytes] = Order()
        self._heard = False  # something of this publisher is known
        self._asked_at: float | None = None  # a request is on its way
        self._asked_for_gap = False
        self._checked_at = float("-inf")
        self._gap_at = time.monotonic()  # when what is missing was missed; now, if nothing is
        self._poller = zmq.Poller()
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.IPV6, 1)  # as well
        self._news = self._context.socket(zmq.SUB)
        self._news.setsockopt(zmq.RCVHWM, 0)  # a dropped message costs a replay, or all that is known
        self._news.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._news.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._replay = replay
        self._again: zmq.Socket[Any] | None = None
        self._watch: zmq.Socket[Any] | None = None
        try:
            if watched:
                self._news.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
                self._news.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
                self._watch = self._news.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            if binds:
                self._news.bind(endpoint)
            else:
                self._news.connect(endpoint)
            self._open_replay()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def _open_replay(self) -> None:
        if not self._replay:
            return
        self._again = self._context.socket(zmq.DEALER)
        self._again.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._again.setsockopt(zmq.IMMEDIATE, 1)  # questions are for whoever is there, not for who may come
        self._again.connect(self._replay)
        self._poller.register(self._again, zmq.POLLIN)

    def _run(self) -> None:
        self._poller.register(self._news, zmq.POLLIN)
        if self._watch is not None:
            self._poller.register(self._watch, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                found = dict(self._poller.poll(TICK_MS))
                if self._again is not None and self._again in found:
                    self._replayed(wire.message(self._again.recv_multipart()))
                if self._watch is not None and self._watch in found:
                    recv_monitor_message(self._watch)
                    while self._news.poll(0):  # what it had said before
                        self._live()
                    self._gone()
                elif self._news in found:
                    self._live()
                self._ask()
        except (zmq.ZMQError, ValueError) as error:
            log.error("kv_events_unreadable", error=repr(error), action="this worker's blocks are told no more")
            self._take([], True)
        finally:
            if self._watch is not None:
                self._news.disable_monitor()
            self._context.destroy(linger=0)

    def _live(self) -> None:
        self._hand(self._order.live(*wire.message(self._news.recv_multipart())))

    def _gone(self) -> None:
        self._order, self._asked_at = Order(), None
        if self._again is not None:  # with the answers that may still be in it
            self._poller.unregister(self._again)
            self._again.close(0)
            self._open_replay()
        if self._heard:
            self._heard = False
            log.warning("kv_publisher_gone", action="forgetting its blocks")
            self._take([], True)

    def _replayed(self, message: wire.Message) -> None:
        if message.number != wire.END:
            self._asked_at = time.monotonic()  # it is on its way
            self._hand(self._order.replayed(*message))
            return
        self._asked_at = None
        if self._asked_for_gap:  # else a gap that is there now came after the question
            self._hand(self._order.given_up())

    def _ask(self) -> None:
        """For what is missing, or may be; one question at a time, until the answer has come or is overdue."""
        now = time.monotonic()
        gap = self._order.missing is not None
        if not gap:
            self._gap_at = now
        if self._again is None:
            self._hand(self._order.given_up())
        elif self._asked_at is not None and now - self._asked_at <= REPLAY_S:
            pass
        elif now - self._gap_at > REPLAY_S:
            self._asked_at = None
            self._hand(self._order.given_up())
        elif gap or now - self._checked_at >= self._check_s:
            self._asked_at = None
            with contextlib.suppress(zmq.Again):  # nobody is there yet
                self._again.send_multipart(wire.request(self._order.expected), zmq.NOBLOCK)
                self._asked_at = self._checked_at = now
                self._asked_for_gap = gap

    def _hand(self, ready: Ready[bytes]) -> None:
        if ready.lost:
            log.warning("kv_events_lost", action="forgetting this publisher's blocks")
        if ready.items or ready.lost:
            self._heard = True
            self._take(ready.items, ready.lost)

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread and its sockets; False: it still hangs. May be called twice."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()
