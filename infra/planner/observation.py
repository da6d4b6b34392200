"""What a planner knows of an interval: the load that came, how it was served, and the workers there were."""

from typing import Literal

from msgspec import Struct

Role = Literal["aggregated", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")


class Times(Struct, frozen=True, omit_defaults=True):
    """Of one latency, ms: its mean and percentiles over requests."""

    mean: float
    p50: float
    p95: float


class Pool(Struct, frozen=True, omit_defaults=True):
    """Workers of one role.

    Attributes:
        ready: take requests.
        starting: were asked for and do not take requests yet.
        waiting: requests that they have and have not begun.
    """

    ready: int = 0
    starting: int = 0
    waiting: int = 0

    @property
    def count(self) -> int:
        return self.ready + self.starting


class Observation(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One interval.

    Attributes:
        seconds: its length.
        arrived: requests that were accepted in it.
        ended: requests that ended in it; what follows is of these, lengths in tokens.
        hit_rate: prompt tokens that came from a cache, of all; 0 to 1.
        queued: requests at its end that no worker has.
        pools: by role; roles without workers may be absent.
    """

    seconds: float
    arrived: int
    ended: int = 0
    isl: float = 0.0
    osl: float = 0.0
    hit_rate: float = 0.0
    ttft: Times | None = None
    itl: Times | None = None
    queued: int = 0
    pools: dict[Role, Pool] = {}

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.arrived / self.seconds if self.seconds > 0 else 0.0

    @property
    def backlog(self) -> int:
        """Requests that wait, at workers or before them."""
        return self.queued + sum(pool.waiting for pool in self.pools.values())

    @property
    def steady(self) -> bool:
        """Whether no worker was on its way."""
        return not any(pool.starting for pool in self.pools.values())


def times(values: list[float]) -> Times | None:
    """Of unordered values; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return Times(
        round(sum(ordered) / len(ordered), 3),
        round(ordered[min(last, len(ordered) // 2)], 3),
        round(ordered[min(last, int(0.95 * len(ordered)))], 3),
    )
