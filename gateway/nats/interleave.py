"""The order in which the tokens of several choices are sent, however they were computed and read. Pure.

Choices take turns, one token each, then their end, so the order depends on the answer only. In the token log it changes
whenever a choice is preempted or another worker continues it, and the record has none.
"""

from collections import deque
from collections.abc import Callable, Iterable

from penstock.schemas.tokens import PROMPT, Finish, TokenItem


class ChoiceInterleaver:
    """Holds back what a choice has beyond the others, at most its ``max_tokens``.

    Args:
        hides_last: whether the token that comes with an end is not shown: then the two are one turn.
    """

    def __init__(self, choices: int, hides_last: Callable[[Finish], bool]) -> None:
        self._waiting: list[deque[TokenItem]] = [deque() for _ in range(choices)]
        self._open = list(range(choices))
        self._turn = 0  # place in ``_open``
        self._hides_last = hides_last

    def push(self, items: Iterable[TokenItem]) -> list[TokenItem]:
        """Items in each choice's own order; returns those whose turn has come, of one token or one end each."""
        for item in items:
            if item.choice != PROMPT:
                self._waiting[item.choice].extend(self._turns(item))
        out: list[TokenItem] = []
        while self._open and (waiting := self._waiting[self._open[self._turn]]):
            item = waiting.popleft()
            out.append(item)
            if item.finish is not None:
                del self._open[self._turn]
            else:
                self._turn += 1
            if self._turn >= len(self._open):
                self._turn = 0
        return out

    def _turns(self, item: TokenItem) -> Iterable[TokenItem]:
        request, attempt, choice, finish = item.request, item.attempt, item.choice, item.finish
        count = len(item.tokens) >> 2
        joined = finish is not None and count > 0 and self._hides_last(finish)
        for at in range(count):
            token = item.tokens[4 * at : 4 * at + 4]
            logprobs = item.logprobs[at : at + 1] if item.logprobs else item.logprobs
            end = finish if joined and at == count - 1 else None
            yield TokenItem(request, attempt, choice, item.first + at, token, end, logprobs)
        if finish is not None and not joined:
            yield TokenItem(request, attempt, choice, item.first + count, b"", finish)
