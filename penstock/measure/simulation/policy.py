"""The interface between a simulated fleet and a routing policy, and policies to compare with the router's own.

Round robin, random, fewest requests and fewest blocks know nothing of caches.

``DynamoPolicy`` is the default cost of NVIDIA Dynamo's KV router (1.6.1), as its documentation publishes it:

    cost = scale · max(0, (A + P) / B - credit · C) + D

A: uncached prompt tokens of requests without a first token; P: tokens of this prompt; B: block size; C: leading blocks
cached by the events seen so far; D: distinct prompt blocks of unfinished requests, with this one. The lowest cost wins,
ties are random, nothing is held. In a prefill pool D is left out; a decode pool takes the fewest prompt blocks.
"""

import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.engine import MAX_SEQUENCES, PassTimes
from penstock.measure.simulation.trace import Request
from penstock.router.placement.cost import TIER_COSTS

Target = tuple[int, int]  # number of the worker in the fleet, rank


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """
    Attributes:
        role: "aggregated", "prefill" or "decode".
        blocks: KV blocks of each rank.
        ranks: attention data-parallel ranks, each a target of its own; their passes run in step.
        slowness: factor on the duration of each pass.
        decode_slowness: a further factor on its decode part.
        times: of its passes; None: the mock's.
        lower: blocks of host memory and of a disk behind each rank's; 0: it has none.
        tier_costs: to bring a block back from each, where computing it is 1.
    """

    role: str = "aggregated"
    blocks: int = 16384
    ranks: int = 1
    slowness: float = 1.0
    decode_slowness: float = 1.0
    max_sequences: int = MAX_SEQUENCES
    times: PassTimes | None = None
    lower: tuple[int, int] = (0, 0)
    tier_costs: tuple[float, float] = TIER_COSTS


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """
    Attributes:
        transfer_ns_per_token: of a prompt that is handed from a prefill to a decode worker.
        move_ns: of reading a prefix from another worker, however short.
        move_ns_per_token: of each token of it, in addition.
        encoders: workers that encode media before the prompt can be computed.
        encode_cache: media whose embeddings each of them keeps.
    """

    workers: tuple[WorkerSpec, ...]
    block_size: int = 64
    transfer_ns_per_token: int = 0
    encoders: int = 0
    encode_ms: float = 60.0
    encode_cache: int = 256
    move_ns: int = 4_000_000
    move_ns_per_token: int = 600  # as between two H200 of one host

    @property
    def targets(self) -> list[Target]:
        return [(number, rank) for number, worker in enumerate(self.workers) for rank in range(worker.ranks)]

    def with_role(self, *roles: str) -> list[Target]:
        return [target for target in self.targets if self.workers[target[0]].role in roles]

    @property
    def entrances(self) -> list[Target]:
        """Targets that a new request can be sent to by a simple rule: those that compute prompts."""
        return self.with_role("aggregated", "prefill")


class Placement(NamedTuple):
    """Where a request goes.

    Attributes:
        decode: takes over from a prefill worker; None: the policy is asked when the prompt is computed.
        whole: a prefill worker runs the request to its end.
        source: from which the target reads a prefix first; None: it computes what it lacks.
        prefix_blocks: leading blocks of the prompt that the source has, as far as is known.
    """

    target: Target
    decode: Target | None = None
    encoder: int | None = None
    whole: bool = False
    source: Target | None = None
    prefix_blocks: int = 0


class Policy(Protocol):
    """A routing policy. Times are ns of simulated time; a request is known by its ``index``.

    Policies that inherit from it hold nothing and look at no events, unless they say otherwise.
    """

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        """Before the run. The requests are all there will be; a fair policy does not look at them."""

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        """Place a request; None: hold it."""

    def decode(self, request: Request, now_ns: int) -> Target:
        """Choose the decode worker of a prompt that was placed without one."""

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        """Placements of held requests; asked after each instant with an event."""
        return ()

    def wake(self) -> int | None:
        """When ``pump`` is to be asked even without an event; asked only while requests are held."""
        return None

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        """Blocks that a target has stored and removed in the passes that ended now."""
        return

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        """The same of each lower tier with those before it; comes first."""
        return

    def prefilled(self, request: Request, now_ns: int) -> None:
        """The prompt is computed."""
        return

    def finished(self, request: Request, now_ns: int) -> None:
        """The request has ended."""


Choose = Callable[[Sequence[Target], "TargetCounts"], Target]


class TargetCounts:
    """What a rule may look at: how many requests and prompt blocks each target has, and how often it was asked."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turns: dict[Target, int] = {}  # decisions so far, by the first target of the pool
        self.requests: dict[Target, int] = {}
        self.blocks: dict[Target, int] = {}

    def add(self, target: Target, blocks: int, sign: int) -> None:
        self.requests[target] = self.requests.get(target, 0) + sign
        self.blocks[target] = self.blocks.get(target, 0) + sign * blocks


def round_robin(pool: Sequence[Target], counts: TargetCounts) -> Target:
    turn = counts.turns.get(pool[0], 0)
    counts.turns[pool[0]] = turn + 1
    return pool[turn % len(pool)]


def uniform(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return pool[counts.rng.randrange(len(pool))]


def least_requests(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return _least(pool, counts.requests, counts.rng)


def least_blocks(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return _least(pool, counts.blocks, counts.rng)


def _least(pool: Sequence[Target], loads: dict[Target, int], rng: random.Random) -> Target:
    best = min(loads.get(target, 0) for target in pool)
    ties = [target for target in pool if loads.get(target, 0) == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


class RulePolicy(Policy):
    """Places each request when it comes; decode workers are chosen by the same rule when the prompt is computed."""

    def __init__(self, choose: Choose, seed: int = 0) -> None:
        self._choose = choose
        self._counts = TargetCounts(seed)
        self._placed: dict[int, Target] = {}

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
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

    def finished(self, request: Request, now_ns: int) -> None:
        self._drop(request)

    def _take(self, request: Request, pool: Sequence[Target]) -> Target:
        target = self._choose(pool, self._counts)
        self._counts.add(target, len(request.keys), 1)
        self._placed[request.index] = target
        return target

    def _drop(self, request: Request) -> None:
        self._counts.add(self._placed.pop(request.index), len(request.keys), -1)


def _leading(held: Container[int], keys: Sequence[int]) -> int:
    """Number of leading keys that are held."""
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


class DynamoPolicy(Policy):
    def __init__(self, seed: int = 0, *, credit: float = 1.0, scale: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._credit, self._scale = credit, scale

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._size = fleet.block_size
        self._targets = fleet.entrances
        self._positions = {target: at for at, target in enumerate(self._targets)}
        self._counts_decode = not fleet.with_role("prefill")
        self._cached: list[set[int]] = [set() for _ in self._targets]
        self._active: list[Counter[int]] = [Counter() for _ in self._targets]
        self._backlog = [0] * len(self._targets)
        self._uncached: dict[int, int] = {}  # by request without a first token
        self._placed: dict[int, int] = {}
        self._decoders = fleet.with_role("decode")
        self._decode_blocks = dict.fromkeys(self._decoders, 0)
        self._decoding: dict[int, Target] = {}

    def arrive(self, request: Request, now_ns: int) -> Placement:
        cached = [_leading(held, request.keys) for held in self._cached]
        costs = []
        for at, backlog in enumerate(self._backlog):
            blocks = (backlog + request.prompt_tokens) / self._size - self._credit * cached[at]
            cost = self._scale * max(0.0, blocks)
            if self._counts_decode:
                active = self._active[at]
                cost += len(active) + len(request.keys) - _leading(active, request.keys)
            costs.append(cost)
        at = self._lowest(costs)
        self._placed[request.index] = at
        uncached = self._uncached[request.index] = max(0, request.prompt_tokens - cached[at] * self._size)
        self._backlog[at] += uncached
        if self._counts_decode:
            self._active[at].update(request.keys)
        return Placement(self._targets[at])

    def decode(self, request: Request, now_ns: int) -> Target:
        self.prefilled(request, now_ns)
        target = self._decoders[self._lowest([self._decode_blocks[target] for target in self._decoders])]
        self._decode_blocks[target] += len(request.keys)
        self._decoding[request.index] = target
        return target

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        at = self._positions.get(target)
        if at is not None:
            self._cached[at].difference_update(removed)
            for keys, _parent in stored:
                self._cached[at].update(keys)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._backlog[self._placed[request.index]] -= self._uncached.pop(request.index, 0)

    def finished(self, request: Request, now_ns: int) -> None:
        self.prefilled(request, now_ns)
        at = self._placed.pop(request.index)
        if self._counts_decode:
            active = self._active[at]
            for key in request.keys:
                active[key] -= 1
                if not active[key]:
                    del active[key]
        target = self._decoding.pop(request.index, None)
        if target is not None:
            self._decode_blocks[target] -= len(request.keys)

    def _lowest(self, costs: Sequence[float]) -> int:
        best = min(costs)
        ties = [at for at, cost in enumerate(costs) if cost == best]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)
