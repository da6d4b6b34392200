"""What is done to which process when: a function of a seed."""

import enum
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

BROKER = "nats"


class Act(enum.StrEnum):
    kill = "kill"  # SIGKILL; the supervisor starts it again
    stop = "stop"  # SIGSTOP, then SIGCONT after ``hold_s``
    restart = "restart"  # SIGTERM; the supervisor starts it again
    roll = "roll"  # every process but the broker is restarted, one after the other
    crash = "crash"  # everything is killed at once, the supervisor too, and started again


class Disturbance(NamedTuple):
    """``target``: how the names of possible victims begin; ``draw``: which of them, from 0 to 1."""

    at_s: float
    act: Act
    target: str
    draw: float = 0.0
    hold_s: float = 0.0

    def victim(self, names: Sequence[str]) -> str | None:
        """The process it hits, of those there are; None: no such process."""
        found = sorted(name for name in names if name.startswith(self.target))
        return found[int(self.draw * len(found))] if found else None


ACTS = {Act.kill: 0.5, Act.stop: 0.3, Act.restart: 0.2}
HOLDS_S = (0.3, 1.0, 2.5, 4.5, 7.0)  # around the limits: heartbeats of 2 s, leases of 3 s
ROLLS_EACH_S = 150.0
CRASHES_EACH_S = 150.0


def plan(seed: int, seconds: float, targets: Mapping[str, float], *, every_s: float = 3.0) -> list[Disturbance]:
    """Disturbances in the order of their times, about one each ``every_s``.

    Args:
        targets: how often each kind of process is hit, by weight.
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
    return sorted(found)


def _one_of(rng: random.Random, weights: Mapping) -> object:
    return rng.choices(list(weights), list(weights.values()))[0]
