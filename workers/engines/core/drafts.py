"""Which proposed tokens are accepted, and how many were. Pure."""

from collections.abc import Sequence as Seq

from penstock.workers.engines.core.sequence import Sampled, Sequence


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
