"""Whether a constraint on the output can be compiled, before its request is accepted."""

import asyncio
from collections import OrderedDict

from blake3 import blake3

from infra.model import constraints
from schemas.errors import Code, ServingError
from schemas.requests import Constraint

REMEMBERED = 1_024
CHECK_S = 5.0


class ConstraintCheck:
    """Checks each constraint once, in a thread, and remembers the latest.

    Without llguidance here, the workers check: their refusal has the same code.
    """

    def __init__(self) -> None:
        self._available = constraints.available()
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # by digest: why it cannot be compiled; "": it can

    async def check(self, constraint: Constraint) -> None:
        """
        Raises:
            ServingError: invalid_request: it cannot be compiled; names the keyword.
        """
        if not self._available:
            return
        digest = blake3(f"{constraint.kind}\0{constraint.text}".encode()).digest()
        reason = self._checked.get(digest)
        if reason is None:
            try:
                async with asyncio.timeout(CHECK_S):
                    reason = await asyncio.to_thread(_reason, constraint)
            except TimeoutError:
                reason = f"it takes more than {CHECK_S:.0f} s to compile; make it simpler"
            self._checked[digest] = reason
            if len(self._checked) > REMEMBERED:
                self._checked.popitem(last=False)
        if reason:
            raise ServingError(Code.invalid_request, f"the constraint cannot be compiled: {reason}")


def _reason(constraint: Constraint) -> str:
    try:
        constraints.check(constraint)
    except constraints.ConstraintError as error:
        return str(error)
    except constraints.LibraryError:
        return ""  # the workers check
    return ""
