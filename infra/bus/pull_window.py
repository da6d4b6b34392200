"""What was asked of a pull consumer and is still to come. Pure: time is an argument.

Requests are counted in generations: after a reconnect, or when the server has been silent for too long, what was asked
before counts no more. A message of an earlier generation is taken all the same; it was just not asked for by this one.
"""

HEARTBEAT_S = 5.0
SILENT_S = 2.5 * HEARTBEAT_S  # a request that is alive sends heartbeats


class Window:
    """
    Attributes:
        requested: messages that may still come by the requests of this generation.
        closed: nothing more is asked for.
    """

    def __init__(self, now: float) -> None:
        self.generation = 0
        self.requested = 0
        self.closed = False
        self._heard = now

    def ask(self, room: int) -> int:
        """How many messages to request now, given room for ``room`` more; 0: none.

        Only if there is room for clearly more than is requested, so that few requests are made.
        """
        if self.closed or room <= 0 or self.requested * 2 > room:
            return 0
        batch, self.requested = room - self.requested, room
        return batch

    def heard(self, now: float) -> None:
        """Anything came."""
        self._heard = now

    def took(self, generation: int) -> None:
        """A message was taken in, and the room counts it."""
        if generation == self.generation and self.requested:
            self.requested -= 1

    def ended(self, generation: int, status: str, pending: int) -> bool:
        """A request ended with ``pending`` messages that it had asked for; True: ask again at once.

        Not if it was refused (consumer deleted, no leader, nobody there): at once would spin.
        """
        if generation != self.generation:
            return False
        if status in ("404", "408"):
            self.requested = max(0, self.requested - pending)
            return True
        self.requested = 0
        return False

    def silent(self, now: float) -> float:
        """For how many seconds a request that should have sent a heartbeat has sent none; 0: all is well."""
        silent = now - self._heard
        return silent if self.requested and silent > SILENT_S else 0.0

    def restart(self, now: float) -> None:
        """Nothing that was asked for counts any more."""
        self.generation += 1
        self.requested = 0
        self._heard = now

    def close(self) -> None:
        self.closed = True
