"""How often workers lost their lease lately, by the names that they keep over their lives. Pure.

A broker that stops, or elects a leader for the workers bucket, lets leases run out whose workers are well. Such losses
are counted apart: those of a router whose own link broke just before, and those of all workers at once.
"""

from collections.abc import Iterable

from penstock.schemas.routers import LostLeases

WINDOW_NS = 600_000_000_000
TOGETHER_NS = 3_000_000_000  # within which all workers lose their leases, if it is not theirs: one lease
NAMES = 16  # in a router's lease, which stays small
REMEMBERED = 10_000  # losses

Loss = tuple[str, str, str, int]  # name, role and model of the worker; Unix time, ns


class LeaseLosses:
    """Of the last ten minutes. A worker that leaves in order has lost nothing."""

    def __init__(self) -> None:
        self._own: list[Loss] = []  # oldest first
        self._together: list[Loss] = []
        self._burst_ns = -TOGETHER_NS  # when the last burst of losses began, and how many workers there were then
        self._burst_of = 0

    def add(self, name: str, role: str, model: str, at_ns: int, *, workers: int, link_broke: bool = False) -> None:
        """
        Args:
            workers: how many were registered before this loss.
            link_broke: this router had lost the broker, too.
        """
        loss = (name, role, model, at_ns)
        if link_broke:
            self._together.append(loss)
        else:
            self._own.append(loss)
            self._find_burst(at_ns, workers)
        del self._own[:-REMEMBERED]
        del self._together[:-REMEMBERED]

    def _find_burst(self, at_ns: int, workers: int) -> None:
        if at_ns - self._burst_ns > TOGETHER_NS:
            self._burst_ns, self._burst_of = at_ns, workers
        since, own, found = self._burst_ns, self._own, self._together
        names = {name for losses in (own, found) for name, _, _, at in losses[-2 * self._burst_of :] if at >= since}
        if len(names) >= max(2, self._burst_of):
            found += [loss for loss in own if loss[3] >= since]
            self._own = [loss for loss in own if loss[3] < since]

    def recent(self, now_ns: int) -> tuple[LostLeases, ...]:
        """Workers by their losses, most first."""
        since = now_ns - WINDOW_NS
        self._own = [loss for loss in self._own if loss[3] > since]
        self._together = [loss for loss in self._together if loss[3] > since]
        found: dict[str, LostLeases] = {}
        for losses, own in ((self._together, 0), (self._own, 1)):
            for name, role, model, at_ns in losses:
                before = found.get(name, LostLeases(name, role, model, 0, 0))
                count, together = before.count + own, before.together + 1 - own
                found[name] = LostLeases(name, role, model, count, at_ns, together)  # the last of its own, if any
        return tuple(sorted(found.values(), key=lambda each: (-each.count, -each.together, each.worker))[:NAMES])

    def part(self) -> tuple[tuple[Loss, ...], tuple[Loss, ...]]:
        """For a snapshot: workers' own losses, and those of all together."""
        return tuple(self._own), tuple(self._together)

    def update(self, own: Iterable[Loss], together: Iterable[Loss]) -> None:
        """Continue from a snapshot."""
        self._own = sorted({*own, *self._own}, key=lambda loss: loss[3])
        self._together = sorted({*together, *self._together}, key=lambda loss: loss[3])
