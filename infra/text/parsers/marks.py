"""Which marks of a format are tokens of a model's vocabulary.

In the text that parsers read, the token of a mark is one character that no text has, a lone surrogate. So a mark that a
model spells in ordinary tokens, for instance because it quotes a document, is text and begins nothing.
"""

import re
from collections.abc import Collection, Iterable

_FIRST, _MOST = 0xD800, 0x800
_LIKE_A_MARK = re.compile(r"[<>\[\]|｜◁▷]")
TOKEN = re.compile("[\ud800-\udfff]")
"""The character of any mark that is a token."""


class Marks:
    """
    Attributes:
        tokens: the marks that are tokens.
    """

    __slots__ = ("_char", "_longest_first", "_text", "tokens")

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self.tokens = tuple(sorted({*tokens}))[:_MOST]
        self._char = {text: chr(_FIRST + index) for index, text in enumerate(self.tokens)}
        self._text = {_FIRST + index: text for index, text in enumerate(self.tokens)}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._longest_first = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def char(self, token: str) -> str:
        """The character that stands for a token, in the text that parsers read."""
        return self._char[token]

    def within(self, mark: str) -> str:
        """A mark of a format as parsers find it: the tokens in it are their characters."""
        if self._longest_first is None:
            return mark
        return self._longest_first.sub(lambda found: self._char[found.group()], mark)

    def text(self, read: str) -> str:
        """What was read, with the text of each token again."""
        return read.translate(self._text) if self._text and TOKEN.search(read) else read

    def in_json(self, read: str) -> str:
        """As ``text``, for a part of a JSON text: tokens within strings are escaped."""
        if not self._text or not TOKEN.search(read):
            return read
        return read.translate(
            {char: text.replace("\\", "\\\\").replace('"', '\\"') for char, text in self._text.items()}
        )


NONE = Marks()


def tokens_in(texts: Iterable[str], vocabulary: Collection[str]) -> tuple[str, ...]:
    """The tokens of which the marks of a format consist, fully or in part.

    Args:
        texts: the marks.
        vocabulary: texts of the tokens beside a vocabulary's own, special or not. Those that are letters or white space
            (as in some vocabularies) are no marks.
    """
    whole = "\n".join(texts)
    return tuple(sorted(t for t in vocabulary if len(t) > 2 and _LIKE_A_MARK.search(t) and t in whole))
