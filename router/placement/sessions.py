"""The target of a session's last request, a hint for its next one. No clock, no NATS.

The prefix index knows the cached part of a prompt, so the hint has little weight. It helps where the index does not
know the conversation: at a target whose KV events are late, or where the new prompt continues the old one in other
tokens.

Requests of one session at the same time show that it is no conversation: while one of them is unfinished there is no
hint, so a name that many requests share does not gather them at one target.
"""

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
