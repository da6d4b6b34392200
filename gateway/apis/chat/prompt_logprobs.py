"""The prompt in an answer: its text (``echo``) and the log-probabilities of its tokens (``prompt_logprobs``)."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from penstock.gateway.apis.chat.logprobs import LARGE, LOWEST, LogprobFormatter
from penstock.gateway.base.chat_objects import PromptLogprob, TextLogprobs
from penstock.gateway.base.json_slices import encode_list
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Logprob, TokenItem
from penstock.schemas.wire import unpack_tokens


class PromptEcho:
    """Takes the items of choice ``PROMPT``, in order. All choices of an answer share it."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._tokens = unpack_tokens(request.prompt)
        self._wanted = request.sampling.prompt_logprobs
        self._detokenizer = detokenizer
        self._logprobs = LogprobFormatter(detokenizer, as_ids=request.shown.tokens_as_ids)
        self._values: list[Logprob] = []  # from the second token on

    def take(self, item: TokenItem) -> None:
        self._values += item.logprobs or ()

    @property
    def complete(self) -> bool:
        return self._wanted is None or len(self._values) == len(self._tokens) - 1

    @property
    def large(self) -> bool:
        return len(self._tokens) * (1 + (self._wanted or 0)) > LARGE

    def check(self) -> None:
        """
        Raises:
            ServingError: the answer has ended and log-probabilities are missing.
        """
        if not self.complete:
            raise ServingError(
                Code.engine_error,
                f"the worker sent log-probabilities of {len(self._values)} of {len(self._tokens) - 1} prompt tokens",
            )

    @cached_property
    def logprobs(self) -> list[bytes] | None:
        """``PromptLogprobs`` as JSON, in slices; None: not requested, or expired."""
        if self._wanted is None or not self.complete:
            return None
        return encode_list(chain((None,), map(self._entry, self._tokens[1:], self._values)))

    def _entry(self, token: int, value: Logprob) -> dict[int, PromptLogprob]:
        entry = {token: self._prompt_logprob(token, value.logprob, value.rank)}
        for rank, (other, logprob) in enumerate(value.top[: self._wanted], 1):
            if other != token:
                entry[other] = self._prompt_logprob(other, logprob, rank)
        return entry

    def _prompt_logprob(self, token: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, LOWEST), rank or None, self._logprobs.token_text(token))

    @cached_property
    def _pieces(self) -> list[str]:
        """The text that each token adds, and the rest at the end."""
        stream = self._detokenizer.stream()
        return [*map(stream.push, self._tokens), stream.finish()]

    @cached_property
    def text(self) -> str:
        """Detokenized like output: special tokens have no text."""
        return "".join(self._pieces)

    def completion_logprobs(self, top: int) -> TextLogprobs:
        """Like those of the output. The first token has none, and no token has any once they have expired.

        Args:
            top: alternatives per token.
        """
        out = TextLogprobs([], [], [], [])
        values: Sequence[Logprob | None] = [None, *self._values] if self.complete else [None] * len(self._tokens)
        offset = 0
        for token, piece, value in zip(self._tokens, self._pieces, values, strict=False):
            self._logprobs.append(out, token, value, offset, top)
            offset += len(piece)
        return out
