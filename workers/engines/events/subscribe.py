"""Reads one publisher's KV events over ZMQ, in a thread: in order, gaps asked for again.

What is lost for good is said (``lost``), since all that is known of the publisher's blocks is void then.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from workers.engines.events import wire
from workers.engines.events.order import Order, Ready

log = structlog.get_logger("engine")

REPLAY_S = 2.0  # an answer to a request for replay takes no longer
CHECK_S = 1.0  # a message that was lost at the end of many shows no gap: so the publisher is asked now and then
RECONNECT_MS = 20  # we may be here before the publisher
TICK_MS = 100  # how soon ``close`` is seen


class Subscriber:
    """Starts at once.

    Args:
        endpoint: where events are published. With ``binds``, the publisher connects to us.
        replay: where they can be asked for again; empty: nowhere.
        take: called in the thread with (payloads in order, lost).
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        take: Callable[[list[bytes], bool], None],
        *,
        topic: str = "",
        binds: bool = False,
        check_s: float = CHECK_S,
    ) -> None:
        self._take = take
        self._check_s = check_s
        self._order: Order[bytes] = Order()
        self._asked_at: float | None = None  # a request is on its way
        self._asked_for_gap = False
        self._checked_at = float("-inf")
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._news = self._context.socket(zmq.SUB)
        self._news.setsockopt(zmq.RCVHWM, 0)  # a dropped message costs a replay, or all that is known
        self._news.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._news.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._again = self._context.socket(zmq.DEALER) if replay else None
        try:
            if binds:
                self._news.bind(endpoint)
            else:
                self._news.connect(endpoint)
            if self._again is not None:
                self._again.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
                self._again.connect(replay)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        if self._again is not None:
            poller.register(self._again, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                found = dict(poller.poll(TICK_MS))
                if self._again is not None and self._again in found:
                    self._replayed(wire.message(self._again.recv_multipart()))
                if self._news in found:
                    message = wire.message(self._news.recv_multipart())
                    self._hand(self._order.live(*message))
                self._ask()
        except (zmq.ZMQError, ValueError) as error:
            log.error("kv_events_unreadable", error=repr(error), action="this worker's blocks are told no more")
            self._take([], True)
        finally:
            self._context.destroy(linger=0)

    def _replayed(self, message: wire.Message) -> None:
        if message.number != wire.END:
            self._hand(self._order.replayed(*message))
            return
        self._asked_at = None
        if self._asked_for_gap:  # else a gap that is there now came after the question
            self._hand(self._order.given_up())

    def _ask(self) -> None:
        """For what is missing, or may be; one question at a time, until the answer has come or is overdue."""
        now = time.monotonic()
        gap = self._order.missing
        if self._again is None:
            self._hand(self._order.given_up())
        elif self._asked_at is not None:
            if gap is not None and now - self._asked_at > REPLAY_S:
                self._asked_at = None
                self._hand(self._order.given_up())
        elif gap is not None or now - self._checked_at >= self._check_s:
            self._asked_at = self._checked_at = now
            self._asked_for_gap = gap is not None
            self._again.send_multipart(wire.request(self._order.expected))

    def _hand(self, ready: Ready[bytes]) -> None:
        if ready.lost:
            log.warning("kv_events_lost", action="forgetting this publisher's blocks")
        if ready.items or ready.lost:
            self._take(ready.items, ready.lost)

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread and its sockets; False: it still hangs. May be called twice."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()
