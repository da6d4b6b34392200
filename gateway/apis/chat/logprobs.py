"""Log-probabilities of tokens in the shapes of the OpenAI API."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain

from penstock.gateway.base.chat_objects import ChatLogprob, PromptLogprob, TextLogprobs, TopLogprob
from penstock.gateway.base.event_stream import encode_list
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.registry import special_texts
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Logprob, TokenItem
from penstock.schemas.wire import unpack_tokens

LOWEST = -9999.0  # in the place of -inf, which JSON does not have
LARGE = 1024  # values; a response with more is encoded in a thread


class LogprobFormatter:
    """
    Args:
        as_ids: tokens are shown as "token_id:ID".
    """

    def __init__(self, detokenizer: Detokenizer, *, as_ids: bool = False) -> None:
        self._detokenizer = detokenizer
        self._as_ids = as_ids

    def token_text(self, token: int) -> str:
        return _by_id(token) if self._as_ids else self._detokenizer.raw(token).decode("utf-8", "replace")

    def _name(self, token: int) -> str:
        """As completions have it: a part of a character as its bytes, as these are keys."""
        if self._as_ids:
            return _by_id(token)
        raw = self._detokenizer.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, token: int, logprob: Logprob) -> ChatLogprob:
        """An entry of a chat completion's log-probabilities."""
        top = [TopLogprob(*self._fields(other, value)) for other, value in logprob.top]
        return ChatLogprob(*self._fields(token, logprob.logprob), top)

    def completion(self, entries: Iterable[tuple[int, Logprob, int]]) -> TextLogprobs:
        """The log-probabilities of a completion.

        Args:
            entries: tokens, and the characters before each.
        """
        out = TextLogprobs([], [], [], [])
        for token, logprob, offset in entries:
            self.append(out, token, logprob, offset, len(logprob.top))
        return out

    def append(self, out: TextLogprobs, token: int, logprob: Logprob | None, offset: int, top: int) -> None:
        """Append a token to a completion's log-probabilities.

        Args:
            logprob: None: unknown.
            offset: characters before the token.
            top: alternatives to include. The token itself is always included.
        """
        text = self._name(token)
        out.tokens.append(text)
        out.text_offset.append(offset)
        if logprob is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            return
        own = max(logprob.logprob, LOWEST)
        best: dict[str, float] = {}
        for other, value in logprob.top[:top]:
            name = text if other == token else self._name(other)
            if name in best or (name == text and other != token):
                name = _by_id(other)  # another token has the same text
            best[name] = max(value, LOWEST)
        best[text] = own
        out.token_logprobs.append(own)
        out.top_logprobs.append(best)

    def _fields(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self.token_text(token), max(logprob, LOWEST), list(self._detokenizer.raw(token))


def _by_id(token: int) -> str:
    return f"token_id:{token}"


class PromptEcho:
    """Takes the items of choice ``PROMPT``, in order. All choices of an answer share it."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._tokens = unpack_tokens(request.prompt)
        self._wanted = request.sampling.prompt_logprobs
        self._detokenizer = detokenizer
        self._special = special_texts(request, detokenizer)
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
        stream = self._detokenizer.stream(marks=self._special)
        return [*map(stream.push, self._tokens), stream.finish()]

    @cached_property
    def text(self) -> str:
        """Detokenized like output: special tokens have no text unless they are shown."""
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
