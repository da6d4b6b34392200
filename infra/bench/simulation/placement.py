"""The router's own placement policy behind a simulated fleet: the code that a live router runs, unchanged."""

from collections.abc import Iterator, Sequence

from infra.bench.simulation.cache import StoredRun
from infra.bench.simulation.policy import Fleet, Placement, Target
from infra.bench.simulation.trace import Request
from router.holders import Holders, Holding
from router.placement import core
from schemas.fleet import Registration

_INDEX_BLOCKS = 1 << 26
_WAKE_NS = 250_000_000  # between two looks at held requests without an event


class PlacementPolicy:
    """
    Args:
        seed: breaks ties.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._index = Holders(_INDEX_BLOCKS)
        self._holdings: dict[Target, Holding] = {}
        self._core = core.Placement(self._index.match)
        self._now = 0
        for number, worker in enumerate(fleet.workers):
            for rank in range(worker.ranks):
                self._holdings[number, rank] = self._index.open((name(number), rank))
            self._core.join(registration(number, fleet))

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._now = now_ns
        arrival = core.Arrival(
            str(request.index),
            request.keys,
            request.prompt_tokens,
            now_ns,
            seed=hash((self._seed, request.index)) & 0xFFFFFFFF,
        )
        placed = self._core.arrive(arrival, now_ns)
        return None if placed is None else Placement(target(placed.target))

    def decode(self, request: Request, now_ns: int) -> Target:
        raise NotImplementedError

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        self._now = now_ns
        for placed in self._core.pump(now_ns):
            yield self._requests[int(placed.arrival.id)], Placement(target(placed.target))

    def wake(self) -> int | None:
        return self._now + _WAKE_NS

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        holding = self._holdings[target]
        self._index.remove(holding, removed)
        for keys, parent in stored:
            self._index.store(holding, keys, parent)
            self._core.stored((name(target[0]), target[1]), keys)

    def prefilled(self, request: Request, now_ns: int) -> None:
        pass

    def finished(self, request: Request, now_ns: int) -> None:
        self._core.ended(str(request.index))


def name(number: int) -> str:
    return f"w{number:05}"


def target(target_id: tuple[str, int]) -> Target:
    return int(target_id[0][1:]), target_id[1]


def registration(number: int, fleet: Fleet) -> Registration:
    worker = fleet.workers[number]
    return Registration(
        name(number),
        "simulated",
        worker.role,
        "mock",
        1,
        fleet.block_size,
        worker.blocks,
        worker.max_sequences,
        1 << 20,
        dp_size=worker.ranks,
    )
