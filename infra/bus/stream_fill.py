"""How near to a stream's edge its unfinished messages are, from a look at its state now and then. Pure.

A full stream discards its oldest messages. What may not be discarded begins at the oldest unfinished message; the share
of ``max_bytes`` from there to the stream's end says how much more can be stored before that one goes. The server tells
counts and bytes of the whole stream only, so bytes from a sequence on are estimated between the looks.
"""

from bisect import bisect_right
from typing import NamedTuple

WARN = 0.5  # of max_bytes
FULL = 0.8  # no new work from here on; the rest is for what is under way
FAIR = 0.6  # from here on, whoever has more than their share is refused first
CALM = 0.9  # of a threshold: an alarm ends below
MOST_LOOKS = 512


class Look(NamedTuple):
    """A stream's state at one time."""

    first: int
    last: int
    bytes: int


class Fill:
    """Bytes stored from a sequence to a stream's end.

    Exact where a look ended; between two looks messages count as equally large, so the error is at most what was
    stored between them.
    """

    def __init__(self) -> None:
        self._seqs: list[int] = []  # ends of looks
        self._written: list[float] = []  # bytes up to there, from an arbitrary zero
        self._first = 0

    @property
    def last(self) -> int:
        return self._seqs[-1] if self._seqs else 0

    def add(self, look: Look) -> None:
        if not self._seqs or look.last < self._seqs[-1] or look.first > self._seqs[-1] + 1:
            # The first look, a stream that was made anew, or nothing is left of what was known.
            self._seqs, self._written = [look.first - 1, look.last], [0.0, float(look.bytes)]
            self._first = look.first
            return
        end = max(self._at(look.first - 1) + look.bytes, self._written[-1])
        if look.last > self._seqs[-1]:
            self._seqs.append(look.last)
            self._written.append(end)
        self._written[-1] = end
        self._begin(look.first, end - look.bytes)
        if len(self._seqs) > MOST_LOOKS:
            del self._seqs[1:-2:2], self._written[1:-2:2]

    def bytes_from(self, seq: int) -> int:
        """From the message at ``seq``, which counts, to the end; of those that are still there."""
        if not self._seqs or seq > self._seqs[-1]:
            return 0
        return round(self._written[-1] - self._at(max(seq, self._first) - 1))

    def _at(self, seq: int) -> float:
        """Bytes up to and with the message at ``seq``."""
        right = bisect_right(self._seqs, seq)
        if right == 0:
            return self._written[0]
        if right == len(self._seqs):
            return self._written[-1]
        low, high = self._seqs[right - 1], self._seqs[right]
        share = (seq - low) / (high - low)
        return self._written[right - 1] + share * (self._written[right] - self._written[right - 1])

    def _begin(self, first: int, before: float) -> None:
        """Forget what lies before the stream's first message, up to which ``before`` bytes are now known exactly."""
        behind = bisect_right(self._seqs, first - 1)
        self._first = first
        self._seqs[:behind], self._written[:behind] = [first - 1], [before]
        for index in range(1, len(self._written)):
            if self._written[index] >= before:
                break
            self._written[index] = before


class Alarm:
    """A threshold that is passed once, until the level has clearly fallen again."""

    def __init__(self, at: float) -> None:
        self._at = at
        self.on = False

    def update(self, level: float) -> bool:
        """Whether it went off just now."""
        was = self.on
        self.on = level >= (self._at * CALM if was else self._at)
        return self.on and not was


def beyond_share(used: dict[str, int], limit: int) -> frozenset[str]:
    """Who uses more than an equal part of ``limit`` bytes. One alone may use all of it."""
    if len(used) < 2:
        return frozenset()
    share = limit / len(used)
    return frozenset(name for name, size in used.items() if size > share)
