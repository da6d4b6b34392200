"""Which requests are to be erased, and when: a fold of WORK and DONE. Pure.

Every router keeps this ledger, so that any of them can erase what another one was to erase. The owner of a request's
model does it; the others check ``OTHERS_S`` later whether anything is left.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

OTHERS_S = 5.0  # how much later than the model's owner the other routers check
# A worker that lost its lease may still send tokens for a few seconds (``workers.outbox.KEEP_S``).
SECOND_LOOK_S = 15.0
REMEMBERED = 50_000  # erased requests, so that late messages about them are erased too


class Due(NamedTuple):
    """A request to erase now.

    Attributes:
        jobs: sequences of its messages in WORK.
        again: it was erased before; this is the second check.
    """

    request: str
    jobs: frozenset[int]
    again: bool


class _Ended:
    __slots__ = ("again", "due_ns")

    def __init__(self, due_ns: int) -> None:
        self.due_ns = due_ns
        self.again = False


class ErasureLedger:
    """``grace_s``: from the end of a request until it is erased."""

    def __init__(self, grace_s: float) -> None:
        self._grace_ns = int(grace_s * 1e9)
        self._jobs: dict[str, set[int]] = {}  # of requests that are not erased yet
        self._ended: dict[str, _Ended] = {}
        self._erased: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Requests that have ended and are not erased."""
        return len(self._ended)

    def __contains__(self, request: str) -> bool:
        return request in self._ended

    def add_job(self, request: str, seq: int) -> None:
        """A message about a request with ``no_store`` was stored in WORK."""
        self._jobs.setdefault(request, set()).add(seq)
        self.left_over((request,))

    def unended(self) -> set[str]:
        """Requests with jobs whose end this router does not know."""
        return self._jobs.keys() - self._ended.keys()

    def end(self, request: str, ended_ns: int, *, own: bool) -> None:
        """Add the end of a request. Repeated ends change nothing.

        Args:
            ended_ns: Unix time.
            own: this router erases it; otherwise it checks later.
        """
        if request in self._ended or request in self._erased:
            return
        due_ns = ended_ns + self._grace_ns + (0 if own else int(OTHERS_S * 1e9))
        self._ended[request] = _Ended(due_ns)

    def left_over(self, requests: Iterable[str]) -> None:
        """Schedule ended requests of which something is stored although they were erased."""
        for request in requests:
            if request in self._erased:
                del self._erased[request]
                self._ended[request] = _Ended(0)

    def due(self, now_ns: int, limit: int) -> list[Due]:
        """Up to ``limit`` requests that are due."""
        requests = []
        for request, ended in self._ended.items():
            if ended.due_ns <= now_ns:
                jobs = frozenset(self._jobs.get(request, ()))
                requests.append(Due(request, jobs, ended.again))
                if len(requests) == limit:
                    break
        return requests

    def erased(self, done: Due, now_ns: int) -> None:
        """Mark a request as erased. It is checked once more later, and then forgotten."""
        ended = self._ended.get(done.request)
        if ended is None:
            return
        jobs = self._jobs.get(done.request)
        if jobs is not None:
            jobs -= done.jobs
            if jobs:  # stored in the meantime
                return
            del self._jobs[done.request]
        if not ended.again:
            ended.again, ended.due_ns = True, now_ns + int(SECOND_LOOK_S * 1e9)
            return
        del self._ended[done.request]
        self._erased[done.request] = None
        if len(self._erased) > REMEMBERED:
            self._erased.popitem(last=False)

    def failed(self, done: Due, retry_ns: int) -> None:
        """Not everything could be erased: retry at ``retry_ns``."""
        ended = self._ended.get(done.request)
        if ended is not None:
            ended.due_ns = retry_ns
