"""The fleet as the log tells it: who is there, and what each worker still has to do. No clock, no NATS.

Registrations come from the lease bucket; load is folded from WORK (a request was given to a worker) and DONE
(it ended, or was given back). The two streams have no common order and both repeat messages, so every step is
idempotent, and an end may come before its beginning. A router also admits its own decisions at once, before
their echo in the log.
"""

from collections.abc import Iterable

import msgspec

from router.holders import Place
from schemas.fleet import Registration, State

CLOSED_REMEMBERED = 65_536  # ended requests remembered, so that a late WORK echo does not revive them
PREFILL_TOKENS_PER_S = 20_000.0
_FOR_EVER = 1 << 62


class Unfinished(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that a worker was given and has not ended."""

    request: str
    attempt: int
    worker: str
    prompt_tokens: int
    cached_tokens: int
    blocks: int  # that its prompt takes beyond the cached ones
    deadline_ns: int
    rank: int = 0
    n: int = 1  # sequences
    gateway: str = ""
    priority: str = ""
    echoed: bool = False  # seen in the log, not only decided here
    seq: int = 0  # of its job in WORK, once seen

    @property
    def place(self) -> Place:
        return (self.worker, self.rank)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one place has to do."""

    requests: int = 0
    sequences: int = 0
    active_blocks: int = 0  # of the prompts of its unfinished requests; cached ones belong to whoever computed them
    prefill_tokens: float = 0.0  # estimated to be still uncomputed


class Member(msgspec.Struct, frozen=True):
    """One place that requests can be sent to, as the policy sees it."""

    place: Place
    registration: Registration
    load: Load

    @property
    def room(self) -> int:
        """Sequences it takes before it is full. An empty place takes any one request."""
        return max(0, self.registration.slots + self.registration.queue - self.load.sequences)


class FleetState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fold of the log, to be continued by another router. Registrations are not part: the bucket has them."""

    unfinished: tuple[Unfinished, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()
    backlogs: tuple[tuple[str, int, float, int], ...] = ()  # worker, rank, tokens, at_ns


class _Work:
    """Sums over the unfinished requests of one place, and its prefill backlog as a leaky bucket."""

    __slots__ = ("at_ns", "backlog", "blocks", "requests", "sequences", "uncached")

    def __init__(self) -> None:
        self.requests: dict[str, Unfinished] = {}
        self.sequences = self.blocks = self.uncached = 0
        self.backlog = 0.0
        self.at_ns = 0

    def change(self, entry: Unfinished, sign: int) -> None:
        self.sequences += sign * entry.n
        self.blocks += sign * entry.blocks
        self.uncached += sign * entry.uncached_tokens

    def prefill_tokens(self, now_ns: int, tokens_per_s: float) -> float:
        drained = max(0, now_ns - self.at_ns) * tokens_per_s / 1e9
        return min(max(0.0, self.backlog - drained), float(self.uncached))


class Fleet:
    """Workers and their load.

    First tokens are not in the log, so what is left of a worker's prefill is an estimate: a leaky bucket that a
    request's uncached prompt tokens fill when it is admitted, that drains at ``prefill_tokens_per_s``, and that
    never holds more than the uncached prompt tokens of the requests that are unfinished.
    """

    def __init__(self, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S) -> None:
        self._rate = prefill_tokens_per_s
        self._registrations: dict[str, Registration] = {}
        self._requests: dict[str, Unfinished] = {}
        self._work: dict[Place, _Work] = {}
        self._closed: dict[str, int] = {}  # request -> highest attempt that has ended, oldest first

    # Workers

    def put(self, registration: Registration) -> bool:
        """A worker registered or renewed; True: it was not known (or its cache was made anew)."""
        old = self._registrations.get(registration.worker)
        self._registrations[registration.worker] = registration
        return old is None or old.epoch != registration.epoch

    def lost(self, worker: str) -> list[Unfinished]:
        """A worker left or its lease ended: it is offered no more. Returns what must be steered again.

        Those requests stay known until a later attempt is admitted, they end, or they expire.
        """
        self._registrations.pop(worker, None)
        return self.unfinished_of(worker)

    def worker(self, worker: str) -> Registration | None:
        return self._registrations.get(worker)

    def workers(self) -> list[Registration]:
        return list(self._registrations.values())

    def members(self, now_ns: int, model: str | None = None) -> list[Member]:
        """Every (worker, rank) with its load, in a fixed order; only those that serve ``model`` if given."""
        found = []
        for name in sorted(self._registrations):
            registration = self._registrations[name]
            if model is None or serves(registration, model):
                for rank in range(registration.dp_size):
                    place = (name, rank)
                    found.append(Member(place, registration, self.load(place, now_ns)))
        return found

    def load(self, place: Place, now_ns: int) -> Load:
        work = self._work.get(place)
        if work is None:
            return Load()
        return Load(len(work.requests), work.sequences, work.blocks, work.prefill_tokens(now_ns, self._rate))

    def room(self, worker: str, rank: int = 0) -> int:
        """Sequences that a place takes before it is full; 0 when unknown or draining. Slots count per rank."""
        registration = self._registrations.get(worker)
        if registration is None or registration.state is not State.ready:
            return 0
        work = self._work.get((worker, rank))
        return max(0, registration.slots + registration.queue - (work.sequences if work else 0))

    def total_room(self, model: str) -> int:
        """Sequences that all places of a model take together."""
        return sum(
            self.room(name, rank)
            for name, registration in self._registrations.items()
            if serves(registration, model)
            for rank in range(registration.dp_size)
        )

    # Requests

    def admitted(
        self,
        request: str,
        attempt: int,
        worker: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        deadline_ns: int,
        now_ns: int,
        n: int = 1,
        rank: int = 0,
        gateway: str = "",
        priority: str = "",
        echo: bool = False,
        seq: int = 0,
    ) -> bool:
        """A request was given to a worker; a later attempt takes it from the earlier one.

        Args:
            echo: read from the log, which is right where this router had decided something else.
            seq: of the job in WORK, if read from there.

        Returns: False: nothing changed (known, overtaken by a later attempt, or already ended).
        """
        if self._closed.get(request, -1) >= attempt:
            return False
        old = self._requests.get(request)
        if old is not None:
            if old.attempt > attempt or (old.attempt == attempt and (old.echoed or not echo)):
                return False
            if (old.attempt, old.worker) == (attempt, worker):  # the echo of our own decision, which knows more
                self._requests[request] = self._work[old.place].requests[request] = msgspec.structs.replace(
                    old, echoed=True, seq=seq
                )
                return False
            self._drop(old)
        registration = self._registrations.get(worker)
        block_size = registration.block_size if registration else 32
        entry = Unfinished(
            request,
            attempt,
            worker,
            prompt_tokens,
            cached_tokens,
            -(-max(0, prompt_tokens - cached_tokens) // block_size),
            deadline_ns,
            rank,
            n,
            gateway,
            priority,
            echo,
            seq,
        )
        self._add(entry, now_ns)
        return True

    def finished(self, request: str) -> Unfinished | None:
        """The terminal event: whatever attempt ran is over, and none begins any more."""
        self._close(request, _FOR_EVER)
        entry = self._requests.get(request)
        if entry is not None:
            self._drop(entry)
        return entry

    def returned(self, request: str, attempt: int) -> Unfinished | None:
        """One attempt ended without a result; a later one, if known, goes on."""
        if self._closed.get(request, -1) < attempt:
            self._close(request, attempt)
        entry = self._requests.get(request)
        if entry is None or entry.attempt > attempt:
            return None
        self._drop(entry)
        return entry

    def withdraw(self, request: str, attempt: int) -> None:
        """This router's own decision could not be stored; it may come to another one. What the log said stays."""
        entry = self._requests.get(request)
        if entry is not None and entry.attempt == attempt and not entry.echoed:
            self._drop(entry)

    def request(self, request: str) -> Unfinished | None:
        return self._requests.get(request)

    def ended(self, request: str) -> bool:
        """Its terminal event was seen lately."""
        return self._closed.get(request, -1) == _FOR_EVER

    def unfinished(self) -> list[Unfinished]:
        return list(self._requests.values())

    def unfinished_of(self, worker: str) -> list[Unfinished]:
        """What ``worker`` (registered or not) was given and has not ended, oldest first, rank by rank."""
        places = sorted(place for place in self._work if place[0] == worker)
        return [entry for place in places for entry in self._work[place].requests.values()]

    def orphans(self) -> list[Unfinished]:
        """Requests whose worker is not registered."""
        return [e for p, work in self._work.items() if p[0] not in self._registrations for e in work.requests.values()]

    def expire(self, now_ns: int, margin_ns: int = 0) -> list[Unfinished]:
        """Drop and return requests whose deadline passed ``margin_ns`` ago: their end was missed."""
        late = [entry for entry in self._requests.values() if entry.deadline_ns + margin_ns <= now_ns]
        for entry in late:
            self._close(entry.request, entry.attempt)
            self._drop(entry)
        return late

    # Restart

    def state(self) -> FleetState:
        """The folded load, to be stored together with the positions in WORK and DONE that it stands at."""
        backlogs = tuple((*place, work.backlog, work.at_ns) for place, work in self._work.items())
        return FleetState(tuple(self._requests.values()), tuple(self._closed.items()), backlogs)

    @classmethod
    def restore(
        cls,
        state: FleetState,
        registrations: Iterable[Registration] = (),
        prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
    ) -> "Fleet":
        """Inverse of ``state``."""
        fleet = cls(prefill_tokens_per_s)
        for registration in registrations:
            fleet.put(registration)
        fleet._closed.update(state.closed)
        for entry in state.unfinished:
            fleet._add(entry, 0)
        for worker, rank, tokens, at_ns in state.backlogs:
            work = fleet._work[worker, rank]
            work.backlog, work.at_ns = tokens, at_ns
        return fleet

    def _add(self, entry: Unfinished, now_ns: int) -> None:
        work = self._work.setdefault(entry.place, _Work())
        left = work.prefill_tokens(now_ns, self._rate)
        work.backlog, work.at_ns = left + entry.uncached_tokens, max(now_ns, work.at_ns)
        work.requests[entry.request] = self._requests[entry.request] = entry
        work.change(entry, +1)

    def _drop(self, entry: Unfinished) -> None:
        del self._requests[entry.request]
        work = self._work[entry.place]
        del work.requests[entry.request]
        work.change(entry, -1)
        if not work.requests:
            del self._work[entry.place]

    def _close(self, request: str, attempt: int) -> None:
        self._closed.pop(request, None)
        self._closed[request] = attempt
        if len(self._closed) > CLOSED_REMEMBERED:
            del self._closed[next(iter(self._closed))]


def serves(registration: Registration, model: str) -> bool:
    """``model`` is its name or one of its aliases."""
    return model == registration.model or model in registration.aliases
