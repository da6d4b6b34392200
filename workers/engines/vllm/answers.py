"""From the pieces of one vLLM answer (``RequestOutputKind.DELTA``) to tokens, each told once. Pure.

Every piece has the tokens that are new; the one that ends the answer is among them. An engine that took over another's
KV computes that engine's token anew: it must be the same, and is not told twice.
"""

from collections.abc import Sequence as Seq
from typing import Any

from schemas.errors import Code
from schemas.tokens import Logprob
from workers.engines.external.answer import MISSING, Ending, Token, logprob_of


class Diverged(Exception):
    """The engine drew another token than the one that the answer has at this place: it must start behind it."""


class Answer:
    """What was told of one sequence.

    Args:
        known: tokens that the engine computes again although they were told.
        top: alternatives per token that the client asked for; None: no log-probabilities.
        adopted: the KV of its prompt came from elsewhere.
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
    ) -> tuple[list[Token], Ending | None]:
        """One piece; what is new in it, and how the sequence failed if it did.

        Raises:
            Diverged: see there; nothing of this answer can be used.
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
            return [], Ending(Code.engine_error, f"the engine ended the answer ({finish}) without a last token")
        if finish == "length":
            new[-1] = new[-1]._replace(finish="length")
        else:
            token = stop_reason if isinstance(stop_reason, int) else new[-1].token
            new[-1] = new[-1]._replace(finish="stop", stop_token=token)
        return new, None

    def _failed(self, finish: str) -> Ending:
        if finish == "abort":
            return Ending(Code.cancelled, "the engine ended the request: abort")
        code = Code.transfer_failed if self._adopted else Code.engine_error
        return Ending(code, "the engine failed at this request: its log says why")

    def _logprob(self, token: int, at: int, logprobs: Seq[Any] | None) -> Logprob | None:
        if self._top is None:
            return None
        if logprobs is None or at >= len(logprobs):
            return Logprob(MISSING)
        return logprob_of(logprobs[at], token, self._top)
