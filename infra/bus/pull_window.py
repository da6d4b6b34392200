"""Messages requested from a pull consumer and not yet received. Pure: time is an argument.

Requests are counted in generations. After a reconnect, or when the server has been silent for too long, the requests
made before no longer count. A message of an earlier generation is taken nevertheless, but not counted in this one.
"""

import enum

from penstock.infra.bus.message import Message

EXPIRES_S = 30.0  # a request that is not filled by then ends
HEARTBEAT_S = 5.0
SILENT_S = 2.5 * HEARTBEAT_S  # the server sends heartbeats for an open request


class Received(enum.Enum):
    """What a message on the inbox of a pull request is."""

    job = enum.auto()
    heartbeat = enum.auto()
    ended = enum.auto()  # a request has ended; ask again at once
    refused = enum.auto()  # a request was refused (consumer deleted, no leader); ask again later, or asking would spin
    stale = enum.auto()  # about a request of an earlier generation


class PullWindow:
    """How much is requested, and when to request more.

    Guarantees: never more is requested than there is room for; while there is room, a request is open, was refused
    (then the caller's clock tries again), or is missed after ``SILENT_S``.

    Attributes:
        generation: of the current requests.
        requested: messages that they may still bring.
        closed: nothing more is requested.
    """

    def __init__(self, now: float) -> None:
        self.generation = 0
        self.requested = 0
        self.closed = False
        self._last_received = now

    def next_batch(self, room: int) -> int:
        """How many messages to request now, given room for ``room`` more; 0: none.

        Only if there is room for clearly more than is requested, so that few requests are made.
        """
        if self.closed or room <= 0 or self.requested * 2 > room:
            return 0
        batch, self.requested = room - self.requested, room
        return batch

    def receive(self, message: Message, generation: int, now: float) -> Received:
        """Classify a message of a generation's inbox, and count the end of its request.

        A job counts as requested until ``taken``: before that, the caller's room may not count it yet.
        """
        self._last_received = now
        headers = message.headers
        if headers is None or message.reply:
            return Received.job
        status = headers.get("Status", "")
        if status == "100":
            return Received.heartbeat
        if generation != self.generation:
            return Received.stale
        if status in ("404", "408"):  # no messages; expired
            self.requested = max(0, self.requested - int(headers.get("Nats-Pending-Messages", "0") or 0))
            return Received.ended
        self.requested = 0
        return Received.refused

    def taken(self, generation: int) -> None:
        """A job was taken, and the caller's room counts it."""
        if generation == self.generation and self.requested:
            self.requested -= 1

    def silent(self, now: float) -> float:
        """Seconds since an open request should have sent a heartbeat; 0: nothing is missing."""
        silent = now - self._last_received
        return silent if self.requested and silent > SILENT_S else 0.0

    def restart(self, now: float) -> None:
        """Begin a generation: no earlier request counts any more."""
        self.generation += 1
        self.requested = 0
        self._last_received = now

    def close(self) -> None:
        self.closed = True


def pull_request(batch: int, expires_s: float = EXPIRES_S) -> bytes:
    """The body of a request for ``batch`` messages; heartbeats only if it lives longer than one takes to be missed."""
    expires, heartbeat = int(expires_s * 1e9), int(HEARTBEAT_S * 1e9)
    beats = b',"idle_heartbeat":%d' % heartbeat if expires_s > 2 * HEARTBEAT_S else b""
    return b'{"batch":%d,"expires":%d%b}' % (batch, expires, beats)
