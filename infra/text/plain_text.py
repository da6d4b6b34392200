"""Keeps the text of control tokens in clients' messages plain text, so that clients cannot forge roles or messages.

A tokenizer turns the text of an added token into that token wherever it stands. Where a client's text contains one, a
mark is inserted into it before the template is rendered, and the mark's own tokens are left out of the prompt. So the
text is encoded as plain text, wherever the template puts it. Everything else is encoded as usual.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.infra.text.longest_match import longest_of

Message = Mapping[str, Any]

_MARKS = range(0xE000, 0xF900)  # private use: rare in texts, and tokenizers split them off as bytes or unknown
_TRIES = 8
_FEW = 16
_OPENING = "<[{＜"


class PlainText:
    """Finds and marks the text of one tokenizer's control tokens.

    Args:
        image: the image token, which no text may become in any case; "": there is none.
    """

    def __init__(self, tokenizer: Tokenizer, image: str = "") -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if len(token.content) > 1]
        self._tokenizer = tokenizer
        self._all = _Texts(token.content for token in added if _controls(token))
        self._special = _Texts(token.content for token in added if token.special)
        self._image = _Texts([image] if image else [])
        # Some tokens are matched after normalisation: then the raw text does not show what becomes a token.
        late = [token for token in added if token.normalized and _controls(token)]
        self._normalizer = tokenizer.normalizer if late else None

    def found(self, messages: Sequence[Message], tools: Any, variables: Any, *, only_image: bool = False) -> bool:
        """Whether any text here would become a control token."""
        texts, own = self._looked_for(only_image)
        if texts.begins:
            for message in messages:
                content = message.get("content")
                if content.__class__ is str and len(message) == 2:
                    if self._becomes(content, own if message["role"] == "assistant" else texts):
                        return True
                elif any(self._within(v, own if _is_own(message, k) else texts) for k, v in message.items()):
                    return True
            if tools is not None and self._within(tools, texts):
                return True
        return bool(self._image.begins and variables) and self._within(variables, self._image)

    def _looked_for(self, only_image: bool) -> tuple["_Texts", "_Texts"]:
        """What to search in clients' texts, and in an assistant's content, whose structure (thoughts, calls) stays."""
        return (self._image, self._image) if only_image else (self._all, self._special)

    def _becomes(self, text: str, texts: "_Texts") -> bool:
        if texts.within(text):
            return True
        if self._normalizer is None or text.isascii():
            return False
        return texts.within(self._normalizer.normalize_str(text))

    def _within(self, value: Any, texts: "_Texts") -> bool:
        if value.__class__ is str:
            return self._becomes(value, texts)
        if isinstance(value, Mapping):
            return any(self._becomes(key, texts) or self._within(inner, texts) for key, inner in value.items())
        return isinstance(value, list | tuple) and any(self._within(inner, texts) for inner in value)

    def marks(self, *values: Any) -> Iterable[str]:
        """Characters that none of these values contains; several, since a tokenizer may not keep one apart."""
        for _ in range(_TRIES):
            mark = chr(_MARKS[secrets.randbelow(len(_MARKS))])
            if not self._within(values, _Texts([mark])):
                yield mark

    def marked(self, messages: Sequence[Message], mark: str, *, only_image: bool = False) -> list[dict[str, Any]]:
        """Copies of the messages with a mark in every text that would become a control token."""
        texts, own = self._looked_for(only_image)
        return [
            {
                key: _marked(value, own if _is_own(message, key) else texts, mark) if key != "role" else value
                for key, value in message.items()
            }
            for message in messages
        ]

    def marked_value(self, value: Any, mark: str, *, only_image: bool = False) -> Any:
        """As ``marked``, for tools, or (with ``only_image``) for the template's variables."""
        return _marked(value, self._image if only_image else self._all, mark)

    def encode(self, text: str, mark: str) -> list[int] | None:
        """The tokens of a rendered text without its marks; None: the tokenizer merged a mark with its neighbours."""
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # a template that writes JSON in ASCII
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        tokens, seen = [], set()
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            piece = text[start:end]
            if mark not in piece:
                tokens.append(token)
            elif piece == mark:
                seen.add(start)
            else:
                return None
        return tokens if len(seen) == text.count(mark) else None


class _Texts:
    """Texts to search for. ``begins``: their first characters, a cheap first test that most texts fail."""

    def __init__(self, texts: Iterable[str]) -> None:
        looked_for = set(texts)
        begins = {text[:2] for text in looked_for}
        self._first = "".join(sorted({text[0] for text in looked_for}))  # most texts do not even have one of these
        self.begins = tuple(sorted(begins if len(begins) <= _FEW else {text[0] for text in looked_for}))
        self._pattern = re.compile(longest_of(looked_for))

    def within(self, text: str) -> bool:
        for first in self._first:
            if first in text:
                break
        else:
            return False
        for begin in self.begins:
            if begin in text:
                return self._pattern.search(text) is not None
        return False

    def split(self, text: str, mark: str) -> str:
        while self.within(text):  # splitting one may leave another
            text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text


def _controls(token: AddedToken) -> bool:
    """Special tokens and tokens for structure (``<tool_call>``); not words, and not runs of spaces."""
    text = token.content.strip()
    return token.special or (len(text) > 1 and text[0] in _OPENING)


def _is_own(message: Message, key: str) -> bool:
    return message.get("role") == "assistant" and key in ("content", "reasoning_content")


def _marked(value: Any, texts: _Texts, mark: str) -> Any:
    if value.__class__ is str:
        return texts.split(value, mark)
    if isinstance(value, Mapping):
        return {_marked(key, texts, mark): _marked(inner, texts, mark) for key, inner in value.items()}
    return [_marked(inner, texts, mark) for inner in value] if isinstance(value, list | tuple) else value
