"""The fleet as the log tells it: who is there, and what each worker still has to do. No clock, no NATS.

Registrations come from the lease bucket; load is folded from WORK (a request was given to a worker) and DONE
(it ended, or was given back). The two streams have no common order and both repeat messages, so every step is
idempotent, and an end may come before its beginning. A router also admits its own decisions at once, before
their echo in the log.

A disaggregated request has a route: the stage that has it now, and later ones. It counts at every one of them, since
they all will have to take it; each message to a later stage moves it on. Which message of an attempt is the newest is
told by the number of stages left, not by the order in which they are heard.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from infra.bus.revisions import Revisions, revisions
from router.holders import Place
from schemas.blocks import DEFAULT_BLOCK_SIZE
from schemas.fleet import Registration, State
from schemas.jobs import Stage

MODELS_REMEMBERED = 256  # names that requests may ask for, of which their workers are known
CLOSED_REMEMBERED = 65_536  # ended requests remembered, so that a late WORK echo does not revive them
PREFILL_TOKENS_PER_S = 20_000.0
ENCODE = "encode"  # the role that computes no part of a prompt
DIFFUSION = "diffusion"  # the role that makes pictures, and nothing else
_FOR_EVER = 1 << 62


class Unfinished(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that was given to a worker and has not ended."""

    request: str
    attempt: int
    worker: str  # who has it now
    prompt_tokens: int
    cached_tokens: int
    blocks: int  # that its prompt takes beyond the cached ones, at the worker that computes it
    deadline_ns: int
    rank: int = 0
    n: int = 1  # sequences
    gateway: str = ""
    priority: str = ""
    echoed: bool = False  # seen in the log, not only decided here
    seq: int = 0  # of its newest message in WORK, once seen
    role: str = ""  # of ``worker``
    later: tuple[Stage, ...] = ()  # the stages after this one
    prompt_blocks: int = 0  # all of its prompt, as a worker takes them that is handed the KV
    handed: bool = False  # its prompt was computed by an earlier stage

    @property
    def place(self) -> Place:
        return (self.worker, self.rank)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is left of its route, the worker that has it now first."""
        return (Stage(self.role, self.worker, self.rank), *self.later)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    def shares(self) -> list["Share"]:
        """What it costs at each stage that is left: a function of this entry alone, so that nothing leaks."""
        if not self.later and not self.handed and self.role != ENCODE:
            return [Share((self.worker, self.rank), self.n, self.blocks, self.uncached_tokens)]
        found, computed = [], self.handed
        for stage in self.stages:
            place = (stage.worker, stage.rank)
            if stage.role == ENCODE:
                found.append(Share(place, 1, 0, 0))
            elif computed:
                found.append(Share(place, self.n, self.prompt_blocks, 0))
            else:
                found.append(Share(place, self.n, self.blocks, self.uncached_tokens))
                computed = True
        return found


class Share(NamedTuple):
    """What one request costs at one place."""

    place: Place
    sequences: int
    blocks: int
    uncached: int  # prompt tokens to compute


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one place has to do, what is on its way there included."""

    requests: int = 0
    sequences: int = 0
    active_blocks: int = 0  # of the prompts of its unfinished requests; cached ones belong to whoever computed them
    prefill_tokens: float = 0.0  # estimated to be still uncomputed


class RoutingTarget(msgspec.Struct, frozen=True):
    """One place that requests can be sent to, as the policy sees it."""

    place: Place
    registration: Registration
    load: Load

    @property
    def room(self) -> int:
        """Sequences it takes before it is full. An empty place takes any one request."""
        return max(0, self.registration.slots + self.registration.queue - self.load.sequences)


class LoadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fold of the log, to be continued by another router. Registrations are not part: the bucket has them."""

    unfinished: tuple[Unfinished, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()
    backlogs: tuple[tuple[str, int, float, int], ...] = ()  # worker, rank, tokens, at_ns


def merge(parts: Iterable[LoadState]) -> LoadState:
    """What ``LoadTracker.parts`` gave, in one."""
    found = list(parts)
    return LoadState(
        tuple(entry for part in found for entry in part.unfinished),
        tuple(entry for part in found for entry in part.closed),
        tuple(entry for part in found for entry in part.backlogs),
    )


class _Work:
    """Sums over the unfinished requests of one place, and its prefill backlog as a leaky bucket."""

    __slots__ = ("at_ns", "backlog", "blocks", "requests", "sequences", "uncached")

    def __init__(self) -> None:
        self.requests: dict[str, Unfinished] = {}
        self.sequences = self.blocks = self.uncached = 0
        self.backlog = 0.0
        self.at_ns = 0

    def change(self, share: Share, sign: int) -> None:
        self.sequences += sign * share.sequences
        self.blocks += sign * share.blocks
        self.uncached += sign * share.uncached

    def prefill_tokens(self, now_ns: int, tokens_per_s: float) -> float:
        drained = max(0, now_ns - self.at_ns) * tokens_per_s / 1e9
        return min(max(0.0, self.backlog - drained), float(self.uncached))


class LoadTracker:
    """Workers and their load.

    First tokens are not in the log, so what is left of a worker's prefill is an estimate: a leaky bucket that a
    request's uncached prompt tokens fill when it is admitted, that drains at ``prefill_tokens_per_s``, and that
    never holds more than the uncached prompt tokens of the requests that are unfinished.
    """

    def __init__(self, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S) -> None:
        self._rate = prefill_tokens_per_s
        self._registrations: dict[str, Registration] = {}
        self._serving: dict[str, list[Registration]] = {}  # by model, in the order of their names; made when asked for
        self._revisions: dict[tuple[str, str], Revisions] = {}  # by model and tokenizer; made when asked for
        self._requests: dict[str, Unfinished] = {}
        self._shares: dict[str, list[Share]] = {}  # of what is in ``_requests``
        self._work: dict[Place, _Work] = {}
        self._unlooked: list[str] = []  # requests that ``expire`` comes to in this round
        self._closed: dict[str, int] = {}  # request -> highest attempt that has ended, oldest first

    # Workers

    def put_worker(self, registration: Registration) -> bool:
        """A worker registered or renewed; True: it was not known (or its cache was made anew)."""
        old = self._registrations.get(registration.worker)
        self._registrations[registration.worker] = registration
        self._workers_changed()
        return old is None or old.epoch != registration.epoch

    def remove_worker(self, worker: str) -> list[Unfinished]:
        """A worker left or its lease ended: it is offered no more. Returns what must be steered again.

        That is what it has now, and what was to come to it from other stages. Those requests stay known until a later
        attempt is admitted, they end, or they expire.
        """
        self._registrations.pop(worker, None)
        self._workers_changed()
        return self.unfinished_of(worker)

    def worker(self, worker: str) -> Registration | None:
        return self._registrations.get(worker)

    @property
    def size(self) -> int:
        """Registered workers."""
        return len(self._registrations)

    def workers(self) -> list[Registration]:
        return list(self._registrations.values())

    def targets(self, now_ns: int, model: str) -> list[RoutingTarget]:
        """Every (worker, rank) of a model with its load, in a fixed order."""
        found = []
        for registration in self.serving(model):
            for rank in range(registration.dp_size):
                place = (registration.worker, rank)
                found.append(RoutingTarget(place, registration, self.load(place, now_ns)))
        return found

    def serving(self, model: str) -> list[Registration]:
        """The workers of a model, by any of its names."""
        known = self._serving.get(model)
        if known is None:
            names = sorted(self._registrations)
            known = [r for name in names if serves(r := self._registrations[name], model)]
            if len(self._serving) >= MODELS_REMEMBERED:
                self._serving.clear()
            self._serving[model] = known
        return known

    def revisions(self, model: str, tokenizer: str) -> Revisions:
        """Which revision answers prompts of this tokenizer."""
        known = self._revisions.get((model, tokenizer))
        if known is None:
            if len(self._revisions) >= MODELS_REMEMBERED:
                self._revisions.clear()
            known = self._revisions[model, tokenizer] = revisions(self.serving(model), tokenizer)
        return known

    def _workers_changed(self) -> None:
        self._serving.clear()
        self._revisions.clear()

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

    def any_room(self) -> bool:
        """Whether any place takes another sequence."""
        return any(self.room(name, rank) for name, r in self._registrations.items() for rank in range(r.dp_size))

    def total_room(self, model: str) -> int:
        """Sequences that all places of a model take together."""
        return sum(
            self.room(name, rank)
            for name, registration in self._registrations.items()
            if serves(registration, model)
            for rank in range(registration.dp_size)
        )

    # Requests

    def admit(
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
        role: str = "",
        route: Sequence[Stage] = (),
        handed: bool = False,
    ) -> bool:
        """A request was given to a worker; a later attempt takes it from the earlier one, a later stage moves it on.

        Args:
            echo: read from the log, which is right where this router had decided something else.
            seq: of the message in WORK, if read from there.
            role: of the worker.
            route: what is left of it, ``worker`` first; it tells the rank and the role. Empty: there is one stage.
            handed: the worker gets the prompt's KV and computes none of it.

        Returns: False: nothing changed (known, overtaken by a later attempt or stage, or already ended).
        """
        if self._closed.get(request, -1) >= attempt:
            return False
        later = tuple(route[1:])
        if route:
            role, rank = route[0].role, route[0].rank
        old = self._requests.get(request)
        if old is not None:
            if old.attempt > attempt:
                return False
            if old.attempt == attempt:
                if not echo or (old.echoed and len(old.later) <= len(later)):
                    return False
                if (old.place, old.later) == ((worker, rank), later):  # the echo of our own decision
                    self._replace(msgspec.structs.replace(old, echoed=True, seq=seq))
                    return False
            self._remove(old)
        block_size = self._block_size(role, worker, later)
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
            role,
            later,
            -(-prompt_tokens // block_size),
            handed,
        )
        self._add(entry, now_ns)
        return True

    def republished(self, request: str, attempt: int, seq: int) -> bool:
        """The job of a request was stored anew at ``seq``; False: that request is not known."""
        old = self._requests.get(request)
        if old is None:
            return self._closed.get(request, -1) >= attempt
        if old.attempt == attempt and seq > old.seq:
            self._replace(msgspec.structs.replace(old, seq=seq))
        return True

    def finish(self, request: str) -> Unfinished | None:
        """The terminal event: whatever attempt ran is over, and none begins any more."""
        self._close(request, _FOR_EVER)
        entry = self._requests.get(request)
        if entry is not None:
            self._remove(entry)
        return entry

    def end_attempt(self, request: str, attempt: int) -> Unfinished | None:
        """One attempt ended without a result; a later one, if known, goes on."""
        if self._closed.get(request, -1) < attempt:
            self._close(request, attempt)
        entry = self._requests.get(request)
        if entry is None or entry.attempt > attempt:
            return None
        self._remove(entry)
        return entry

    def release(self, request: str, attempt: int) -> None:
        """This router's own decision could not be stored; it may come to another one. What the log said stays."""
        entry = self._requests.get(request)
        if entry is not None and entry.attempt == attempt and not entry.echoed:
            self._remove(entry)

    def request(self, request: str) -> Unfinished | None:
        return self._requests.get(request)

    def ended(self, request: str) -> bool:
        """Its terminal event was seen lately."""
        return self._closed.get(request, -1) == _FOR_EVER

    def unfinished(self) -> list[Unfinished]:
        return list(self._requests.values())

    def unfinished_of(self, worker: str) -> list[Unfinished]:
        """What ``worker`` (registered or not) has to do, now or at a later stage: oldest first, rank by rank."""
        return self._at(sorted(place for place in self._work if place[0] == worker))

    def orphans(self) -> list[Unfinished]:
        """Requests that have a worker before them that is not registered: this attempt cannot come to an end."""
        return self._at(place for place in self._work if place[0] not in self._registrations)

    def expire(self, now_ns: int, margin_ns: int = 0, limit: int = 1 << 60) -> list[Unfinished]:
        """Drop and return requests whose deadline passed ``margin_ns`` ago: their end was missed.

        Looks at ``limit`` requests, where it stopped the last time.
        """
        if not self._unlooked:
            self._unlooked = list(self._requests)
        part = self._unlooked[-limit:]
        del self._unlooked[-limit:]
        entries = [entry for name in part if (entry := self._requests.get(name)) is not None]
        late = [entry for entry in entries if entry.deadline_ns + margin_ns <= now_ns]
        for entry in late:
            self._close(entry.request, entry.attempt)
            self._remove(entry)
        return late

    # Restart

    def parts(self, size: int = 1000) -> Iterator[LoadState]:
        """The folded load, to be stored with the positions in WORK and DONE that were reached before the first part.

        The fold may go on between two parts: what is read again from those positions on changes nothing that is known.
        """
        requests = list(self._requests)
        for start in range(0, len(requests), size):
            entries = map(self._requests.get, requests[start : start + size])
            yield LoadState(unfinished=tuple(entry for entry in entries if entry is not None))
        yield LoadState(
            backlogs=tuple((*place, work.backlog, work.at_ns) for place, work in sorted(self._work.items()))
        )
        closed = list(self._closed)
        for start in range(0, len(closed), size):
            attempts = ((request, self._closed.get(request)) for request in closed[start : start + size])
            yield LoadState(closed=tuple((name, attempt) for name, attempt in attempts if attempt is not None))

    @classmethod
    def restore(
        cls,
        state: LoadState,
        registrations: Iterable[Registration] = (),
        prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
    ) -> "LoadTracker":
        """Inverse of ``parts``."""
        tracker = cls(prefill_tokens_per_s)
        for registration in registrations:
            tracker.put_worker(registration)
        tracker._closed.update(state.closed)
        for entry in state.unfinished:
            tracker._add(entry, 0)
        for worker, rank, tokens, at_ns in state.backlogs:
            if (work := tracker._work.get((worker, rank))) is not None:
                work.backlog, work.at_ns = tokens, at_ns
        return tracker

    def _at(self, places: Iterable[Place]) -> list[Unfinished]:
        found = {name: entry for place in places for name, entry in self._work[place].requests.items()}
        return list(found.values())

    def _block_size(self, role: str, worker: str, later: Sequence[Stage]) -> int:
        """Of the worker that computes the prompt."""
        computing = next((stage.worker for stage in later), worker) if role == ENCODE else worker
        registration = self._registrations.get(computing)
        return registration.block_size if registration else DEFAULT_BLOCK_SIZE

    def _add(self, entry: Unfinished, now_ns: int) -> None:
        self._requests[entry.request] = entry
        shares = self._shares[entry.request] = entry.shares()
        for share in shares:
            work = self._work.get(share.place)
            if work is None:
                work = self._work[share.place] = _Work()
            left = work.prefill_tokens(now_ns, self._rate)
            work.backlog, work.at_ns = left + share.uncached, max(now_ns, work.at_ns)
            work.requests[entry.request] = entry
            work.change(share, +1)

    def _replace(self, entry: Unfinished) -> None:
        """With what costs the same."""
        self._requests[entry.request] = entry
        for share in self._shares[entry.request]:
            self._work[share.place].requests[entry.request] = entry

    def _remove(self, entry: Unfinished) -> None:
        del self._requests[entry.request]
        for share in self._shares.pop(entry.request):
            work = self._work.get(share.place)
            if work is not None:  # a malformed route may name a place twice
                work.requests.pop(entry.request, None)
                work.change(share, -1)
                if not work.requests:
                    del self._work[share.place]

    def _close(self, request: str, attempt: int) -> None:
        self._closed.pop(request, None)
        self._closed[request] = attempt
        if len(self._closed) > CLOSED_REMEMBERED:
            del self._closed[next(iter(self._closed))]


def serves(registration: Registration, model: str) -> bool:
    """``model`` is its name or one of its aliases."""
    return model == registration.model or model in registration.aliases
