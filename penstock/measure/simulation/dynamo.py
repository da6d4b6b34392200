"""The default cost of NVIDIA Dynamo's KV router (1.6.1), as its documentation publishes it, for comparison.

    cost = scale · max(0, (A + P) / B - credit · C) + D

A: uncached prompt tokens of requests without a first token; P: tokens of this prompt; B: block size; C: leading blocks
cached by the events seen so far; D: distinct prompt blocks of unfinished requests, with this one. The lowest cost wins,
ties are random, nothing is held. In a prefill pool D is left out; a decode pool takes the fewest prompt blocks.
"""

import random
from collections.abc import Iterable, Sequence

from penstock.measure.simulation.cache import StoredRun
from penstock.measure.simulation.key_masks import KeyCounts, KeyMasks
from penstock.measure.simulation.policy import Fleet, Placement, Target
from penstock.measure.simulation.trace import Request


class DynamoPolicy:
    def __init__(self, seed: int = 0, *, credit: float = 1.0, scale: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._credit, self._scale = credit, scale

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
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

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        return ()

    def wake(self) -> int | None:
        return None

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
