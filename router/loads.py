"""How loaded each worker is: admitted minus finished, folded from WORK and DONE. Pure; ``now`` is an argument.

The two streams have no common order and a router counts its own decisions before they come back from the log, so
every event may arrive early, late or twice.
"""

from collections import OrderedDict

import msgspec

from schemas.fleet import Registration

REMEMBERED = 100_000
OVERDUE_NS = 30_000_000_000  # a request this long past its deadline ended without our hearing of it


class Entry(msgspec.Struct):
    """One unfinished request: its newest attempt and what that costs its worker."""

    request: str
    attempt: int
    worker: str
    gateway: str
    n: int
    prompt_tokens: int
    prefill_tokens: int  # not cached when it was placed
    deadline_ns: int
    admitted_ns: int
    seq: int = 0  # of the job in WORK, once known


class Load(msgspec.Struct):
    """Sums over a worker's unfinished requests."""

    running: int = 0  # sequences
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    requests: dict[str, None] = {}


class Loads:
    """The fold."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._loads: dict[str, Load] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._none = Load()

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, request: str) -> bool:
        """Whether a request was placed or has ended, as far as the log was seen."""
        return request in self._entries or request in self._finished

    def entry(self, request: str) -> Entry | None:
        return self._entries.get(request)

    def workers(self) -> list[str]:
        """Workers with unfinished requests."""
        return list(self._loads)

    def unfinished_of(self, worker: str) -> list[Entry]:
        load = self._loads.get(worker)
        return [self._entries[request] for request in load.requests] if load is not None else []

    def load(self, worker: str) -> Load:
        """Do not change it."""
        return self._loads.get(worker, self._none)

    def room(self, registration: Registration) -> int:
        """Sequences that the worker would take now."""
        return registration.slots + registration.queue - self.load(registration.worker).running

    def admitted(
        self,
        request: str,
        attempt: int,
        worker: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        gateway: str,
        deadline_ns: int,
        now_ns: int,
        n: int = 1,
        seq: int = 0,
    ) -> None:
        """An attempt was given to a worker: our own decision (no ``seq`` yet) or the log's word, which wins."""
        if request in self._finished:
            return
        known = self._entries.get(request)
        if known is not None:
            if known.attempt > attempt or (known.attempt == attempt and (known.seq or not seq)):
                return
            self._remove(known)
        entry = Entry(
            request,
            attempt,
            worker,
            gateway,
            n,
            prompt_tokens,
            max(prompt_tokens - cached_tokens, 0),
            deadline_ns,
            now_ns,
            seq,
        )
        self._entries[request] = entry
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = Load()
        load.running += n
        load.prompt_tokens += entry.prompt_tokens
        load.prefill_tokens += entry.prefill_tokens
        load.requests[request] = None

    def withdraw(self, request: str, attempt: int, worker: str) -> None:
        """Our own decision did not come true; the log's word on the attempt stays."""
        known = self._entries.get(request)
        if known is not None and known.attempt == attempt and known.worker == worker and not known.seq:
            self._remove(known)

    def finished(self, request: str) -> None:
        """The request has its terminal event."""
        known = self._entries.get(request)
        if known is not None:
            self._remove(known)
        self._finished[request] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def expire(self, now_ns: int) -> int:
        """Forget requests far beyond their deadline; returns how many."""
        overdue = [entry for entry in self._entries.values() if now_ns > entry.deadline_ns + OVERDUE_NS]
        for entry in overdue:
            self._remove(entry)
        return len(overdue)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.request]
        load = self._loads[entry.worker]
        del load.requests[entry.request]
        if not load.requests:
            del self._loads[entry.worker]
            return
        load.running -= entry.n
        load.prompt_tokens -= entry.prompt_tokens
        load.prefill_tokens -= entry.prefill_tokens
