"""A request that kills its workers kills three at most, and those that ran beside it wait and do not fail."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.placement.pending import EVIDENCE_S, Standing, crowded, standing
from penstock.router.state.attempts import ReturnedAttempts
from penstock.router.state.load_tracker import LoadTracker, merge
from penstock.schemas.done import CRASHES, KILLED
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import LoadHeader
from tests.properties import examples

LOST = ((1, "a-1"), (2, "b-1"))


def nobody_is_back(worker: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("returned", "lost", "waited_s", "expected"),
    [
        ({}, (), 0.0, Standing.free),
        ({1: ""}, (), 0.0, Standing.free),  # drained
        ({1: "killed", 2: "killed"}, (), 0.0, Standing.free),
        ({1: "shared", 2: "killed"}, (), 0.0, Standing.suspect),
        ({1: "shared"}, (), 0.0, Standing.suspect),
        ({}, LOST[:1], 0.0, Standing.suspect),
        ({1: "shared"}, LOST[:1], 0.0, Standing.suspect),
        ({1: "shared"}, LOST, 0.0, Standing.unknown),
        ({}, LOST, 0.0, Standing.unknown),
        ({}, LOST, EVIDENCE_S, Standing.suspect),
        ({1: "", 2: ""}, LOST, 0.0, Standing.free),  # both were killed
        ({1: "shared", 2: "shared"}, LOST, 0.0, Standing.alone),
        ({1: "shared", 2: "shared", 3: ""}, LOST, 0.0, Standing.alone),
        ({1: "shared", 2: "shared"}, (*LOST, (3, "c-1")), 0.0, Standing.unknown),
        ({1: "shared", 2: "shared"}, (*LOST, (3, "c-1")), EVIDENCE_S, Standing.alone),
        ({1: "shared", 2: "shared", 3: "shared"}, (), 0.0, Standing.alone),  # the third was not alone
        ({1: "shared", 2: "shared", 3: "alone"}, (), 0.0, Standing.poisonous),
    ],
)
def test_only_crashes_count_and_what_is_not_known_is_waited_for(
    returned: dict[int, str], lost: tuple[tuple[int, str], ...], waited_s: float, expected: Standing
) -> None:
    assert standing(returned, lost, nobody_is_back, waited_s) is expected


def test_a_worker_that_is_back_without_a_report_did_not_crash() -> None:
    assert standing({}, LOST, lambda worker: worker == "b-1", 0.0) is Standing.suspect
    assert standing({}, LOST, lambda worker: True, 0.0) is Standing.free


def test_a_repeat_of_a_poisonous_request_runs_alone_at_once_and_kills_one() -> None:
    assert standing({}, (), nobody_is_back, 0.0, repeats=True) is Standing.alone
    assert standing({}, LOST[:1], nobody_is_back, 0.0, repeats=True) is Standing.unknown
    assert standing({1: ""}, LOST[:1], nobody_is_back, 0.0, repeats=True) is Standing.alone
    assert standing({1: "alone"}, (), nobody_is_back, 0.0, repeats=True) is Standing.poisonous


@pytest.mark.parametrize(
    ("returned", "lost", "waited_s", "expected"),
    [
        ({}, (), 0.0, Standing.free),
        ({1: "killed"}, (), 0.0, Standing.free),
        ({}, LOST[:1], 0.0, Standing.unknown),
        ({}, LOST[:1], EVIDENCE_S, Standing.suspect),  # nobody says that it crashed
        ({1: ""}, LOST[:1], 0.0, Standing.free),
        ({1: "shared"}, (), 0.0, Standing.alone),
        ({1: "shared"}, LOST[:1], 0.0, Standing.alone),
        ({1: "shared"}, LOST, 0.0, Standing.unknown),
        ({1: "shared", 2: "alone"}, (), 0.0, Standing.poisonous),
    ],
)
def test_a_watched_request_runs_alone_after_one_crash(
    returned: dict[int, str], lost: tuple[tuple[int, str], ...], waited_s: float, expected: Standing
) -> None:
    assert standing(returned, lost, nobody_is_back, waited_s, watched=True) is expected


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(["", KILLED, *CRASHES]))))
def test_returned_attempts_are_a_fold_that_continues_from_a_snapshot(events: list[tuple[str, int, str]]) -> None:
    whole, first = ReturnedAttempts(), ReturnedAttempts()
    whole.update(events)
    whole.update(events)  # the log repeats
    first.update(events[: len(events) // 2])
    second = ReturnedAttempts()
    for part in first.parts(2):
        second.update(part)
    second.update(events)
    for name in "ab":
        assert second.of(name) == whole.of(name)
        whole.end(name)
        assert not whole.of(name)


def registered(worker: str) -> Registration:
    return Registration(worker, "m", "aggregated", "mock", 1, 32, 100, 4, 4096, queue=2, name=worker[0])


def admit(tracker: LoadTracker, request: str, worker: str, attempt: int = 1, suspect: str = "") -> None:
    load = LoadHeader(32, 0, "", 1 << 62, "")
    tracker.admit(request, attempt, worker, load, now_ns=0, echoed=True, seq=1, suspect=suspect)


def test_suspects_are_spread_and_one_that_runs_alone_has_its_worker_for_itself() -> None:
    tracker = LoadTracker()
    for worker in ("a-1", "b-1", "c-1"):
        tracker.put_worker(registered(worker))
    admit(tracker, "s1", "a-1", suspect="suspect")
    admit(tracker, "s2", "b-1", suspect="suspect")
    admit(tracker, "r", "c-1")
    assert crowded(tracker, "m", Standing.suspect, 0) == {"a-1", "b-1"}
    tracker.finish("s1")
    assert crowded(tracker, "m", Standing.suspect, 0) == {"b-1"}
    assert crowded(tracker, "m", Standing.alone, 0) == {"b-1", "c-1"}
    admit(tracker, "s1x", "a-1", 3, suspect="alone")
    assert tracker.capacity("a-1") == 0
    assert tracker.another_alone("m", "other")
    assert not tracker.another_alone("m", "s1x")
    tracker.put_worker(registered("a-1"))  # a renewal that changes something
    assert tracker.capacity("a-1") == 0
    assert tracker.revisions("m", "").serving is not None
    copy = LoadTracker()
    copy.put_worker(registered("a-1"))
    copy.restore(merge(tracker.parts()))
    assert copy.capacity("a-1") == 0
    assert not copy.has_capacity()
    for each in (tracker, copy):
        each.end_attempt("s1x", 3)
        assert each.capacity("a-1") == 6
        assert each.has_capacity()
        assert not each.another_alone("m", "other")


# --- random deaths ---


@dataclass
class Request:
    name: str
    poison: bool
    repeats: bool = False
    watched: bool = False
    attempt: int = 0
    worker: str = ""  # that has it
    begun: bool = False
    alone: bool = False
    lost: tuple[tuple[int, str], ...] = ()
    since: float = 0.0
    gone: str = ""
    kills: int = 0
    end: str = ""


@dataclass
class Life:
    """One life of a worker. ``reports``: when what it ran is reported, if it crashed."""

    id: str
    name: str
    here: list[Request] = field(default_factory=list)


class Simulated:
    """Routers as they are, and workers that run, wait to be alone, crash, are killed or lose their lease at random.

    A report of a crash comes up to 20 s later; the next life of the worker comes after it.
    """

    def __init__(self, seed: int, workers: int, requests: list[Request]) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.tracker = LoadTracker()
        self.returned = ReturnedAttempts()
        self.log: list[tuple[str, int, str]] = []
        self.requests = requests
        self.lives: dict[str, Life] = {}
        self.due: list[tuple[float, int, str, Any]] = []
        self.born = self.ordered = 0
        self.joined: dict[str, float] = {}
        for number in range(workers):
            self.join(f"w{number}")

    def join(self, name: str) -> None:
        self.born += 1
        life = Life(f"{name}-{self.born}", name)
        self.lives[life.id] = life
        self.joined[life.id] = self.now
        self.tracker.put_worker(
            Registration(life.id, "m", "aggregated", "mock", 1, 32, 100, 4, 4096, queue=2, name=name)
        )

    def later(self, seconds: float, what: str, of: Any) -> None:
        self.ordered += 1
        self.due.append((self.now + seconds, self.ordered, what, of))

    def explained(self, worker: str) -> bool:
        name = worker.rpartition("-")[0]
        return any(life.name == name and id != worker for id, life in self.lives.items())

    # the router

    def standing(self, request: Request) -> Standing:
        returned = self.returned.of(request.name)
        waited = self.now - request.since
        return standing(
            returned, request.lost, self.explained, waited, repeats=request.repeats, watched=request.watched
        )

    def place(self, request: Request) -> None:
        how = self.standing(request)
        if how is Standing.poisonous:
            request.end = "poisoned"
            self.returned.end(request.name)
            return
        if how is Standing.unknown or (how is Standing.alone and self.tracker.another_alone("m", request.name)):
            return
        free = [each.worker for each in self.tracker.serving("m") if self.tracker.capacity(each.worker) > 0]
        avoid = crowded(self.tracker, "m", how, 0) if how else frozenset()
        wanted = [worker for worker in free if worker not in avoid and worker != request.gone]
        wanted = wanted or [worker for worker in free if worker != request.gone]
        if not wanted:
            return
        request.worker, request.alone, request.begun = self.random.choice(wanted), how is Standing.alone, False
        request.attempt += 1
        suspect = how.value
        admit(self.tracker, request.name, request.worker, request.attempt, suspect)
        if request.worker in self.lives:
            self.lives[request.worker].here.append(request)

    def recover(self, request: Request, worker: str, *, lost: bool) -> None:
        if request.end or request.worker != worker:
            return
        self.tracker.end_attempt(request.name, request.attempt)
        crashed = bool(self.returned.of(request.name).get(request.attempt))
        if lost:
            request.lost += ((request.attempt, worker),)
        request.worker, request.since = "", self.now
        request.gone = worker if lost or crashed else ""

    def router_dies(self) -> None:
        """The next one knows what is in the log, and begins to wait anew."""
        self.returned = ReturnedAttempts()
        self.returned.update(entry for entry in self.log if not self.named(entry[0]).end)
        for request in self.requests:
            request.since = self.now

    def named(self, name: str) -> Request:
        return next(request for request in self.requests if request.name == name)

    # workers

    def run(self, life: Life) -> None:
        for request in list(life.here):
            others = [each for each in life.here if each is not request]
            if request.alone and others and not request.begun:
                continue
            if not request.alone and any(each.alone and each.begun for each in others):
                raise AssertionError(f"{request.name} runs beside one that runs alone")
            request.begun = True
            if request.poison and self.random.random() < 0.5:
                request.kills += 1
                self.die(life, crashed=True)
                return
            if not request.poison and self.random.random() < 0.3:
                life.here.remove(request)
                request.end = "done"
                self.tracker.finish(request.name)
                self.returned.end(request.name)

    def die(self, life: Life, *, crashed: bool, silent: bool = False) -> None:
        """``silent``: it loses its lease, and says nothing of what it ran."""
        del self.lives[life.id]
        ran = [each for each in life.here if each.begun]
        report = [
            (each.name, each.attempt, ("alone" if each.alone else "shared") if crashed else "killed") for each in ran
        ]
        reported = self.random.choice([0.1, 1.0, 20.0]) * self.random.random()
        if not silent:
            self.later(reported, "report", (life.id, report))
        self.later(self.random.choice([0.4, 3.0]), "lost", life)
        self.later(reported + self.random.choice([0.5, 5.0]), "join", life.name)

    def step(self) -> None:
        self.now += self.random.choice([0.1, 0.5, 2.0])
        for event in sorted(event for event in self.due if event[0] <= self.now):
            self.due.remove(event)
            _, _, what, of = event
            if what == "join":
                self.join(of)
            elif what == "report":
                worker, report = of
                for name, attempt, crash in report:
                    self.log.append((name, attempt, crash))
                    if not self.named(name).end:
                        self.returned.add(name, attempt, crash)
                        if self.named(name).attempt == attempt:
                            self.recover(self.named(name), worker, lost=False)
            else:
                self.tracker.remove_worker(of.id)
                for request in self.requests:
                    self.recover(request, of.id, lost=True)
        waiting = [request for request in self.requests if not request.worker and not request.end]
        self.random.shuffle(waiting)
        for request in waiting:
            self.place(request)
        for life in list(self.lives.values()):
            if self.random.random() < 0.6:
                self.run(life)


@examples(60)
@given(
    seed=st.integers(0, 1 << 32),
    workers=st.integers(1, 5),
    innocent=st.integers(0, 14),
    poisons=st.integers(0, 2),
    repeats=st.integers(0, 1),
    watched=st.integers(0, 2),
    accidents=st.integers(0, 6),
)
def test_with_random_deaths_one_request_kills_three_workers_at_most_and_no_other_fails(
    seed: int, workers: int, innocent: int, poisons: int, repeats: int, watched: int, accidents: int
) -> None:
    requests = [Request(f"r{number}", poison=False, watched=number % 3 == 0) for number in range(innocent)]
    requests += [Request(f"p{number}", poison=True) for number in range(poisons)]
    requests += [Request(f"watched{number}", poison=True, watched=True) for number in range(watched)]
    requests += [Request(f"again{number}", poison=True, repeats=True) for number in range(repeats)]
    world = Simulated(seed, workers, requests)
    for number in range(4_000):
        world.step()
        if accidents and number % 15 == 7 and world.lives:  # killed, lost, or the router dies
            accidents -= 1
            kind = world.random.randrange(3)
            if kind == 2:
                world.router_dies()
            else:
                life = world.random.choice(list(world.lives.values()))
                world.die(life, crashed=False, silent=kind == 1)
        if all(request.end for request in requests):
            break
    assert [request.name for request in requests if not request.end] == []
    for request in requests:
        assert request.end == ("poisoned" if request.poison else "done"), request
        assert request.kills == (request.poison and (1 if request.repeats else request.kills))
        assert request.kills <= (2 if request.watched else 3)
