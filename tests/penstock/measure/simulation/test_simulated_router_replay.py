"""A decision is a function of recorded inputs: who folds them again comes to the same decision."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.simulation.placement import Arrival, PlacedArrival, SimulatedRouter
from penstock.router.state.holders import Holders, Holding, TargetId
from penstock.schemas.fleet import Registration

MS = 1_000_000
BLOCK = 16
Call = tuple[str, tuple[Any, ...]]


class Deployment:
    """A placement core with its index: a fold of calls."""

    def __init__(self) -> None:
        self.index = Holders(1 << 20)
        self.core = SimulatedRouter(self.match)
        self.holdings: dict[str, Holding] = {}
        self.decided: list[tuple[str, str, int, float]] = []

    def match(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        return self.index.match(keys)

    def fold(self, call: Call) -> list[PlacedArrival]:
        what, arguments = call
        found = getattr(self, what)(*arguments)
        return [found] if isinstance(found, PlacedArrival) else list(found or ())

    def join(self, worker: str, slots: int) -> None:
        self.holdings[worker] = self.index.open((worker, 0))
        self.core.join(Registration(worker, "m", "aggregated", "stub", 1, BLOCK, 60, slots, 1 << 20))

    def leave(self, worker: str) -> None:
        self.core.leave(worker)
        self.index.retire((worker, 0))

    def arrive(self, arrival: Arrival, now_ns: int) -> PlacedArrival | None:
        return self.core.arrive(arrival, now_ns)

    def stored(self, worker: str, keys: Sequence[int], now_ns: int) -> None:
        if self.core.tracker.worker(worker) is not None:
            holding = self.holdings[worker]
            self.index.store(holding, keys, None)
            self.core.stored((worker, 0), keys, now_ns)

    def ended(self, request: str) -> None:
        self.core.ended(request)

    def pump(self, now_ns: int) -> list[PlacedArrival]:
        return list(self.core.pump(now_ns))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "stored", "ended", "pump", "join", "leave"]),
        st.integers(0, 3),
        st.integers(0, 25),
        st.integers(0, 2_000),
    ),
    max_size=60,
)


def calls(steps: list[tuple[str, int, int, int]]) -> list[Call]:
    found: list[Call] = [("join", (f"w{number}", 3)) for number in range(2)]
    now_ns, prompts = 0, list[Sequence[int]]()
    for what, which, blocks, pause_ms in steps:
        now_ns += pause_ms * MS
        keys = [1000 * which + n for n in range(blocks)]
        if what == "arrive":
            tokens, number = blocks * BLOCK + 7, len(prompts)
            arrival = Arrival(str(number), keys, tokens, now_ns, rank=which % 3, seed=7919 * number)
            found.append((what, (arrival, now_ns)))
            prompts.append(keys)
        elif what == "stored" and prompts:
            found.append((what, (f"w{which}", prompts[blocks % len(prompts)], now_ns)))
        elif what == "ended":
            found.append((what, (str(blocks),)))
        elif what == "join":
            found.append((what, (f"w{which}", 1 + blocks % 4)))
        elif what == "leave":
            found.append((what, (f"w{which}",)))
        found.append(("pump", (now_ns,)))
    return found


@given(STEPS)
def test_the_same_calls_bring_the_same_decisions(steps: list[tuple[str, int, int, int]]) -> None:
    one, two = Deployment(), Deployment()
    record = calls(steps)
    assert [one.fold(call) for call in record] == [two.fold(call) for call in record]
    assert len(one.core) == len(two.core)


@given(STEPS)
def test_no_target_has_more_than_it_takes_and_no_request_is_placed_twice(
    steps: list[tuple[str, int, int, int]],
) -> None:
    deployment, placed = Deployment(), set[str]()
    before: dict[TargetId, int] = {}  # a worker may come back with fewer slots than it has sequences
    for call in calls(steps):
        if call[0] == "leave":
            placed -= {entry.request for entry in deployment.core.tracker.active_at(call[1][0])}
        for found in deployment.fold(call):
            assert found.arrival.id not in placed
            placed.add(found.arrival.id)
        for target in deployment.core.tracker.targets(0, "m"):
            assert target.load.sequences <= max(1, target.registration.slots, before.get(target.id, 0))
        before = {target.id: target.load.sequences for target in deployment.core.tracker.targets(0, "m")}
