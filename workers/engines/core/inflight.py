"""Plans that were made and not yet committed, and what must wait for them. Pure."""

from penstock.workers.engines.core.scoring import wants_scores
from penstock.workers.engines.core.sequence import Sequence


class InflightPlans:
    """Steps may overlap: while one is computed, the next is planned. True while a plan is not committed.

    Attributes:
        made: plans so far, without empty ones; ``Sequence.step`` is the number of the last one that a sequence is in.
        committed: of these.
    """

    def __init__(self) -> None:
        self.made = 0
        self.committed = 0

    def __bool__(self) -> bool:
        return self.made > self.committed

    def uses(self, sequence: Sequence) -> bool:
        """Whether a plan in flight reads or writes the blocks of a sequence."""
        return sequence.step > self.committed

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the plan in flight may end a sequence, or decides what the next step computes of it."""
        if sequence.length >= sequence.limit:
            return True
        if not sequence.lockstep or sequence.step <= self.committed:
            return False
        return sequence.length > len(sequence.tokens) or wants_scores(sequence)
