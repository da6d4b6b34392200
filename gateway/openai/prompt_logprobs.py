"""The prompt's part of an answer: its text in front (``echo``), and the log-probabilities of its tokens."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from gateway.openai.json_slices import encode_list
from gateway.openai.responses import PromptLogprob, TextLogprobs
from infra.model.detokenizer import Detokenizer
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import Logprob, TokenItem
from schemas.wire import unpack_tokens

LOWEST = -9999.0  # JSON has no -inf
LARGE = 1024  # values; to write more is worth a thread


class PromptEcho:
    """Filled with the items of choice ``PROMPT``, in order; all choices of an answer share it."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._tokens = unpack_tokens(request.prompt)
        self._wanted = request.sampling.prompt_logprobs
        self._detokenizer = detokenizer
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
            ServingError: values are missing although the answer has ended.
        """
        if not self.complete:
            raise ServingError(
                Code.engine_error,
                f"the worker gave log-probabilities of {len(self._values)} prompt tokens of {len(self._tokens) - 1}",
            )

    @cached_property
    def logprobs(self) -> list[bytes] | None:
        """``PromptLogprobs`` as JSON, in slices; None: they were not asked for, or are not known any more."""
        if self._wanted is None or not self.complete:
            return None
        return encode_list(chain((None,), map(self._entry, self._tokens[1:], self._values)))

    def _entry(self, token: int, value: Logprob) -> dict[int, PromptLogprob]:
        found = {token: self._described(token, value.logprob, value.rank)}
        for rank, (other, logprob) in enumerate(value.top[: self._wanted], 1):
            if other != token:
                found[other] = self._described(other, logprob, rank)
        return found

    def _described(self, token: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, LOWEST), rank or None, self._text_of(token))

    def _text_of(self, token: int) -> str:
        return self._detokenizer.raw(token).decode("utf-8", "replace")

    @cached_property
    def _pieces(self) -> list[str]:
        """The text that each token adds, and what is left at the end."""
        stream = self._detokenizer.stream()
        return [*map(stream.push, self._tokens), stream.finish()]

    @cached_property
    def text(self) -> str:
        """As an answer of these tokens would read: special tokens have no text."""
        return "".join(self._pieces)

    def text_logprobs(self, top: int) -> TextLogprobs:
        """As of an answer's tokens; the first has none, nor have all if they are not known any more.

        Args:
            top: alternatives of each token.
        """
        out = TextLogprobs([], [], [], [])
        values: Sequence[Logprob | None] = [None, *self._values] if self.complete else [None] * len(self._tokens)
        offset = 0
        for token, piece, value in zip(self._tokens, self._pieces, values, strict=False):
            text = self._text_of(token)
            out.tokens.append(text)
            out.text_offset.append(offset)
            offset += len(piece)
            if value is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            own = max(value.logprob, LOWEST)
            best = {self._text_of(other): max(logprob, LOWEST) for other, logprob in reversed(value.top[:top])}
            out.token_logprobs.append(own)
            out.top_logprobs.append({**best, text: own})
        return out
