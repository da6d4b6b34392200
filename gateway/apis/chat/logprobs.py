"""Log-probabilities of tokens in the shapes of the OpenAI API."""

from collections.abc import Iterable

from penstock.gateway.base.chat_objects import ChatLogprob, TextLogprobs, TopLogprob
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.tokens import Logprob

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
