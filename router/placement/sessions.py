"""The target of a session's last request, a hint for its next one. No clock, no NATS.

The prefix index knows the cached part of a prompt, so the hint has little weight. It helps where the index does not
know the conversation: at a target whose KV events are late, or where the new prompt continues the old one in other
tokens.

Requests of one session at the same time show that it is no conversation: while one of them is unfinished there is no
hint, so a name that many requests share does not gather them at one target.

The length of a prompt's prefix that many prompts share, such as a system prompt. No clock, no NATS.

Every target will have such a prefix before long. A request that happens to compute it first is not charged for it:
otherwise all its traffic would stay at the targets that have it, while others are idle. A prefix is shared once
``USES`` prompts for each target went on differently behind it, among the last prompts. The turns of one conversation go
on in one way, so they stay where they are.

Prefixes are counted at some lengths, sixteen for each doubling. A prompt adds at most ``ADDED`` of them, the shortest
that are not known, so memory is bounded by the number of prompts remembered.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.infra.bounded import ByteCache
from penstock.router.state.depths import TargetId

SESSIONS_BYTES = 16 << 20  # remembered, some 30,000; those used longest ago are forgotten first


class SessionId(NamedTuple):
    """The identity of a session. Sessions of different tenants, models or cache salts are separate."""

    tenant: str
    model: str
    salt: str
    name: str


class _Last(NamedTuple):
    request: str
    targets: tuple[TargetId, ...]


class Sessions:
    """
    Args:
        is_active: whether a request is unfinished.
    """

    def __init__(self, is_active: Callable[[str], bool], most_bytes: int = SESSIONS_BYTES) -> None:
        self._is_active = is_active
        self._last: ByteCache[SessionId, _Last] = ByteCache(most_bytes, _size)

    def __len__(self) -> int:
        return len(self._last)

    def targets(self, session: SessionId, request: str) -> tuple[TargetId, ...]:
        """The targets of the session's last request; empty: unknown, or another request of it is unfinished."""
        last = self._last.get(session)
        if last is None or (last.request != request and self._is_active(last.request)):
            return ()
        return last.targets

    def sent(self, session: SessionId, request: str, targets: Sequence[TargetId]) -> None:
        """A request of the session was sent to these targets, one for each stage."""
        self._last.put(session, _Last(request, tuple(targets)))


def _size(session: SessionId, last: _Last) -> int:
    """Bytes, of which a character may take four: clients choose names and salts."""
    return 4 * sum(map(len, session)) + len(last.request) + 128 * len(last.targets)


USES = 8  # by each target, from which on a prefix is shared; with 4, bursts make theirs free too early
PROMPTS = 128  # for each target, until the older generation is dropped
MOST_PROMPTS = 1 << 14
ADDED = 8
LENGTHS = [*range(1, 16), *(step << octave for octave in range(16) for step in range(16, 32))]


class SharedPrefixes:
    """Branches behind prefixes, in two generations: when the younger one is full, the older one is forgotten."""

    def __init__(self) -> None:
        self._branches: dict[int, int] = {}  # by the key of a prefix' last block: prompts that went on differently
        self._older: dict[int, int] = {}
        self._prompts = 0  # in the younger generation

    def blocks(self, keys: Sequence[int], targets: float) -> int:
        """Leading blocks of a prompt that are shared; this prompt counts from now on.

        Looking at the same prompt again adds its longer lengths, and counts at most one for ``ADDED`` of them.

        Args:
            targets: among which the prompts of its model are distributed, for each router that places them.
        """
        branches, older = self._branches, self._older
        enough, shared, last = USES * targets, 0, None
        lengths = LENGTHS[: bisect_right(LENGTHS, len(keys))]
        for at, length in enumerate(lengths):
            key = keys[length - 1]
            count = branches.get(key)
            if count is None:
                count = older.pop(key, None)
                if count is None:
                    self._add([keys[each - 1] for each in lengths[at : at + ADDED]], last, targets)
                    break
                branches[key] = count = count // 2
            if count >= enough:
                shared = length
            last = key
        return shared

    def _add(self, new: Sequence[int], behind: int | None, targets: float) -> None:
        self._branches.update(dict.fromkeys(new, 0))
        if behind is not None:
            self._branches[behind] += 1
        self._prompts += 1
        if self._prompts >= min(PROMPTS * targets, MOST_PROMPTS):
            self._older, self._branches, self._prompts = self._branches, {}, 0
