"""What is done to which process when: a function of a seed."""

import enum
import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

BROKER = "nats"


class Act(enum.StrEnum):
    kill = "kill"  # SIGKILL; the supervisor starts it again
    stop = "stop"  # SIGSTOP, then SIGCONT after ``hold_s``
    restart = "restart"  # SIGTERM; the supervisor starts it again
    roll = "roll"  # every process but the broker is restarted, one after the other; of several cells, all but one is
    # given up and taken again
    crash = "crash"  # everything is killed at once, the supervisor too, and started again
    stall = "stall"  # its link to the broker carries nothing in one direction for ``hold_s``, and stays open
    fill = "fill"  # the broker's disk is full for ``hold_s``


class Way(enum.StrEnum):
    """Which direction of a link stalls, as its process sees it."""

    out = "out"
    into = "in"


class Disturbance(NamedTuple):
    """``target``: how the names of possible victims begin; ``draw``: which of them, from 0 to 1."""

    at_s: float
    act: Act
    target: str
    draw: float = 0.0
    hold_s: float = 0.0
    way: Way = Way.out

    def victim(self, names: Sequence[str]) -> str | None:
        """The process it hits, of those there are; None: no such process."""
        found = sorted(name for name in names if name.startswith(self.target))
        return found[int(self.draw * len(found))] if found else None


class Hit(NamedTuple):
    """One disturbance that took place; ``at``: Unix time."""

    at: float
    act: Act
    name: str
    hold_s: float = 0.0


ACTS = {Act.kill: 0.5, Act.stop: 0.3, Act.restart: 0.2}
HOLDS_S = (0.3, 1.0, 2.5, 4.5, 7.0)  # around the limits: heartbeats of 2 s, leases of 3 s
ROLLS_EACH_S = 150.0
CRASHES_EACH_S = 150.0
LONG_S = 30.0  # of a stop that outlasts every lease, drain and grace
LONG_EACH_S = 75.0
STALLS_S = (0.5, 2.0, 4.0, 8.0, 15.0)
STALLS_EACH = 4.0  # times the distance of ordinary disturbances
FILLS_S = (1.0, 4.0, 10.0, 20.0)  # around the 15 s within which a request is refused
FILLS_EACH_S = 75.0
TWINS = 0.2  # of the ordinary ones come with a second one at the same time


def plan(
    seed: int,
    seconds: float,
    targets: Mapping[str, float],
    *,
    every_s: float = 3.0,
    more: Collection[Act] = (),
    several: bool = False,
) -> list[Disturbance]:
    """Disturbances in the order of their times, about one each ``every_s``.

    Args:
        targets: how often each kind of process is hit, by weight.
        more: of ``Act.stall`` and ``Act.fill``, those that this deployment can have.
        several: there are several brokers: the links of all processes to one of them may stall.
    """
    rng = random.Random(f"plan-{seed}")
    found = []
    at = every_s
    while at < seconds:
        target = _one_of(rng, targets)
        act = _one_of(rng, ACTS)
        hold_s = rng.choice(HOLDS_S) * rng.uniform(0.8, 1.2) if act is Act.stop else 0.0
        found.append(Disturbance(at, act, target, rng.random(), hold_s))
        at += every_s * rng.uniform(0.5, 1.5)
    for rare, each_s in ((Act.roll, ROLLS_EACH_S), (Act.crash, CRASHES_EACH_S)):
        count = int(seconds // each_s)
        found += [Disturbance(seconds * (n + rng.random()) / count, rare, "") for n in range(count)]
    return sorted([*found, *_more(seed, seconds, targets, found, every_s, more, several)])


def _more(
    seed: int,
    seconds: float,
    targets: Mapping[str, float],
    ordinary: Sequence[Disturbance],
    every_s: float,
    more: Collection[Act],
    several: bool,
) -> list[Disturbance]:
    """What is drawn apart, so that the ordinary disturbances of a seed stay the same whatever else there is."""
    rng = random.Random(f"plan-more-{seed}")
    own = {target: weight for target, weight in targets.items() if several or target != BROKER}
    found = []
    for each in ordinary:
        others = {target: weight for target, weight in targets.items() if target != each.target}
        if each.act in ACTS and others and rng.random() < TWINS:
            act = rng.choice((Act.kill, Act.kill, Act.stop))
            hold_s = rng.choice(HOLDS_S) if act is Act.stop else 0.0
            found.append(Disturbance(each.at_s, act, _one_of(rng, others), rng.random(), hold_s))
    for at in _spread(rng, seconds, LONG_EACH_S):
        found.append(Disturbance(at, Act.stop, _one_of(rng, targets), rng.random(), LONG_S))
    if Act.stall in more and own:
        for at in _spread(rng, seconds, STALLS_EACH * every_s):
            hold_s, way = rng.choice(STALLS_S) * rng.uniform(0.8, 1.2), rng.choice(tuple(Way))
            found.append(Disturbance(at, Act.stall, _one_of(rng, own), rng.random(), hold_s, way))
    if Act.fill in more:
        for at in _spread(rng, seconds, FILLS_EACH_S):
            found.append(Disturbance(at, Act.fill, BROKER, 0.0, rng.choice(FILLS_S)))
    return found


def _spread(rng: random.Random, seconds: float, each_s: float) -> list[float]:
    count = int(seconds // each_s)
    return [seconds * (n + rng.random()) / count for n in range(count)]


def _one_of(rng: random.Random, weights: Mapping) -> object:
    return rng.choices(list(weights), list(weights.values()))[0]
