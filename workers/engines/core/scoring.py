"""Prompt log-probabilities: which prompt tokens a step scores, and how the scores are reported. Pure.

A sequence asks for them from position ``score`` on. Each scored token is a row of logits as wide as the vocabulary, so
their number per step is bounded.
"""

from collections.abc import Sequence as Seq

from penstock.workers.engines.base import Scored
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence

MAX_SCORED_TOKENS = 512  # per step


def wants_scores(sequence: Sequence) -> bool:
    """Whether prompt tokens remain to be scored."""
    return sequence.score < sequence.prompt_len


class PromptScoring:
    """The sequences to be scored in the step that is being planned.

    Args:
        max_tokens: prompt tokens per step of sequences whose prompts are scored.
    """

    def __init__(self, max_tokens: int = MAX_SCORED_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.sequences: list[ScheduledSequence] = []

    def begin(self) -> None:
        """Start planning a step; those of the last one stay with their plan."""
        self.sequences = []

    def limit(self, sequence: Sequence, count: int) -> int:
        """How many of ``count`` tokens may be computed in this step; 0: wait for the next."""
        if not wants_scores(sequence):
            return count
        return min(count, self.max_tokens - sum(scheduled.count for scheduled in self.sequences))

    def add(self, scheduled: ScheduledSequence) -> None:
        if wants_scores(scheduled.sequence):
            self.sequences.append(scheduled)


def collect(sequences: Seq[ScheduledSequence]) -> list[Scored]:
    """Take the scores that the executor has stored in the sequences of a step."""
    scores = []
    for scheduled in sequences:
        sequence = scheduled.sequence
        if sequence.scores:
            scores.append(Scored(sequence.key, sequence.score, sequence.scores))
            sequence.score += len(sequence.scores)
            sequence.scores = []
    return scores
