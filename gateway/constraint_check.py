"""Whether a constraint on the output can be compiled, before its request is accepted."""

from infra.model import constraints
from infra.model.byte_cache import ByteCache
from infra.model.constraint_trials import ConstraintTrials, Trial, TrialsBusy, digest_of
from schemas.errors import Code, ServingError
from schemas.requests import Constraint

REMEMBERED_BYTES = 1 << 20  # about 4,000 verdicts


class ConstraintCheck:
    """Tries each constraint once, and remembers what is the constraint's own. ``close`` it.

    Without llguidance here, the workers check: their refusal has the same code.
    """

    def __init__(self, trials: ConstraintTrials | None = None) -> None:
        self._trials = (trials or ConstraintTrials()) if constraints.available() else None
        self._reasons: ByteCache[bytes, str] = ByteCache(REMEMBERED_BYTES, _size)  # by digest; "": it can be compiled

    async def check(self, constraint: Constraint, tenant: str, field: str | None = None) -> None:
        """
        Args:
            field: of the body, for the error.
        Raises:
            ServingError: invalid_request: it cannot be compiled; names the keyword. overloaded: too many wait.
        """
        if self._trials is None:
            return
        digest = digest_of(constraint)
        reason = self._reasons.get(digest)
        if reason is None:
            trial = await self._try(self._trials, constraint, tenant)
            reason = trial.reason
            if trial.lasting:
                self._reasons.put(digest, reason)
        if reason:
            raise ServingError(Code.invalid_request, f"the constraint cannot be compiled: {reason}", param=field)

    async def close(self) -> None:
        if self._trials is not None:
            await self._trials.close()

    async def _try(self, trials: ConstraintTrials, constraint: Constraint, tenant: str) -> Trial:
        try:
            return await trials.of(constraint, tenant)
        except TrialsBusy as busy:
            raise ServingError(Code.overloaded, f"{busy}; try again later", retry_after=busy.retry_after) from None


def _size(digest: bytes, reason: str) -> int:
    return len(digest) + 4 * len(reason)
