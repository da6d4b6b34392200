"""Speculation with a draft model on CUDA: its steps are launched back to back, without waiting for tokens."""

from collections.abc import Sequence as Seq

from workers.engines.core.sequence import Slot
from workers.engines.native.cuda.executor import CudaExecutor
from workers.engines.native.draft import progress_of


class CudaDraftModel:
    """Implements ``workers.engines.core.speculation.Drafter``. Owns the executor.

    Args:
        executor: of the draft model, over a pool under the target's block numbers; as many steps as tokens are proposed
            may be in flight.
    """

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def propose(self, plan: list[Slot], limits: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in plan]
        progress = [progress_of(slot) for slot in plan]
        slots = []
        for slot, each, limit in zip(plan, progress, limits, strict=True):
            end = slot.start + slot.count
            slots.append(Slot(slot.sequence, each.computed, end - each.computed, limit > 0))
            each.computed = end
        launched = [([n for n, limit in enumerate(limits) if limit], self._executor.launch(slots))]
        for count in range(2, max(limits, default=0) + 1):
            left = [number for number, limit in enumerate(limits) if limit >= count]
            slots = [Slot(plan[n].sequence, plan[n].start + plan[n].count + count - 2, 1, True) for n in left]
            launched.append((left, self._executor.launch(slots)))
        for left, pending in launched:
            for number, sampled in zip(left, pending.result(), strict=True):
                drafts[number].append(sampled.token)
        for each, draft in zip(progress, drafts, strict=True):
            each.proposed = list(draft)
        return drafts

    def close(self) -> None:
        self._executor.close()
