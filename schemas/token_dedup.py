"""De-duplicates one request's token items and puts them in order. Used by every reader of the token stream.

Push items in stream order: the attempt rule of ``penstock.schemas.tokens`` is defined on that order. Within an attempt,
items may be repeated, overlap or overtake each other. Each token is returned once, each choice ends once.

The prompt's log-probabilities are positions of one more choice, ``PROMPT``, which starts at 1 and has no end. A
server's counts (``COUNTS``) are returned as often as they come.
"""

from collections.abc import Iterable, Sequence

import msgspec

from penstock.schemas.errors import Code
from penstock.schemas.tokens import ANOTHER_MODEL, COUNTS, FAILURES, PROMPT, WHOLE_REQUEST, Finish, Logprob, TokenItem

DIFFERS = Finish(
    "error",
    code=Code.worker_lost,
    message="two workers computed this answer, and their tokens differ; read it again, or ask again",
)


class _ChoiceCursor:
    __slots__ = ("early", "ended", "fenced_at", "position", "since")

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.ended = False
        self.early: dict[int, list[TokenItem]] = {}  # by first index: items after a gap
        self.fenced_at = 0
        self.since: bytearray | None = None  # packed tokens from ``fenced_at`` on; None: no attempt followed another

    def differs(self, item: TokenItem) -> bool:
        """Whether an item has other tokens than were returned since a fence, or ends a whole answer before these do."""
        if self.since is None:
            return False
        start, end = max(item.first, self.fenced_at), item.first + (len(item.tokens) >> 2)
        ends = item.finish is not None and item.finish.reason not in FAILURES
        if ends and self.since and end < self.position:
            return True
        end = min(end, self.position)
        repeated = item.tokens[4 * (start - item.first) : 4 * (end - item.first)] if start < end else b""
        return repeated != self.since[4 * (start - self.fenced_at) :][: len(repeated)]


class TokenReassembler:
    """The reassembly state of one request with ``n`` choices.

    Args:
        last_attempt: that the request has ended with, by its terminal event: what came of it after a fence counts.
    Attributes:
        attempt: the highest seen; items of lower attempts are void.
        open: choices that have not ended.
        fallback: which of the request's fallbacks has the attempt, as in ``GenerateRequest``; 0: none.
    """

    def __init__(self, n: int = 1, *, last_attempt: int | None = None) -> None:
        self.attempt = -1
        self.open = n
        self.fallback = 0
        self._last_attempt = last_attempt
        self._choices = [_ChoiceCursor() for _ in range(n)]
        self._prompt: _ChoiceCursor | None = None

    @property
    def mark(self) -> int:
        """A number that grows whenever items were returned, or an attempt began."""
        return self.attempt - self.open + self.scored + sum([choice.position for choice in self._choices])

    def conclude(self, items: Sequence[TokenItem]) -> Sequence[TokenItem]:
        """Push the items of a terminal event (``penstock.schemas.done.items``), of whatever attempt.

        They contain each choice from its beginning, so this returns everything that is still missing. Nothing is due
        after it. An attempt that was given up may have ended the request although tokens of the next one were returned.
        Where these are others, the choice ends with an error: the rest would continue another text.
        """
        out: list[TokenItem] = []
        self.attempt = max((self.attempt, *(item.attempt for item in items)))
        for choice in self._choices:
            choice.early.clear()
        for item in items:
            if item.choice == PROMPT:
                out += self._push_prompt(item)
            elif item.choice == COUNTS:
                out.append(item)
            elif item.choice == WHOLE_REQUEST:
                out += self._end_all(item)
            elif item.choice < len(self._choices) and not (choice := self._choices[item.choice]).ended:
                if choice.differs(item):
                    item = TokenItem(item.request, item.attempt, item.choice, choice.position, b"", DIFFERS)
                out += self._take(choice, item, len(item.tokens) >> 2)
        return out

    @property
    def waiting(self) -> bool:
        """Whether items are held after a gap. If it does not close, read the stream again into a new instance."""
        return any(choice.early for choice in self._choices) or (self._prompt is not None and bool(self._prompt.early))

    @property
    def scored(self) -> int:
        """Leading prompt tokens whose log-probabilities were returned (the first token has none); 0: none."""
        return self._prompt.position if self._prompt is not None else 0

    def position(self, choice: int) -> int:
        """Tokens of a choice returned so far."""
        return self._choices[choice].position

    def push(self, item: TokenItem) -> Sequence[TokenItem]:
        """Add an item; returns the items now due, consecutive from each choice's last token on.

        ``WHOLE_REQUEST`` items are returned as one item per open choice.
        """
        if item.attempt != self.attempt:
            if item.attempt < self.attempt or (self._last_attempt is not None and item.attempt > self._last_attempt):
                return ()
            for choice in self._choices:
                choice.early.clear()
                if choice.since is None and item.attempt > 1:  # also if nothing came of the attempts before
                    choice.fenced_at, choice.since = choice.position, bytearray()
            self.attempt = item.attempt
            if self._prompt is not None:
                self._prompt.early.clear()
        if not 0 <= item.choice < len(self._choices):
            if item.choice == PROMPT:
                return self._push_prompt(item)
            if item.choice == COUNTS:
                return (item,) if self.open else ()
            if item.choice == ANOTHER_MODEL:
                self.fallback = item.first
            return self._end_all(item) if item.choice == WHOLE_REQUEST and item.finish else ()
        choice = self._choices[item.choice]
        if choice.ended:
            return ()
        if item.first > choice.position:
            choice.early.setdefault(item.first, []).append(item)
            return ()
        due = self._take(choice, item, len(item.tokens) >> 2)
        return self._with_early(choice, due) if choice.early else due

    def _push_prompt(self, item: TokenItem) -> Sequence[TokenItem]:
        if self._prompt is None:
            self._prompt = _ChoiceCursor(1)
        if item.first > self._prompt.position:
            self._prompt.early.setdefault(item.first, []).append(item)
            return ()
        return self._with_early(self._prompt, self._take(self._prompt, item, len(item.logprobs or ())))

    def _take(self, choice: _ChoiceCursor, item: TokenItem, count: int) -> Sequence[TokenItem]:
        """``count``: positions of the item."""
        repeated = choice.position - item.first
        if repeated > 0:
            if repeated >= count and item.finish is None:
                return ()
            repeated = min(repeated, count)
            item = TokenItem(
                item.request,
                item.attempt,
                item.choice,
                choice.position,
                item.tokens[4 * repeated :],
                item.finish,
                item.logprobs[repeated:] if item.logprobs is not None else None,
            )
            count -= repeated
        elif not count and item.finish is None:
            return ()
        choice.position += count
        if choice.since is not None:
            choice.since += item.tokens
        if item.finish is not None:
            choice.ended = True
            self.open -= 1
        return (item,)

    def _with_early(self, choice: _ChoiceCursor, due: Sequence[TokenItem]) -> Sequence[TokenItem]:
        out = list(due)
        while not choice.ended and (reached := [first for first in choice.early if first <= choice.position]):
            for item in choice.early.pop(min(reached)):
                if not choice.ended:
                    count = len(item.logprobs or ()) if item.choice == PROMPT else len(item.tokens) >> 2
                    out.extend(self._take(choice, item, count))
        if choice.ended:
            choice.early.clear()
        return out

    def _end_all(self, item: TokenItem) -> Sequence[TokenItem]:
        out = []
        for number, choice in enumerate(self._choices):
            if not choice.ended:
                choice.ended = True
                choice.early.clear()
                out.append(TokenItem(item.request, item.attempt, number, choice.position, b"", item.finish))
        self.open = 0
        return out


class ChoiceProgress(msgspec.Struct):
    """The output of one choice so far: packed u32 ids, and how it ended, if it did."""

    tokens: bytes = b""
    finish: Finish | None = None
    logprobs: tuple[Logprob, ...] = ()  # one per token, if requested


def replay(items: Iterable[TokenItem], n: int = 1) -> list[ChoiceProgress]:
    """A request's output by choice, from its items in stream order (of all attempts)."""
    fold = TokenReassembler(n)
    tokens: list[list[bytes]] = [[] for _ in range(n)]
    logprobs: list[list[Logprob]] = [[] for _ in range(n)]
    finishes: list[Finish | None] = [None] * n
    for item in items:
        for due in fold.push(item):
            if due.choice < 0:
                continue
            tokens[due.choice].append(due.tokens)
            logprobs[due.choice] += due.logprobs or ()
            if due.finish is not None:
                finishes[due.choice] = due.finish
    return [
        ChoiceProgress(b"".join(parts), finish, tuple(scores))
        for parts, finish, scores in zip(tokens, finishes, logprobs, strict=True)
    ]


def scores(items: Iterable[TokenItem]) -> tuple[Logprob, ...]:
    """Log-probabilities of the prompt's tokens 1 .., from a request's items in stream order (of all attempts)."""
    fold = TokenReassembler(0)
    return tuple(each for item in items for due in fold.push(item) for each in due.logprobs or ())
