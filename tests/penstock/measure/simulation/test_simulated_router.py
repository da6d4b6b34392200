"""The placement policy: which target a request goes to, what waits, and in which order."""

from collections.abc import Mapping, Sequence

from penstock.measure.simulation.placement import Arrival, PlacedArrival, SimulatedRouter
from penstock.router.state.holders import TargetId
from penstock.schemas.fleet import Registration

MS, S = 1_000_000, 1_000_000_000
BLOCK = 16


class Caches:
    """What targets cache, as a plain index."""

    def __init__(self) -> None:
        self.blocks: dict[TargetId, set[int]] = {}

    def match(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        found = {}
        for target, held in self.blocks.items():
            found[target] = next((at for at, key in enumerate(keys) if key not in held), len(keys))
        return {target: count for target, count in found.items() if count}


def placement(workers: int = 2, blocks: int = 100, slots: int = 8) -> tuple[SimulatedRouter, Caches]:
    caches = Caches()
    made = SimulatedRouter(caches.match)
    for number in range(workers):
        made.join(Registration(f"w{number}", "m", "aggregated", "stub", 1, BLOCK, blocks, slots, 1 << 20))
    return made, caches


def arrival(name: str, blocks: int, *, family: int = 0, at: int = 0, rank: int = 0, deadline: int = 1 << 62) -> Arrival:
    """A prompt of full blocks whose keys are those of its family."""
    keys = [family * 1000 + n for n in range(blocks)]
    return Arrival(name, keys, blocks * BLOCK + 1, at, deadline, rank=rank)


def target(placed: PlacedArrival | None) -> str:
    assert placed is not None
    return placed.target[0]


def test_requests_spread_over_idle_targets() -> None:
    core, _ = placement(4)
    assert {target(core.arrive(arrival(f"r{n}", 5, family=n), 0)) for n in range(4)} == {"w0", "w1", "w2", "w3"}


def test_idle_targets_take_turns_however_the_seed_falls() -> None:
    """Ties alone would give each of them a random share."""
    core, _ = placement(4)
    counts = dict.fromkeys(("w0", "w1", "w2", "w3"), 0)
    for number in range(40):
        counts[target(core.arrive(arrival(f"r{number}", 5, family=number), 0))] += 1
        core.ended(f"r{number}")
    assert set(counts.values()) == {10}


def test_a_target_that_joins_does_not_make_up_for_what_others_served_before() -> None:
    core, _ = placement(2)
    for number in range(20):
        core.arrive(arrival(f"r{number}", 5, family=number), 0)
        core.ended(f"r{number}")
    core.join(Registration("w2", "m", "aggregated", "stub", 1, BLOCK, 100, 8, 1 << 20))
    chosen = []
    for number in range(20, 26):
        chosen.append(target(core.arrive(arrival(f"r{number}", 5, family=number), 0)))
        core.ended(f"r{number}")
    assert sorted(chosen) == ["w0", "w0", "w1", "w1", "w2", "w2"]


def test_a_prompt_follows_its_cached_prefix() -> None:
    core, caches = placement(4)
    caches.blocks["w2", 0] = set(range(10))
    placed = core.arrive(arrival("r", 12), 0)
    assert target(placed) == "w2"
    assert placed is not None
    assert placed.decision.overlap_blocks == 10


def test_a_prompt_follows_the_same_prefix_of_a_request_that_is_not_computed_yet() -> None:
    core, _ = placement(4)
    first = target(core.arrive(arrival("r1", 10), 0))
    assert target(core.arrive(arrival("r2", 12), 0)) == first


def test_a_request_waits_until_the_cache_has_room_for_its_prompt() -> None:
    core, _ = placement(1, blocks=100)
    assert core.arrive(arrival("r1", 50, family=1), 0) is not None
    assert core.arrive(arrival("r2", 50, family=2), 0) is None
    assert list(core.pump(1 * S)) == []
    core.ended("r1")
    assert [placed.arrival.id for placed in core.pump(1 * S)] == ["r2"]
    assert len(core) == 0


def test_an_idle_target_takes_any_request() -> None:
    core, _ = placement(1, blocks=100)
    assert core.arrive(arrival("r", 99), 0) is not None


def test_no_more_sequences_than_slots_are_placed() -> None:
    core, _ = placement(1, slots=2)
    assert core.arrive(arrival("r1", 1, family=1), 0) is not None
    assert core.arrive(arrival("r2", 1, family=2), 0) is not None
    assert core.arrive(arrival("r3", 1, family=3), 0) is None


def test_short_prompts_are_placed_first_then_those_that_came_first() -> None:
    core, _ = placement(1, blocks=100)
    core.arrive(arrival("first", 80, family=1), 0)
    for number, blocks in enumerate((60, 10, 10, 60)):
        core.arrive(arrival(f"{blocks} {number}", blocks, family=number + 2, at=number * MS), number * MS)
    order = []
    for ended in ("first", "10 1", "10 2", "60 0", "60 3"):
        core.ended(ended)
        order += [placed.arrival.id for placed in core.pump(2 * S)]
    assert order == ["10 1", "10 2", "60 0", "60 3"]


def test_a_long_prompt_goes_before_short_ones_that_came_much_later() -> None:
    core, _ = placement(1, blocks=100)
    core.arrive(arrival("first", 90, family=1), 0)
    core.arrive(arrival("long", 90, family=2), 0)
    core.arrive(arrival("short", 10, family=3, at=30 * S), 30 * S)
    core.ended("first")
    assert next(core.pump(30 * S)).arrival.id == "long"


def test_a_lower_class_and_a_distant_deadline_wait() -> None:
    core, _ = placement(1, blocks=100)
    core.arrive(arrival("first", 90, family=1), 0)
    core.arrive(arrival("batch", 90, family=2, rank=2), 0)
    core.arrive(arrival("later", 90, family=3, at=1 * S), 1 * S)
    core.arrive(arrival("near its deadline", 90, family=4, at=2 * S, deadline=20 * S), 2 * S)
    order = []
    for ended in ("first", "near its deadline", "later"):
        core.ended(ended)
        order += [placed.arrival.id for placed in core.pump(3 * S)]
    assert order == ["near its deadline", "later", "batch"]


def test_the_requests_of_a_worker_that_left_have_to_arrive_again() -> None:
    core, _ = placement(2)
    lost = target(core.arrive(arrival("r", 10), 0))
    assert core.leave(lost) == ["r"]
    again = core.arrive(arrival("r", 10), 1 * S)
    assert target(again) != lost


def test_a_prompt_whose_last_block_is_stored_counts_as_computed() -> None:
    core, caches = placement(2)
    first = target(core.arrive(arrival("r1", 40, family=1), 0))
    second = target(core.arrive(arrival("r2", 20, family=2), 0))
    assert second != first
    keys = arrival("r1", 40, family=1).keys
    caches.blocks[first, 0] = set(keys)
    core.stored((first, 0), keys)
    assert target(core.arrive(arrival("r3", 10, family=3), 1 * S)) == first


def queued(core: SimulatedRouter, *arrivals: Arrival) -> list[str]:
    """The names of those that are sent to a worker at once."""
    return [each.id for each in arrivals if core.arrive(each, each.arrived_ns) is not None]


def test_prompts_that_a_worker_has_no_time_for_wait_in_the_order_of_their_classes() -> None:
    """Its KV cache has room for all of them."""
    core, _ = placement(1, blocks=100_000)
    documents = [arrival(f"document {n}", 1000, family=n, at=n * MS, rank=2) for n in range(5)]
    assert queued(core, *documents) == ["document 0", "document 1"], "32,000 tokens"
    assert queued(core, arrival("chat", 20, family=9, at=5 * MS)) == []
    core.stored(("w0", 0), documents[0].keys, S)
    assert [each.arrival.id for each in core.pump(S)] == ["chat", "document 2"]


def test_a_prompt_that_a_worker_has_goes_there_although_others_wait() -> None:
    core, caches = placement(1, blocks=100_000)
    caches.blocks["w0", 0] = set(arrival("before", 1000, family=9).keys)
    assert queued(core, *(arrival(f"document {n}", 1000, family=n) for n in range(3))) == ["document 0", "document 1"]
    assert queued(core, arrival("follow-up", 1010, family=9)) == [], "it has its turn among what is held"
    assert [each.arrival.id for each in core.pump(MS)] == ["follow-up"]
