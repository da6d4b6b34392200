"""Converts the deltas of one vLLM output (``RequestOutputKind.DELTA``) to tokens, each reported once. Pure.

Every delta has the new tokens, including the ending one. An engine that took over another's KV draws that engine's last
token again: it must be the same, and is not reported twice.
"""

from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.outputs import MISSING, SequenceFailure, Token, logprob_of


class Diverged(Exception):
    """The engine drew another token than the one already reported, after which it must continue."""


class OutputCursor:
    """Position in the output of one sequence.

    Args:
        known: tokens already reported that the engine draws again.
        top: alternatives per token; None: no log-probabilities.
        adopted: its prompt's KV was fetched from another engine.
    """

    def __init__(self, *, known: Seq[int] = (), top: int | None = None, adopted: bool = False) -> None:
        self.finished = False
        self._known = list(known)
        self._top = top
        self._adopted = adopted

    def take(
        self,
        token_ids: Seq[int],
        logprobs: Seq[Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[list[Token], SequenceFailure | None]:
        """Take one delta; returns its new tokens and the failure, if any.

        Raises:
            Diverged: nothing of this output can be used.
        """
        if self.finished:
            return [], None
        new: list[Token] = []
        for at, token in enumerate(token_ids):
            if self._known:
                if token != self._known.pop(0):
                    raise Diverged
                continue
            new.append(Token(token, "", self._logprob(token, at, logprobs)))
        if finish is None:
            return new, None
        if finish in ("stop", "repetition", "length") and self._known:
            raise Diverged
        self.finished = True
        if finish in ("abort", "error"):
            return new, self._failed(finish)
        if not new:
            return [], SequenceFailure(
                Code.engine_error, f"the engine ended the output ({finish}) without a last token"
            )
        if finish == "length":
            new[-1] = new[-1]._replace(finish="length")
        else:
            token = stop_reason if isinstance(stop_reason, int) else new[-1].token
            new[-1] = new[-1]._replace(finish="stop", stop_token=token)
        return new, None

    def _failed(self, finish: str) -> SequenceFailure:
        if finish == "abort":
            return SequenceFailure(Code.cancelled, "the engine ended the request: abort")
        code = Code.transfer_failed if self._adopted else Code.engine_error
        return SequenceFailure(code, "the engine failed on this request; see its log")

    def _logprob(self, token: int, at: int, logprobs: Seq[Any] | None) -> Logprob | None:
        if self._top is None:
            return None
        if logprobs is None or at >= len(logprobs):
            return Logprob(MISSING)
        return logprob_of(logprobs[at], token, self._top)
