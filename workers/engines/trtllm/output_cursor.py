"""Converts the cumulative outputs of one sequence to tokens, each reported once.

TensorRT-LLM returns the same list again and again as it grows by several tokens, and its last version may be shorter (a
stop token was trimmed). Our protocol reports every token once, including the ending one, which is marked.
"""

from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.outputs import MISSING, SequenceFailure, Token, logprob_of

_ENDED = frozenset({"stop", "length", "timeout", "cancelled"})  # "not_finished": another engine continues


class OutputCursor:
    """Position in the output of one sequence.

    Args:
        limit: new tokens after which it ends.
        stops: token ids that end it, after at least ``min_tokens`` new tokens.
        end_id: the token that a finish reason "stop" without a token stands for; -1: none.
        skip: tokens already reported (a prefill worker's) that the engine may repeat at the start.
        top: alternatives per token; None: no log-probabilities.
    """

    def __init__(
        self,
        *,
        limit: int,
        stops: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        end_id: int = -1,
        skip: Seq[int] = (),
        top: int | None = None,
    ) -> None:
        self.reported = 0  # new tokens
        self.finished = False
        self.repeats: bool | None = None if skip else False  # the output starts with ``skip``; None: unknown
        self._skip = list(skip)
        self._limit = limit
        self._stops = stops
        self._min_tokens = min_tokens
        self._end_id = end_id
        self._top = top

    def advance(
        self,
        token_ids: Seq[int],
        logprobs: Seq[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[list[Token], SequenceFailure | None]:
        """Take one version of the output; returns its new tokens and the failure, if any."""
        if self.finished:
            return [], None
        offset = self._offset(token_ids, finish)
        if offset is None:
            return [], None
        new: list[Token] = []
        for at in range(offset + self.reported, len(token_ids)):
            token = token_ids[at]
            self.reported += 1
            ends = self._ends(token)
            value = self._logprob(token, at, len(token_ids), logprobs)
            new.append(Token(token, ends, value, token if ends == "stop" else None))
            if ends:
                self.finished = True
                return new, None
        if finish in _ENDED:
            return self._engine_ended(new, finish, stop_reason)
        return new, None

    def _offset(self, token_ids: Seq[int], finish: str | None) -> int | None:
        """Where the new tokens start; None: not known yet."""
        if self.repeats is None:
            skipped = len(self._skip)
            if len(token_ids) < skipped and list(token_ids) == self._skip[: len(token_ids)] and finish not in _ENDED:
                return None
            self.repeats = list(token_ids[:skipped]) == self._skip
        return len(self._skip) if self.repeats else 0

    def _ends(self, token: int) -> str:
        if token in self._stops and self.reported > self._min_tokens:
            return "stop"
        return "length" if self.reported >= self._limit else ""

    def _engine_ended(
        self, new: list[Token], finish: str, stop_reason: int | str | None
    ) -> tuple[list[Token], SequenceFailure | None]:
        """Handle an end that the tokens did not show."""
        self.finished = True
        if finish in ("cancelled", "timeout"):
            code = Code.cancelled if finish == "cancelled" else Code.deadline_exceeded
            return new, SequenceFailure(code, f"the engine ended the request: {finish}")
        trimmed = stop_reason if isinstance(stop_reason, int) else self._end_id if stop_reason is None else -1
        if finish == "stop" and trimmed >= 0:  # our protocol includes the stop token
            self.reported += 1
            value = Logprob(MISSING) if self._top is not None else None
            return [*new, Token(trimmed, "stop", value, trimmed)], None
        if new:
            return [*new[:-1], new[-1]._replace(finish=finish)], None
        return [], SequenceFailure(Code.engine_error, f"the engine ended the output ({finish}) without a last token")

    def _logprob(self, token: int, at: int, length: int, logprobs: Seq[Any] | None) -> Logprob | None:
        if self._top is None:
            return None
        # With fewer entries than tokens, the entries of a prefill worker's tokens are missing at the front.
        place = at - (length - len(logprobs)) if logprobs else -1
        if not logprobs or not 0 <= place < len(logprobs):
            return Logprob(MISSING)
        return logprob_of(logprobs[place], token, self._top)
