"""Speculation with a draft model on CUDA: its steps follow each other on the device, without waiting for tokens."""

from collections.abc import Sequence as Seq

from penstock.workers.engines.core.sequence import PendingStep, ScheduledSequence
from penstock.workers.engines.native.cuda.draft_loop import DraftLoop, Row
from penstock.workers.engines.native.cuda.executor import CudaExecutor
from penstock.workers.engines.native.model.draft import progress_of


class CudaDraftModel:
    """Implements ``penstock.workers.engines.core.speculation.Drafter``. Owns the executor.

    Args:
        executor: of the draft model, over a pool under the target's block numbers; as many steps as tokens are proposed
            may be in flight.
        loop: computes all steps behind the first at once where it can; None: each is launched.
    """

    def __init__(self, executor: CudaExecutor, loop: DraftLoop | None = None) -> None:
        self._executor, self._loop = executor, loop

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in plan]
        progress = [progress_of(scheduled) for scheduled in plan]
        plans = []
        for scheduled, each, limit in zip(plan, progress, limits, strict=True):
            end = scheduled.start + scheduled.count
            plans.append(ScheduledSequence(scheduled.sequence, each.computed, end - each.computed, limit > 0))
            each.computed = end
        launched = [([n for n, limit in enumerate(limits) if limit], self._executor.launch(plans))]
        rows = self._rows(plan, limits)
        loop = self._loop
        if loop is not None and rows and loop.suits(list(rows.values())):
            following = loop.launch(list(rows.values()))
            _take(drafts, launched)
            for number, row, tokens in zip(rows, rows.values(), following.tokens(), strict=True):
                drafts[number] += tokens[: row.steps]
        else:
            _take(drafts, launched + self._launch_each(plan, limits))
        for each, draft in zip(progress, drafts, strict=True):
            each.proposed = list(draft)
        return drafts

    def _launch_each(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[tuple[list[int], PendingStep]]:
        """Launch the steps behind the first."""
        launched: list[tuple[list[int], PendingStep]] = []
        for count in range(2, max(limits, default=0) + 1):
            left = [number for number, limit in enumerate(limits) if limit >= count]
            plans = [
                ScheduledSequence(plan[n].sequence, plan[n].start + plan[n].count + count - 2, 1, True) for n in left
            ]
            launched.append((left, self._executor.launch(plans)))
        return launched

    def _rows(self, plan: list[ScheduledSequence], limits: Seq[int]) -> dict[int, Row]:
        """The sequences for which more than one token is proposed, by their numbers in the plan."""
        return {
            number: Row(
                scheduled.sequence,
                self._executor.table_row(scheduled.sequence),
                scheduled.start + scheduled.count,
                limit - 1,
            )
            for number, (scheduled, limit) in enumerate(zip(plan, limits, strict=True))
            if limit > 1
        }

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._executor.close()


def _take(drafts: list[list[int]], launched: Seq[tuple[list[int], PendingStep]]) -> None:
    """Wait for steps and append their tokens to the drafts that each has computed."""
    for left, pending in launched:
        if not left:  # a step of prompts alone
            continue
        for number, (token, _) in zip(left, pending.result(), strict=True):
            drafts[number].append(token)
