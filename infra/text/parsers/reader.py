"""Incremental reading: a parser is a generator that yields when it needs more text.

Results depend on the text alone, never on how it is cut into pieces: each method waits until more text could not
change its result.

In the text that parsers read, the token of a mark is one character that no text has, a lone surrogate. So a mark that a
model spells in ordinary tokens, for instance because it quotes a document, is text and begins nothing.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TypeVar

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


T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text

SPACE = " \t\r\n"
_SPACE = re.compile(f"[{SPACE}]*")


class MalformedCall(Exception):
    """The text is not a call. Everything read since ``Reader.checkpoint`` must be rolled back."""


class NotACall(MalformedCall):
    """It is text, also if nothing follows: it did not even begin as a call."""


class EmptySection(MalformedCall):
    """Marks around no call at all, which are part of nothing."""


class Markers:
    """Texts to search for; none may contain another."""

    def __init__(self, *marks: str) -> None:
        assert all(a is b or a not in b for a in marks for b in marks), marks
        self._marks = marks
        self._longest = max(map(len, marks))
        self._any = re.compile("|".join(map(re.escape, marks)))
        self._first = re.compile(f"[{re.escape(''.join(sorted({mark[0] for mark in marks})))}]")

    def find(self, text: str, at: int) -> tuple[int, str]:
        """(start of the first mark, the mark), or (start of an end of the text that may yet become one, "")."""
        if match := self._any.search(text, at):
            return match.start(), match.group()
        for first in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            tail = text[first.start() :]
            if any(mark.startswith(tail) for mark in self._marks):
                return first.start(), ""
        return len(text), ""


class Reader:
    """
    Attributes:
        ended: no more text will follow.
        limited: the text ends because it may not be longer, not because it is complete.
    """

    __slots__ = ("_at", "_call", "_pinned", "_recorded", "_tape", "_text", "ended", "limited")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self._call: list[str] | None = None
        self._pinned = False
        self._tape: list[str] | None = None
        self.ended = self.limited = False

    @property
    def cut_short(self) -> bool:
        """Everything was read, and there would have been more."""
        return self.limited and not self.peek()

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def rest(self) -> str:
        """Read all that is left."""
        return self._take(len(self._text))

    def peek(self) -> str:
        """The next character; "" if more text is needed."""
        return self._text[self._at : self._at + 1]

    # --- checkpoints ---

    def checkpoint(self, text: str = "") -> None:
        """Record all text read from here on, for ``rollback``; ``text`` was read just before."""
        self._recorded = [text]

    def checkpoint_call(self, text: str = "") -> None:
        """As ``checkpoint``, where a call may begin. Its text is kept until ``end_call``, for ``call_text``."""
        self._recorded = [text]
        self._call = [text]

    def end_call(self) -> None:
        """The call that began at ``checkpoint_call`` is complete."""
        if not self._pinned:
            self._call = None

    def pin(self) -> None:
        """Keep the checkpoint, whatever is committed, until ``unpin`` or ``rollback``."""
        self._pinned = True

    def unpin(self) -> str:
        """The text read since the checkpoint, which can be committed again."""
        self._pinned = False
        return "".join(self._recorded or [])

    @property
    def call_text(self) -> str:
        """The text of the call that has begun and is not complete; "": there is none."""
        return "".join(self._call) if self._call is not None else ""

    def commit(self) -> None:
        """Forget the checkpoint."""
        if not self._pinned:
            self._recorded = None

    def rollback(self) -> str:
        """Drop the checkpoint and return the text read since, which then counts as read."""
        recorded, self._recorded = self._recorded or [], None
        self._call = None
        self._pinned = False
        return "".join(recorded)

    # --- reading twice ---

    def tape(self, text: str) -> None:
        """Keep all text read from here on, for ``taped``; ``text`` was read just before."""
        self._tape = [text]

    def taped(self) -> str:
        """The text read since ``tape``, which is kept no longer."""
        kept, self._tape = self._tape or [], None
        return "".join(kept)

    def within(self, text: str) -> "Reader":
        """A reader of the last part of the text, which this one has read to its end."""
        inner = Reader()
        inner.feed(text)
        inner.ended, inner.limited = True, self.limited
        return inner

    # --- reading ---

    def until(self, marks: Markers, emit: Callable[[str], object]) -> Steps[str]:
        """Pass the text before the first of ``marks`` to ``emit``; returns the mark, or "" at the end of the text.

        Tokens that begin a mark whose rest was cut off by a limit are dropped.
        """
        while True:
            end, mark = marks.find(self._text, self._at)
            if self.ended and not mark and not (self.limited and TOKEN.search(self._text, end)):
                end = len(self._text)
            if end > self._at:
                emit(self._take(end))
            if mark:
                self._take(end + len(mark))
                return mark
            if self.ended:
                self.rest()
                return ""
            yield

    def literal(self, *options: str) -> Steps[str]:
        """Read one of ``options`` if it comes next, the longest; returns it, or "".

        The beginning of one whose rest a limit cut off is read, too.
        """
        while True:
            found = ""
            for option in options:
                if len(option) > len(found) and self._text.startswith(option, self._at):
                    found = option
            tail = self._text[self._at : self._at + max(map(len, options))]
            if self.ended or not any(len(each) > len(tail) and each.startswith(tail) for each in options):
                if not found and self.limited and self.cut_off(*options):
                    self.rest()
                return self._take(self._at + len(found)) if found else ""
            yield

    def cut_off(self, *options: str) -> bool:
        """Whether, where ``literal`` found none of ``options``, the text ends before it could be one."""
        rest = self._text[self._at : self._at + max(map(len, options))]
        return any(option.startswith(rest) for option in options)

    def space(self) -> Steps[str]:
        """Read white space."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: "re.Pattern[str]") -> Steps[str]:
        """Read as many characters of a kind as there are; ``pattern`` matches any number of them, also none."""
        parts = ""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            parts += self._take(match.end())
            if self._at < len(self._text) or self.ended:
                return parts
            yield

    def follows(self, pattern: "re.Pattern[str]", then: str) -> Steps[bool]:
        """Whether at least one character of a kind comes next, and ``then``, at most one, after it. Reads nothing."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            if match.end() < len(self._text) or self.ended:
                return match.end() > self._at and self._text.startswith(then, match.end())
            yield

    def scan(self, next_end: Callable[[str, int], tuple[int, bool]], emit: Callable[[str], object]) -> Steps[bool]:
        """Pass text to ``emit`` up to where a scanner ends.

        Args:
            next_end: (text, start) -> (end of what belongs to it, whether it ends there); keeps its own state.
        Returns: False: the text ended first.
        """
        while True:
            end, over = next_end(self._text, self._at)
            if end > self._at:
                emit(self._take(end))
            if over:
                return True
            if self.ended:
                return False
            yield

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._recorded is not None and text:
            self._recorded.append(text)
        if self._call is not None and text:
            self._call.append(text)
        if self._tape is not None and text:
            self._tape.append(text)
        return text
