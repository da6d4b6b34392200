"""Proposes what followed the latest occurrence of a sequence's last n-gram, and accepts and counts proposed tokens.
Pure.

Prompt lookup decoding, as vLLM's method "ngram": the longest match of ``shortest`` to ``longest`` tokens wins.
"""

from array import array
from collections.abc import Sequence as Seq

from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence, Sequence


class DraftCounts:
    """Counts since start."""

    def __init__(self) -> None:
        self.drafts = 0  # sequences in steps with proposals
        self.proposed = 0  # tokens
        self.accepted = 0

    def count(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted

    def accept(self, sequence: Sequence, drawn: list[Sampled]) -> list[Sampled]:
        """The drawn tokens up to the first that was not proposed, itself included; the proposals are used up."""
        draft, sequence.draft = sequence.draft, ()
        right = accepted(draft, [token for token, _ in drawn])
        self.count(len(draft), right)
        return drawn[: right + 1]


def accepted(draft: Seq[int], drawn: Seq[int]) -> int:
    """How many leading proposals equal the drawn tokens."""
    count = 0
    while count < len(draft) and draft[count] == drawn[count]:
        count += 1
    return count


CANDIDATES = 8  # occurrences that are compared for the longest match


class _Index:
    """Where each n-gram of the shortest length ended; kept in ``Sequence.drafter_state``."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], int] = {}  # n-gram -> end of its latest occurrence
        self.before = array("i")  # by end: end of the occurrence before it; -1: none


class NgramDrafter:
    """Implements ``penstock.workers.engines.core.engine.Drafter``.

    Args:
        shortest, longest: tokens that must match.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"prompt_lookup_min must be 1 to prompt_lookup_max ({longest}), not {shortest}")
        self._shortest, self._longest = shortest, longest

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        return [
            self._of(scheduled.sequence, limit) if limit else [] for scheduled, limit in zip(plan, limits, strict=True)
        ]

    def _of(self, sequence: Sequence, limit: int) -> list[int]:
        tokens, index = sequence.tokens, sequence.drafter_state
        if not isinstance(index, _Index):
            index = sequence.drafter_state = _Index()
        self._update(index, tokens)
        best, matched = -1, 0
        end = index.last.get(tuple(tokens[-self._shortest :]), -1)
        for _ in range(CANDIDATES):
            if end < 0:
                break
            length = self._match(tokens, end)
            if length > matched:
                best, matched = end, length
            end = index.before[end]
        return tokens[best : best + limit] if best >= 0 else []

    def _match(self, tokens: list[int], end: int) -> int:
        """How many tokens before ``end`` equal those before the sequence's end."""
        length = self._shortest
        while length < min(self._longest, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _update(self, index: _Index, tokens: list[int]) -> None:
        """Enter the n-grams that end before the last token."""
        size, before = self._shortest, index.before
        for end in range(len(before), len(tokens)):
            if end < size:
                before.append(-1)
                continue
            gram = tuple(tokens[end - size : end])
            before.append(index.last.get(gram, -1))
            index.last[gram] = end

    def close(self) -> None:
        """Nothing to free: the indexes go with their sequences."""
