"""Simple routing rules: round robin, random, fewest requests, fewest blocks. They know nothing of caches."""

import random
from collections.abc import Callable, Iterable, Sequence

from penstock.measure.simulation.cache import StoredRun
from penstock.measure.simulation.policy import Fleet, Placement, Target
from penstock.measure.simulation.trace import Request

Choose = Callable[[Sequence[Target], "Counts"], Target]


class Counts:
    """What a rule may look at: how many requests and prompt blocks each target has, and how often it was asked."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turns: dict[Target, int] = {}  # decisions so far, by the first target of the pool
        self.requests: dict[Target, int] = {}
        self.blocks: dict[Target, int] = {}

    def add(self, target: Target, blocks: int, sign: int) -> None:
        self.requests[target] = self.requests.get(target, 0) + sign
        self.blocks[target] = self.blocks.get(target, 0) + sign * blocks


def round_robin(pool: Sequence[Target], counts: Counts) -> Target:
    turn = counts.turns.get(pool[0], 0)
    counts.turns[pool[0]] = turn + 1
    return pool[turn % len(pool)]


def uniform(pool: Sequence[Target], counts: Counts) -> Target:
    return pool[counts.rng.randrange(len(pool))]


def least_requests(pool: Sequence[Target], counts: Counts) -> Target:
    return _least(pool, counts.requests, counts.rng)


def least_blocks(pool: Sequence[Target], counts: Counts) -> Target:
    return _least(pool, counts.blocks, counts.rng)


def _least(pool: Sequence[Target], loads: dict[Target, int], rng: random.Random) -> Target:
    best = min(loads.get(target, 0) for target in pool)
    ties = [target for target in pool if loads.get(target, 0) == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


class RulePolicy:
    """Places each request when it comes; decode workers are chosen by the same rule when the prompt is computed."""

    def __init__(self, choose: Choose, seed: int = 0) -> None:
        self._choose = choose
        self._counts = Counts(seed)
        self._placed: dict[int, Target] = {}

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._entrances, self._decoders = fleet.entrances, fleet.with_role("decode")
        self._encoders = [(-1 - number, 0) for number in range(fleet.encoders)]

    def arrive(self, request: Request, now_ns: int) -> Placement:
        encoder = None
        if request.media and self._encoders:
            encoder = -1 - self._choose(self._encoders, self._counts)[0]
        return Placement(self._take(request, self._entrances), encoder=encoder)

    def decode(self, request: Request, now_ns: int) -> Target:
        self._drop(request)
        return self._take(request, self._decoders)

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        return ()

    def wake(self) -> int | None:
        return None

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        pass

    def prefilled(self, request: Request, now_ns: int) -> None:
        pass

    def finished(self, request: Request, now_ns: int) -> None:
        self._drop(request)

    def _take(self, request: Request, pool: Sequence[Target]) -> Target:
        target = self._choose(pool, self._counts)
        self._counts.add(target, len(request.keys), 1)
        self._placed[request.index] = target
        return target

    def _drop(self, request: Request) -> None:
        self._counts.add(self._placed.pop(request.index), len(request.keys), -1)
