"""A fleet whose workers come and go: the router's own policy, and a planner that is asked after every interval.

All workers that there may ever be are in the fleet from the beginning; one that has not started gets no request. A
start takes a worker that never ran, so that its cache is empty. A worker that is to go gets no further request and
ends when those it has are over, as ``penstock drain`` does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.fleet import SimulatedRequest
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import Placement, SimulatedFleet, Target
from penstock.measure.simulation.trace import Request
from penstock.planner.observe import times
from penstock.schemas.plans import Observation, PlanDecision, Pool, Role

Decide = Callable[[Observation, float], PlanDecision | None]


@dataclass(slots=True)
class Life:
    """Of one worker, ns; -1: not yet. ``open``: requests that it has."""

    asked_ns: int
    ready_ns: int
    leaving: bool = False
    ended_ns: int = -1
    open: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One interval: when it ended, what was seen, and what was decided."""

    at_s: float
    observed: Observation
    decision: PlanDecision | None


@dataclass(slots=True)
class _Interval:
    arrived: int = 0
    ended: list[Request] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


class ElasticPolicy:
    """
    Args:
        counts: workers that run from the beginning, by role.
        decide: told what happened in an interval and when it ended, s; None: the workers stay as they are.
    """

    def __init__(
        self, counts: Mapping[Role, int], *, seed: int, interval_s: float, start_s: float, decide: Decide | None = None
    ) -> None:
        self._inner = PlacementPolicy(seed, joined=False)
        self._counts = counts
        self._decide = decide
        self._interval_ns = round(interval_s * 1e9)
        self._start_ns = round(start_s * 1e9)
        self.lives: dict[int, Life] = {}
        self.steps: list[Step] = []
        self.served: Sequence[SimulatedRequest] = ()  # set before the run; filled by the simulation

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._fleet = fleet
        self._inner.start(fleet, requests)
        self._unused: dict[str, list[int]] = {}
        for number, worker in enumerate(fleet.workers):
            self._unused.setdefault(worker.role, []).append(number)
        self._tick = self._interval_ns
        self._starting: list[int] = []
        self._now = _Interval()
        self._at: dict[int, tuple[int, ...]] = {}  # of each open request, the workers that have it
        self._held = 0
        self._prompts: set[int] = set()  # requests at a worker whose prompt is not computed
        for role, count in self._counts.items():
            for _ in range(count):
                self._begin(role, 0, 0)

    # What the simulation tells

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._pass(now_ns)
        self._now.arrived += 1
        placement = self._inner.arrive(request, now_ns)
        if placement is None:
            self._held += 1
        else:
            self._placed(request, placement)
        return placement

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        self._pass(now_ns)
        for request, placement in self._inner.pump(now_ns):
            self._held -= 1
            self._placed(request, placement)
            yield request, placement

    def wake(self) -> int | None:
        return self._inner.wake()

    def decode(self, request: Request, now_ns: int) -> Target:
        return self._inner.decode(request, now_ns)

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self._inner.events(target, stored, removed, now_ns)

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        self._inner.lower_events(target, changes)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._pass(now_ns)
        self._prompts.discard(request.index)
        self._inner.prefilled(request, now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        self._pass(now_ns)
        self._inner.finished(request, now_ns)
        self._prompts.discard(request.index)
        served = self.served[request.index]
        if served.complete:
            self._now.ended.append(request)
            self._now.ttft.append((served.first_ns - request.arrival_ns) / 1e6)
            if request.output_tokens > 1:
                self._now.itl.append((served.last_ns - served.first_ns) / 1e6 / (request.output_tokens - 1))
        for number in self._at.pop(request.index, ()):
            life = self.lives[number]
            life.open -= 1
            self._end_if_idle(life, now_ns)

    # Time and workers

    def _placed(self, request: Request, placement: Placement) -> None:
        numbers = {placement.target[0]} | ({placement.decode[0]} if placement.decode else set())
        self._at[request.index] = tuple(numbers)
        self._prompts.add(request.index)
        for number in numbers:
            self.lives[number].open += 1

    def _pass(self, now_ns: int) -> None:
        """Let the time pass: workers become ready, intervals end."""
        while self._starting and self.lives[self._starting[0]].ready_ns <= min(now_ns, self._tick):
            number = self._starting.pop(0)
            if not self.lives[number].leaving:
                self._inner.join(number)
        if self._tick <= now_ns:
            self._end_interval(self._tick)
            self._tick += self._interval_ns
            self._pass(now_ns)

    def _end_interval(self, now_ns: int) -> None:
        seen = self._observation(now_ns)
        self._now = _Interval()
        decision = self._decide(seen, now_ns / 1e9) if self._decide else None
        self.steps.append(Step(now_ns / 1e9, seen, decision))
        for role, target in decision.targets.items() if decision else ():
            self._scale(role, target, now_ns)

    def _observation(self, now_ns: int) -> Observation:
        done, ended = self._now, self._now.ended
        prompt = sum(each.prompt_tokens for each in ended)
        cached = sum(self.served[each.index].cached_tokens for each in ended)
        return Observation(
            seconds=self._interval_ns / 1e9,
            arrived=done.arrived,
            ended=len(ended),
            isl=prompt / len(ended) if ended else 0.0,
            osl=sum(each.output_tokens for each in ended) / len(ended) if ended else 0.0,
            hit_rate=cached / prompt if prompt else 0.0,
            ttft=times(done.ttft),
            itl=times(done.itl),
            queued=self._held,
            pools={role: self._pool(role, now_ns) for role in self._counts},
        )

    def _pool(self, role: Role, now_ns: int) -> Pool:
        lives = [self.lives[number] for number in self._of(role)]
        ready = sum(life.ready_ns <= now_ns for life in lives)
        waiting = 0 if role == "decode" else max(0, len(self._prompts) - ready)  # each computes one
        return Pool(ready, len(lives) - ready, waiting)

    def _of(self, role: Role) -> list[int]:
        """Workers that take requests, or will."""
        return [
            number
            for number, life in self.lives.items()
            if self._fleet.workers[number].role == role and not life.leaving
        ]

    def _scale(self, role: Role, target: int, now_ns: int) -> None:
        running = self._of(role)
        for _ in range(target - len(running)):
            self._begin(role, now_ns, self._start_ns)
        # Those that are still starting go first: nothing is lost with them.
        for number in sorted(running, key=lambda each: (-self.lives[each].ready_ns, self.lives[each].open))[
            : max(0, len(running) - target)
        ]:
            life = self.lives[number]
            life.leaving = True
            if life.ready_ns <= now_ns:
                self._inner.drain(number)
            self._end_if_idle(life, now_ns)

    def _begin(self, role: Role, now_ns: int, start_ns: int) -> None:
        unused = self._unused[role]
        if not unused:
            raise ValueError(f"all {role} workers of the fleet have run; make it larger")
        number = unused.pop(0)
        self.lives[number] = Life(now_ns, now_ns + start_ns)
        if start_ns:
            self._starting.append(number)
        else:
            self._inner.join(number)

    @staticmethod
    def _end_if_idle(life: Life, now_ns: int) -> None:
        if life.leaving and not life.open and life.ended_ns < 0:
            life.ended_ns = now_ns
