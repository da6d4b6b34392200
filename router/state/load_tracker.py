"""Registered workers and the load of each target: a fold of the workers bucket, WORK and DONE. No clock, no NATS.

WORK records that a request was sent to a worker, DONE that it ended or was returned. The two streams have no common
order and both repeat messages, so every step is idempotent, and an end may arrive before its beginning: which attempts
have ended is remembered, so that a late message in WORK does not revive them. A router also admits its own decisions at
once, before it reads them from the log.

A disaggregated request counts at its present stage and at every later one, since all of them will have to take it. Each
message to a later stage moves it on. The newest message of an attempt is the one with the fewest stages left, whatever
the order of arrival.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock.router.state.attempts import EVERY, ActiveRequest, EndedAttempts, StageLoad
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import (
    ENCODE,
    ExpectedLoad,
    RoutingTarget,
    TargetColumns,
    TargetLoads,
    TargetSums,
    Task,
    serves,
)
from penstock.schemas.block_hashes import DEFAULT_BLOCK_SIZE
from penstock.schemas.cells import CELL
from penstock.schemas.fleet import Registration, Revisions, WorkerState, revisions
from penstock.schemas.jobs import ALONE, LoadHeader, Stage


class LoadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a ``LoadTracker`` for a snapshot. Registrations come from the bucket and are not part of it."""

    unfinished: tuple[ActiveRequest, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()  # request, highest attempt that ended
    backlogs: tuple[tuple[str, int, float, int], ...] = ()  # worker, rank, tokens, at_ns
    returned: tuple[tuple[str, int, str], ...] = ()  # request, attempt, ``Returned.crashed``
    losses: tuple[tuple[str, str, str, int], ...] = ()  # of leases, see ``LeaseLosses``
    losses_together: tuple[tuple[str, str, str, int], ...] = ()


def merge(parts: Iterable[LoadState]) -> LoadState:
    """Join the parts of ``LoadTracker.parts``."""
    states = list(parts)
    return LoadState(
        tuple(entry for state in states for entry in state.unfinished),
        tuple(entry for state in states for entry in state.closed),
        tuple(entry for state in states for entry in state.backlogs),
        tuple(entry for state in states for entry in state.returned),
        tuple(entry for state in states for entry in state.losses),
        tuple(entry for state in states for entry in state.losses_together),
    )


MODELS_CACHED = 256  # model names whose workers are cached; requests may name any model
PREFILL_TOKENS_PER_S = 20_000.0


class LoadTracker:
    """Workers and their load.

    The log has no message for a first token. If the keys of a prompt are known, since this router placed the request or
    another one sent them, and its worker publishes KV events, the prompt counts in the prefill backlog until its last
    block is stored. The backlog of other requests is an estimate: a request adds its uncached prompt tokens when it is
    admitted, and the backlog drains at ``prefill_tokens_per_s``, but never exceeds the uncached prompt tokens of the
    active requests.

    Attributes:
        loads: the loads of registered targets, column by column.
        requests: attempts that have not ended, by request; ``stage_loads`` has what each is at several targets.
        keys: of prompts' blocks, by request.
        sleepers: workers that are asleep.
        tokens_per_s: at which an estimated backlog drains.
    """

    def __init__(self, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S, *, kv_events: bool = True) -> None:
        self.loads = TargetLoads()
        self.tokens_per_s = prefill_tokens_per_s
        self._kv_events = kv_events
        self.keys: dict[str, Sequence[int]] = {}  # of prompts, by request
        self._registrations: dict[str, Registration] = {}  # of workers that take nothing as if they were draining
        self._given: dict[str, Registration] = {}  # as they came
        self.sleepers: set[str] = set()
        self._alone: dict[str, set[str]] = {}  # by worker: requests that run alone there
        self._suspects: Counter[str] = Counter()  # by worker, those that run alone left out
        self._serving: dict[str, list[Registration]] = {}  # cache: by model, sorted by worker id
        self._revisions: dict[tuple[str, str], Revisions] = {}  # cache: by model and tokenizer
        self._models: dict[str, str] = {}  # cache: by name
        self._ready: list[TargetColumns] | None = None  # cache: targets of workers that take requests
        self.requests: dict[str, ActiveRequest] = {}
        self._waiting: dict[str, ActiveRequest] = {}  # attempts that ended here, until the log has what follows them
        self.stage_loads: dict[str, list[StageLoad]] = {}  # by request, except those of ``_only_counts``
        self._targets = TargetSums(self.loads, prefill_tokens_per_s)
        self.version = 0  # of the registrations
        self._unchecked: list[str] = []  # requests that the present round of ``expire`` has yet to check
        self._closed = EndedAttempts()

    # Workers

    def put_worker(self, registration: Registration) -> None:
        """Add or update a worker."""
        old = self._registrations.get(registration.worker)
        self._given[registration.worker] = registration
        (self.sleepers.add if registration.weights.asleep else self.sleepers.discard)(registration.worker)
        registration = self._registrations[registration.worker] = self._marked(registration)
        self._clear_caches()
        for rank in range(registration.dp_size, old.dp_size if old is not None else 0):
            self.loads.remove((registration.worker, rank))
        for rank in range(registration.dp_size):
            self._put_target((registration.worker, rank), registration)

    def remove_worker(self, worker: str) -> list[ActiveRequest]:
        """Remove a worker and return the requests at it or on their way to it, which must be requeued.

        They stay active until a later attempt is admitted, they end, or they expire.
        """
        registration = self._registrations.pop(worker, None)
        self._given.pop(worker, None)
        self.sleepers.discard(worker)
        self._clear_caches()
        for rank in range(registration.dp_size if registration is not None else 0):
            self.loads.remove((worker, rank))
        return self.active_at(worker)

    def worker(self, worker: str) -> Registration | None:
        return self._registrations.get(worker)

    @property
    def size(self) -> int:
        """Number of registered workers."""
        return len(self._registrations)

    def workers(self) -> list[Registration]:
        return list(self._registrations.values())

    def asleep(self, model: str) -> list[Registration]:
        """The workers of a model that sleep, and take requests once they are awake."""
        given = [self._given[each.worker] for each in self.serving(model)] if self.sleepers else []
        return [each for each in given if each.weights.asleep and not each.weights.paused and not each.leaves]

    def targets(self, now_ns: int, model: str) -> list[RoutingTarget]:
        """All targets of a model with their load, sorted by worker and rank."""
        return [
            RoutingTarget(target, each, self.load(target, now_ns))
            for each in self.serving(model)
            for rank in range(each.dp_size)
            for target in ((each.worker, rank),)
        ]

    def stored(self, target_id: TargetId, keys: Sequence[int], now_ns: int) -> bool:
        """KV events: a target now holds these blocks. Returns whether a prompt is thereby computed."""
        return bool(self.loads.stored(target_id, keys, now_ns))

    def block_size(self, model: str) -> int:
        """The largest block size among the workers of a model."""
        return max((each.block_size for each in self.serving(model)), default=DEFAULT_BLOCK_SIZE)

    def serving(self, model: str) -> list[Registration]:
        """The workers of a model, by any of its names, sorted by worker id."""
        serving = self._serving.get(model)
        if serving is None:
            names = sorted(self._registrations)
            serving = [r for name in names if serves(r := self._registrations[name], model)]
            if len(self._serving) >= MODELS_CACHED:
                self._serving.clear()
            self._serving[model] = serving
        return serving

    def models(self) -> Mapping[str, str]:
        """The model that each name stands for: its own, or an alias, which several may have."""
        if not self._models:
            workers = [self._registrations[name] for name in sorted(self._registrations)]
            aliases = {alias: each.model for each in workers for alias in each.aliases}
            self._models = aliases | {each.model: each.model for each in workers}
        return self._models

    def revisions(self, model: str, tokenizer: str) -> Revisions:
        """The revisions of a model whose workers can read prompts of this tokenizer."""
        cached = self._revisions.get((model, tokenizer))
        if cached is None:
            if len(self._revisions) >= MODELS_CACHED:
                self._revisions.clear()
            cached = self._revisions[model, tokenizer] = revisions(
                [self._given[each.worker] for each in self.serving(model)], tokenizer
            )
        return cached

    def load(self, target_id: TargetId, now_ns: int) -> ExpectedLoad:
        """The load of a registered target; that of others counts as none."""
        row = self.loads.row(target_id)
        if row is None:
            return ExpectedLoad()
        column, held = self.loads.load(row), self._targets.by_target.get(target_id)
        if held is None:
            slowness, decode_slowness, served = column.slowness, column.decode_slowness, column.served_tokens
            return ExpectedLoad(slowness=slowness, decode_slowness=decode_slowness, served_tokens=served)
        return ExpectedLoad(
            held.requests,
            column.sequences,
            int(column.active_blocks),
            column.prefill_tokens + held.prefill_tokens(now_ns, self.tokens_per_s) // 1,
            int(column.computing),
            column.slowness,
            int(column.context_blocks),
            column.decode_slowness,
            column.served_tokens,
        )

    def capacity(self, worker: str, rank: int = 0) -> int:
        """Further sequences that a target accepts; 0 if it is unknown or draining. Slots count per rank."""
        registration, row = self._registrations.get(worker), self.loads.row((worker, rank))
        if registration is None or row is None or registration.state is not WorkerState.ready:
            return 0
        return max(0, registration.slots + registration.queue - int(self.loads.load(row).sequences))

    def has_capacity(self) -> bool:
        """Whether any target accepts another sequence."""
        if self._ready is None:
            ready = (each for each in self._registrations.values() if each.state is WorkerState.ready)
            rows = (self.loads.row((each.worker, rank)) for each in ready for rank in range(each.dp_size))
            self._ready = [self.loads.load(row) for row in rows if row is not None]
        return any(each.sequences < each.limit for each in self._ready)

    # Suspects (``Standing``)

    def suspects(self, worker: str) -> int:
        """Requests at a worker, or on their way to it, of which one may be what ends workers."""
        return self._suspects[worker]

    def another_alone(self, model: str, request: str) -> bool:
        """Whether another request than ``request`` runs alone at a worker of the model."""
        if not self._alone:
            return False
        return any(self._alone.get(each.worker, {request}) - {request} for each in self.serving(model))

    def _marked(self, registration: Registration) -> Registration:
        """A worker that runs a request alone, is paused or asleep takes nothing else, as one that drains."""
        if registration.worker not in self._alone and not registration.rests:
            return registration
        return msgspec.structs.replace(registration, state=WorkerState.draining)

    def _count_suspect(self, entry: ActiveRequest, more: int) -> None:
        for worker in {stage.worker for stage in entry.stages}:
            if entry.suspect != ALONE:
                self._suspects[worker] += more
                if not self._suspects[worker]:
                    del self._suspects[worker]
                continue
            requests = self._alone.setdefault(worker, set())
            (requests.add if more > 0 else requests.discard)(entry.request)
            if not requests:
                del self._alone[worker]
            if worker in self._given:
                self._registrations[worker] = self._marked(self._given[worker])
                self._clear_caches()

    def _clear_caches(self) -> None:
        self.version += 1
        self._serving.clear()
        self._revisions.clear()
        self._models = {}
        self._ready = None

    # Requests

    def admit(
        self,
        request: str,
        attempt: int,
        worker: str,
        load: LoadHeader,
        *,
        now_ns: int,
        role: str = "",
        echoed: bool = False,
        seq: int = 0,
        handed: bool = False,
        keys: Sequence[int] = (),
        suspect: str = "",
    ) -> bool:
        """A request was sent to a worker. A later attempt replaces an earlier one, a later stage moves it on.

        Args:
            load: ``route`` is the present stage and all later ones; empty: ``worker`` is the only stage, at rank 0.
            role: of the worker, if ``load`` has no route.
            echoed: read from the log, which overrules what this router decided.
            seq: of the message in WORK, if read from there.
            handed: the worker receives the prompt's KV and computes none of it.
            keys: of the full blocks of its prompt; empty: unknown.
            suspect: as in ``Job``.

        Returns: False: nothing changed: it is known, a later attempt or stage was admitted, or the attempt has ended.
        """
        if self._closed.last(request) >= attempt:
            return False
        if echoed:
            self._waiting.pop(request, None)
        route = load.route
        role, rank = (route[0].role, route[0].rank) if route else (role, 0)
        later = route[1:]
        old = self.requests.get(request)
        if old is not None:
            if not self._replaces(old, attempt, worker, rank, later, echoed=echoed, seq=seq):
                return False
            keys = keys or self.keys.get(request, ())
            self._remove(old)
        if keys:
            self.keys[request] = keys
        block_size, prompt, cached = self._block_size(role, worker, later), load.prompt_tokens, load.cached_tokens
        blocks, uncached = -(-prompt // block_size), -(-max(0, prompt - cached) // block_size)
        entry = ActiveRequest(
            request, attempt, worker, prompt, cached, uncached, load.deadline_ns, rank, load.n,
            load.token_address, load.priority, echoed, seq, role, later, blocks, handed, suspect,
        )  # fmt: skip
        self._add(entry, now_ns)
        if not echoed:
            for stage in entry.stages:
                self.loads.sent((stage.worker, stage.rank), prompt)
        return True

    def set_seq(self, request: str, attempt: int, seq: int) -> bool:
        """The job of a request was published again at ``seq`` of WORK; False: the request is unknown."""
        old = self.requests.get(request) or self._waiting.get(request)
        if old is None:
            return self._closed.last(request) >= attempt
        if old.attempt == attempt and seq > old.seq:
            old.seq = seq
        return True

    def finish(self, request: str, now_ns: int = 0) -> ActiveRequest | None:
        """The terminal event of a request: every attempt is over. ``now_ns`` 0: nothing is learnt from it."""
        self._closed.close(request, EVERY)
        self._waiting.pop(request, None)
        entry = self.requests.get(request)
        if entry is not None:
            self._remove(entry, now_ns)
        return entry

    def end_attempt(self, request: str, attempt: int) -> None:
        """An attempt ended without a result. A later attempt stays active."""
        if self._closed.last(request) < attempt:
            self._closed.close(request, attempt)
        entry = self.requests.get(request)
        if entry is not None and entry.attempt <= attempt:
            self._remove(entry)

    def requeue(self, request: str, attempt: int) -> None:
        """An attempt ended without a result, and this router places the next one.

        Until the log has that, the attempt is in the snapshots: the request may be held for long, and if all routers
        end meanwhile, nothing else says that it is unfinished.
        """
        entry = self.requests.get(request)
        self.end_attempt(request, attempt)
        if entry is not None and request not in self.requests:
            self._waiting[request] = entry

    def reopen(self, request: str) -> None:
        """Make the attempt that ``requeue`` ended an orphan again: its router could not place the next one."""
        entry = self._waiting.pop(request, None)
        if entry is not None and request not in self.requests:
            self._add(self._orphaned(entry), 0)

    def release(self, request: str, attempt: int) -> None:
        """Undo this router's own decision, whose job could not be stored. What the log says stays."""
        entry = self.requests.get(request)
        if entry is not None and entry.attempt == attempt and not entry.echoed:
            self._remove(entry)

    def request(self, request: str) -> ActiveRequest | None:
        return self.requests.get(request)

    def ended(self, request: str) -> bool:
        """Whether the terminal event of a request was read; the last ``ENDED_REMEMBERED`` are remembered."""
        return self._closed.last(request) == EVERY

    def active(self) -> list[ActiveRequest]:
        return list(self.requests.values())

    def waiting(self) -> list[ActiveRequest]:
        """Attempts that ended here, of requests whose next job is not in the log; their own is needed until it is."""
        active = self.requests.get
        return [e for e in self._waiting.values() if (later := active(e.request)) is None or not later.echoed]

    def busy(self) -> set[str]:
        """Workers, registered or not, that requests were sent to or are on their way to."""
        return {worker for worker, _ in self._targets.by_target}

    def active_at(self, worker: str) -> list[ActiveRequest]:
        """Requests at ``worker``, registered or not, now or at a later stage: by rank, oldest first."""
        return self._at(sorted(target_id for target_id in self._targets.by_target if target_id[0] == worker))

    def orphans(self) -> list[ActiveRequest]:
        """Requests with a stage left at a worker that is not registered: this attempt cannot finish.

        What another cell runs is none: a gateway ends or returns it.
        """
        lost = self._at(target_id for target_id in self._targets.by_target if target_id[0] not in self._registrations)
        return [entry for entry in lost if entry.role != CELL or not entry.worker]

    def expire(self, before_ns: int, limit: int) -> None:
        """Remove requests whose deadline was at ``before_ns`` or earlier: their terminal event was missed.

        Checks ``limit`` requests per call and continues there the next time.
        """
        if not self._unchecked:
            self._unchecked = list(self.requests)
            for name in [name for name, entry in self._waiting.items() if entry.deadline_ns <= before_ns]:
                del self._waiting[name]
        names = self._unchecked[-limit:]
        del self._unchecked[-limit:]
        for name in names:
            entry = self.requests.get(name)
            if entry is not None and entry.deadline_ns <= before_ns:
                self._closed.close(name, entry.attempt)
                self._remove(entry)

    # Snapshots

    def parts(self, size: int = 500) -> Iterator[LoadState]:
        """The state in parts, to be stored with the positions in WORK and DONE reached before the first part.

        The fold may continue between two parts: reading the same messages again from those positions changes nothing.
        """
        requests = list(self.requests)
        for start in range(0, len(requests), size):
            entries = map(self.requests.get, requests[start : start + size])
            yield LoadState(unfinished=tuple(entry for entry in entries if entry is not None))
        waiting = self.waiting()
        for start in range(0, len(waiting), size):
            yield LoadState(unfinished=tuple(map(self._orphaned, waiting[start : start + size])))
        yield LoadState(backlogs=self._targets.backlogs())
        for part in self._closed.parts(size):
            yield LoadState(closed=part)

    def _orphaned(self, entry: ActiveRequest) -> ActiveRequest:
        """As it is found again after a restart: at no worker, if its own is alive and has returned it."""
        alive = entry.worker in self._registrations or entry.role == CELL
        return msgspec.structs.replace(entry, worker="", later=()) if alive else entry

    def restore(self, state: LoadState) -> None:
        """Continue from the merged ``parts`` of a snapshot; nothing was folded before."""
        self._closed.update(state.closed)
        for entry in state.unfinished:
            old = self.requests.get(entry.request)  # it came to wait between two parts
            if old is not None and old.attempt > entry.attempt:
                continue
            if old is not None:
                self._remove(old)
            self._add(entry, 0)
        for worker, rank, tokens, at_ns in state.backlogs:
            if (held := self._targets.by_target.get((worker, rank))) is not None:
                held.backlog, held.at_ns = tokens, at_ns

    def _replaces(
        self,
        old: ActiveRequest,
        attempt: int,
        worker: str,
        rank: int,
        later: tuple[Stage, ...],
        *,
        echoed: bool,
        seq: int,
    ) -> bool:
        """Whether a message replaces ``old``. Our own decision, read from the log, only marks it as echoed."""
        if old.attempt != attempt:
            return old.attempt < attempt
        if not echoed or (old.echoed and len(old.later) <= len(later)):
            return False
        if (old.worker, old.rank, old.later) == (worker, rank, later):
            old.echoed, old.seq = True, seq
            return False
        return True

    def _at(self, target_ids: Iterable[TargetId]) -> list[ActiveRequest]:
        names = {name: None for target_id in target_ids for name in self._targets.by_target[target_id].names}
        return [self.requests[name] for name in names]

    def _block_size(self, role: str, worker: str, later: Sequence[Stage]) -> int:
        """The block size of the worker that computes the prompt."""
        if role == ENCODE and later:
            worker = later[0].worker
        registration = self._registrations.get(worker)
        return registration.block_size if registration else DEFAULT_BLOCK_SIZE

    def _add(self, entry: ActiveRequest, now_ns: int) -> None:
        self.requests[entry.request] = entry
        if entry.suspect:
            self._count_suspect(entry, 1)
        if self._only_counts(entry):
            self.loads.count(entry.target_id, entry.n, entry.blocks, entry.prompt_blocks)
            self._targets.add(entry.target_id, entry.request, entry.uncached_tokens, now_ns)
            return
        loads = self.stage_loads[entry.request] = []
        computed = entry.handed
        roles = (entry.role, *(stage.role for stage in entry.later)) if entry.later else (entry.role,)
        for role, load in zip(roles, entry.stage_loads(), strict=True):
            # Blocks that come from another worker cannot be reused before they are there.
            keys = () if computed or role == ENCODE else self.keys.get(entry.request, ())
            loads.append(self._tracked(entry, role, keys, load, now_ns))
            computed = computed or role != ENCODE
        for load in loads:
            self._targets.add(load.target_id, entry.request, load.uncached_tokens, now_ns)

    def _only_counts(self, entry: ActiveRequest) -> bool:
        """Whether a request adds to the sums and nothing more: no event will show when its prompt is computed.

        This is so for short prompts that other routers placed, the most frequent ones. ``entry`` has what they cost.
        """
        if entry.later or entry.handed or entry.role == ENCODE or entry.request in self.keys:
            return False
        registration = self._registrations.get(entry.worker)
        events = self._kv_events and registration is not None and registration.kv_events
        return events and entry.prompt_tokens > entry.cached_tokens

    def _tracked(self, entry: ActiveRequest, role: str, keys: Sequence[int], load: StageLoad, now_ns: int) -> StageLoad:
        """Add a request to the columns of a target; returns what of it is left to estimate."""
        registration = self._registrations.get(load.target_id[0])
        events = self._kv_events and registration is not None and registration.kv_events
        uncached = load.uncached_tokens if events else 0
        # A prompt behind an encode worker does not begin now.
        at_ns = 0 if entry.role == ENCODE else now_ns
        context = 0 if role == ENCODE else entry.prompt_blocks
        task = Task(entry.request, load.target_id, keys, load.blocks, uncached, load.sequences, context, at_ns)
        tracked = self.loads.add(task)
        return StageLoad(load.target_id, load.sequences, load.blocks, 0) if tracked else load

    def _put_target(self, target_id: TargetId, registration: Registration) -> None:
        size, blocks = registration.block_size, registration.total_blocks
        slots, limit = registration.slots, registration.slots + registration.queue
        held = self._targets.by_target.get(target_id)
        model = registration.model
        new = self.loads.put(target_id, block_size=size, blocks=blocks, slots=slots, limit=limit, model=model)
        if new and held is not None:
            self.loads.estimate(target_id, held.backlog, held.at_ns, held.uncached_tokens)
            # Sent there before it was registered, or before its registration was lost.
            for entry in self._at([target_id]):
                if (loads := self.stage_loads.get(entry.request)) is None:
                    self.loads.count(target_id, entry.n, entry.blocks, entry.prompt_blocks)
                    continue
                context = entry.prompt_blocks if registration.role != ENCODE else 0
                for load in loads:
                    if load.target_id == target_id:
                        self.loads.add(Task(entry.request, target_id, (), load.blocks, 0, load.sequences, context))

    def _remove(self, entry: ActiveRequest, now_ns: int = 0) -> None:
        del self.requests[entry.request]
        if entry.suspect:
            self._count_suspect(entry, -1)
        loads = self.stage_loads.pop(entry.request, None)
        if loads is None:
            self.loads.count(entry.target_id, -entry.n, -entry.blocks, entry.prompt_blocks)
            self._targets.remove(entry.target_id, entry.request, entry.uncached_tokens)
            return
        self.keys.pop(entry.request, None)
        for load in loads:
            self.loads.end(entry.request, load.target_id, now_ns)
            self._targets.remove(load.target_id, entry.request, load.uncached_tokens)
