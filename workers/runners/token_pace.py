"""How fast a worker's tokens come, and what its engine spends on them: what ``penstock.schemas.pace`` compares. Pure.

Requests that run are looked at about once a second, and when they end, so that nothing is added to a token's way, and a
worker that is slow is known before its first answer ends.
"""

from collections.abc import Iterable

from penstock.schemas.pace import PREFILL
from penstock.workers.engine_loop.sequence_state import SequenceState
from penstock.workers.session.requests import RunningRequest

LOOK_S = 1.0
WINDOW_S = 30.0  # the measure is of this window and of the one before it
LEAST_TOKENS, LEAST_PROMPTS = 20, 3  # in them; fewer say nothing
KNOWN_S = 600.0  # a measure is kept while there is too little to measure: routers avoid a slow worker


class _Sums:
    __slots__ = ("busy_s", "computed", "prompt_s", "prompts", "token_s", "tokens")

    def __init__(self) -> None:
        self.token_s = self.prompt_s = self.busy_s = 0.0
        self.tokens = self.prompts = self.computed = 0


class TokenPace:
    """
    Args:
        role: of the worker.
    Attributes:
        measured: ``latency_us``, ``engine_us`` and ``work_ns`` as of ``fleet.Load``.
    """

    def __init__(self, role: str) -> None:
        self._of_prompts = role == PREFILL
        self._now, self._before = _Sums(), _Sums()
        self._busy_s = 0.0  # at the last look
        self._since: float | None = None  # of this window; None: there was no look
        self._looked = float("-inf")
        self._known = float("-inf")
        self.measured = (0, 0, 0)

    def look(self, running: Iterable[RunningRequest], now: float, now_ns: int, busy_s: float) -> None:
        """Count what has come since the last look, unless that was just now.

        Args:
            now: monotonic, seconds.
            now_ns: Unix time.
            busy_s: that the engine has spent in steps, in all.
        """
        if now - self._looked < LOOK_S:
            return
        if self._since is None:
            self._since = now
        for each in running:
            self.count(each, now_ns)
        self._now.busy_s += busy_s - self._busy_s
        self._busy_s, self._looked = busy_s, now
        self._measure(now)
        if now - self._since > WINDOW_S:
            self._before = self._now if now - self._since < 2 * WINDOW_S else _Sums()
            self._now, self._since = _Sums(), now

    def count(self, running: RunningRequest, now_ns: int) -> None:
        """Count the tokens of a request; also as it ends."""
        for sequence in running.sequences:
            if sequence.first > sequence.seen_tokens or sequence.seen_ns:
                self._count(running, sequence, now_ns)

    def _count(self, running: RunningRequest, sequence: SequenceState, now_ns: int) -> None:
        sums = self._now
        new = sequence.first - sequence.seen_tokens
        sums.computed += new
        since_ns = sequence.seen_ns
        if not since_ns:
            if not sequence.started_ns:
                return
            # The prompt's computing ends with the first token. Where this worker goes on with a request, it is unknown.
            since_ns = sequence.started_ns
            if not running.prefilled and running.first_token_ns and not sequence.seen_tokens:
                since_ns = running.first_token_ns
                new -= 1
                if not sequence.index:
                    sums.prompts += 1
                    sums.prompt_s += max(0, running.first_token_ns - sequence.started_ns) / 1e9
                    sums.computed += running.request.prompt_tokens - sequence.cached
        if sequence.finish is None or new:  # else it ended before, and waits for the others of its request
            sums.token_s += max(0, now_ns - since_ns) / 1e9
            sums.tokens += new
        sequence.seen_ns, sequence.seen_tokens = now_ns, sequence.first

    def _measure(self, now: float) -> None:
        def both(name: str) -> float:
            return float(getattr(self._now, name) + getattr(self._before, name))

        count, seconds, least = both("tokens"), both("token_s"), LEAST_TOKENS
        if self._of_prompts:
            count, seconds, least = both("prompts"), both("prompt_s"), LEAST_PROMPTS
        computed, busy_s = both("computed"), both("busy_s")
        if count >= least and computed > 0:
            self.measured = (round(1e6 * seconds / count), round(1e6 * busy_s / count), round(1e9 * busy_s / computed))
            self._known = now
        elif now - self._known > KNOWN_S:
            self.measured = (0, 0, 0)
