"""Measures how fast a worker's tokens come, and what its engine spends on them, for ``penstock.schemas.pace``. Pure.

It looks at running requests about once a second, and when they end: nothing is added to the path of a token, and a slow
worker is known before its first answer ends.
"""

from collections.abc import Iterable

from penstock.schemas.pace import PREFILL
from penstock.workers.engine_loop.loop import StepPace
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.session.requests import RunningRequest

LOOK_S = 1.0
WINDOW_S = 30.0  # the measure is of this window and of the one before it; longer until there is enough to measure
LEAST_TOKENS, LEAST_PROMPTS, LEAST_DECODES = 20, 3, 10  # in them; fewer say nothing
KNOWN_S = 600.0  # a measure is kept while there is too little to measure: routers avoid a slow worker


class _Sums:
    __slots__ = (
        "busy_s",
        "computed",
        "decode_s",
        "decodes",
        "prompt_s",
        "prompt_tokens",
        "prompts",
        "token_s",
        "tokens",
    )

    def __init__(self) -> None:
        self.token_s = self.prompt_s = self.busy_s = self.decode_s = 0.0
        self.tokens = self.prompts = self.prompt_tokens = self.computed = self.decodes = 0


class TokenPace:
    """One for all sessions of a worker: a slow machine loses leases, too, while its engine keeps running.

    Args:
        role: of the worker.
    Attributes:
        measured: ``latency_us``, ``engine_us``, ``work_ns`` and ``decode_us`` as in ``fleet.Load``.
    """

    def __init__(self, role: str) -> None:
        self._of_prompts = role == PREFILL
        self._now, self._before = _Sums(), _Sums()
        self._seen = (0.0, 0, 0.0)  # of the engine, at the last look
        self._since: float | None = None  # of this window; None: there was no look
        self._looked = float("-inf")
        self._known = float("-inf")  # when there was something to measure
        self._computed = 0  # of ``_now``, at the last look
        self.measured = (0, 0, 0, 0)

    def look(self, running: Iterable[RunningRequest], now: float, now_ns: int, engine: StepPace) -> None:
        """Count what has come since the last look, unless that was just now.

        Args:
            now: monotonic, seconds.
            now_ns: of ``steady_ns``.
            engine: what its steps have taken.
        """
        if now - self._looked < LOOK_S:
            return
        if self._since is None:
            self._since = now
        for each in running:
            self.count(each, now_ns)
        sums, seen = self._now, (engine.busy_s, engine.decodes, engine.decode_s)
        busy_s, decodes, decode_s = self._seen
        sums.busy_s += seen[0] - busy_s
        sums.decodes += seen[1] - decodes
        sums.decode_s += seen[2] - decode_s
        self._seen, self._looked = seen, now
        if sums.computed != self._computed:
            self._computed, self._known = sums.computed, now
        elif now - self._known > KNOWN_S:
            self._before, self._now, self._computed, self._since = _Sums(), _Sums(), 0, now
            self.measured = (0, 0, 0, 0)
            return
        self._measure()
        if now - self._since > WINDOW_S and self._enough(sums):  # a slow worker gets little to do: it takes longer
            self._before, self._now, self._computed, self._since = sums, _Sums(), 0, now

    def _enough(self, *sums: _Sums) -> bool:
        if self._of_prompts:
            return sum(each.prompts for each in sums) >= LEAST_PROMPTS
        return sum(each.tokens for each in sums) >= LEAST_TOKENS

    def count(self, running: RunningRequest, now_ns: int) -> None:
        """Count the tokens of a request; also as it ends."""
        for sequence in running.sequences:
            if sequence.first > sequence.seen_tokens or sequence.seen_ns:
                self._count(running, sequence, now_ns)

    def computing_s(self, tokens: int) -> float:
        """How long this many tokens of a prompt take from its start, by those of the last minute; 0: unknown."""
        known = self._now.prompt_tokens + self._before.prompt_tokens
        return tokens * (self._now.prompt_s + self._before.prompt_s) / known if known else 0.0

    def _count(self, running: RunningRequest, sequence: SequenceState, now_ns: int) -> None:
        sums = self._now
        new = sequence.first - sequence.seen_tokens
        sums.computed += new
        since_ns = sequence.seen_ns
        if not since_ns:
            if not sequence.started_ns:
                return
            # The prompt's computing ends with the first token. Where this worker continues a request, it is unknown.
            since_ns = sequence.started_ns
            if not running.prefilled and running.first_token_ns and not sequence.seen_tokens:
                since_ns = running.first_token_ns
                new -= 1
                if not sequence.index:
                    sums.prompts += 1
                    sums.prompt_s += max(0, running.first_token_ns - sequence.started_ns) / 1e9
                    sums.prompt_tokens += running.request.prompt_tokens - sequence.cached
                    sums.computed += running.request.prompt_tokens - sequence.cached
        if sequence.finish is None or new:  # else it ended before, and waits for the others of its request
            sums.token_s += max(0, now_ns - since_ns) / 1e9
            sums.tokens += new
        sequence.seen_ns, sequence.seen_tokens = now_ns, sequence.first

    def _measure(self) -> None:
        def both(name: str) -> float:
            return float(getattr(self._now, name) + getattr(self._before, name))

        count, seconds = both("tokens"), both("token_s")
        if self._of_prompts:
            count, seconds = both("prompts"), both("prompt_s")
        computed, busy_s, decodes = both("computed"), both("busy_s"), both("decodes")
        if self._enough(self._now, self._before) and computed > 0:
            self.measured = (
                round(1e6 * seconds / count),
                round(1e6 * busy_s / count),
                round(1e9 * busy_s / computed),
                round(1e6 * both("decode_s") / decodes) if decodes >= LEAST_DECODES else 0,
            )
