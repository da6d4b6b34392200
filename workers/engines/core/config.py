"""Sizes and policy of a scheduler, and the limits of one sequence that follow from them. Pure.

Prompt log-probabilities: which prompt tokens a step scores, and how the scores are reported. Pure.

A sequence asks for them from position ``score`` on. Each scored token is a row of logits as wide as the vocabulary, so
their number per step is bounded.
"""

from collections.abc import Sequence as Seq

import msgspec

from penstock.schemas.errors import Code
from penstock.workers.engines.base import RequestError, Scored, SequenceRequest, check_length
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


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        block_size: tokens per KV block.
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        max_model_len: prompt + output of one sequence, tokens.
        eos_token_ids: end a sequence, unless it ignores them.
        max_scored_tokens: prompt tokens per step of sequences whose prompts are scored.
        no_evict: admit a sequence only if all blocks that it may need are available. Sequences with a reservation are
            exempt: it was made without knowing their output.

    Raises:
        ValueError: a size is below 1.
    """

    block_size: int
    max_running: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_scored_tokens: int = MAX_SCORED_TOKENS
    no_evict: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "max_batched_tokens", "max_model_len", "max_scored_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


class SequenceLimits:
    """How long a sequence may become on one engine.

    Args:
        total_blocks: of the KV pool.
    """

    def __init__(self, config: SchedulerConfig, total_blocks: int) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.eos = frozenset(config.eos_token_ids)
        self.pool_tokens = total_blocks * config.block_size
        self.pool_limit = (
            f"this worker's KV pool holds {self.pool_tokens} tokens ({total_blocks} blocks of {config.block_size})"
        )

    def check(self, request: SequenceRequest, prompt_len: int, known: int) -> None:
        """
        Args:
            known: tokens of the prompt and of earlier attempts.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        generated, max_tokens = known - prompt_len, request.stop.max_tokens
        check_length(prompt_len, generated, max_tokens=max_tokens, max_model_len=self.max_model_len)
        if known >= self.pool_tokens:
            raise RequestError(
                Code.out_of_blocks, f"{known} tokens leave no room for a new one: {self.pool_limit}, output included"
            )
