"""Text that comes in pieces, read as if it were whole: a parser is a generator that yields when it needs more.

What a parser does may depend on the text alone, never on where it was cut: each method here waits until more text could
not change its result.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields: wants more text

_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text is no call after all; what was read of it since ``Reader.hold`` is to be given back."""


class Marks:
    """Texts to look for; none may be inside another."""

    def __init__(self, *marks: str) -> None:
        assert all(a is b or a not in b for a in marks for b in marks), marks
        self._marks = marks
        self._longest = max(map(len, marks))
        self._any = re.compile("|".join(map(re.escape, marks)))
        self._first = re.compile(f"[{re.escape(''.join(sorted({mark[0] for mark in marks})))}]")

    def find(self, text: str, at: int) -> tuple[int, str]:
        """(where the first mark begins, the mark); without one (where the end begins that may become one, "")."""
        if found := self._any.search(text, at):
            return found.start(), found.group()
        for first in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            tail = text[first.start() :]
            if any(mark.startswith(tail) for mark in self._marks):
                return first.start(), ""
        return len(text), ""


class Reader:
    """Attributes: ``ended``: no more text will come."""

    __slots__ = ("_at", "_held", "_text", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def rest(self) -> str:
        """Everything that came and was not read; it counts as read."""
        return self._take(len(self._text))

    def peek(self) -> str:
        """The next character; "": none is here."""
        return self._text[self._at : self._at + 1]

    # --- giving back ---

    def hold(self, text: str = "") -> None:
        """Remember what is read from here on; ``text`` was read just before."""
        self._held = [text]

    def drop(self) -> None:
        """It will not be given back."""
        self._held = None

    def held(self) -> str:
        """What was read since ``hold``, which ends."""
        held, self._held = self._held or [], None
        return "".join(held)

    # --- reading ---

    def until(self, marks: Marks, emit: Callable[[str], object]) -> Steps[str]:
        """Hand the text before the first of ``marks`` to ``emit``; returns the mark, or "" at the end of the text."""
        while True:
            end, mark = marks.find(self._text, self._at)
            if self.ended and not mark:
                end = len(self._text)
            if end > self._at:
                emit(self._take(end))
            if mark:
                self._take(end + len(mark))
                return mark
            if self.ended:
                return ""
            yield

    def literal(self, *options: str) -> Steps[str]:
        """Read one of ``options`` (none begins another) if it comes next; returns it, or ""."""
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return self._take(self._at + len(option))
            tail = self._text[self._at : self._at + max(map(len, options))]
            if self.ended or not any(option.startswith(tail) for option in options):
                return ""
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
            found = pattern.match(self._text, self._at)
            assert found is not None
            parts += self._take(found.end())
            if self._at < len(self._text) or self.ended:
                return parts
            yield

    def scan(self, next_end: Callable[[str, int], tuple[int, bool]], emit: Callable[[str], object]) -> Steps[bool]:
        """Hand on text for as long as a scanner goes on.

        Args:
            next_end: (text, from) -> (up to where it is part, whether it is over there); keeps its own state.
        Returns: False: the text ended before it was over.
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
        if self._held is not None and text:
            self._held.append(text)
        return text
