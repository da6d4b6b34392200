"""Simple routing rules: round robin, random, fewest requests, fewest blocks. They know nothing of caches.

The default cost of NVIDIA Dynamo's KV router (1.6.1), as its documentation publishes it, for comparison.

    cost = scale · max(0, (A + P) / B - credit · C) + D

A: uncached prompt tokens of requests without a first token; P: tokens of this prompt; B: block size; C: leading blocks
cached by the events seen so far; D: distinct prompt blocks of unfinished requests, with this one. The lowest cost wins,
ties are random, nothing is held. In a prefill pool D is left out; a decode pool takes the fewest prompt blocks.

Which targets have which keys: a map from a key to a bitmask of positions.
"""

import random
from collections.abc import Callable, Iterable, Sequence

from penstock.measure.simulation.cache import StoredRun
from penstock.measure.simulation.policy import Placement, Policy, SimulatedFleet, Target
from penstock.measure.simulation.trace import Request

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


class KeyMasks:
    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._masks: dict[int, int] = {}

    def add(self, position: int, keys: Iterable[int]) -> None:
        bit, masks = 1 << position, self._masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def remove(self, position: int, keys: Iterable[int]) -> None:
        keep, masks = ~(1 << position), self._masks
        for key in keys:
            left = masks.get(key, 0) & keep
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)

    def leading(self, keys: Sequence[int]) -> list[int]:
        """Number of leading keys that each position has."""
        depths = [0] * self._positions
        get = self._masks.get
        mask, depth = (1 << self._positions) - 1, 0
        for key in keys:
            left = mask & get(key, 0)
            if left != mask:
                _set(depths, mask ^ left, depth)
                mask = left
                if not mask:
                    return depths
            depth += 1
        _set(depths, mask, depth)
        return depths


class KeyCounts:
    """As ``KeyMasks``, where each position has every key as often as it was added."""

    def __init__(self, positions: int) -> None:
        self._masks = KeyMasks(positions)
        self._counts: list[dict[int, int]] = [{} for _ in range(positions)]

    def distinct(self, position: int) -> int:
        return len(self._counts[position])

    def leading(self, keys: Sequence[int]) -> list[int]:
        return self._masks.leading(keys)

    def add(self, position: int, keys: Iterable[int]) -> None:
        counts, new = self._counts[position], []
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                new.append(key)
        self._masks.add(position, new)

    def remove(self, position: int, keys: Iterable[int]) -> None:
        counts, gone = self._counts[position], []
        for key in keys:
            count = counts[key] - 1
            if count:
                counts[key] = count
            else:
                del counts[key]
                gone.append(key)
        self._masks.remove(position, gone)


def _set(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        bit = mask & -mask
        depths[bit.bit_length() - 1] = depth
        mask ^= bit


class DynamoPolicy(Policy):
    def __init__(self, seed: int = 0, *, credit: float = 1.0, scale: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._credit, self._scale = credit, scale

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._size = fleet.block_size
        self._targets = fleet.entrances
        self._positions = {target: at for at, target in enumerate(self._targets)}
        self._counts_decode = not fleet.with_role("prefill")
        self._cached = KeyMasks(len(self._targets))
        self._active = KeyCounts(len(self._targets))
        self._backlog = [0] * len(self._targets)
        self._uncached: dict[int, int] = {}  # by request without a first token
        self._placed: dict[int, int] = {}
        self._decoders = fleet.with_role("decode")
        self._decode_blocks = dict.fromkeys(self._decoders, 0)
        self._decoding: dict[int, Target] = {}

    def arrive(self, request: Request, now_ns: int) -> Placement:
        cached = self._cached.leading(request.keys)
        active = self._active.leading(request.keys) if self._counts_decode else []
        costs = []
        for at, backlog in enumerate(self._backlog):
            blocks = (backlog + request.prompt_tokens) / self._size - self._credit * cached[at]
            cost = self._scale * max(0.0, blocks)
            if self._counts_decode:
                cost += self._active.distinct(at) + len(request.keys) - active[at]
            costs.append(cost)
        at = self._lowest(costs)
        self._placed[request.index] = at
        uncached = self._uncached[request.index] = max(0, request.prompt_tokens - cached[at] * self._size)
        self._backlog[at] += uncached
        if self._counts_decode:
            self._active.add(at, request.keys)
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
            self._cached.remove(at, removed)
            for keys, _parent in stored:
                self._cached.add(at, keys)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._backlog[self._placed[request.index]] -= self._uncached.pop(request.index, 0)

    def finished(self, request: Request, now_ns: int) -> None:
        self.prefilled(request, now_ns)
        at = self._placed.pop(request.index)
        if self._counts_decode:
            self._active.remove(at, request.keys)
        target = self._decoding.pop(request.index, None)
        if target is not None:
            self._decode_blocks[target] -= len(request.keys)

    def _lowest(self, costs: Sequence[float]) -> int:
        best = min(costs)
        ties = [at for at, cost in enumerate(costs) if cost == best]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)
