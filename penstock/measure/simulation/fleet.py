"""A fleet of simulated engines behind one routing policy, event by event.

At one instant, in this order: passes that end; the KV events of those passes reach the policy, then their first tokens
and ends; requests arrive and are routed one by one; the policy may place requests that it holds; idle workers form
their next pass.
"""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count

from penstock.infra.process.class_queue import StartShare
from penstock.measure.simulation.engine import TOKEN_NS, EngineSequence, SimulatedEngine
from penstock.measure.simulation.policy import Placement, Policy, SimulatedFleet, Target, WorkerSpec
from penstock.measure.simulation.trace import Request


class Encoder:
    """
    Args:
        encode_ms: time per medium that is not cached.
        cache: media whose embeddings are kept.
    """

    def __init__(self, encode_ms: float, cache: int) -> None:
        self._encode_ns = round(encode_ms * 1e6)
        self._capacity = cache
        self._ready: OrderedDict[int, int] = OrderedDict()  # medium -> when its embeddings are there, in ns
        self._free_ns = 0

    def encode(self, medium: int, now_ns: int) -> int:
        """Encode a medium after those before it, and return when its embeddings are ready, in ns."""
        if medium in self._ready:
            self._ready.move_to_end(medium)
            return max(now_ns, self._ready[medium])
        self._free_ns = max(self._free_ns, now_ns) + self._encode_ns
        self._ready[medium] = self._free_ns
        if len(self._ready) > self._capacity:
            self._ready.popitem(last=False)
        return self._free_ns


class SimulationError(Exception):
    """The policy did something that a fleet cannot do."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """The course of one request; times in ns, -1: it did not happen.

    Attributes:
        prompt_ns: when the prompt was computed; a prefill worker streams the first token then, before ``first_ns``.
        cached_tokens: of the prompt, when a worker first admitted it.
        moved_tokens: of these, which it had just read from another worker.
    """

    request: Request
    placed_ns: int = -1
    first_ns: int = -1
    last_ns: int = -1
    cached_tokens: int = 0
    placement: Placement | None = None
    decode: Target | None = None  # that took the prompt over
    rejected: bool = False
    prompt_ns: int = -1
    moved_tokens: int = 0

    @property
    def complete(self) -> bool:
        return self.last_ns >= 0


@dataclass(slots=True)
class SimulationResult:
    served: list[SimulatedRequest]
    preemptions: int


class _Worker:
    """The ranks of a worker: their passes begin and end together."""

    __slots__ = ("busy", "ends", "number", "ranks", "spec", "version")

    def __init__(self, number: int, spec: WorkerSpec, block_size: int) -> None:
        self.number = number
        self.spec = spec
        self.busy = False
        self.version = 0
        self.ends: list[int] = []  # of the passes under way, in ns
        self.ranks = [
            SimulatedEngine(
                spec.blocks,
                block_size,
                max_sequences=spec.max_sequences,
                holds=spec.role == "prefill",
                slowness=spec.slowness,
                decode_slowness=spec.decode_slowness,
                times=spec.times,
                lower=spec.lower,
                lower_ns=[round(cost * block_size * TOKEN_NS) for cost in spec.tier_costs],
            )
            for _ in range(spec.ranks)
        ]

    def form(self, now: int) -> bool:
        """Form the next pass or passes; False: there is nothing to do."""
        if len(self.ranks) == 1:
            durations = self.ranks[0].form()
        else:
            plans = [plan for engine in self.ranks if engine.has_work and (plan := engine.form())]
            durations = [max(passes) for passes in zip(*plans, strict=False)]
        if not durations:
            return False
        self.ends = list(accumulate(durations, initial=now))
        del self.ends[0]
        self.busy = True
        return True

    def pass_end(self, now: int) -> int:
        """When the pass under way ends; ``now``, if there is none."""
        return self.ends[bisect_left(self.ends, now)] if self.busy else now

    def end_after(self, now: int) -> bool:
        """Let the run end with the current pass. True: it ends earlier than planned."""
        at = bisect_left(self.ends, now)
        if at + 1 >= len(self.ends):
            return False
        del self.ends[at + 1 :]
        return True


class Simulation:
    """One run. Times in integer ns."""

    def __init__(self, fleet: SimulatedFleet, requests: Sequence[Request], policy: Policy) -> None:
        self._requests = requests
        self._policy = policy
        self._workers = [_Worker(number, spec, fleet.block_size) for number, spec in enumerate(fleet.workers)]
        self._encoders = [Encoder(fleet.encode_ms, fleet.encode_cache) for _ in range(fleet.encoders)]
        self._transfer_ns = fleet.transfer_ns_per_token
        self._move_ns, self._move_ns_per_token = fleet.move_ns, fleet.move_ns_per_token
        self._block_size = fleet.block_size
        self._served = [SimulatedRequest(request) for request in requests]
        self._heap: list[tuple[int, int, _Worker | None, int, Callable[[], None] | None]] = []
        self._order = count()
        self._idle: set[int] = set()  # workers that may have something to do
        self._sources: dict[int, tuple[_Worker, int, EngineSequence]] = {}  # prompts that are held for handoff
        self._held = 0
        self._now = 0
        policy.start(fleet, requests)

    @property
    def served(self) -> Sequence[SimulatedRequest]:
        """The course of each request so far, in the order of the requests."""
        return self._served

    def run(self, until_ns: int | None = None, most_held: int | None = None) -> SimulationResult:
        """Run all requests; or until a time, or until the policy holds more than a fleet that can serve them would."""
        heap, requests, policy = self._heap, self._requests, self._policy
        arrived = 0
        while True:
            next_arrival = requests[arrived].arrival_ns if arrived < len(requests) else None
            wake = policy.wake() if self._held else None
            times = [time for time in (heap[0][0] if heap else None, next_arrival, wake) if time is not None]
            if not times:
                break
            now = self._now = max(self._now, min(times))
            if (until_ns is not None and now > until_ns) or (most_held is not None and self._held > most_held):
                break
            self._finish_passes(now)
            while arrived < len(requests) and requests[arrived].arrival_ns <= now:
                self._held += 1
                placement = policy.arrive(requests[arrived], now)
                if placement is not None:
                    self._place(requests[arrived], placement, now)
                arrived += 1
            if self._held:
                for request, placement in policy.pump(now):
                    self._place(request, placement, now)
            for number in sorted(self._idle):
                self._form(self._workers[number], now)
            self._idle.clear()
        return SimulationResult(
            self._served, sum(engine.preemptions for worker in self._workers for engine in worker.ranks)
        )

    def _finish_passes(self, now: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now:
            _time, _order, worker, version, call = heapq.heappop(heap)
            if worker is None:
                assert call is not None
                call()
            elif version == worker.version:
                self._finish(worker, now)

    def _finish(self, worker: _Worker, now: int) -> None:
        worker.busy = False
        passes = len(worker.ends)
        policy, role = self._policy, worker.spec.role
        for rank, engine in enumerate(worker.ranks):
            outcome = engine.finish(passes)
            target = (worker.number, rank)
            if outcome.lower and (outcome.stored or any(removed for _, removed in outcome.lower)):
                policy.lower_events(target, outcome.lower)
            if outcome.stored or outcome.removed:
                policy.events(target, outcome.stored, outcome.removed, now)
            for sequence in outcome.first:
                self._first(sequence, target, role, now)
            for sequence in outcome.ended:
                self._end(sequence, target, role, now)
            for sequence in outcome.rejected:
                served = self._served[sequence.index]
                served.rejected = True
                policy.finished(served.request, now)
            engine.take_handed()
        self._idle.add(worker.number)

    def _first(self, sequence: EngineSequence, target: Target, role: str, now: int) -> None:
        served = self._served[sequence.index]
        if not sequence.handed:
            served.cached_tokens, served.prompt_ns = sequence.cached_tokens, now
            self._policy.prefilled(served.request, now)
        if role != "prefill" or self._is_whole(served):
            served.first_ns = now

    def _end(self, sequence: EngineSequence, target: Target, role: str, now: int) -> None:
        served = self._served[sequence.index]
        if role != "prefill" or self._is_whole(served):
            served.last_ns = now
            self._policy.finished(served.request, now)
            if role == "prefill":
                self._workers[target[0]].ranks[target[1]].release(sequence)
            return
        assert served.placement is not None
        decode = served.placement.decode or self._policy.decode(served.request, now)
        self._sources[sequence.index] = (self._workers[target[0]], target[1], sequence)
        if delay := self._transfer_ns * sequence.prompt_tokens:
            self._at(now + delay, partial(self._hand_off, served, decode))
        else:
            self._hand_off(served, decode)

    def _is_whole(self, served: SimulatedRequest) -> bool:
        """Whether a prefill worker runs the request to its end."""
        return served.placement is not None and served.placement.whole

    def _hand_off(self, served: SimulatedRequest, target: Target) -> None:
        request, served.decode = served.request, target
        worker = self._workers[target[0]]
        engine = worker.ranks[target[1]]
        sequence = EngineSequence(request.index, request.prompt_tokens, request.output_tokens, request.keys)
        sequence.order = next(self._order)
        engine.hand_off(sequence, partial(self._taken, request.index))
        if not worker.busy:
            engine.take_handed()
            self._idle.add(worker.number)
        elif engine.takes_prompts:
            self._end_early(worker)

    def _taken(self, index: int) -> None:
        worker, rank, sequence = self._sources.pop(index)
        worker.ranks[rank].release(sequence)
        if not worker.busy:
            self._idle.add(worker.number)

    def _place(self, request: Request, placement: Placement, now: int) -> None:
        served = self._served[request.index]
        if served.placement is not None:
            raise SimulationError(f"request {request.index} was placed twice")
        served.placement, served.placed_ns = placement, now
        self._held -= 1
        ready = now
        if placement.encoder is not None:
            ready = self._encoders[placement.encoder].encode(request.media, now)
        worker = self._workers[placement.target[0]]
        if placement.source is not None and (pause := worker.pass_end(now)) > ready:  # blocks are reserved between two
            ready = pause
        begin = self._dispatch if placement.source is None else self._move
        if ready > now:
            self._at(ready, partial(begin, request, placement))
        else:
            begin(request, placement)

    def _move(self, request: Request, placement: Placement) -> None:
        """Read a prefix from another worker, as much of it as is there, then send the request to its own."""
        assert placement.source is not None
        (number, rank), (own, own_rank) = placement.source, placement.target
        wanted = request.keys[: min(placement.prefix_blocks, (request.prompt_tokens - 1) // self._block_size)]
        there = self._workers[number].ranks[rank].cache.match(wanted)[0]
        tokens = (there - self._workers[own].ranks[own_rank].cache.match(wanted)[0]) * self._block_size
        if tokens <= 0:
            self._dispatch(request, placement)
            return
        at = self._now + self._move_ns + self._move_ns_per_token * tokens
        self._at(at, partial(self._moved, request, placement, wanted[:there]))

    def _moved(self, request: Request, placement: Placement, keys: Sequence[int]) -> None:
        number, rank = placement.target
        blocks = self._workers[number].ranks[rank].bring(keys)
        self._served[request.index].moved_tokens = blocks * self._block_size
        self._dispatch(request, placement)

    def _dispatch(self, request: Request, placement: Placement) -> None:
        number, rank = placement.target
        worker = self._workers[number]
        engine = worker.ranks[rank]
        is_prefill = worker.spec.role == "prefill" and not placement.whole
        output = 1 if is_prefill else request.output_tokens
        share = StartShare(request.priority.rank, request.tenant)
        engine.add(EngineSequence(request.index, request.prompt_tokens, output, request.keys, share=share))
        if not worker.busy:
            self._idle.add(number)
        elif engine.takes_more:
            self._end_early(worker)

    def _end_early(self, worker: _Worker) -> None:
        if worker.end_after(self._now):
            self._push(worker)

    def _form(self, worker: _Worker, now: int) -> None:
        if not worker.busy and worker.form(now):
            self._push(worker)

    def _push(self, worker: _Worker) -> None:
        worker.version += 1
        heapq.heappush(self._heap, (worker.ends[-1], next(self._order), worker, worker.version, None))

    def _at(self, time: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), None, 0, call))


def simulate(
    fleet: SimulatedFleet,
    requests: Sequence[Request],
    policy: Policy,
    *,
    until_ns: int | None = None,
    most_held: int | None = None,
) -> SimulationResult:
    """Run all requests, sorted by arrival, through the fleet. For the other arguments see ``Simulation.run``."""
    return Simulation(fleet, requests, policy).run(until_ns, most_held)
