"""Decides whether all routers share the requests of an owner's models. Pure.

One router places the requests of a model, because decisions are best with one queue and one view of the load. A router
is one process on one core, so its rate is limited. Before it reaches that limit, the owner asks the others to place
requests as well: each places those that it pulls, and sees the decisions of the others a few milliseconds later. Only
the owner recovers the requests of lost workers, which must not be done twice.
"""

BUSY = 0.7  # of a core
BUSY_S = 2.0  # for so long, before requests are shared
CALM = 0.6  # of the rate at which they were: alone, the owner would be busy for less than half a core
CALM_S = 10.0


class Sharing:
    """Call ``update`` once a second.

    Attributes:
        active: all routers place requests.
    """

    def __init__(self) -> None:
        self.active = False
        self._since: float | None = None  # the rate calls for a change since then
        self._rate = 0.0  # at which sharing began

    def update(self, busy: float, rate: float, now: float, *, own_rate: float = 0.0) -> bool:
        """
        Args:
            busy: share of a core that this process used in the last second.
            rate: requests per second that all routers placed.
            now: monotonic time, seconds.
            own_rate: of these, by this router; 0: unknown.

        Returns: ``active``.
        """
        if not self._lasts(self._is_calm(busy, rate, own_rate) if self.active else busy >= BUSY, now):
            return self.active
        self.active, self._since = not self.active, None
        self._rate = rate
        return self.active

    def _is_calm(self, busy: float, rate: float, own_rate: float) -> bool:
        """Whether this router would be far from full alone.

        The rate at which sharing began says nothing if requests were not what it was busy with, such as KV events. So
        its use of the core is enough, too: at most it grows as the number of requests does.
        """
        alone = busy if rate <= own_rate else busy * rate / own_rate if own_rate else float("inf")
        return rate < CALM * self._rate or alone < CALM * BUSY

    def _lasts(self, changes: bool, now: float) -> bool:
        if not changes:
            self._since = None
        elif self._since is None:
            self._since = now
        else:
            return now - self._since >= (CALM_S if self.active else BUSY_S)
        return False
