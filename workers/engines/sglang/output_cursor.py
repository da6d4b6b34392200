"""Converts the chunks of one SGLang output (incremental streaming) to tokens, each reported once. Pure.

A chunk is a dictionary with the new ``output_ids`` and a ``meta_info``, in which log-probabilities are lists of
(logprob, token id, text or None) beside the new tokens. The last chunk of an aborted request repeats a token.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.outputs import MISSING, SequenceFailure, Token

_BAD_REQUEST = 400


class OutputCursor:
    """Position in the output of one sequence.

    Args:
        top: alternatives per token; None: no log-probabilities.
        stops: token ids that end the output though the engine goes on.
        least: tokens before which they do not.
        goes_on: reaching the call's limit does not end the sequence: another call follows.
        adopted: its prompt's KV was fetched from another engine.

    Attributes:
        finished: the sequence has ended.
    """

    def __init__(
        self,
        *,
        top: int | None = None,
        stops: Collection[int] = (),
        least: int = 0,
        goes_on: bool = False,
        adopted: bool = False,
    ) -> None:
        self.finished = False
        self._top = top
        self._stops = frozenset(stops)
        self._least = least
        self._count = 0
        self._goes_on = goes_on
        self._adopted = adopted

    def take(self, chunk: Mapping[str, Any]) -> tuple[list[Token], SequenceFailure | None]:
        """Take one chunk; returns its new tokens and the failure, if any."""
        if self.finished:
            return [], None
        info = chunk["meta_info"]
        reason = info.get("finish_reason")
        if reason is not None and reason["type"] not in ("stop", "length"):
            self.finished = True
            return [], self._failure(reason)
        if reason is not None and isinstance(reason.get("matched"), str):
            # It is given no strings to stop at: so it ends an output whose logits are no numbers.
            self.finished = True
            return [], SequenceFailure(Code.engine_error, f"the engine ended the output: {reason['matched']}")
        new = []
        for at, token in enumerate(chunk["output_ids"]):
            stops = token in self._stops and self._count >= self._least
            self._count += 1
            finish, stop_token = ("stop", token) if stops else ("", None)
            new.append(Token(token, finish, self._logprob(token, at, info), stop_token))
            if stops:
                self.finished = True
                return new, None
        if reason is None or (reason["type"] == "length" and self._goes_on):
            return new, None
        self.finished = True
        if not new:
            return [], SequenceFailure(Code.engine_error, f"the engine ended the output without a last token: {reason}")
        if reason["type"] == "length":
            new[-1] = new[-1]._replace(finish="length")
        else:
            matched = reason.get("matched")
            new[-1] = new[-1]._replace(finish="stop", stop_token=matched if isinstance(matched, int) else new[-1].token)
        return new, None

    def _failure(self, reason: Mapping[str, Any]) -> SequenceFailure:
        """Of an abort: the engine's status code says whose fault it is."""
        status, message = reason.get("status_code"), str(reason.get("message") or "the engine aborted the request")
        if status == _BAD_REQUEST:
            return SequenceFailure(Code.invalid_request, message)
        if status is None:
            return SequenceFailure(Code.cancelled, message)
        return SequenceFailure(Code.transfer_failed if self._adopted else Code.engine_error, message)

    def _logprob(self, token: int, at: int, info: Mapping[str, Any]) -> Logprob | None:
        if self._top is None:
            return None
        own = info.get("output_token_logprobs") or ()
        if at >= len(own) or own[at][0] is None:
            return Logprob(MISSING)
        best = (info.get("output_top_logprobs") or ()) if self._top else ()
        return Logprob(float(own[at][0]), _best(best[at] if at < len(best) else (), self._top))


def prompt_scores(info: Mapping[str, Any], tokens: int, first: int, top: int) -> list[Logprob]:
    """Log-probabilities of a prompt's tokens from ``first`` on, of a call with ``logprob_start_len`` = ``first`` - 1.

    SGLang reports no ranks: a token's is known if it is among the best.

    Args:
        tokens: of the prompt.
    Returns: an empty list if entries are missing: they could not be assigned to tokens.
    """
    own = info.get("input_token_logprobs") or ()
    best = (info.get("input_top_logprobs") or ()) if top else ()
    if len(own) < tokens - first + 1 or (top and len(best) < tokens - first + 1):
        return []
    scores = []
    for at in range(1, tokens - first + 1):  # the first entry is of the token before
        value, token = own[at][:2]
        alternatives = _best(best[at], top) if top else ()
        ranked = [each for each, _ in alternatives]
        scores.append(
            Logprob(
                MISSING if value is None else float(value),
                alternatives,
                ranked.index(token) + 1 if token in ranked else 0,
            )
        )
    return scores


def _best(entries: Seq[Any] | None, top: int) -> tuple[tuple[int, float], ...]:
    pairs = [(int(token), float(value)) for value, token, *_ in entries or ()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])
