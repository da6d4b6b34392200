"""Speculative decoding: proposed tokens are verified several at a time. Pure.

The target computes the last token and ``n`` proposed ones in one step and draws a token behind each, exactly as it
would have drawn them one by one: a draw depends on (seed, choice, position) and the logits only. Proposals are accepted
as long as they equal the drawn tokens, so the output is that of the target alone, greedy and seeded.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from msgspec.structs import replace

from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import ScheduledSequence


class Drafter(Protocol):
    """Proposes tokens that are likely to come next. Called once per step, with all sequences of its plan."""

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        """Up to ``limits[i]`` tokens behind the known ones of ``plan[i]``; their blocks are allocated.

        Raises:
            EngineError: the device is lost.
        """

    def close(self) -> None: ...


class Speculation:
    """Adds proposals to plans.

    Args:
        tokens: proposed per sequence and step, at most.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {tokens}")
        self.drafter = drafter
        self._tokens = tokens

    def extend(self, plan: list[ScheduledSequence], scheduler: Scheduler) -> list[ScheduledSequence]:
        """The plan with proposed tokens behind single ones; they are in ``sequence.draft`` until it is committed."""
        budget = scheduler.max_batched_tokens - sum(scheduled.count for scheduled in plan)
        limits = []
        for scheduled in plan:
            # What a constraint allows behind a proposed token is known only once that token is.
            most = 0 if scheduled.sequence.constraint is not None else min(self._tokens, budget)
            limits.append(scheduler.kv_cache.draft_room(scheduled, most))
            budget -= limits[-1]
        extended = []
        for scheduled, draft in zip(plan, self.drafter.propose(plan, limits), strict=True):
            scheduled.sequence.draft = draft
            extended.append(replace(scheduled, count=scheduled.count + len(draft)) if draft else scheduled)
        return extended
