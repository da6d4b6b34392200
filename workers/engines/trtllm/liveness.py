"""Whether an engine is alive. Pure: times are arguments, in seconds of one clock.

An engine whose processes hang answers nothing and reports nothing: its calls have no timeout, and its health check may
still say yes. Three signs are therefore watched: that polls of its queues return, that the event loop which submits
requests runs, and that it generates. Where nothing was generated for ``QUIET_S``, idle or not, one token is asked for.
"""

POLL_LATE_S = 10.0  # a poll that should return at once
LOOP_LATE_S = 60.0  # the event loop: it also tokenizes prompts with images
QUIET_S = 60.0  # without output, after which a token is asked for
ANSWER_S = 60.0  # for that token
CHECK_S = 1.0  # between two checks


class Liveness:
    """Each method may be called by another thread: a sign is one attribute, and one that is lost is soon replaced.

    Args:
        now: the start.
        quiet_s, answer_s: as the constants.
    """

    def __init__(self, now: float, *, quiet_s: float = QUIET_S, answer_s: float = ANSWER_S) -> None:
        self._polled = self._looped = self._generated = now
        self._asked: float | None = None
        self._checked = now
        self._quiet_s, self._answer_s = quiet_s, answer_s

    def polled(self, now: float) -> None:
        """A round of polls has returned."""
        self._polled = now

    def looped(self, now: float) -> None:
        """The event loop has run a callback."""
        self._looped = now

    def generated(self, now: float) -> None:
        """The engine has produced output, for anyone."""
        self._generated = now

    def wants_token(self, now: float) -> bool:
        """Whether to ask for a token. If so, ``asked`` must follow."""
        return self._asked is None and now - self._generated >= self._quiet_s

    def asked(self, now: float) -> None:
        self._asked = now

    def answered(self, now: float) -> None:
        """The token has come, or the engine has refused it by itself: it is alive."""
        self._asked, self._generated = None, now

    def problem(self, now: float) -> str:
        """Why the engine counts as broken; "": it does not. Called every ``CHECK_S``.

        What a check comes too late by is no sign of the engine: this process had no processor, or was stopped.
        """
        stalled = now - self._checked - 2 * CHECK_S
        self._checked = now
        if stalled > 0:
            self._polled += stalled
            self._looped += stalled
            self._generated += stalled
            self._asked = None if self._asked is None else self._asked + stalled
        late = now - self._polled
        if late > POLL_LATE_S:
            return f"it has not answered a poll for {late:.0f} s"
        late = now - self._looped
        if late > LOOP_LATE_S:
            return f"a call that submits a request has not returned for {late:.0f} s"
        if self._asked is not None:
            late = now - max(self._asked, self._generated)
            if late > self._answer_s:
                return (
                    f"it has generated nothing for {now - self._generated:.0f} s, also not for a request of one token"
                )
        return ""
