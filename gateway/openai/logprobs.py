"""Log-probabilities of tokens in the shapes of the OpenAI API."""

from collections.abc import Iterable

from gateway.openai.responses import ChatLogprob, TextLogprobs, TopLogprob
from infra.model.detokenizer import Detokenizer
from schemas.tokens import Logprob

LOWEST = -9999.0  # in the place of -inf, which JSON does not have
LARGE = 1024  # values; a response with more is encoded in a thread


class LogprobFormatter:
    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def token_text(self, token: int) -> str:
        return self._detokenizer.raw(token).decode("utf-8", "replace")

    def chat(self, token: int, logprob: Logprob) -> ChatLogprob:
        """An entry of a chat completion's log-probabilities."""
        top = [TopLogprob(*self._fields(other, value)) for other, value in logprob.top]
        return ChatLogprob(*self._fields(token, logprob.logprob), top)

    def completion(self, entries: Iterable[tuple[int, Logprob]], offset: int) -> TextLogprobs:
        """The log-probabilities of a completion.

        Args:
            offset: characters before the first of these tokens.
        """
        out = TextLogprobs([], [], [], [])
        for token, logprob in entries:
            offset += len(self.append(out, token, logprob, offset, len(logprob.top)))
        return out

    def append(self, out: TextLogprobs, token: int, logprob: Logprob | None, offset: int, top: int) -> str:
        """Append a token to a completion's log-probabilities; returns its text.

        Args:
            logprob: None: unknown.
            top: alternatives to include. The token itself is always included.
        """
        text = self.token_text(token)
        out.tokens.append(text)
        out.text_offset.append(offset)
        if logprob is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            return text
        own = max(logprob.logprob, LOWEST)
        best = {self.token_text(other): max(value, LOWEST) for other, value in reversed(logprob.top[:top])}
        out.token_logprobs.append(own)
        out.top_logprobs.append({**best, text: own})
        return text

    def _fields(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self.token_text(token), max(logprob, LOWEST), list(self._detokenizer.raw(token))
