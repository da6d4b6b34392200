"""Which messages in memory storage no open request needs any more. Pure.

Messages are deleted from the front, of one gateway's subjects at a time: one command deletes however many. So each
request holds back what was stored after its beginning, until its end and the grace period are over. A request that runs
for long would hold back everything; see ``late``.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

REMEMBERED = 4096  # ended requests; what is left of others expires


class Fronts(NamedTuple):
    """The first sequence that is still needed, of a gateway's contents and of its tokens; 0: nothing new to delete."""

    contents: int
    tokens: int


class _Floor(msgspec.Struct, gc=False):
    """Everything of a request is behind the sequences ``contents`` and ``tokens``. ``since``: when that became so."""

    contents: int
    tokens: int
    since: float
    first: tuple[int, int, float]  # these as they were at its beginning: no later request had lower ones
    has_parts: bool = False  # stored before the request's content


class MemoryLedger:
    """Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._live: dict[str, _Floor] = {}
        self._dead: dict[str, None] = {}  # ended, and perhaps not deleted yet
        self._contents = 0  # the last sequences known
        self._tokens = 0
        self._deleted = Fronts(1, 1)

    def __len__(self) -> int:
        """Requests that are open, or in their grace period."""
        return len(self._live)

    def began(self, request: str, now: float) -> None:
        """A request is about to be stored, or a part of it; then again."""
        floor = self._live.get(request)
        if floor is None:
            first = self._contents, self._tokens, now
            self._live[request] = _Floor(*first, first)
        else:
            floor.has_parts = True

    def stored(self, request: str, seq: int) -> None:
        """Its content was stored, before anything else of it."""
        self._contents = max(self._contents, seq)
        floor = self._live.get(request)
        if floor is not None and seq and not floor.has_parts:
            floor.contents = max(floor.contents, seq - 1)

    def read(self, seq: int) -> None:
        """A message of tokens was read; later ones have higher sequences."""
        self._tokens = max(self._tokens, seq)

    def over(self, request: str) -> None:
        """Nobody needs it any more."""
        if self._live.pop(request, None) is not None:
            self._dead[request] = None
            if len(self._dead) > REMEMBERED:
                del self._dead[next(iter(self._dead))]

    def renewed(self) -> None:
        """The streams were lost: sequences begin again, and what is open is stored again."""
        self._contents = self._tokens = 0
        self._deleted = Fronts(1, 1)
        self._dead.clear()
        for floor in self._live.values():
            floor.contents = floor.tokens = 0
            floor.first = 0, 0, floor.first[2]

    @property
    def busy(self) -> bool:
        """Whether anything is open, or may have to be deleted."""
        return bool(self._live or self._dead) or any(self.fronts())

    def fronts(self) -> Fronts:
        """What can be deleted by now; call ``deleted`` once it is."""
        contents, tokens = self._contents, self._tokens
        for floor in self._live.values():
            if floor.first[0] >= contents and floor.first[1] >= tokens:
                break  # nor has any later one a lower floor: tens of thousands may be in their grace period
            contents, tokens = min(contents, floor.contents), min(tokens, floor.tokens)
        deleted = self._deleted
        return Fronts(
            contents + 1 if contents >= deleted.contents else 0, tokens + 1 if tokens >= deleted.tokens else 0
        )

    def deleted(self, fronts: Fronts) -> None:
        self._deleted = Fronts(max(self._deleted.contents, fronts.contents), max(self._deleted.tokens, fronts.tokens))

    def late(self, now: float, after_s: float, limit: int) -> list[str]:
        """Requests that have held back others' tokens for so long: what they have so far is to be stored again.

        Then ``moved`` is called with the last sequence that was read before.
        """
        if not self._dead:
            return []
        late = []
        for name, floor in self._live.items():
            if now - floor.first[2] <= after_s:
                break
            if now - floor.since > after_s:
                late.append((floor.tokens, name))
        return [name for tokens, name in sorted(late)[:limit] if tokens < self._tokens]

    @property
    def position(self) -> int:
        """Of the tokens: the last sequence that was read."""
        return self._tokens

    def moved(self, request: str, position: int, now: float) -> None:
        floor = self._live.get(request)
        if floor is not None:
            floor.tokens, floor.since = max(floor.tokens, position), now

    def left(self, limit: int) -> list[str]:
        """The latest ended requests of which parts may be left: stored by routers or workers, or held back.

        They are deleted one by one.
        """
        return list(self._dead)[-limit:]

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._dead.pop(request, None)
