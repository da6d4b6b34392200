"""A policy that a search on the conversation trace found, for comparison. Aggregated workers alone.

    cost = A + 2 u + u · d / 64 + D / 16

A: tokens to compute for other requests; u: tokens of this prompt to compute; d: decoding sequences; D: tokens of the
distinct prompt blocks of unfinished requests, with one block each for the answers. A request is held while no target
has room (95 % of its blocks), or while another one is held. Held requests are due at their arrival, plus 12.5 ms for
each token that no target has, at most 400 s. The first 32 are tried, and wait for a better target that is full for up
to 4 ms per token that it saves.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infra.bench.simulation.cache import StoredRun
from infra.bench.simulation.key_masks import KeyCounts, KeyMasks
from infra.bench.simulation.policy import Fleet, Placement, Target
from infra.bench.simulation.trace import Request

_FILL = 0.95
_DELAY_NS, _LONGEST_DELAY_NS = 12_500_000, 400_000_000_000
_PATIENCE_NS = 4_000_000
_WINDOW = 32
_WAKE_NS = 250_000_000
_REFRESH_NS, _REFRESHED = 1_000_000_000, 64
_SHORTEST = 64


class _Cost(NamedTuple):
    cost: float
    at: int
    uncached: int
    fits: bool


class SearchedPolicy:
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._requests, self._size = requests, fleet.block_size
        self._targets = fleet.entrances
        self._positions = {target: at for at, target in enumerate(self._targets)}
        self._blocks = [fleet.workers[number].blocks for number, _ in self._targets]
        self._cached, self._active = KeyMasks(len(self._targets)), KeyCounts(len(self._targets))
        self._sequences, self._backlog = [0] * len(self._targets), [0] * len(self._targets)
        self._computing: list[dict[int, int]] = [{} for _ in self._targets]  # tokens by request
        self._placed: dict[int, int] = {}
        self._held: list[tuple[int, int]] = []  # when due, and which request
        self._looked: dict[int, int] = {}  # when a held request was looked up, oldest first
        self._now, self._changed = 0, False

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._now = now_ns
        if not self._held:
            best = min((each for each in self._costs(request) if each.fits), key=lambda each: each.cost, default=None)
            if best is not None:
                return self._place(request, best)
        insort(self._held, (self._due(request, now_ns), request.index))
        self._changed = True
        return None

    def decode(self, request: Request, now_ns: int) -> Target:
        raise AssertionError("`bench router` refuses this policy for prefill and decode workers")

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        self._now = now_ns
        self._refresh(now_ns)
        while self._changed:
            self._changed = False
            for entry in self._held[:_WINDOW]:
                request = self._requests[entry[1]]
                best = self._best(request, now_ns)
                if best is not None:
                    self._held.remove(entry)
                    del self._looked[request.index]
                    self._changed = True
                    yield request, self._place(request, best)
                    break

    def wake(self) -> int | None:
        return self._now + _WAKE_NS

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        at = self._positions[target]
        self._cached.remove(at, removed)
        for keys, _parent in stored:
            self._cached.add(at, keys)
            new = set(keys)
            for index in [index for index in self._computing[at] if self._requests[index].keys[-1] in new]:
                self._computed(at, index)

    def prefilled(self, request: Request, now_ns: int) -> None:
        """A prompt counts as computed when its last block is stored."""

    def finished(self, request: Request, now_ns: int) -> None:
        at = self._placed.pop(request.index)
        self._computed(at, request.index)
        self._sequences[at] -= 1
        self._active.remove(at, request.keys)
        self._changed = True

    def _costs(self, request: Request) -> list[_Cost]:
        cached, active = self._cached.leading(request.keys), self._active.leading(request.keys)
        size, costs = self._size, []
        for at, running in enumerate(self._sequences):
            uncached = max(1, request.prompt_tokens - size * max(cached[at], active[at]))
            blocks = self._active.distinct(at) + running + request.prompt_tokens // size - active[at]
            decoding = running - len(self._computing[at])
            cost = self._backlog[at] + uncached * (2 + decoding / 64) + size * blocks / 16
            costs.append(_Cost(cost, at, uncached, not running or blocks + 1 <= _FILL * self._blocks[at]))
        first = hash((self._seed, request.index)) % len(costs)
        return costs[first:] + costs[:first]

    def _best(self, request: Request, now_ns: int) -> _Cost | None:
        costs = self._costs(request)
        best = min((each for each in costs if each.fits), key=lambda each: each.cost, default=None)
        better = min(costs, key=lambda each: each.cost)
        if best is None or better.fits:
            return best
        patience_ns = _PATIENCE_NS * (best.uncached - better.uncached)
        return None if now_ns - request.arrival_ns < patience_ns else best

    def _place(self, request: Request, chosen: _Cost) -> Placement:
        at = self._placed[request.index] = chosen.at
        self._sequences[at] += 1
        self._active.add(at, request.keys)
        if chosen.uncached >= self._size and request.keys:
            self._computing[at][request.index] = chosen.uncached
            self._backlog[at] += chosen.uncached
        return Placement(self._targets[at])

    def _computed(self, at: int, index: int) -> None:
        tokens = self._computing[at].pop(index, 0)
        if tokens:
            self._backlog[at] -= tokens
            self._changed = True

    def _due(self, request: Request, now_ns: int) -> int:
        """Look up what targets have of a held request."""
        self._looked[request.index] = now_ns
        blocks = max(*self._cached.leading(request.keys), *self._active.leading(request.keys))
        tokens = max(_SHORTEST, request.prompt_tokens - blocks * self._size)
        return request.arrival_ns + min(_DELAY_NS * tokens, _LONGEST_DELAY_NS)

    def _refresh(self, now_ns: int) -> None:
        old = [each for each, at_ns in self._looked.items() if now_ns - at_ns >= _REFRESH_NS][:_REFRESHED]
        due = {index: at_ns for at_ns, index in self._held} if old else {}
        for index in old:
            del self._looked[index]
            self._held.remove((due[index], index))
            insort(self._held, (self._due(self._requests[index], now_ns), index))
