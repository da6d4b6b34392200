"""Which targets a router prefers while several place a model's requests."""

from dataclasses import dataclass, field

from penstock.router.placement.decision_inputs import PREFERENCE_NS, Decisions
from penstock.router.placement.routing import ALONE, ModelPart, RoutingRequest, Weights
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration


def worker(number: int, model: str = "m", *aliases: str) -> Registration:
    return Registration(f"w{number}", model, "aggregated", "mock", 1, 16, 100, 4, 4096, aliases=aliases)


@dataclass
class Router:
    tracker: LoadTracker = field(default_factory=LoadTracker)

    def __post_init__(self) -> None:
        self.decisions = Decisions(self.tracker, None, "kv", Weights())

    def decide(self, model: str, part: ModelPart, now_ns: int = 0) -> list[int]:
        """Which workers it does not prefer afterwards."""
        self.decisions.decide(RoutingRequest(model, 10, 10), (), {}, now_ns=now_ns, seed=0, part=part)
        return [at for at in range(4) if self.tracker.loads.served_tokens((f"w{at}", 0))]


def test_the_names_of_a_model_share_its_preferred_workers_and_lose_them_together() -> None:
    router = Router()
    for number in range(4):
        router.tracker.put_worker(worker(number, "m", "alias"))
    assert router.decide("alias", ModelPart(0, 2)) == [1, 3]
    assert router.decide("m", ALONE) == []
    assert router.decide("m", ModelPart(1, 2)) == [0, 2]
    assert router.decide("alias", ALONE) == []


def test_an_adapter_that_some_workers_have_does_not_change_which_are_preferred() -> None:
    routers = [Router(), Router()]
    for router in routers:
        for number in range(4):
            router.tracker.put_worker(worker(number, "m", *["adapter"] * (number == 1)))
    for name in ("m", "adapter"):
        assert [router.decide(name, ModelPart(at, 2)) for at, router in enumerate(routers)] == [[1, 3], [0, 2]]


def test_an_alias_of_two_models_leaves_the_preferred_workers_of_the_one_that_it_does_not_stand_for() -> None:
    router = Router()
    for number in range(4):
        router.tracker.put_worker(worker(number, "m" if number < 2 else "n", "alias"))
    assert router.tracker.models() == {"alias": "n", "m": "m", "n": "n"}
    assert router.decide("m", ModelPart(0, 2)) == [1]
    assert router.decide("alias", ALONE) == [1]
    assert router.decide("alias", ModelPart(1, 2)) == [1, 2]
    assert router.decide("n", ALONE) == [1]


def test_a_worker_that_changes_to_another_model_is_not_less_preferred_there() -> None:
    router = Router()
    for number in range(4):
        router.tracker.put_worker(worker(number))
    assert router.decide("m", ModelPart(0, 2)) == [1, 3]
    router.tracker.put_worker(worker(3, "n"))
    assert router.decide("n", ALONE) == [1]
    assert router.decide("m", ModelPart(0, 2)) == [1]


def test_routers_take_turns_with_each_part_since_some_place_more_requests_than_others() -> None:
    routers = [Router(), Router()]
    for router in routers:
        for number in range(4):
            router.tracker.put_worker(worker(number))
    for turn in range(4):
        for now_ns in (turn * PREFERENCE_NS, (turn + 1) * PREFERENCE_NS - 1):
            others = [router.decide("m", ModelPart(at, 2), now_ns) for at, router in enumerate(routers)]
            assert others == ([[1, 3], [0, 2]] if turn % 2 == 0 else [[0, 2], [1, 3]])
